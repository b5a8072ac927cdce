"""A checkpoint on disk: whole or not there, refused when damaged, readable by others."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

pytest.importorskip("torch")

import checkpoint_cases as cases
import torch
from engine_helpers import ranks
from safetensors.torch import load_file
from stage_models import CONFIGS
from weights_cases import seeded

import zeropipe as zp
from zeropipe.cli import main
from zeropipe.engine import hf_model
from zeropipe.engine.checkpoint import reader, writer
from zeropipe.engine.checkpoint.convert import convert
from zeropipe.engine.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    read_manifest,
    resolve_pointer,
    verify_checksums,
)
from zeropipe.engine.checkpoint.reader import read_full_tensor
from zeropipe.engine.checkpoint.writer import StagedCheckpoint
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.engine.run.rank import Failed
from zeropipe.errors import ConfigError

FOUR = zp.build("1f1b", ranks=4, microbatches=4)
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    ranks(4).run(cases.save_small, FOUR, str(path))
    return path


# crashes


def killed(path: Path, number: int, seed: int) -> None:
    """Saves that end in kill -9: what is there afterwards is one whole checkpoint, not older than the last one."""
    dice, last = random.Random(seed), 0
    for _ in range(number):
        victim, after = dice.randrange(2), dice.random() * 0.4
        pool = LocalRanks(2, preload=["zeropipe.engine.checkpoint.save", "torch.distributed.checkpoint"], grace=60)
        outcomes = pool.outcomes(
            cases.save_until_killed, zp.build("zbv", ranks=2, microbatches=4), str(path), victim, after, last + 1
        )
        assert outcomes[victim].text == "killed by SIGKILL"
        assert isinstance(outcomes[1 - victim], Failed)
        assert f"rank {victim} was lost" in outcomes[1 - victim].text, outcomes
        manifest = read_manifest(path)
        verify_checksums(path, manifest)
        assert manifest.step >= max(last, 1)
        last = manifest.step
        for name, tensor in manifest.tensors.items():
            if name.startswith("model.") or name.endswith("exp_avg"):
                assert bool((read_full_tensor(path / manifest.folder, name, tensor) == last).all()), name
    assert len(list(path.iterdir())) < 5, "what crashes leave is cleaned up"


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    killed(tmp_path / "c", 3, seed=1)


@pytest.mark.full
def test_twenty_kills(tmp_path):
    killed(tmp_path / "c", 20, seed=2)


class Crash(BaseException):
    """Not an Exception: nothing tidies up after it."""


def save_alone(path: Path, value: float) -> None:
    """A checkpoint of one tensor, by one process."""
    state = {"model.x": torch.full((4,), value)}
    staged = StagedCheckpoint(path, StagedCheckpoint.create_folder(path))
    (plan,), metadata = writer.plan_global([writer.plan_local(state)])
    written = [writer.write_shards(staged.folder, plan, state)]
    staged.commit(Manifest("", int(value), {}, {"ties": {}}, None, None), metadata, written)


def test_a_crash_between_any_two_changes_of_the_disk(tmp_path, monkeypatch):
    seen = []
    for steps in itertools.count():
        path, left = tmp_path / str(steps), [steps]
        save_alone(path, 1.0)
        (path / "data-0123456789ab").mkdir()  # of a crash before
        with monkeypatch.context() as patch:
            for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
                patch.setattr(os, name, counted(getattr(os, name), left))
            try:
                save_alone(path, 2.0)
            except Crash:
                manifest = read_manifest(path)
                found = read_full_tensor(path / manifest.folder, "model.x", manifest.tensors["model.x"])
                assert torch.equal(found, torch.full((4,), float(manifest.step)))
                seen.append(manifest.step)
            else:
                break
        save_alone(path, 3.0)
        assert read_manifest(path).step == 3
        assert len(list(path.iterdir())) == 2, "nothing is left of the crash"
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


def counted(original, left):
    def step(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise Crash
        return original(*args, **kwargs)

    return step


# damage


def test_a_damaged_checkpoint_is_refused_in_one_line(saved, tmp_path):
    manifest = read_manifest(saved)
    text = (saved / MANIFEST_FILE).read_text()
    big = max(manifest.files, key=manifest.files.__getitem__)
    first = manifest.tensors["model.0.up.weight"].shards[0]

    def shorter(path: Path) -> None:
        data = path / manifest.folder / first.file
        data.write_bytes(data.read_bytes()[:-10])

    def flipped(path: Path) -> None:
        data = bytearray((path / manifest.folder / first.file).read_bytes())
        data[first.start + first.num_bytes // 2] ^= 1
        (path / manifest.folder / first.file).write_bytes(data)

    def changed(old: str, new: str):
        return lambda path: (path / MANIFEST_FILE).write_text(text.replace(old, new, 1))

    damages = {
        "has .* bytes, .* were written": shorter,
        "is damaged at byte": flipped,
        "is missing": lambda path: (path / manifest.folder / big).unlink(),
        "cannot read": lambda path: (path / MANIFEST_FILE).write_text(text[: len(text) // 2]),
        "is not a zeropipe checkpoint": lambda path: (path / MANIFEST_FILE).write_text('{"format": "cheese"}'),
        "has version 9": changed('"version":1', '"version":9'),
        "is damaged: its folder": changed('"folder":"', '"folder":"../'),
        "a shard of .* is outside": changed('"start":0', '"start":99999999'),
        "is damaged: KeyError": changed('"pieces"', '"peaces"'),
        "do not make the full tensor": changed('"shape":[12,6]', '"shape":[120,6]'),
        "is not a checkpoint": lambda path: (path / MANIFEST_FILE).unlink(),
    }
    paths = []
    for number, damage in enumerate(damages.values()):
        shutil.copytree(saved, tmp_path / str(number))
        damage(tmp_path / str(number))
        paths.append(str(tmp_path / str(number)))
    for said in ranks(4).run(cases.load_each, FOUR, paths):
        for line, pattern in zip(said, damages, strict=True):
            assert re.search(pattern, line), (pattern, line)
            assert len(line.splitlines()) == 1
    cases_of_cli = [run_cli("checkpoint", "inspect", paths[number]) for number in (0, 3)]
    assert [done.returncode for done in cases_of_cli] == [2, 2]


def test_the_folder_of_a_run_names_its_newest_checkpoint(tmp_path):
    for step in ("step-000002", "step-000010"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / MANIFEST_FILE).write_text("{}")
    for folder in (tmp_path, tmp_path / "checkpoints"):
        inside = re.escape(f"use one of those inside, as {tmp_path}/checkpoints/step-000010")
        with pytest.raises(ConfigError, match=f"is not a checkpoint, as it has no checkpoint.json; {inside}"):
            read_manifest(folder)
        with pytest.raises(ConfigError, match=f"neither a checkpoint .*; {inside}"):
            convert(folder, tmp_path / "to")
    (tmp_path / "checkpoints" / "best").write_text("step-000002\n")
    assert resolve_pointer(tmp_path / "checkpoints" / "best") == tmp_path / "checkpoints" / "step-000002"
    with pytest.raises(ConfigError, match=re.escape("step-000002/checkpoint.json is not a zeropipe")):
        convert(tmp_path / "checkpoints" / "best", tmp_path / "to")


def test_a_folder_with_other_things_is_not_written_into(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"contains thesis\.txt, which is not part of a checkpoint"):
        StagedCheckpoint.create_folder(tmp_path)
    with pytest.raises(ConfigError, match="it is a file"):
        StagedCheckpoint.create_folder(tmp_path / "thesis.txt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_loader_reads_the_same_files(saved):
    import torch.distributed.checkpoint as dcp

    manifest = read_manifest(saved)
    state = {name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for name, t in manifest.tensors.items()}
    dcp.load(state, checkpoint_id=saved / manifest.folder, no_dist=True)
    for name, tensor in manifest.tensors.items():
        assert torch.equal(state[name], read_full_tensor(saved / manifest.folder, name, tensor)), name


# conversion


@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen3-moe", False)])
def test_a_checkpoint_becomes_a_model_and_a_model_a_checkpoint(tmp_path, capsys, family, tied):
    config = CONFIGS[family](tie_word_embeddings=tied)
    seeded(hf_model(config)).save_pretrained(tmp_path / "given")
    (tmp_path / "given" / "tokenizer.json").write_text("{}")
    wanted = logits_of(tmp_path / "given")
    assert convert(tmp_path / "given", tmp_path / "start") == "checkpoint"
    for got in ranks(4).run(cases.logits_of, FOUR, config, str(tmp_path / "start"), TOKENS):
        torch.testing.assert_close(got, wanted)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "notes.txt").write_text("was there")
    capsys.readouterr()
    main(["checkpoint", "convert", str(tmp_path / "start"), str(tmp_path / "back"), "--shard-size", "20KB", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["made"], told["num_files"]) == ("model", len(list((tmp_path / "back").iterdir())) - 1)
    assert torch.equal(logits_of(tmp_path / "back"), wanted)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert (tmp_path / "back" / "tokenizer.json").exists()


def logits_of(directory: Path) -> torch.Tensor:
    """What transformers makes of a directory."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager", attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def test_a_sharded_run_becomes_a_model_a_tensor_at_a_time(tmp_path, monkeypatch):
    config = CONFIGS["llama"]()
    two = zp.build("1f1b", ranks=2, microbatches=2)
    for said in ranks(4).run(cases.save_hf, two, config, {"pp": 2, "dp_shard": 2}, str(tmp_path / "c")):
        assert re.search(r"is sharded; use save_checkpoint\(path, engine\), then `zeropipe checkpoint convert", said)
    alive: weakref.WeakSet = weakref.WeakSet()
    most = []

    def counted(*args):
        tensor = read_full_tensor(*args)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(reader, "read_full_tensor", counted)
    convert(tmp_path / "c", tmp_path / "model", shard_size=1)
    files = (load_file(file) for file in (tmp_path / "model").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in file.items()}
    wanted = hf_model(config, seed=4).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert max(most) <= 10 < len(most), "a layer at most"


