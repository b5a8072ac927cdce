"""The scripts in examples/ run under torchrun and learn something."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from born import torchrun

pytest.importorskip("transformers")

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("train_*.py"))


def printed(script: Path, folder: Path, name: str) -> list[float]:
    """The values that a script prints for each step."""
    done = torchrun(2, [str(script)], folder, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.output
    return [float(value) for value in re.findall(rf"step \d: {name} ([\d.]+)", done.output)]


def test_a_policy_learns_what_is_rewarded(tmp_path):
    rewards = printed(EXAMPLES[0].parent / "grpo.py", tmp_path, "reward")
    assert len(rewards) == 6
    assert max(rewards[-2:]) > rewards[0] + 0.1


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(script, tmp_path):
    losses = printed(script, tmp_path, "loss")
    assert len(losses) == 5
    assert losses[-1] < losses[0]
