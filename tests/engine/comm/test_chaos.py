"""Random faults at random points of random runs: who survives names the culprit in time, and nothing is left.

A run is decided by its seed, which is the name of its test.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time

import pytest

pytest.importorskip("torch")

import chaos_cases as cases
from test_faults import gone

import zeropipe as zp
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.errors import ConfigError

NAMES = ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "gpipe", "chimera", "dualpipe"]
KINDS = ["kill", "raise", "killed", "interrupt", "stop", "delay", "raise", "kill", "leave", "killed", "stopped"]
TIMEOUT = 4.0  # of the engine
TEXTS = {
    "kill": r"rank {} (was lost: .*|has not created its Engine: .*)",
    "stop": r"rank {} (was lost: no heartbeat .*|has not created its Engine: .*)",
    "raise": r"rank {} failed at .*: ValueError: the cat sat on the keyboard",
    "interrupt": r"rank {} failed at .*: KeyboardInterrupt",
    "leave": r"rank {} failed at .*: SystemExit: enough",
}


def schedule_of(chance):
    """A random schedule of 2 to 4 ranks."""
    while True:
        try:
            return zp.build(chance.choice(NAMES), ranks=chance.choice([2, 3, 4]), microbatches=chance.choice([4, 8]))
        except ConfigError:
            continue  # not every schedule has every size


def run(seed, scratch):
    chance = random.Random(seed)
    schedule, kind = schedule_of(chance), KINDS[seed % len(KINDS)]
    culprit = chance.randrange(schedule.num_ranks)
    when = chance.randrange(1, 30)
    outside = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}.get(kind)
    with LocalRanks(schedule.num_ranks, grace=3 * TIMEOUT if "kill" in kind else 1) as ranks:
        pids = ranks.pids
        if outside:
            threading.Timer(0.2 + chance.random(), os.kill, (pids[culprit], outside)).start()
        found = ranks.outcomes(cases.train, schedule, seed, culprit, kind, when, TIMEOUT, timeout=60)
    end = time.monotonic() + 10
    while not gone(pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert gone(pids)
    assert not list(scratch.iterdir())
    if kind == "delay":
        assert found == ["done"] * schedule.num_ranks
        return
    survivors = [item for rank, item in enumerate(found) if rank != culprit]
    wanted = TEXTS[{"killed": "kill", "stopped": "stop"}.get(kind, kind)].format(culprit)
    assert all(item.kind == "EngineError" and re.fullmatch(wanted, item.text) for item in survivors), found
    assert len({item.text for item in survivors}) == 1, found
    if kind in ("kill", "killed", "stop", "stopped"):
        assert found[culprit].kind in ("Died", "TimedOut")


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where temporary files would be."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("seed", [KINDS.index(kind) for kind in dict.fromkeys(KINDS)])
def test_chaos(seed, scratch):
    run(seed, scratch)


@pytest.mark.full
@pytest.mark.parametrize("seed", [6, 7, 9, *range(100, 220)])
def test_much_chaos(seed, scratch):
    run(seed, scratch)
