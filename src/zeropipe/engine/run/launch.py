"""Local ranks: processes on this machine that run functions together, with a time-out for silence and no orphans."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from zeropipe.engine.run.forkserver import fork_server
from zeropipe.engine.run.rank import HEARTBEAT, Failed, rank_main
from zeropipe.errors import ConfigError, EngineError, require_positive_integers, short

# for the fork server to import what ranks need: minutes after an installation, or from a network drive
IMPORT_TIMEOUT_S = 600.0
START_MARGIN_S = 20.0  # beyond the ranks' own time-out for their start, whose error says more
# torch imports its compiler when the first optimizer is created
PRELOAD = ("torch._dynamo", "zeropipe.engine.run.measure", "zeropipe.engine.stages.build")


class LocalRanks:
    """A pool of local processes, one per rank, joined in torch.distributed.

        with LocalRanks(4) as ranks:
            results = ranks.run(function, *args)        # function(*args) on every rank; results in rank order

    `function` must be importable; `preload` names modules that it will import. `timeout` of a run is for silence: an
    Engine that makes progress restarts it, and so does `heartbeat()`. `start_timeout`: seconds that the ranks wait for
    each other when they start. Once a rank has failed, the others have `grace` seconds to end as well: they may be
    waiting for it. After a failure, a time-out or Ctrl-C all processes are gone and the pool is closed.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        threads: int = 1,
        backend: str = "gloo",
        preload: Sequence[str] = (),
        start_timeout: float = 120.0,
        grace: float = 10.0,
    ) -> None:
        require_positive_integers(num_ranks=num_ranks)
        self.num_ranks, self._grace = num_ranks, grace
        self._server = fork_server()
        self._server.preload([*PRELOAD, *preload])  # imported once, there: ranks then start at once
        # the store is in this process, so that it outlives any rank
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        self.closed = False
        try:
            for rank in range(num_ranks):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                with theirs:
                    args = (rank, num_ranks, self._store.port, threads, backend, start_timeout)
                    self._pids.append(self._server.start_rank(rank_main, args, theirs.fileno(), IMPORT_TIMEOUT_S))
            _require_success(self._collect(start_timeout + START_MARGIN_S))
        except BaseException:
            self.close(patience=0)
            raise

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return list(self._pids)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """`function(*args)` on every rank; EngineError if one of them fails."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        _require_success(outcomes)
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Like `run`, with a Failed for a rank that failed."""
        if self.closed:
            raise EngineError("these ranks are closed: create new ones")
        try:
            call = pickle.dumps((function, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            name = getattr(function, "__name__", short(function))
            raise ConfigError(
                f"{name} and its arguments cannot be sent to local ranks ({error}): use a function of an importable "
                "file, and plain values"
            ) from None
        try:
            for pipe in self._pipes:
                pipe.send_bytes(call)
            return self._collect(timeout)
        except BaseException:  # Ctrl-C: late results would be taken for those of the next run
            self.close(patience=0)
            raise

    def _collect(self, timeout: float) -> list[Any]:
        """The outcomes of all ranks; those that are silent for `timeout` seconds have timed out."""
        outcomes: dict[int, Any] = {}
        failed = False
        end = time.monotonic() + timeout
        while len(outcomes) < self.num_ranks:
            pending = {self._pipes[rank]: rank for rank in range(self.num_ranks) if rank not in outcomes}
            ready = wait(list(pending), max(0.0, end - time.monotonic()))
            if not ready:
                why = "stopped, another rank failed" if failed else f"no result within {timeout:g} seconds"
                outcomes |= {rank: Failed(rank, "TimedOut", why) for rank in pending.values()}
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    message = pipe.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = Failed(rank, "Died", _describe_exit(self._server.wait(self._pids[rank], 30)))
                else:
                    if message == HEARTBEAT:
                        end = end if failed else time.monotonic() + timeout
                        continue
                    outcomes[rank] = pickle.loads(message[1:])
                if isinstance(outcomes[rank], Failed) and not failed:
                    failed, end = True, min(end, time.monotonic() + self._grace)
        if failed or any(isinstance(outcome, Failed) for outcome in outcomes.values()):
            self.close(patience=0)
        return [outcomes[rank] for rank in range(self.num_ranks)]

    def close(self, patience: float = 5.0) -> None:
        """End all processes; those that still run after `patience` seconds are killed."""
        self.closed = True
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + patience
        for pid in self._pids:
            if self._server.wait(pid, max(0.0, end - time.monotonic())) is None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            self._server.wait(pid, 60)

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(patience=5.0 if kind is None else 0.0)


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def _require_success(outcomes: Sequence[Any]) -> None:
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    if failures:
        raise EngineError(describe_failures(failures))


def describe_failures(failures: Sequence[Failed]) -> str:
    """One line where all ranks have the same error; an unforeseen error comes with its traceback."""
    unforeseen = next((f for f in failures if f.details and not f.foreseen), None)
    if unforeseen is not None:
        return "\n".join([*map(str, failures), unforeseen.details])
    texts = list(dict.fromkeys(f.text for f in failures if f.foreseen))
    quoted = [text for text in texts if not any(other != text and other in text for other in texts)]
    if len(quoted) != 1:
        return "\n".join(map(str, failures))
    # the other ranks cannot know how one died
    return quoted[0] + "".join(f"; rank {f.rank}: {f.text}" for f in failures if f.kind == "Died")


def model_modules(device: str) -> list[str]:
    """Modules to preload for ranks that run Hugging Face models: importing them takes a rank a second or more.

    None for GPUs: these modules may query them when they are imported, and CUDA does not work in forks of a process
    that has used it.
    """
    if device != "cpu" and torch.cuda.is_available():
        return []
    return ["transformers.modeling_utils", "transformers.models.auto.modeling_auto"]


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 600.0) -> list[Any]:
    """`function(*args)` once on `num_ranks` local processes, which are gone afterwards; results in rank order."""
    with LocalRanks(num_ranks) as ranks:
        return ranks.run(function, *args, timeout=timeout)


def is_local() -> bool:
    """Whether this process is no rank: neither torchrun nor LocalRanks started it."""
    return "RANK" not in os.environ
