"""How processes that share a key-value store find each other, also after a restart.

torchrun's agent keeps one store over all restarts, with everything that processes wrote there that are gone. The number
of restarts does not tell processes apart: agents on several machines do not count alike. So every process makes a name
of its own. The first rank writes its name down as that of the meeting, the others sign there with theirs, and when all
have signed, it writes the list of names. Who finds its own name in the list has met the processes that run now: nobody
who is gone can have answered to a name that was made just now.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any, NamedTuple

from zeropipe.engine.comm.faults import StoreThread
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import EngineError

SHORTEST, LONGEST = 0.0005, 0.05  # seconds between two looks
Missing = Callable[[Sequence[int]], str]  # the line about ranks that do not come


class Met(NamedTuple):
    """A meeting that all ranks have come to."""

    name: str  # the same on all ranks, and never used before
    hosts: tuple[int, ...]  # the ranks on the machine of the store


def meet(store: StoreThread, key: str, rank: int, size: int, patience: float, missing: Missing) -> Met:
    """Wait for all ranks; EngineError on those that came if others do not within `patience` seconds."""
    guest, pause, end = _Guest(key, rank, size, missing), SHORTEST, time.monotonic() + patience
    store.ask(guest.come)
    while True:
        is_over = time.monotonic() > end
        outcome = store.ask(guest.give_up if is_over else guest.attend)
        if isinstance(outcome, str):
            raise EngineError(outcome)
        if outcome:
            return Met(guest.meeting, tuple(one for one, (_, is_host) in enumerate(outcome) if is_host))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)


Outcome = str | list[tuple[str, bool]]  # the line about who is missing, or the names of all


class _Guest:
    """What one rank does at a meeting. Its outcome is decided once: all that were there hear the same."""

    def __init__(self, key: str, rank: int, size: int, missing: Missing) -> None:
        self._key, self._rank, self._missing = key, rank, missing
        self._ranks, self._token = range(size), token_hex(8)
        self.meeting = ""  # the key of the one where this rank has signed

    def come(self, store: Any) -> None:
        """The first rank calls the meeting."""
        self._signature = [self._token, torch_comm.is_host_of(store)]
        if self._rank == 0:
            store.set(self._key, self._token)

    def attend(self, store: Any) -> Outcome:
        """Sign where this rank has not yet; the first one decides when all have signed. Nothing while it is open."""
        name = self._token if self._rank == 0 else _read(store, self._key).decode()
        if not name:
            return []
        if self.meeting != f"{self._key}/{name}":
            self.meeting = f"{self._key}/{name}"
            store.set(f"{self.meeting}/{self._rank}", json.dumps(self._signature))
        keys = [f"{self.meeting}/{rank}" for rank in self._ranks]
        if self._rank == 0:
            return self._decide(store, [json.loads(store.get(key)) for key in keys]) if store.check(keys) else []
        decided = _read(store, f"{self.meeting}/outcome")
        outcome = json.loads(decided) if decided else []
        if isinstance(outcome, str) and not torch_comm.store_outlives_ranks():
            return outcome
        # else it may be that of processes that are gone: the first rank may still call a meeting
        return outcome if self._is_in(outcome) else []

    def give_up(self, store: Any) -> Outcome:
        """Decide that ranks are missing; others may have decided before."""
        if not self.meeting:
            return self._missing([0])
        away = [rank for rank in self._ranks if not store.check([f"{self.meeting}/{rank}"])]
        # where all have signed, they did so before a restart: the first rank has not called a new meeting
        outcome = self._decide(store, self._missing(away or [0]))
        return outcome if isinstance(outcome, str) or self._is_in(outcome) else self._missing([0])

    def _is_in(self, outcome: Outcome) -> bool:
        return not isinstance(outcome, str) and bool(outcome) and list(outcome[self._rank]) == self._signature

    def _decide(self, store: Any, outcome: Outcome) -> Outcome:
        found: Outcome = json.loads(store.compare_set(f"{self.meeting}/outcome", "", json.dumps(outcome)))
        return found


def _read(store: Any, key: str) -> bytes:
    return bytes(store.get(key)) if store.check([key]) else b""
