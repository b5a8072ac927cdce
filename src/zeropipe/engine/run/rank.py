"""The code of a local rank: join torch.distributed, then run one function after the other."""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from zeropipe.engine.comm.watchdog import progress_callbacks
from zeropipe.engine.run.slow_dtypes import TORCH_WARNING
from zeropipe.engine.run.torchrun import join
from zeropipe.engine.torch_private.comm import lower_gloo_priority
from zeropipe.errors import ConfigError, ZeropipeError, short

HEARTBEAT, RESULT = b".", b"="  # the first byte of a message of a rank
HEARTBEAT_INTERVAL_S = 0.5


@dataclass(frozen=True)
class Failed:
    """The exception that a rank raised, or how it died."""

    rank: int
    kind: str  # the exception's class name; "Died" if the process is gone, "TimedOut" if it was stopped
    text: str
    details: str = ""  # traceback
    foreseen: bool = False  # an error of zeropipe's own, whose text is complete

    @classmethod
    def from_exception(cls, rank: int, error: BaseException) -> Failed:
        """Of the exception that is being handled."""
        return cls(rank, type(error).__name__, str(error), traceback.format_exc(), isinstance(error, ZeropipeError))

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.text}"


class RankConnection:
    """A rank's end of its connection: results from one thread, heartbeats from others."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock, self._is_busy, self._last_heartbeat = pipe, threading.Lock(), False, 0.0

    def receive_call(self) -> bytes:
        """Wait for the next call."""
        call = self._pipe.recv_bytes()
        self._is_busy = True
        return call

    def send_result(self, data: bytes) -> None:
        """Send the result of a call, which ends it."""
        with self._lock:
            self._is_busy = False
            self._pipe.send_bytes(RESULT + data)

    def send_heartbeat(self) -> None:
        """Report that the call makes progress, at most every HEARTBEAT_INTERVAL_S seconds."""
        if self._is_busy and time.monotonic() - self._last_heartbeat > HEARTBEAT_INTERVAL_S:
            with self._lock:
                if self._is_busy:
                    self._last_heartbeat = time.monotonic()
                    self._pipe.send_bytes(HEARTBEAT)


_connection: RankConnection | None = None


def heartbeat() -> None:
    """Restart the time-out of the process that started this rank. Does nothing in other processes."""
    if _connection is not None:
        _connection.send_heartbeat()


def rank_main(file: int, rank: int, num_ranks: int, port: int, threads: int, backend: str, timeout: float) -> None:
    """Join the other ranks over the store at `port`, and run calls until the connection is closed."""
    global _connection
    _connection = connection = RankConnection(Connection(file))
    progress_callbacks.append(heartbeat)
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message=TORCH_WARNING)  # `warn_if_slow` has printed one line
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))

    def open_store() -> dist.Store:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))

    try:
        join(open_store, backend, rank, num_ranks, timeout)
    except Exception as error:
        connection.send_result(pickle.dumps(Failed.from_exception(rank, error)))
        return
    lower_gloo_priority()
    connection.send_result(pickle.dumps(None))
    while True:
        try:
            call = connection.receive_call()
        except EOFError:
            return
        connection.send_result(_run_call(call, rank))


def _run_call(call: bytes, rank: int) -> bytes:
    """The pickled result of a call, or a pickled Failed."""
    try:
        function, args = _load(call)
        return _dump(function, function(*args))
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too: the result says what ended this rank
        return pickle.dumps(Failed.from_exception(rank, error))


def _load(call: bytes) -> Any:
    try:
        return pickle.loads(call)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"local ranks cannot import the function ({error}): define it at the top of an importable file, above "
            "`if __name__ == '__main__':`, and not in a notebook"
        ) from None


def _dump(function: Any, result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__name__", short(function))
        raise ConfigError(f"the result of {name} cannot be pickled ({error}); return plain values") from None
