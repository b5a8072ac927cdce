"""Hands a Schedule to torch's own pipeline runtime: a second, independent executor for the same rows.

It is a check, not a way to train: torch's runtime fixes shapes, keeps losses in the order of execution and changes
with every release.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropipe.core.formats.csv import to_csv
from zeropipe.core.lower import lower
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError


def torch_runtime(
    schedule: Schedule,
    stages: Mapping[int, nn.Module],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """A `_PipelineScheduleRuntime` that walks this schedule, lowered by us, with this rank's stages.

    `loss_fn(output, target)` is summed over the microbatches, not averaged. Call `.step(x, target=..., losses=[...])`
    as torch's documentation says: inputs on the rank with the first stage, targets on the one with the last.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    if len(schedule.placement.copies) > 1:
        raise ConfigError(f"{schedule.name} keeps two copies of each stage: torch's runtime knows only one")
    if schedule.problem.num_weight_parts > 1:
        raise ConfigError(f"the W of {schedule.name} are in parts: torch's runtime knows only whole ones")
    runtime = _PipelineScheduleRuntime(
        [
            PipelineStage(module, stage, schedule.num_stages, torch.device(device), group=group)
            for stage, module in sorted(stages.items())
        ],
        schedule.num_microbatches,
        loss_fn=loss_fn,
        scale_grads=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(to_csv(lower(schedule)))
        runtime._load_csv(str(path), format="compute_comms")
    return runtime
