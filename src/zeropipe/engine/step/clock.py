"""Clocks of machines: ranks write times by their own, a Timeline has rank 0's."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

import torch

from zeropipe.engine.comm.communicator import Communicator

PINGS = 16
CLOCK_TAG = 2


class Clock:
    """How far this rank's clock is ahead of rank 0's, at any time: clocks drift, so it is measured again and again.

    Ranks of one machine share a clock and measure nothing.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        machines = comm.exchange(machine_name())
        self._others = [rank for rank, machine in enumerate(machines) if machine != machines[0]]
        self._measured: list[tuple[float, float]] = []  # the last two: a time of ours, how far we were ahead
        self.measure()

    def measure(self) -> None:
        """Ask rank 0 for the time; every rank calls this."""
        for rank in self._others:
            if self._comm.rank in (0, rank):
                found = self._ping(rank)
                if self._comm.rank == rank:
                    self._measured = [*self._measured[-1:], found]

    def of_rank_0(self, moment: float) -> float:
        """Rank 0's time at a moment of ours."""
        if not self._measured:
            return moment
        (first, ahead), (last, ahead_then) = self._measured[0], self._measured[-1]
        drift = (ahead_then - ahead) / (last - first) if last > first else 0.0
        return moment - ahead - drift * (moment - first)

    def _ping(self, rank: int) -> tuple[float, float]:
        """Rank `rank` asks rank 0; the fastest answer counts: when it was asked for, and how far we were ahead."""
        comm, word, best = self._comm, torch.zeros(1, dtype=torch.float64, device="cpu"), (float("inf"), 0.0, 0.0)
        for _ in range(PINGS):
            if comm.rank == 0:
                comm.receive(word, rank, CLOCK_TAG)
                word.fill_(time.perf_counter())
                comm.send(word, rank, CLOCK_TAG)
            else:
                asked = time.perf_counter()
                comm.send(word, 0, CLOCK_TAG)
                comm.receive(word, 0, CLOCK_TAG)
                answered = time.perf_counter()
                middle = (asked + answered) / 2
                best = min(best, (answered - asked, middle, middle - float(word)))
        return best[1:]


def machine_name() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
