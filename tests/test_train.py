"""`train(config)`: the weights of plain torch on every mesh, metrics, exports, what is not finite, signals."""

from __future__ import annotations

import pytest
import torch
from train_helpers import difference, metrics_of, model_directory, plain_training, run_config, train_on
from transformers import AutoModelForCausalLM

LAYOUTS = [
    pytest.param({"pp": 2}, "1f1b", False, id="pp2"),
    pytest.param({"pp": 2, "dp_shard": 2}, "zbv", True, id="pp2-shard2-tied"),
    pytest.param({"pp": 4}, "1f1b", True, id="pp4-tied", marks=pytest.mark.full),
    pytest.param({"pp": 2}, "zbv", True, id="pp2-zbv-tied", marks=pytest.mark.full),
    pytest.param({"pp": 2, "dp_shard": 2}, "1f1b", False, id="pp2-shard2", marks=pytest.mark.full),
    pytest.param({"pp": 2, "dp_replicate": 2}, "1f1b", False, id="pp2-replicate2", marks=pytest.mark.full),
    pytest.param({"pp": 2, "tp": 2}, "1f1b", False, id="pp2-tp2", marks=pytest.mark.full),
    pytest.param({"pp": 2, "tp": 2}, "zbv", True, id="pp2-tp2-tied", marks=pytest.mark.full),
    pytest.param({"pp": 1}, "gpipe", False, id="one", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("mesh", "schedule", "tied"), LAYOUTS)
def test_five_steps_give_the_weights_of_plain_torch(tmp_path, mesh, schedule, tied):
    start = model_directory(tmp_path / "start", tied=tied)
    config = run_config(tmp_path / "out", start, mesh=mesh, schedule={"name": schedule})
    outcome = train_on(config)
    plain = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    wanted = plain_training(config, plain)
    assert outcome.losses == pytest.approx(wanted, rel=1e-10)
    assert outcome.steps == 5
    ours = AutoModelForCausalLM.from_pretrained(outcome.export, dtype=torch.float64)
    assert ours.config.tie_word_embeddings == tied
    assert difference(ours, plain) < 1e-9
    assert [line["loss"] for line in metrics_of(tmp_path / "out")] == list(outcome.losses)
