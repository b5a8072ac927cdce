"""`zeropipe train` as a process: signals end it after a saved step, errors are a line."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zeropipe.train.loop.signals import SIGNALS, StopSignals
from zeropipe.train.start import ignore_signals

RUN = """
[model]
path = "tiny-qwen3"
weights = "random"
num_layers = 2
[mesh]
pp = 2
[engine]
device = "cpu"
[data]
sequence = 16
batch = 2
[train]
steps = 100000
record_every = 0
[checkpoint]
export = false
"""
COMMAND = [sys.executable, "-m", "zeropipe", "train", "run.toml"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    return tmp_path


def started(*more: str) -> subprocess.Popen:
    """A run in a group of processes of its own, after some steps."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*COMMAND, *more], start_new_session=True, **pipes)
    end = time.monotonic() + 240
    while time.monotonic() < end and process.poll() is None:
        if Path("out/metrics.jsonl").is_file() and Path("out/metrics.jsonl").read_text().count("\n") > 2:
            return process
        time.sleep(0.1)
    process.kill()
    raise AssertionError(process.communicate()[1])


@pytest.mark.full
@pytest.mark.parametrize("number, to_all", [
    (signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, False), (signal.SIGINT, True),
])  # fmt: skip
def test_a_signal_ends_a_run_after_a_saved_step(folder, number, to_all):
    """To the command alone, or to its whole group as a terminal, `timeout` and Slurm do it."""
    process = started("--json")
    (os.killpg if to_all else os.kill)(process.pid, number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"{number.name}: finishing and saving this step; a second signal stops at once\n" in err
    outcome = json.loads(out)
    assert outcome["stopped_by"] == number.name
    assert outcome["checkpoint"] == f"out/checkpoints/step-{outcome['steps']:06d}"
    assert Path("out/checkpoints/latest").read_text().strip() == Path(outcome["checkpoint"]).name
    again = subprocess.run(
        [*COMMAND, "--train.steps", str(outcome["steps"] + 2), "--json"], capture_output=True, text=True, timeout=240
    )
    assert len(json.loads(again.stdout)["losses"]) == 2


@pytest.mark.full
def test_the_second_signal_stops_everything_at_once(folder):
    process = started("--engine.timeout", "30")
    ranks = [int(pid) for pid in subprocess.run(
        ["pgrep", "-g", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()]  # fmt: skip
    assert len(ranks) >= 4  # the command, the fork server, and two ranks
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (0, 130)  # 0: it had ended by then
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.full
def test_two_signals_at_the_same_moment_are_one_and_print_nothing(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        ignore_signals()
        with StopSignals() as signals:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            for number in SIGNALS:
                signal.pthread_kill(threading.get_ident(), number)  # another thread would not wait with it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            assert signals.received == "SIGINT"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not printed


WRONG = ["--data.kind", "text", "--data.path", "a.txt", "--data.tokenizer", "bytes"]


def test_what_goes_wrong_on_a_rank_is_a_line(folder, run):
    """Only a rank meets this: the file is there and is no text."""
    Path("a.txt").write_bytes(b"\xff\xfe\x00")
    status, _, err = run("train", "run.toml", *WRONG)
    assert status == 2
    assert "a.txt" in err
    assert err.count("\n") == 1


@pytest.mark.full
def test_ranks_add_no_line_to_it(folder):
    Path("a.txt").write_bytes(b"\xff\xfe\x00")
    done = subprocess.run([*COMMAND, *WRONG], capture_output=True, text=True, timeout=240)
    assert "a.txt" in done.stderr
    assert done.stderr.count("\n") == 1
