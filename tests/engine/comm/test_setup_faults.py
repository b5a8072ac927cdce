"""A rank is killed, stopped or cut off during set-up: all others end by its name in time, and no process is left."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

import setup_fault_cases as cases
from struck_jobs import FIELDS, LATER, TIMEOUT, job_of, require_named


def struck(kind, moment, culprit, work, *args, size=2, with_agent=False, delay=None):
    """What every survivor ended with, after something has happened to the culprit: at a moment, or after some time."""
    with job_of(size, kind, with_agent) as job:
        job.start(culprit, moment, work, *args)
        if delay is None:
            assert job.lines[culprit].poll(60), f"{moment} is not reached"
            assert job.lines[culprit].recv() == "reached"
        else:
            time.sleep(delay)
        job.strike(kind, culprit)
        if delay is None and kind == "cut":
            job.lines[culprit].send("go on")
        survivors = [rank for rank in range(size) if kind == "cut" or rank != culprit]
        end = time.monotonic() + TIMEOUT + LATER
        return {rank: job.outcome(rank, max(0.0, end - time.monotonic())) for rank in survivors}


def fields(folder, size):
    train = {"output": str(folder / "out"), "steps": 10**6, "record_every": 0}
    return {**FIELDS, "mesh": {"pp": 2, "dp_shard": size // 2}, "train": train}


def side_by_side(folder, todo):
    """Many jobs at once, which wait most of the time: each is what is done, when and to whom, of how many ranks."""

    def run(number, kind, moment, culprit, size):
        scratch = folder / str(number)
        return struck(kind, moment, culprit, cases.train, fields(scratch, size), size=size, with_agent=number % 2 == 1)

    with ThreadPoolExecutor(6) as people:
        return {one: people.submit(run, number, *one) for number, one in enumerate(todo)}


SOME = [
    ("cut", "process group", 1, 2), ("cut", "data", 1, 2), ("cut", "connections", 1, 2), ("stop", "mesh", 1, 4),
    ("kill", "stages", 0, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    return side_by_side(tmp_path_factory.mktemp("jobs"), SOME)


@pytest.mark.parametrize("case", SOME, ids=lambda case: " ".join(map(str, case)))
def test_training_ends_by_the_name_of_the_rank_that_is_missing(some, case):
    _, _, culprit, size = case
    require_named(some[case].result(), culprit, size)


def test_a_script_with_an_engine_ends_by_the_name_of_the_rank_that_is_missing():
    require_named(struck("cut", "edges", 1, cases.script, TIMEOUT), 1)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("kind", ["cut", "stop", "kill"])
def test_every_moment_of_training(tmp_path, kind, culprit):
    sizes = (2, 4) if culprit else (2,)
    found = side_by_side(tmp_path, [(kind, moment, culprit, size) for moment in cases.TRAINING for size in sizes])
    for one in found.values():
        require_named(one.result(), culprit)


@pytest.mark.full
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("kind", ["cut", "stop", "kill"])
@pytest.mark.parametrize("moment", cases.SCRIPT)
def test_every_moment_of_a_script(kind, moment, culprit):
    require_named(struck(kind, moment, culprit, cases.script, TIMEOUT), culprit)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_a_moment_by_chance(tmp_path, seed):
    """After some questions to the store, which are asked all the time, or after some seconds."""
    chance = random.Random(seed)
    kind, size = chance.choice(["cut", "stop", "kill"]), chance.choice([2, 2, 4])
    culprit, with_agent = chance.randrange(size), chance.random() < 0.5
    moment, delay = (chance.randrange(1, 80), None) if chance.random() < 0.5 else ("", chance.uniform(0.0, 4.0))
    work, args = cases.train, (fields(tmp_path, size),)
    if chance.random() < 0.4:
        work, args = cases.script, (TIMEOUT, True)
    found = struck(kind, moment, culprit, work, *args, size=size, with_agent=with_agent, delay=delay)
    require_named(found, culprit, size)
