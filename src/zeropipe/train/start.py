"""Starts the processes of a run, or uses those that torchrun started."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
import torch.distributed as dist

from zeropipe.engine.run.launch import LocalRanks, is_local, model_modules
from zeropipe.engine.run.slow_dtypes import warn_if_slow
from zeropipe.engine.run.torchrun import join_torchrun, local_world_size
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.signals import SIGNALS
from zeropipe.train.loop.trainer import Outcome, train

MORE = 60.0  # seconds beyond the engine's own time-out, which says more
START = 120.0  # seconds for local ranks to find each other, if the engine has no shorter time-out
AGAIN = 0.2  # seconds between two signals to the ranks


def start(config: RunConfig) -> Outcome | None:
    """What training gave; None on all ranks of torchrun's but the first."""
    if not is_local():
        join_torchrun(_backend(config, local_world_size()), config.engine.timeout)
        try:
            outcome = train(config)
            return outcome if dist.get_rank() == 0 else None
        finally:
            dist.destroy_process_group()
    number = config.mesh.num_processes
    warn_if_slow(config.model.dtype, "cuda" if _on_gpus(config) else "cpu")
    wanted = ["zeropipe.train.loop.trainer", *model_modules(config.engine.device)]
    with (
        LocalRanks(
            number, backend=_backend(config, number), preload=wanted, start_timeout=min(START, config.engine.timeout)
        ) as ranks,
        _passing_on(ranks.pids) as heard,
    ):
        first: Outcome = ranks.run(_on_rank, config, timeout=config.engine.timeout + MORE)[0]
        return replace(first, stopped_by=heard[0]) if heard and first.stopped_by else first


def _backend(config: RunConfig, num_local_ranks: int) -> str:
    """NCCL where every rank of this machine has a GPU of its own, else gloo."""
    return "nccl" if _on_gpus(config) and torch.cuda.device_count() >= num_local_ranks else "gloo"


def _on_gpus(config: RunConfig) -> bool:
    return config.engine.device != "cpu" and torch.cuda.is_available()


def _say(line: str) -> None:
    """From inside a signal handler, where the stream may be in use."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _on_rank(config: RunConfig) -> Outcome:
    """Train on a local rank, which hears the first signal alone: what more there is, the starting process decides.

    Ctrl-C in a terminal, and SIGTERM to a process group, reach a rank twice: from there, and passed on.
    """
    hear_nothing()
    return train(config)


def hear_nothing() -> None:
    """Ignore signals by a function: of one that came before SIG_IGN was set, Python would print an OSError."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)


@contextmanager
def _passing_on(pids: list[int]) -> Iterator[list[str]]:
    """The first Ctrl-C or SIGTERM reaches the ranks, which save and end; the second one stops everything at once.

    Yields the names of signals heard. Ranks get SIGINT, whichever it was: SIGTERM would end one that has just started.
    """
    heard: list[str] = []
    over = threading.Event()

    def tell() -> None:
        """Again and again: a rank that has just been started does not listen yet."""
        while not over.wait(AGAIN):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        if heard:
            _say("stopped at once; the same command goes on from the newest checkpoint")
            raise KeyboardInterrupt
        heard.append(signal.Signals(number).name)
        _say(f"{heard[0]}: the step is finished and saved; once more stops at once")
        threading.Thread(target=tell, daemon=True).start()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield heard
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
