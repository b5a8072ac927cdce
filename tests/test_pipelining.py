"""Our classes with torch.distributed.pipelining's interface: equal to torch's own, and to the plain model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import pipelining_cases as cases
from engine_helpers import TOLERANCE, ranks

BOTH = [
    ("ScheduleGPipe", 4, 1),
    ("Schedule1F1B", 6, 1),
    ("ScheduleLoopedBFS", 4, 2),
    ("ScheduleInterleaved1F1B", 8, 2),
    ("ScheduleInterleavedZeroBubble", 4, 2),
    ("ScheduleZBVZeroBubble", 5, 2),
    ("ScheduleDualPipeV", 8, 2),
]


@pytest.mark.parametrize(("name", "microbatches", "per_rank"), BOTH)
def test_equal_to_torchs_class(name, microbatches, per_rank):
    assert max(ranks(4).run(cases.beside_torch, name, microbatches, per_rank)) < TOLERANCE
