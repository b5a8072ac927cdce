"""Several ranks on one GPU: tensors between them go through pinned memory and gloo, Overlaps use two streams."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from dynamic_cases import both_orders
from engine_helpers import TOLERANCE, SquareLoss, blocks, largest, microbatches, own, ranks, train_on_cuda

import zeropipe as zp
from zeropipe.engine import Engine
from zeropipe.schedules.registry import entries

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("entry", entries(), ids=str)
def test_every_schedule_on_one_gpu(entry):
    differences = largest(ranks().run(train_on_cuda, zp.build(entry.name, ranks=4, microbatches=8), 2))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipe"])
def test_dynamic_weights_on_one_gpu(name):
    found = ranks().run(both_orders, zp.build(name, ranks=4, microbatches=8), {"device": "cuda"}, 6)
    assert all(same for same, _ in found)
    assert any(moved for _, moved in found)


def peaks(schedule):
    """The caller's peak before and after a recorded step; of a second one the peak as recorded, and the caller's."""
    stages = {stage: module.cuda() for stage, module in own(blocks(schedule.num_stages), schedule).items()}
    batches = microbatches(schedule.num_microbatches, lengths=(4096,))
    with Engine(schedule, stages, record=True) as engine:
        torch.empty(2**28, dtype=torch.uint8, device="cuda")  # a peak that no step reaches
        before = torch.cuda.max_memory_allocated()
        engine.train_step(batches, SquareLoss())
        after = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.train_step(batches, SquareLoss())
        return before, after, engine.timeline().peak_memory[engine.rank], torch.cuda.max_memory_allocated()


def test_a_recording_leaves_the_callers_peaks_alone():
    for before, after, recorded, alone in ranks(2).run(peaks, zp.build("1f1b", ranks=2, microbatches=4)):
        assert after == before
        assert 0.9 * alone < recorded < 1.01 * alone, "what is received is allocated between actions"
