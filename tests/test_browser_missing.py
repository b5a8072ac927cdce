"""Without Chromium one line says how many tests were skipped, and how to run them."""

import os
import re
import subprocess
import sys

import pytest
from paths import ROOT, TESTS

pytest.importorskip("playwright")


def test_one_line_tells_of_all_tests_that_need_chromium(tmp_path):
    files = [TESTS / "viz" / name for name in ("test_browser_trace.py", "test_browser_picture.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    told = [line for line in done.stdout.splitlines() if "Chromium" in line]
    assert len(told) == 1, done.stdout
    number = re.search(r"(\d+) skipped", done.stdout)[1]
    assert int(number) > 20
    assert told[0].startswith(f"SKIPPED [{number}] ")
    assert "apt-get install chromium-headless-shell" in told[0]
