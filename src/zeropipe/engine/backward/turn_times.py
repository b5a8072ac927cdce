"""How long the computations of an Overlap take between its messages, and what follows for its weight gradients.

The weight gradients of experts can run while the dispatch of B is under way, together with the experts of F, or one
message later, together with the attention of both. They go where there is less to compute for a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from zeropipe.engine.timing import elapsed_seconds, mark_time

DISPATCH, COMBINE = "dispatch", "combine"  # messages: rows to experts (of F), their gradients back (of I); the others
BACKWARD, FORWARD = 0, 1  # the first and the second of two computations
WEIGHTS = 2  # products of the backward that run while it waits for a message

# what is computed, and a message: of a side, after it has arrived and until the next one; of weights, while it is sent
Span = tuple[int, str]

MEASURED_STEP = 2  # the first one compiles and allocates


class TurnTimes:
    """Measures the computations between messages in one step. `delayed`: the share of W that waits one message more."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._step, self.delayed = device, 0, 0.0
        self._running: dict[int, tuple[Span, Any]] = {}  # by side
        self._spans: dict[Span, list[tuple[Any, Any]]] = defaultdict(list)
        self.seconds: dict[Span, float] = {}  # of the measured step

    def begin_step(self) -> None:
        """Start a step; the one after the measured step decides."""
        self._step += 1
        self._running.clear()
        if self._step == MEASURED_STEP + 1:
            self.seconds = {name: sum(elapsed_seconds(*span) for span in spans) for name, spans in self._spans.items()}
            self._spans.clear()
            self.delayed = share_to_delay(self.seconds)

    @property
    def is_measuring(self) -> bool:
        return self._step == MEASURED_STEP

    def begin(self, side: int, message: str) -> None:
        """A message of one side has arrived."""
        if self.is_measuring:
            self._running[side] = (side, message), mark_time(self._device)

    def end(self, side: int) -> None:
        """One side has started its next message."""
        if side in self._running:
            span, start = self._running.pop(side)
            self._spans[span].append((start, mark_time(self._device)))

    @contextmanager
    def measure_weights(self, message: str) -> Iterator[None]:
        """The weight gradients inside run while `message` is under way."""
        if not self.is_measuring:
            yield
            return
        start = mark_time(self._device)
        yield
        self._spans[WEIGHTS, message].append((start, mark_time(self._device)))


def share_to_delay(seconds: Mapping[Span, float]) -> float:
    """The share of the experts' W that makes computations per message equal.

    While one message (dispatch of B) is under way, the experts of F and experts' W run; while two (combine of B and of
    F), the attention of both and its W, and what of the experts' W was delayed.
    """
    experts = seconds.get((FORWARD, DISPATCH), 0.0)
    weights = seconds.get((WEIGHTS, DISPATCH), 0.0)
    attention = seconds.get((FORWARD, COMBINE), 0.0) + seconds.get((BACKWARD, DISPATCH), 0.0)
    attention += seconds.get((WEIGHTS, COMBINE), 0.0)
    if not weights or not experts:
        return 0.0
    return min(1.0, max(0.0, (2 * (experts + weights) - attention) / (3 * weights)))
