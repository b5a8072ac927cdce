"""Several ranks on one GPU: tensors between them go through pinned memory and gloo, Overlaps use two streams."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from engine_helpers import TOLERANCE, largest, ranks, train_on_cuda

import zeropipe as zp
from zeropipe.schedules.registry import entries

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("entry", entries(), ids=str)
def test_every_schedule_on_one_gpu(entry):
    differences = largest(ranks().run(train_on_cuda, zp.build(entry.name, ranks=4, microbatches=8), 2))
    assert max(differences.values()) < TOLERANCE, differences
