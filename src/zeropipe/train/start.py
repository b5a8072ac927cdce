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

EXTRA_S = 60.0  # beyond the engine's own timeout, whose error says more
START_TIMEOUT_S = 120.0  # for local ranks to find each other, if the engine has no shorter timeout
SIGNAL_INTERVAL_S = 0.2  # between two signals to the ranks
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second one is the older name


def start(config: RunConfig) -> Outcome | None:
    """Train, and return the outcome; None on all ranks of torchrun but the first."""
    if _on_gpus(config):
        use_expandable_segments()
    if not is_local():
        join_torchrun(_backend(config, local_world_size()), config.engine.timeout)
        try:
            outcome = train(config)
            return outcome if dist.get_rank() == 0 else None
        finally:
            dist.destroy_process_group()
    number = config.mesh.num_processes
    warn_if_slow(config.model.dtype, "cuda" if _on_gpus(config) else "cpu")
    preload = ["zeropipe.train.loop.trainer", *model_modules(config.engine.device)]
    with (
        LocalRanks(
            number,
            backend=_backend(config, number),
            preload=preload,
            start_timeout=min(START_TIMEOUT_S, config.engine.timeout),
        ) as ranks,  # fmt: skip
        _forward_signals(ranks.pids) as received,
    ):
        first: Outcome = ranks.run(_on_rank, config, timeout=config.engine.timeout + EXTRA_S)[0]
        return replace(first, stopped_by=received[0]) if received and first.stopped_by else first


def use_expandable_segments() -> None:
    """Let torch's allocator extend its segments, unless the user has set it: freed blocks of any size are used again.

    Segments of fixed sizes leave gaps where microbatches differ in length. torch reads the setting when CUDA starts, in
    this process and those that it starts.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def _backend(config: RunConfig, num_local_ranks: int) -> str:
    """NCCL where every rank of this machine has a GPU of its own, else gloo."""
    return "nccl" if _on_gpus(config) and torch.cuda.device_count() >= num_local_ranks else "gloo"


def _on_gpus(config: RunConfig) -> bool:
    return config.engine.device != "cpu" and torch.cuda.is_available()


def _print_in_handler(line: str) -> None:
    """Print from a signal handler, which may interrupt another write to the stream."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _on_rank(config: RunConfig) -> Outcome:
    """Train on a local rank. After the first signal it ignores others: the starting process handles the second one.

    Ctrl-C in a terminal, and SIGTERM to a process group, reach a rank twice: directly, and forwarded.
    """
    ignore_signals()
    return train(config)


def ignore_signals() -> None:
    """Ignore signals by a function: with SIG_IGN Python prints an OSError for a signal that arrived just before."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: None)


@contextmanager
def _forward_signals(pids: list[int]) -> Iterator[list[str]]:
    """Forward the first Ctrl-C or SIGTERM to the ranks, which save and end; the second one stops all at once.

    Yields a list that gets the names of the signals. Ranks always get SIGINT: SIGTERM would kill one that just started.
    """
    received: list[str] = []
    ended = threading.Event()

    def interrupt_ranks() -> None:
        """Send SIGINT repeatedly: a rank that has just started has no handler yet."""
        while not ended.wait(SIGNAL_INTERVAL_S):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        if received:
            _print_in_handler("stopped; the same command continues from the newest checkpoint")
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)
        _print_in_handler(f"{received[0]}: finishing and saving this step; a second signal stops at once")
        threading.Thread(target=interrupt_ranks, daemon=True).start()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield received
    finally:
        ended.set()
        for number, handler in before.items():
            signal.signal(number, handler)
