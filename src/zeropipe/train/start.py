"""Starts the processes of a run, or uses those that torchrun started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zeropipe.engine.run.launch import LocalRanks, is_local
from zeropipe.train.config.models import RunConfig
from zeropipe.train.loop.job import train

if TYPE_CHECKING:
    from zeropipe.train.loop.job import Outcome

MORE = 60.0  # seconds beyond the engine's own time-out, which says more


def start(config: RunConfig) -> Outcome | None:
    """What training gave; None on all ranks of torchrun's but the first."""
    if not is_local():
        dist.init_process_group(_backend(config, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        try:
            outcome = train(config)
            return outcome if dist.get_rank() == 0 else None
        finally:
            dist.destroy_process_group()
    number = config.mesh.num_processes
    with (
        LocalRanks(number, backend=_backend(config, number), preload=["zeropipe.train.loop.job"]) as ranks,
        _passing_on(ranks.pids),
    ):
        first: Outcome = ranks.run(train, config, timeout=config.engine.timeout + MORE)[0]
        return first


def _backend(config: RunConfig, ranks_here: int) -> str:
    """NCCL where every rank of this machine has a GPU of its own, else gloo."""
    wanted = config.engine.device != "cpu" and torch.cuda.is_available()
    return "nccl" if wanted and torch.cuda.device_count() >= ranks_here else "gloo"


@contextmanager
def _passing_on(pids: list[int]) -> Iterator[None]:
    """Ctrl-C and SIGTERM reach the ranks, which save and end; the second time everything stops at once."""
    told: list[int] = []

    def handle(number: int, frame: object) -> None:
        if told:
            raise KeyboardInterrupt
        told.append(number)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
