"""`zeropipe checkpoint convert --merge` gives the weights of peft's merge_and_unload; adapters have a tokenizer."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from train_runs import model_directory, run_config, train_on
from train_samples import save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from zeropipe.engine.checkpoint.convert import convert
from zeropipe.errors import ConfigError

FULL = [pytest.param(one, marks=pytest.mark.full) for one in (("float64", True), ("bfloat16", False))]


@pytest.fixture(scope="module", params=[("bfloat16", True), *FULL], ids=["bfloat16-tied", "float64-tied", "bfloat16"])
def trained(request, tmp_path_factory):
    """A base model, and the outcome of a run that trained an adapter on it."""
    dtype, tied = request.param
    folder = tmp_path_factory.mktemp("trained")
    start = model_directory(folder / "start", tied=tied)
    save_tokenizer(start, vocabulary=300)
    tables = {"mesh": {"pp": 2}, "model": {"dtype": dtype}, "lora": {"rank": 4, "alpha": 16.0}, "train": {"steps": 2}}
    return start, train_on(run_config(folder / "out", start, **tables))


def test_merged_weights_are_those_of_peft(trained, tmp_path, run):
    start, outcome = trained
    status, out, err = run("checkpoint", "convert", outcome.checkpoint, tmp_path / "merged", "--merge", "--json")
    assert (status, json.loads(out)["made"]) == (0, "model"), err
    base = AutoModelForCausalLM.from_pretrained(start, dtype="auto")
    plain = PeftModel.from_pretrained(base, outcome.export).merge_and_unload(safe_merge=True)
    ours, theirs = (
        dict(one.named_parameters())
        for one in (AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto"), plain)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    untouched = dict(AutoModelForCausalLM.from_pretrained(start, dtype="auto").named_parameters())
    assert not torch.equal(ours["model.layers.0.mlp.up_proj.weight"], untouched["model.layers.0.mlp.up_proj.weight"])
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
    convert(outcome.export, tmp_path / "again", merge=True)  # of the adapter's own directory
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto").named_parameters():
        assert torch.equal(tensor, ours[name]), name


def test_adapters_are_exported_with_the_tokenizer(trained, tmp_path):
    start, outcome = trained
    text = "the answer is that"
    expected = AutoTokenizer.from_pretrained(start)(text).input_ids
    assert AutoTokenizer.from_pretrained(outcome.export)(text).input_ids == expected
    assert convert(outcome.checkpoint, tmp_path / "adapter") == "adapter"
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template is not None


def test_other_base_weights_are_refused(trained, tmp_path, run):
    start, outcome = trained
    config = json.loads((start / "config.json").read_text())
    other = model_directory(tmp_path / "other", tied=config["tie_word_embeddings"], seed=5)
    with pytest.raises(ConfigError, match=r"was trained with other weights than those in .*other; pass the directory"):
        convert(outcome.checkpoint, tmp_path / "merged", merge=True, base=other)
    assert not list(tmp_path.glob("merged/*"))
    shutil.copytree(start, tmp_path / "copy")
    assert convert(outcome.checkpoint, tmp_path / "merged", merge=True, base=tmp_path / "copy") == "model"
    with pytest.raises(
        ConfigError, match=r"the base model '.*gone' does not exist; pass the directory of the base model"
    ):
        convert(outcome.checkpoint, tmp_path / "more", merge=True, base=tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"is neither a checkpoint .* nor an adapter"):
        convert(start, tmp_path / "more", merge=True)
    status, _, err = run("checkpoint", "convert", outcome.checkpoint, tmp_path / "more", "--base", start)
    assert (status, err.splitlines()[-1]) == (2, f"zeropipe: --base {start}: is only for --merge; leave it out")
