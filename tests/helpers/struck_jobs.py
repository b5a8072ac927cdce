"""Jobs of ranks on machines of their own or on this one, for tests in which something happens to a rank."""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe

import setup_fault_cases as cases
from machines import PORT, Machine, connected_machines

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


def free_port():
    """A port of this machine that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


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


def require_named(found, culprit, size=2):
    """One line each about the rank that is missing.

    To the one that is cut off it is the first, which has the store; to the first it is any other.
    """
    for rank, (name, text) in found.items():
        missing = culprit if rank != culprit else 0 if culprit else f"[1-{size - 1}]"
        assert name == "EngineError", found
        assert "\n" not in text
        lost = rf"ranks? (\d+, )*{missing}(, \d+)* (was|were) lost: .*|.*rank {missing} was lost: .*"
        late = rf"ranks? (\d+, )*{missing}(, \d+)* ha(s|ve) not (started|begun to train|created its Engine): .*"
        unmet = rf"rank {rank} cannot join the others over (the job's store, which rank 0 hosts|torchrun's store), .*"
        assert re.fullmatch(f"{lost}|{late}" + (f"|{unmet}" if missing == 0 else ""), text), found
