"""Every model type that is cut exactly goes through a checkpoint onto another cut, and into a model directory."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import ranks
from family_checkpoint_cases import drawn, save_and_load
from family_models import EXACT, TABLE, tiny
from transformers import AutoModelForCausalLM

import zeropipe as zp
from zeropipe.engine.checkpoint.convert import convert
from zeropipe.engine.checkpoint.manifest import read_manifest

FIRST, SECOND = zp.build("1f1b", ranks=2, microbatches=2), zp.build("zbv", ranks=2, microbatches=2)
QUICK = ("deepseek_v3",)


def assert_kept(model_type, tied, path):
    config = tiny(model_type, num_layers=6, tie_word_embeddings=tied)
    layers = [[3, 3], [2, 1, 1, 2]] if config.num_hidden_layers == 6 else [None, None]
    wrong = ranks(2).run(save_and_load, config, str(path), ((FIRST, layers[0]), (SECOND, layers[1])))
    assert wrong == [[], []]
    model = drawn(config)
    saved = read_manifest(path).select("model")
    assert {name for name in model.state_dict() if name in saved} == saved.keys()
    return config, model


@pytest.mark.parametrize("model_type", QUICK)
def test_a_checkpoint_goes_onto_another_cut(tmp_path, model_type):
    assert_kept(model_type, TABLE[model_type].tied == "yes", tmp_path / "saved")


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", EXACT)
def test_a_checkpoint_of_every_type(tmp_path, model_type, tied):
    if tied and TABLE[model_type].tied != "yes":
        pytest.skip("its head is never tied")
    assert_kept(model_type, tied, tmp_path / "saved")


@pytest.mark.full
def test_phi4_multimodal_becomes_a_model_directory(tmp_path):
    _, model = assert_kept("phi4_multimodal", False, tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
