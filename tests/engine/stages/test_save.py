"""A saved model is what transformers loads, and a crash leaves the old one or the new one."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import family_models
import pytest
import torch
from engine_helpers import ranks
from full_marker import mark_rest_full
from safetensors.torch import load_file, save_file
from stage_models import CONFIGS, microbatches
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from weights_cases import all_stages, run, save_in_group, save_in_wrong_group, save_over, scale, seeded

import zeropipe as zp
from zeropipe.engine import hf_model, hf_stages, module_stages, save_stages
from zeropipe.engine.stages import save, staging
from zeropipe.errors import ConfigError

TWO = zp.build("1f1b", ranks=2, microbatches=2)
ONE = zp.build("1f1b", ranks=1, microbatches=1)
BATCH = microbatches()[0]


def logits(directory: Path) -> torch.Tensor:
    """What transformers makes of a directory."""
    model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager", attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(BATCH["input_ids"]).logits


def save_all(source, directory, schedule=TWO, factor=1.0, **options) -> None:
    """Every rank of a single process, one after the other."""
    for rank in range(schedule.num_ranks):
        save_stages(scale(hf_stages(source, schedule, rank, **options), factor), schedule.placement, rank, directory)


def tiny(seed: int) -> nn.Module:
    return seeded(hf_model(CONFIGS["llama"](num_hidden_layers=2)), seed)


def old_model(directory: Path, form: str) -> None:
    """A model in one of the forms that a directory may have."""
    model = tiny(0)
    if form == "bin":
        model.config.save_pretrained(directory)
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
        return
    model.save_pretrained(directory, max_shard_size="20KB" if form == "shards" else "1GB")
    for _ in range(2 if form == "saved twice" else 0):
        save_all(directory, directory, factor=0.9)
    if form == "both":  # transformers takes model.safetensors
        save_all(tiny(9), directory / "other")
        for file in (directory / "other").glob("model*"):
            shutil.move(file, directory / file.name)
        shutil.rmtree(directory / "other")


class Crash(BaseException):
    """Not an Exception: nothing tidies up after it."""


FORMS = ["single", "shards", "saved twice", "both", "bin"]


@pytest.mark.parametrize("form", mark_rest_full(FORMS, ["saved twice", "both", "bin"]))
def test_a_crash_at_any_moment_leaves_the_old_or_the_new_model(tmp_path, monkeypatch, form):
    old = tmp_path / "old"
    old.mkdir()
    old_model(old, form)
    stages = all_stages(tiny(7), TWO)
    left = [0]

    def counted(original):
        def step(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return original(*args, **kwargs)

        return step

    def save_until(steps: int, directory: Path, attempt: str) -> bool:
        """Save into a copy of the old directory as a process that crashes after some changes of the disk."""
        shutil.copytree(old, directory, dirs_exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(staging, "_PROCESS_TOKEN", attempt)
            for name in ("replace", "unlink"):
                patch.setattr(os, name, counted(getattr(os, name)))
            left[0] = steps
            try:
                for rank, stage in enumerate(stages):
                    save_stages({rank: stage}, TWO.placement, rank, directory)
            except Crash:
                return False
        return True

    assert save_until(10**9, tmp_path / "new", "whole")
    want = {"old": logits(old), "new": logits(tmp_path / "new")}
    assert not torch.allclose(want["old"], want["new"])
    seen: list[str] = []
    for steps in itertools.count():
        here = tmp_path / str(steps)
        if save_until(steps, here, "crashed"):
            break
        now = logits(here)
        found = [name for name, value in want.items() if torch.equal(now, value)]
        assert len(found) == 1, f"a mixture after {steps} steps: {sorted(path.name for path in here.iterdir())}"
        seen += found
    assert seen == sorted(seen, reverse=True), "once it is new it stays new"
    assert set(seen) == {"old", "new"}
    for crashed in (0, len(seen) // 2, len(seen) - 1):  # the next save leaves nothing of it
        here = tmp_path / str(crashed)
        for rank, stage in enumerate(stages):
            save_stages({rank: stage}, TWO.placement, rank, here)
        assert torch.equal(logits(here), want["new"])
        assert {path.name for path in here.iterdir()} >= {"config.json", "model.safetensors.index.json"}
        assert {path.suffix for path in here.iterdir()} == {".json", ".safetensors"}
        assert len(list(here.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("name, number", [("1f1b", 4), ("dualpipe", 2)])
def test_ranks_save_over_the_directory_they_loaded(tmp_path, name, number):
    seeded(hf_model(CONFIGS["qwen3-moe"](tie_word_embeddings=True))).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    before = logits(tmp_path)
    schedule = zp.build(name, ranks=number, microbatches=8)
    assert ranks(number).run(save_over, str(tmp_path), schedule, 0.5) == [""] * number
    after = logits(tmp_path)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(run(all_stages(tmp_path, schedule), BATCH), after)
    assert ranks(number).run(save_over, str(tmp_path), schedule, 2.0) == [""] * number
    torch.testing.assert_close(logits(tmp_path), before)
    assert (tmp_path / "tokenizer.json").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_rank_that_cannot_write_stops_all_and_nothing_changes(tmp_path):
    hf_model(CONFIGS["qwen3"]()).save_pretrained(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    schedule = zp.build("1f1b", ranks=4, microbatches=4)
    told = ranks().run(save_over, str(tmp_path), schedule, 0.5, 2)
    assert told == ["rank 2: the disk is full"] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_one_of_several_pipelines_saves(tmp_path):
    config = CONFIGS["llama"]()
    assert all("pass group=" in told for told in ranks().run(save_in_wrong_group, str(tmp_path), TWO, config))
    ranks().run(save_in_group, str(tmp_path), TWO, config)
    torch.testing.assert_close(logits(tmp_path), hf_model(config, seed=3).eval()(BATCH["input_ids"]).logits)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-neox", "gemma3", "phi"])
def test_saved_as_transformers_saves(tmp_path, family):
    """The same tensors under the same names: published forms, which other tools read."""
    model = seeded(hf_model(CONFIGS[family]()))
    model.save_pretrained(tmp_path / "theirs")
    save_all(model, tmp_path / "ours")
    theirs, ours = (
        {k: v for file in sorted((tmp_path / who).glob("*.safetensors")) for k, v in load_file(file).items()}
        for who in ("theirs", "ours")
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == ours.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in ours.values())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]


def test_large_stages_are_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "MAX_FILE_BYTES", 20_000)
    model = seeded(hf_model(CONFIGS["llama"]()))
    save_all(model, tmp_path)
    sizes = [sum(t.nbytes for t in load_file(file).values()) for file in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 4
    assert max(sizes) <= 20_000
    torch.testing.assert_close(logits(tmp_path), model.eval()(BATCH["input_ids"]).logits)


def test_what_the_config_ties_and_the_checkpoint_does_not_is_saved_apart(tmp_path):
    model = seeded(hf_model(CONFIGS["llama"](tie_word_embeddings=True)))
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, file, {"format": "pt"})
    before = logits(tmp_path)
    save_all(tmp_path, tmp_path)
    assert torch.equal(logits(tmp_path), before)


@pytest.mark.parametrize("model_type", ["roberta", "prophetnet"])
def test_a_weight_with_more_names_than_embedding_and_head(tmp_path, model_type):
    """The bias of one head has two names, the embedding of the other model three: trained once, they are saved once."""
    model = seeded(hf_model(family_models.tiny(model_type, num_layers=2, tie_word_embeddings=True)))
    stages = all_stages(model, TWO)
    assert all(stage.has_tied_ends for stage in stages)
    named = dict(model.named_parameters(remove_duplicate=False))
    own = [{named[stage.full_name(name)] for name, _ in stage.named_parameters()} for stage in stages]
    assert own[0] & own[1] == {model.get_output_embeddings().weight}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
        for parameter, whole in (
            (p, named[stage.full_name(n)]) for stage in stages for n, p in stage.named_parameters()
        ):
            parameter.copy_(whole)
    for rank, stage in enumerate(stages):
        save_stages({rank: stage}, TWO.placement, rank, tmp_path)
    torch.testing.assert_close(logits(tmp_path), model.eval()(BATCH["input_ids"]).logits)
    again = dict(hf_model(tmp_path).named_parameters(remove_duplicate=False))
    assert all(torch.equal(parameter, again[name]) for name, parameter in named.items())
    save_all(tmp_path, tmp_path)
    torch.testing.assert_close(logits(tmp_path), model.eval()(BATCH["input_ids"]).logits)


def test_a_score_head_is_loaded_as_a_classifier(tmp_path):
    stages = all_stages(CONFIGS["qwen3"](), TWO, head="score", seed=4)
    for rank in range(2):
        save_stages({rank: stages[rank]}, TWO.placement, rank, tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    model.config.pad_token_id = 0
    tokens = {"input_ids": BATCH["input_ids"].clamp_min(1)}
    torch.testing.assert_close(model(**tokens).logits, run(stages, tokens)[:, -1])
    refuses_to_save(stages, hf_model(CONFIGS["qwen3"]()), tmp_path / "whole", "has another model")


def test_a_classifier_keeps_its_labels(tmp_path):
    config = CONFIGS["qwen3"](num_labels=3, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    tokens = {"input_ids": BATCH["input_ids"].clamp_min(1)}
    with pytest.raises(ConfigError, match=r"has no lm_head.weight: .*or head='score' for a classifier or a reward"):
        all_stages(model, TWO)
    stages = all_stages(model, TWO, head="score")
    for rank in range(2):
        save_stages({rank: stages[rank]}, TWO.placement, rank, tmp_path)
    for found in (stages, all_stages(tmp_path, TWO, head="score")):
        torch.testing.assert_close(run(found, tokens)[:, -1], model(**tokens).logits)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).score.weight.equal(model.score.weight)


IDS = "must be an integer Tensor (sequences, tokens)"


@pytest.mark.parametrize(
    "microbatch, words",
    [
        ({"labels": 1}, "a microbatch has the keys ['labels']: must have 'input_ids' for a Hugging Face model"),
        (
            {"input_ids": torch.tensor([[0, 61]])},
            "a microbatch has token id 61: must be from 0 to 60, the model's vocabulary",
        ),
        (
            {"input_ids": torch.tensor([[-1, 60]])},
            "a microbatch has token id -1: must be from 0 to 60, the model's vocabulary",
        ),
        ({"input_ids": [[0, 1]]}, f"a microbatch has input_ids of type list: {IDS}"),
        ({"input_ids": torch.ones(2, 3)}, f"a microbatch has input_ids of torch.float32 and shape (2, 3): {IDS}"),
        ({"input_ids": torch.tensor([0, 1])}, f"a microbatch has input_ids of torch.int64 and shape (2,): {IDS}"),
        (
            {"input_ids": torch.ones(2, 0, dtype=torch.long)},
            f"a microbatch has input_ids of torch.int64 and shape (2, 0): {IDS}",
        ),
        (
            {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 4)},
            "a microbatch has an attention_mask of shape (2, 4): must have the shape of input_ids, (2, 3)",
        ),
        ({"input_ids": torch.tensor([[0, 60]]), "attention_mask": torch.ones(1, 1, 2, 2)}, None),
    ],
)
def test_a_microbatch_that_no_model_can_take(microbatch, words):
    assert all_stages(CONFIGS["qwen3"](), TWO)[0].refusal(microbatch) == words


def refuses_to_save(stages, model, directory, match):
    """A directory with `model` stays as it is."""
    model.save_pretrained(directory)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(ConfigError, match=match):
        save_stages({0: stages[0]}, TWO.placement, 0, directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_another_model_is_not_overwritten(tmp_path):
    stages = all_stages(CONFIGS["llama"](), TWO)
    refuses_to_save(
        stages, hf_model(CONFIGS["llama"](num_hidden_layers=2)), tmp_path / "a", "num_hidden_layers is 2, here 4"
    )
    refuses_to_save(stages, hf_model(CONFIGS["qwen3"]()), tmp_path / "b", "has another model")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "adapter_config.json").write_text("{}")
    refuses_to_save(stages, hf_model(CONFIGS["llama"]()), tmp_path / "c", "has an adapter")


def test_what_goes_with_a_model_is_copied(tmp_path):
    hf_model(CONFIGS["llama"]()).save_pretrained(tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "README.md"):
        (tmp_path / "in" / name).write_text(name)
    save_all(tmp_path / "in", tmp_path / "out")
    copied = {path.name for path in (tmp_path / "out").iterdir()} - {"config.json"}
    assert {name for name in copied if not name.startswith("model")} == {
        "tokenizer.json", "tokenizer_config.json", "merges.txt", "generation_config.json",
    }  # fmt: skip


def test_what_cannot_be_saved_is_refused(tmp_path, monkeypatch):
    stages = all_stages(CONFIGS["llama"](), TWO)
    with pytest.raises(ConfigError, match=r"rank 0 has stages \[0, 1\]"):
        save_stages(dict(enumerate(stages)), TWO.placement, 0, tmp_path)
    plain = module_stages([nn.Linear(2, 2)], ONE, 0)
    with pytest.raises(ConfigError, match="stage 0 is a PlainStage"):
        save_stages(plain, ONE.placement, 0, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write into"):
        save_stages({0: stages[0]}, TWO.placement, 0, tmp_path / "file")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        save_stages({0: stages[0]}, TWO.placement, 0, tmp_path)


def test_stages_of_two_models_are_refused(tmp_path):
    one, other = all_stages(CONFIGS["llama"](), TWO), all_stages(CONFIGS["llama"](), TWO, layers=[3, 1])
    with pytest.raises(ConfigError, match="placement=None: must be a schedule, or the placement of one"):
        save_stages({0: one[0]}, None, 0, tmp_path)
    save_stages({0: one[0]}, TWO, 0, tmp_path)
    with pytest.raises(ConfigError, match=r"no stage has model\.layers\.2"):
        save_stages({1: other[1]}, TWO.placement, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []
