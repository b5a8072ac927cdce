"""Runs that are struck again and again, each time on another layout: their curve is that of a run left alone.

A fault is a kill -9, a SIGSTOP, a cut cable or a full disk, which ends with a kill, at a random moment; checkpoints are
written all the time. ZEROPIPE_FAULTS are the faults, all 264 if it is not set (`12` are the first, `120:264` others):
more than 200 are kills and stops. Each test has a run of its own, so that some can be run alone.
"""

from __future__ import annotations

import math
import random
import subprocess
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("torch")

import setup_fault_cases as cases
from portions import portion
from process_tools import alive, children, until
from struck_jobs import FIELDS, LATER, TIMEOUT, job_of, require_named
from train_runs import metrics_of, model_directory

from zeropipe.engine.checkpoint.manifest import MANIFEST_FILE, read_manifest, verify_checksums
from zeropipe.train.loop.checkpoints import list_steps, read_pointer
from zeropipe.train.report.page import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

FAULTS = portion("ZEROPIPE_FAULTS", 264)
FAULTS_PER_RUN = 8
KINDS = ["kill", "kill", "kill", "stop", "stop", "cut", "cut", "full disk", "kill on a full disk"]
LAYOUTS = [
    ({"pp": 2}, "1f1b"), ({"pp": 2}, "zbv"), ({"pp": 4}, "zb-h1"), ({"pp": 2, "dp_shard": 2}, "interleaved"),
    ({"pp": 2, "dp_replicate": 2}, "1f1b"), ({"pp": 2, "tp": 2}, "zbv"), ({"pp": 1, "dp_shard": 2}, "gpipe"),
]  # fmt: skip
KEPT = 2  # checkpoints
DISK = 8 * 2**20  # bytes
PATIENCE = 120.0  # seconds for a few steps, on a busy machine


def fields_of(model, output, mesh, schedule, steps=10**6):
    """A training file; a rate that is constant does not depend on the number of steps."""
    return FIELDS | {
        "model": {"path": str(model), "dtype": "float64"},
        "mesh": mesh,
        "schedule": {"name": schedule},
        "optimizer": {"lr": 1e-2, "eps": 1e-4},
        "rate": {"shape": "constant"},
        "train": {"output": str(output), "steps": steps, "record_every": 0},
        "checkpoint": {"every": 1, "keep": KEPT, "export": False},
    }


@contextmanager
def small_disk(path):
    """A disk with room for a few checkpoints."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path):
    """Leave no room on the disk of a file."""
    with pytest.raises(OSError, match="No space left"):
        path.write_bytes(bytes(2 * DISK))


def last_step(output):
    """The last step in metrics.jsonl, whose last line may be incomplete: a kill, or a full disk."""
    return max((line["step"] for line in read_metrics(output / "metrics.jsonl")), default=0)


def require_running(job):
    for rank, line in enumerate(job.lines):
        assert not line.poll(0), f"rank {rank} ended: {line.recv()}"


def wait_for_step(job, output, step):
    end = time.monotonic() + PATIENCE
    while last_step(output) < step:
        require_running(job)
        assert time.monotonic() < end, f"step {step} is not reached"
        time.sleep(0.01)


def newest(output):
    """The number of the newest checkpoint by its pointer, 0 if there is none."""
    name = read_pointer(output / "checkpoints", "latest")
    return int(name.removeprefix("step-")) if name else 0


def wait_for_checkpoint(job, output, step):
    end = time.monotonic() + PATIENCE
    while newest(output) <= step:
        require_running(job)
        assert time.monotonic() < end, f"no checkpoint after step {step}, though there is room again"
        time.sleep(0.01)


def strike(job, kind, culprit, output, chance):
    """Let the fault happen; returns what can be seen of it by others: kill, stop or cut."""
    if "full disk" not in kind:
        job.strike(kind, culprit)
        return kind
    filler, before = output.parent / "filler", newest(output)
    fill(filler)
    time.sleep(chance.uniform(0.1, 2.0))
    require_running(job)
    if kind == "kill on a full disk":
        job.strike("kill", culprit)
        filler.unlink()
    else:
        filler.unlink()
        wait_for_checkpoint(job, output, before)
        job.strike("kill", culprit)
    return "kill"


def one_fault(model, output, chance):
    """Start the run on a random layout, let a fault happen: survivors end by the culprit's name, nothing is left."""
    (mesh, schedule), kind = chance.choice(LAYOUTS), chance.choice(KINDS)
    size = math.prod(mesh.values())
    culprit, before = chance.randrange(size), last_step(output)
    with job_of(size, kind, with_agent=chance.random() < 0.5) as job:
        job.start(culprit, "", cases.train, fields_of(model, output, mesh, schedule))
        if "disk" in kind or chance.random() < 0.8:
            wait_for_step(job, output, max(before, newest(output)) + chance.randrange(1, 4))
            time.sleep(chance.uniform(0.0, 0.2))
        else:
            time.sleep(chance.uniform(0.0, 4.0))
        processes = {*job.pids, *(child for pid in job.pids for child in children(pid))}
        kind = strike(job, kind, culprit, output, chance)
        end = time.monotonic() + TIMEOUT + LATER
        survivors = [rank for rank in range(size) if kind == "cut" or rank != culprit]
        found = {rank: job.outcome(rank, max(0.0, end - time.monotonic())) for rank in survivors}
    require_named(found, culprit, size)
    until(lambda: not any(map(alive, processes)), "a process is left")


def require_whole(folder):
    """Every checkpoint that says that it is complete is."""
    for path in folder.glob(f"step-*/{MANIFEST_FILE}"):
        verify_checksums(path.parent, read_manifest(path.parent))


def finish(model, output, mesh, schedule, steps):
    """Let the run come to its end."""
    size = math.prod(mesh.values())
    with job_of(size, "none") as job:
        job.start(-1, "", cases.train, fields_of(model, output, mesh, schedule, steps))
        assert [job.outcome(rank, PATIENCE + steps) for rank in range(size)] == [("no error", "")] * size
    return metrics_of(output)


def test_more_than_200_faults_are_kills_and_stops():
    if len(FAULTS) < 264:
        pytest.skip("ZEROPIPE_FAULTS asks for fewer")
    ends = sum("kill" in kind or kind in ("stop", "full disk") for kind in KINDS) / len(KINDS)
    assert len(FAULTS) * ends > 200


@pytest.mark.parametrize("seed", range(FAULTS.start // FAULTS_PER_RUN, math.ceil(FAULTS.stop / FAULTS_PER_RUN)))
def test_a_run_that_is_struck_again_and_again_has_the_curve_of_one_that_is_not(tmp_path, seed):
    chance, model = random.Random(seed), model_directory(tmp_path / "model")
    with small_disk(tmp_path / "disk") as disk:
        output = disk / "out"
        for _ in range(min(FAULTS_PER_RUN, FAULTS.stop - seed * FAULTS_PER_RUN)):
            one_fault(model, output, chance)
            require_whole(output / "checkpoints")
        ours = finish(model, output, *chance.choice(LAYOUTS), last_step(output) + 2)
        folder = output / "checkpoints"
        assert len(list(list_steps(folder))) == KEPT
        assert {path.name for path in folder.iterdir()} == {"latest", *(path.name for path in folder.glob("step-*"))}
        assert all(len(list(path.iterdir())) == 2 for path in folder.glob("step-*")), "half a checkpoint is left"
        require_whole(folder)
        assert not list(output.glob(".run.*")), "a file that was being written is left"
    theirs = finish(model, tmp_path / "alone", {"pp": 1}, "gpipe", ours[-1]["step"])
    for name in ("step", "samples", "tokens", "lr"):
        assert [line[name] for line in ours] == [line[name] for line in theirs]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in theirs], rel=1e-8)
