"""Stages cut from models give the plain model's loss and gradients."""

from __future__ import annotations

import pytest
import torch
from stage_models import CONFIGS, assert_same_gradients, microbatches, plain_step, staged_step

import zeropipe as zp
from zeropipe.engine.modules import defer
from zeropipe.engine.split import WeightStore
from zeropipe.engine.stages import hf_model, hf_stages


def all_stages(source, schedule, **kwargs):
    found = {}
    for rank in range(schedule.num_ranks):
        found |= hf_stages(source, schedule, rank, **kwargs)
    return [found[s] for s in range(schedule.num_stages)]


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("family", CONFIGS)
def test_stages_equal_the_plain_model(family, split):
    model = hf_model(CONFIGS[family](), dtype=torch.float64, seed=3)
    schedule = zp.build("1f1b", ranks=3, microbatches=4)
    stages = all_stages(model, schedule, layers=[1, 2, 1])
    if split:
        assert all(defer(stage) for stage in stages)
    batches = microbatches()
    loss = plain_step(model, batches)
    assert staged_step(stages, batches, WeightStore() if split else None) == pytest.approx(loss, rel=1e-10)
    assert_same_gradients(stages, model)
