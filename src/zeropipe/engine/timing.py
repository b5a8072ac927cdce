"""Points in time on a device: seconds of the host's clock on a CPU, events on CUDA."""

from __future__ import annotations

import time
from typing import Any

import torch


def mark_time(device: torch.device, stream: torch.cuda.Stream | None = None) -> Any:
    """The time now; on CUDA an event in a stream, by default the current one."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def elapsed_seconds(start: Any, end: Any) -> float:
    """The seconds between two results of `mark_time`; on CUDA the host waits for the end."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
