"""Local ranks: processes on this machine that run functions together, with a time-out for silence and no orphans."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from zeropipe.engine.comm.watchdog import progress_callbacks
from zeropipe.engine.run.nursery import nursery
from zeropipe.engine.run.slow import TORCH_SAYS
from zeropipe.engine.run.torchrun import join
from zeropipe.engine.torch_private.comm import calm_gloo
from zeropipe.errors import ConfigError, EngineError, ZeropipeError, require_positive_integers, short

BEAT, ANSWER = b".", b"="  # the first byte of what a rank says
REST = 0.5  # seconds between two beats of a rank
IMPORTS = 120.0  # seconds for the process that starts ranks to import what they need
MORE = 20.0  # seconds beyond the ranks' own time-out for their start, which says more


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

    `function` must be importable; `preload` names modules it will want. `timeout` of a run is for silence: an Engine
    that gets on with its work is heard, and so is who calls `heartbeat()`. `start_timeout`: seconds that the ranks wait
    for each other when they start. Once a rank has failed the others have
    `grace` seconds to end as well: they may be waiting for it. After a failure, a time-out or Ctrl-C all processes
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
        grace: float = 10.0,
    ) -> None:
        require_positive_integers(num_ranks=num_ranks)
        self.num_ranks, self._grace = num_ranks, grace
        self._nursery = nursery()
        # torch (and what `preload` names) is imported once, there: ranks then start in a blink. torch imports its
        # compiler when the first optimizer is made.
        ours = ("torch._dynamo", "zeropipe.engine.run.measure", "zeropipe.engine.stages.build")
        self._nursery.preload([*ours, *preload])
        # the store lives here, so that it outlives any rank
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
                    self._pids.append(self._nursery.bear(_rank_main, args, theirs.fileno(), IMPORTS))
            failures = [outcome for outcome in self._collect(start_timeout + MORE) if isinstance(outcome, Failed)]
            if failures:
                raise EngineError(_told(failures))
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
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
        if failures:
            raise EngineError(_told(failures))
        return outcomes

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Like `run`, with a Failed in the place of a rank that failed."""
        if self.closed:
            raise EngineError("these ranks are closed: make new ones")
        try:
            job = pickle.dumps((function, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            name = getattr(function, "__name__", short(function))
            raise ConfigError(
                f"{name} and its arguments cannot be handed to local ranks ({error}): give a function of a "
                "file that can be imported, and plain values"
            ) from None
        try:
            for pipe in self._pipes:
                pipe.send_bytes(job)
            return self._collect(timeout)
        except BaseException:  # Ctrl-C: answers that come late would be taken for those of the next run
            self.close(patience=0)
            raise

    def _collect(self, timeout: float) -> list[Any]:
        outcomes: dict[int, Any] = {}
        failed = False
        end = time.monotonic() + timeout
        while len(outcomes) < self.num_ranks:
            open_pipes = {self._pipes[rank]: rank for rank in range(self.num_ranks) if rank not in outcomes}
            ready = wait(list(open_pipes), max(0.0, end - time.monotonic()))
            if not ready:
                why = "stopped, another rank failed" if failed else f"no sign of life within {timeout:g} seconds"
                for rank in open_pipes.values():
                    outcomes[rank] = Failed(rank, "TimedOut", why)
            for pipe in ready:
                rank = open_pipes[pipe]  # type: ignore[index]
                try:
                    said = pipe.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = Failed(rank, "Died", _how(self._nursery.wait(self._pids[rank], 5)))
                else:
                    if said == BEAT:
                        end = end if failed else time.monotonic() + timeout
                        continue
                    outcomes[rank] = pickle.loads(said[1:])
                if isinstance(outcomes[rank], Failed) and not failed:
                    failed, end = True, min(end, time.monotonic() + self._grace)
        if failed or any(isinstance(outcome, Failed) for outcome in outcomes.values()):
            self.close(patience=0)
        return [outcomes[rank] for rank in range(self.num_ranks)]

    def close(self, patience: float = 5.0) -> None:
        """End all processes: they may tidy up for `patience` seconds, then they are killed."""
        self.closed = True
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + patience
        for pid in self._pids:
            if self._nursery.wait(pid, max(0.0, end - time.monotonic())) is None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            self._nursery.wait(pid, 60)

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self.close(patience=5.0 if kind is None else 0.0)


def _how(code: int | None) -> str:
    """The end of a process, in words."""
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def _told(failures: Sequence[Failed]) -> str:
    """One line where all ranks were told the same; an error nobody foresaw comes with its traceback."""
    unforeseen = next((f for f in failures if f.details and not f.foreseen), None)
    if unforeseen is not None:
        return "\n".join([*map(str, failures), unforeseen.details])
    said = list(dict.fromkeys(f.text for f in failures if f.foreseen))
    texts = [one for one in said if not any(other != one and other in one for other in said)]  # others quote it
    how = "".join(f"; rank {f.rank}: {f.text}" for f in failures if f.kind == "Died")  # what others cannot know
    return texts[0] + how if len(texts) == 1 else "\n".join(map(str, failures))


def model_code(device: str) -> list[str]:
    """What to preload for ranks that run Hugging Face models: each would import it for itself, for a second or more.

    Nothing for GPUs: that code may look for them when it is imported, and CUDA does not work in forks of a process that
    has used it.
    """
    if device != "cpu" and torch.cuda.is_available():
        return []
    return ["transformers.modeling_utils", "transformers.models.auto.modeling_auto"]


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 600.0) -> list[Any]:
    """`function(*args)` once on `num_ranks` local processes, which are gone afterwards; results in rank order."""
    with LocalRanks(num_ranks) as ranks:
        return ranks.run(function, *args, timeout=timeout)


class Line:
    """A rank's end of its connection: answers from one thread, beats from others."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock, self._busy, self._last = pipe, threading.Lock(), False, 0.0

    def take(self) -> bytes:
        """The next job."""
        job = self._pipe.recv_bytes()
        self._busy = True
        return job

    def answer(self, data: bytes) -> None:
        """The end of a job."""
        with self._lock:
            self._busy = False
            self._pipe.send_bytes(ANSWER + data)

    def beat(self) -> None:
        """Say that the job gets on, at most every REST seconds."""
        if self._busy and time.monotonic() - self._last > REST:
            with self._lock:
                if self._busy:
                    self._last = time.monotonic()
                    self._pipe.send_bytes(BEAT)


_line: Line | None = None


def heartbeat() -> None:
    """Tell the process that started this rank that it gets on: its time-out starts again. Does nothing elsewhere."""
    if _line is not None:
        _line.beat()


def _rank_main(end: int, rank: int, num_ranks: int, port: int, threads: int, backend: str, timeout: float) -> None:
    global _line
    _line = Line(Connection(end))
    progress_callbacks.append(heartbeat)
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message=TORCH_SAYS)  # who starts ranks has told it in a line
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))

    def open_store() -> dist.Store:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))

    try:
        join(open_store, backend, rank, num_ranks, timeout)
    except Exception as error:
        _line.answer(pickle.dumps(_failed(rank, error)))
        return
    calm_gloo()
    _line.answer(pickle.dumps(None))
    while True:
        try:
            job = _line.take()
        except EOFError:
            return
        _line.answer(_answer(job, rank))


def _loaded(job: bytes) -> Any:
    try:
        return pickle.loads(job)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"local ranks do not find what they are to run ({error}): define it at the top of a file that can be "
            "imported, above `if __name__ == '__main__':`, and not in a notebook"
        ) from None


def _dumped(function: Any, result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__name__", short(function))
        raise ConfigError(f"what {name} returns cannot be sent back ({error}): return plain values") from None


def _answer(job: bytes, rank: int) -> bytes:
    try:
        function, args = _loaded(job)
        return _dumped(function, function(*args))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the others are told what ended this rank
        return pickle.dumps(_failed(rank, error))


def _failed(rank: int, error: BaseException) -> Failed:
    return Failed(rank, type(error).__name__, str(error), traceback.format_exc(), isinstance(error, ZeropipeError))


def is_local() -> bool:
    """Whether this process is no rank yet: not started by torchrun."""
    return "RANK" not in os.environ
