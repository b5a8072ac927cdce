"""Records the copies of activations to the host and back: when they ran, and their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from zeropipe.core.action import Action
from zeropipe.engine.timing import mark_time


class CopyEvent(NamedTuple):
    """One OFFLOAD or RELOAD."""

    action: Action
    start: Any  # of `mark_time`
    end: Any
    size: int


class CopyRecorder:
    """Records all copies of one rank, on the stream that they run on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.events: list[CopyEvent] = []

    def wrap(self, copy: Callable[[], int], action: Action, stream: torch.cuda.Stream | None) -> Callable[[], int]:
        """A copy whose start and end are recorded; it returns its bytes."""

        def timed() -> int:
            start = mark_time(self._device, stream)
            size = copy()
            self.events.append(CopyEvent(action, start, mark_time(self._device, stream), size))
            return size

        return timed
