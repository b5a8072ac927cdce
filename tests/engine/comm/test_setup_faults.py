"""A rank is killed, stopped or cut off during set-up: all others end by its name in time, and no process is left."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe

import pytest

pytest.importorskip("torch")

import setup_fault_cases as cases
from machines import PORT, Machine, connected_machines
from test_faults import free_port

from zeropipe.engine.run.forkserver import fork_server
from zeropipe.engine.run.launch import model_modules

TIMEOUT = 6.0  # of the engine
LATER = 60.0  # seconds beyond, for a busy computer: nothing of torch's own ends so soon
PRELOAD = ["setup_fault_cases", "transformers.models.qwen3.modeling_qwen3", *model_modules("cpu")]

FIELDS = {
    "model": {"path": "tiny-qwen3", "weights": "random", "vocabulary": 64},
    "engine": {"device": "cpu", "timeout": TIMEOUT},
    "data": {"kind": "synthetic", "sequence": 8, "batch": 4},
}


class Job:
    """Ranks, each on a machine of its own or all on this one; the store is on the first."""

    def __init__(self, size: int, machines: list[Machine] | None, with_agent: bool = False) -> None:
        self.size, self._machines, self._with_agent = size, machines, with_agent
        self.address, self.port = (machines[0].address, PORT) if machines else ("127.0.0.1", str(free_port()))
        self.lines, self.pids = [], []

    def _bear(self, function, machine, *args):
        ours, theirs = Pipe()
        with theirs:
            return ours, fork_server().start_rank(function, (machine, *args), theirs.fileno(), 240.0)

    def machine(self, number):
        return self._machines[number] if self._machines else None

    def start(self, culprit, moment, work, *args):
        """All ranks; the culprit has a moment."""
        if self._with_agent:
            self.agent, self._agents_pid = self._bear(cases.agent, self.machine(0), self.address, int(self.port))
            assert self.agent.recv() == "serves"
        for rank in range(self.size):
            environment = {
                "RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self.address, "MASTER_PORT": self.port, "GLOO_SOCKET_IFNAME": "lo",
                "TORCHELASTIC_USE_AGENT_STORE": str(self._with_agent),
            } | ({"GLOO_SOCKET_IFNAME": Machine.device} if self._machines else {})  # fmt: skip
            mine = moment if rank == culprit else ""
            line, pid = self._bear(cases.rank_main, self.machine(rank), environment, mine, work, *args)
            self.lines.append(line)
            self.pids.append(pid)

    def strike(self, kind, culprit):
        if kind == "cut":
            self.machine(culprit).cut()
        else:
            os.kill(self.pids[culprit], {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])

    def outcome(self, rank, patience):
        """What a rank ended with; its process is gone then."""
        assert self.lines[rank].poll(patience), f"rank {rank} still waits"
        found = self.lines[rank].recv()
        assert fork_server().wait(self.pids[rank], 30.0) is not None, f"the process of rank {rank} is left"
        return found

    def close(self):
        for pid in [*self.pids, *([self._agents_pid] if self._with_agent else [])]:
            if fork_server().wait(pid, 0) is None:
                os.kill(pid, signal.SIGKILL)
                fork_server().wait(pid, 30)


@contextmanager
def job_of(size, kind, with_agent=False):
    fork_server().preload(PRELOAD)
    with ExitStack() as stack:
        job = Job(size, stack.enter_context(connected_machines(size)) if kind == "cut" else None, with_agent)
        stack.callback(job.close)
        yield job


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


def require_named(found, kind, culprit, size=2):
    """One line each about the rank that is missing: to the one that is cut off it is the first, which has the store."""
    for rank, (name, text) in found.items():
        missing = culprit if rank != culprit else 0 if culprit else min(1, size - 1)
        assert name == "EngineError", found
        assert "\n" not in text
        lost = rf"ranks? (\d+, )*{missing}(, \d+)* (was|were) lost: .*|.*rank {missing} was lost: .*"
        late = rf"ranks? (\d+, )*{missing}(, \d+)* ha(s|ve) not (started|begun to train|created its Engine): .*"
        unmet = rf"rank {rank} cannot join the others over (the job's store, which rank 0 hosts|torchrun's store), .*"
        assert re.fullmatch(f"{lost}|{late}" + (f"|{unmet}" if missing == 0 else ""), text), found


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
    ("cut", "process group", 1, 2), ("cut", "options", 1, 2), ("cut", "mesh", 3, 4), ("cut", "data", 1, 2),
    ("cut", "stages", 0, 2), ("cut", "connections", 1, 2), ("stop", "mesh", 1, 4), ("stop", "options", 0, 2),
    ("kill", "stages", 0, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    return side_by_side(tmp_path_factory.mktemp("jobs"), SOME)


@pytest.mark.parametrize("case", SOME, ids=lambda case: " ".join(map(str, case)))
def test_training_ends_by_the_name_of_the_rank_that_is_missing(some, case):
    kind, _, culprit, size = case
    require_named(some[case].result(), kind, culprit, size)


def test_a_script_with_an_engine_ends_by_the_name_of_the_rank_that_is_missing():
    require_named(struck("cut", "edges", 1, cases.script, TIMEOUT), "cut", 1)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("kind", ["cut", "stop", "kill"])
def test_every_moment_of_training(tmp_path, kind, culprit):
    found = side_by_side(tmp_path, [(kind, moment, culprit, 2) for moment in cases.TRAINING])
    for one in found.values():
        require_named(one.result(), kind, culprit)


@pytest.mark.full
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("kind", ["cut", "stop", "kill"])
@pytest.mark.parametrize("moment", cases.SCRIPT)
def test_every_moment_of_a_script(kind, moment, culprit):
    require_named(struck(kind, moment, culprit, cases.script, TIMEOUT), kind, culprit)


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
    require_named(found, kind, culprit, size)
