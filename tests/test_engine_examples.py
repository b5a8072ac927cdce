"""The scripts in examples/ run under torchrun and learn something."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from born import torchrun

pytest.importorskip("transformers")

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("train_*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(script, tmp_path):
    done = torchrun(2, [str(script)], tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.output
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", done.output)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