def test_what_cannot_be_converted_is_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match="is not of a Hugging Face model"):
        convert(saved, tmp_path / "a")
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        convert(tmp_path, tmp_path / "a")
    with pytest.raises(ConfigError, match="cannot be converted to itself"):
        convert(saved, saved)
    assert not list(tmp_path.iterdir())


# the command line


def run_cli(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "zeropipe", *words], capture_output=True, text=True)


def test_inspect(saved):
    done = run_cli("checkpoint", "inspect", str(saved), "--json", "--check")
    facts = json.loads(done.stdout)
    assert facts["step"] == 1
    assert facts["written_by"]["mesh"] == {"pp": 4}
    assert facts["written_by"]["schedule"] == "1f1b"
    assert facts["num_parameters"] == 8 * (12 * 6 + 12 + 6 * 12 + 6)
    assert facts["tensors"]["model.3.up.weight"]["shape"] == [12, 6]
    assert facts["optimizer"]["kind"] == "AdamW"
    assert facts["checked"] is True
    text = run_cli("checkpoint", "inspect", str(saved)).stdout
    assert "step 1, 32 tensors, 1,296 parameters" in text
    assert "written by 1f1b (linear) on pp=4, stages: 4; zeropipe" in text
    assert "optimizer AdamW: exp_avg, exp_avg_sq, step" in text
