"""Tests of a framework run in the virtual environment that has it: `make test-torchtitan`, and others."""

import os
from importlib.util import find_spec

FRAMEWORKS = {
    "test_torchtitan.py": "torchtitan", "test_archon.py": "areal", "test_trainer_integration.py": "trl",
    "test_automodel.py": "nemo_automodel", "test_verl.py": "verl",
}  # fmt: skip
collect_ignore = [file for file, framework in FRAMEWORKS.items() if find_spec(framework) is None]

# ranks run side by side: threads of their own would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
