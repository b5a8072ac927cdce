"""Clocks of machines: ranks record times of their own clock, a Timeline has those of rank 0's."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

import torch

from zeropipe.engine.comm.communicator import Communicator

NUM_PINGS = 16
CLOCK_TAG = 2


class Clock:
    """The offset of this rank's clock from rank 0's. Clocks drift, so it is measured before every recorded step.

    Ranks of one machine share a clock.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        machines = comm.exchange(machine_name())
        self._remote = [rank for rank, machine in enumerate(machines) if machine != machines[0]]
        self._offsets: list[tuple[float, float]] = []  # the last two (own time, offset)
        self.measure()

    def measure(self) -> None:
        """Measure the offset; every rank calls this."""
        for rank in self._remote:
            if self._comm.rank in (0, rank):
                offset = self._ping(rank)
                if self._comm.rank == rank:
                    self._offsets = [*self._offsets[-1:], offset]

    def to_rank_0(self, moment: float) -> float:
        """Convert a time of this rank's clock to rank 0's."""
        if not self._offsets:
            return moment
        (first, offset), (last, last_offset) = self._offsets[0], self._offsets[-1]
        drift = (last_offset - offset) / (last - first) if last > first else 0.0
        return moment - offset - drift * (moment - first)

    def _ping(self, rank: int) -> tuple[float, float]:
        """Rank `rank` requests rank 0's time; (own time, offset) of the fastest answer."""
        comm, value, best = self._comm, torch.zeros(1, dtype=torch.float64, device="cpu"), (float("inf"), 0.0, 0.0)
        for _ in range(NUM_PINGS):
            if comm.rank == 0:
                comm.receive(value, rank, CLOCK_TAG)
                value.fill_(time.perf_counter())
                comm.send(value, rank, CLOCK_TAG)
            else:
                sent = time.perf_counter()
                comm.send(value, 0, CLOCK_TAG)
                comm.receive(value, 0, CLOCK_TAG)
                received = time.perf_counter()
                middle = (sent + received) / 2
                best = min(best, (received - sent, middle, middle - float(value)))
        return best[1:]


def machine_name() -> str:
    """A name that differs between machines, and between boots."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
