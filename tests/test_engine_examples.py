"""The scripts in examples/ run under torchrun and learn something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("train_*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(script, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
