"""Data that is made ready once: by the first rank, while the others wait for its word."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from secrets import token_hex
from typing import Any

import torch.distributed as dist

from zeropipe.engine.comm.fabric import name_start
from zeropipe.engine.comm.threads import started
from zeropipe.engine.run.launch import heartbeat
from zeropipe.engine.torch_private import default_store
from zeropipe.errors import ConfigError, EngineError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.data import prepare
from zeropipe.train.loop.metrics import log
from zeropipe.train.loop.signals import StopSignals
from zeropipe.train.loop.sole import OutputLock

EVERY = 1.0  # seconds between two signs of life of the first rank


def named() -> str:
    """A name for this call of `train` that all ranks share: torchrun's store keeps the words of killed processes."""
    names = [token_hex(6)]
    dist.broadcast_object_list(names, src=0)
    name_start(names[0])
    return names[0]


def prepared(config: RunConfig, name: str, signals: StopSignals, lock: OutputLock) -> None:
    """All ranks leave this when the folder is this run's and the data is ready, or with the first rank's error.

    The word goes through the job's store and not through a collective, which would time out while files are read.
    """
    key = f"zeropipe/train/{name}/prepared"
    store = default_store()
    if dist.get_rank() == 0:
        fault = "the first rank has ended"
        try:
            with alive(store, key):
                lock.acquire(config.train.output)
                prepare(config, log, looker(signals))
            fault = ""
        except Exception as error:
            fault = str(error)
            raise
        finally:
            store.set(key, fault)
    elif fault := word_of(store, key, config.engine.timeout):
        raise ConfigError(fault)


@contextmanager
def alive(store: Any, key: str, every: float = EVERY) -> Iterator[None]:
    """Signs of life meanwhile, from a thread: to read a large file is no silence, to be killed is."""
    over = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # the store is gone, and with it those who listen
            for number in count():
                store.set(f"{key}/beat", str(number))
                if over.wait(every):
                    return

    thread = started("preparing", beat)
    try:
        yield
    finally:
        over.set()
        thread.join()


def word_of(store: Any, key: str, patience: float) -> str:
    """What the first rank says in the end; EngineError if it gives no sign of life for `patience` seconds."""
    seen, since = b"", time.monotonic()
    while not store.check([key]):
        beat = store.get(f"{key}/beat") if store.check([f"{key}/beat"]) else b""
        if beat != seen:
            seen, since = beat, time.monotonic()
        if time.monotonic() - since > patience:
            raise EngineError(f"rank 0 was lost while it made the data ready: no sign of life within {patience:g} s")
        time.sleep(0.02)
    return str(store.get(key).decode())


def looker(signals: StopSignals) -> Callable[[], None]:
    """For the first rank, every second: who wants to stop need not wait until the last file is read."""

    def look() -> None:
        if signals.received:
            raise EngineError(f"{signals.received}: stopped while the data was prepared; there is nothing to save yet")
        heartbeat()

    return look
