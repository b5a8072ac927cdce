"""The scripts in examples/ run under torchrun and learn something."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import EXAMPLES
from script_runner import torchrun

pytest.importorskip("transformers")

SCRIPTS = sorted(EXAMPLES.glob("train_*.py"))


def printed(script: Path, folder: Path, name: str) -> list[float]:
    """The values that a script prints for each step."""
    done = torchrun(2, [str(script)], folder, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.output
    return [float(value) for value in re.findall(rf"step \d: {name} ([\d.]+)", done.output)]


def test_a_policy_learns_what_is_rewarded(tmp_path):
    rewards = printed(EXAMPLES / "grpo.py", tmp_path, "reward")
    assert len(rewards) == 6
    assert max(rewards[-2:]) > rewards[0] + 0.1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_trains(script, tmp_path):
    losses = printed(script, tmp_path, "loss")
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_what_make_run_does_in_fewer_steps(tmp_path):
    folder, tiny = EXAMPLES / "tiny", tmp_path / "tiny"
    train = ["-m", "zeropipe", "train", str(tiny / "run.toml"), "--train.record_every", "5"]
    commands = [
        [str(folder / "make.py"), str(tiny)],
        [*train, "--train.steps", "12"],
        [*train, "--train.steps", "18", "--schedule.name", "1f1b", "--mesh.pp", "2", "--mesh.dp_shard", "2"],
        [str(folder / "ask.py"), str(tiny)],
    ]
    for words in commands:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    assert "as in the last evaluation" in done.stdout  # plain transformers has the engine's loss
    lines = [json.loads(line) for line in (tiny / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 18
    assert losses[-1] < 0.6 * losses[0]
    assert "from here on: 1f1b on pp 2 x dp_shard 2" in (tiny / "run" / "report.html").read_text()
