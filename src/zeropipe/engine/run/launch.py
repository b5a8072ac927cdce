"""Local ranks: processes on this machine that run functions together, with a hard time-out and no orphans."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from zeropipe.errors import EngineError, ZeropipeError

PR_SET_PDEATHSIG = 1
GRACE = 30.0  # seconds that ranks still get once one has failed: they may be waiting for it


@dataclass(frozen=True)
class Failed:
    """What a rank raised, or how it died."""

    rank: int
    kind: str  # the exception's class name; "Died" if the process is gone, "TimedOut" if it was stopped
    text: str
    details: str = ""
    foreseen: bool = False  # an error of zeropipe's own, whose text says it all

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.text}"


class LocalRanks:
    """A pool of local processes, one per rank, joined in torch.distributed.

        with LocalRanks(4) as ranks:
            results = ranks.run(function, *args)        # function(*args) on every rank; results in rank order

    `function` must be importable; `preload` names modules it will want. After a failure or a time-out all processes
    are gone and the pool is closed.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        threads: int = 1,
        backend: str = "gloo",
        preload: Sequence[str] = (),
        start_timeout: float = 120.0,
    ) -> None:
        self.num_ranks = num_ranks
        context = mp.get_context("forkserver")
        # torch (and what `preload` names) is imported once, in the server: ranks then start in a blink
        context.set_forkserver_preload(
            ["torch", "zeropipe.engine.run.measure", "zeropipe.engine.stages.build", *preload]
        )
        # the store lives here, so that it outlives any rank
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, num_ranks, self._store.port, threads, backend)
            process = context.Process(target=_rank_main, args=arguments, name=f"zeropipe-rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.closed = False
        self._collect(start_timeout)

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """`function(*args)` on every rank; EngineError if one of them fails."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        if failures:
            raise EngineError(_told(failures))
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Like `run`, with a Failed in the place of a rank that failed."""
        if self.closed:
            raise EngineError("these ranks are closed: make new ones")
        job = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Any]:
        outcomes: dict[int, Any] = {}
        end = time.monotonic() + timeout
        while len(outcomes) < self.num_ranks:
            open_pipes = {self._pipes[rank]: rank for rank in range(self.num_ranks) if rank not in outcomes}
            ready = wait(list(open_pipes), max(0.0, end - time.monotonic()))
            if not ready:
                failed = any(isinstance(outcome, Failed) for outcome in outcomes.values())
                why = "stopped, another rank failed" if failed else f"no answer within {timeout:g} seconds"
                for rank in open_pipes.values():
                    outcomes[rank] = Failed(rank, "TimedOut", why)
            for pipe in ready:
                rank = open_pipes[pipe]  # type: ignore[index]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    outcomes[rank] = Failed(rank, "Died", f"exit code {self._processes[rank].exitcode}")
                if isinstance(outcomes[rank], Failed):
                    end = min(end, time.monotonic() + GRACE)
        if any(isinstance(outcome, Failed) for outcome in outcomes.values()):
            self.close(patience=0)
        return [outcomes[rank] for rank in range(self.num_ranks)]

    def close(self, patience: float = 5.0) -> None:
        """End all processes: they may tidy up for `patience` seconds, then they are killed."""
        self.closed = True
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _told(failures: Sequence[Failed]) -> str:
    """One line where all ranks were told the same; an error nobody foresaw comes with its traceback."""
    unforeseen = next((f for f in failures if f.details and not f.foreseen), None)
    if unforeseen is not None:
        return "\n".join([*map(str, failures), unforeseen.details])
    texts = list(dict.fromkeys(f.text for f in failures if f.foreseen))
    return texts[0] if len(texts) == 1 else "\n".join(map(str, failures))


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 600.0) -> list[Any]:
    """`function(*args)` once on `num_ranks` local processes, which are gone afterwards; results in rank order."""
    with LocalRanks(num_ranks) as ranks:
        return ranks.run(function, *args, timeout=timeout)


def _rank_main(pipe: Connection, rank: int, num_ranks: int, port: int, threads: int, backend: str) -> None:
    if sys.platform == "linux":  # die with the process that started us, whatever happens to it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    pipe.send_bytes(pickle.dumps(None))
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(job, rank))


def _answer(job: bytes, rank: int) -> bytes:
    try:
        function, args = pickle.loads(job)
        return pickle.dumps(function(*args))
    except Exception as error:
        return pickle.dumps(
            Failed(rank, type(error).__name__, str(error), traceback.format_exc(), isinstance(error, ZeropipeError))
        )


def is_local() -> bool:
    """Whether this process is no rank yet: not started by torchrun."""
    return "RANK" not in os.environ
