"""Rendezvous of processes that share a key-value store, also after a restart.

torchrun's agent keeps one store over all restarts, with the keys of processes that are gone. The restart count cannot
tell processes apart: agents on several machines count differently. So every process draws a token. The first rank
writes its token as the name of the rendezvous, the others register there with theirs, and when all have registered, it
writes the list of tokens. A process that finds its token in the list has met the processes that run now: one that is
gone cannot have registered under a token that was drawn just now.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any, NamedTuple

from zeropipe.engine.comm.faults import MAX_POLL_S, MIN_POLL_S, StoreThread
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import EngineError

DescribeMissing = Callable[[Sequence[int]], str]  # the error for ranks that have not registered
Outcome = str | list[tuple[str, bool]]  # the error for missing ranks, or the registrations of all; [] while undecided


class Rendezvous(NamedTuple):
    """A rendezvous that all ranks have reached."""

    name: str  # the same on all ranks, and never used before
    hosts: tuple[int, ...]  # the ranks on the machine of the store


def rendezvous(
    store: StoreThread, key: str, rank: int, size: int, timeout: float, describe_missing: DescribeMissing
) -> Rendezvous:
    """Wait for all ranks; EngineError on those that came if others do not within `timeout` seconds."""
    participant, pause, end = _Participant(key, rank, size, describe_missing), MIN_POLL_S, time.monotonic() + timeout
    store.request(participant.open)
    while True:
        has_timed_out = time.monotonic() > end
        outcome = store.request(participant.time_out if has_timed_out else participant.poll)
        if isinstance(outcome, str):
            raise EngineError(outcome)
        if outcome:
            hosts = tuple(other for other, (_, is_host) in enumerate(outcome) if is_host)
            return Rendezvous(participant.name, hosts)
        time.sleep(pause)
        pause = min(2 * pause, MAX_POLL_S)


class _Participant:
    """One rank at a rendezvous. The outcome is decided once, so all registered ranks get the same."""

    def __init__(self, key: str, rank: int, size: int, describe_missing: DescribeMissing) -> None:
        self._key, self._rank, self._describe_missing = key, rank, describe_missing
        self._ranks, self._token = range(size), token_hex(8)
        self.name = ""  # of the rendezvous at which this rank has registered

    def open(self, store: Any) -> None:
        """The first rank opens the rendezvous."""
        self._registration = [self._token, torch_comm.is_host_of(store)]
        if self._rank == 0:
            store.set(self._key, self._token)

    def poll(self, store: Any) -> Outcome:
        """Register if this rank has not yet; the first rank decides when all have."""
        token = self._token if self._rank == 0 else _read(store, self._key).decode()
        if not token:
            return []
        if self.name != f"{self._key}/{token}":
            self.name = f"{self._key}/{token}"
            store.set(f"{self.name}/{self._rank}", json.dumps(self._registration))
        keys = [f"{self.name}/{rank}" for rank in self._ranks]
        if self._rank == 0:
            return self._decide(store, [json.loads(store.get(key)) for key in keys]) if store.check(keys) else []
        decided = _read(store, f"{self.name}/outcome")
        outcome = json.loads(decided) if decided else []
        if isinstance(outcome, str) and not torch_comm.store_outlives_ranks():
            return outcome
        # otherwise it may be that of processes that are gone: the first rank may still open a new rendezvous
        return outcome if self._is_in(outcome) else []

    def time_out(self, store: Any) -> Outcome:
        """Decide that ranks are missing, unless another rank has decided."""
        if not self.name:
            return self._describe_missing([0])
        missing = [rank for rank in self._ranks if not store.check([f"{self.name}/{rank}"])]
        # where all have registered, they did so before a restart: the first rank has not opened a new rendezvous
        outcome = self._decide(store, self._describe_missing(missing or [0]))
        return outcome if isinstance(outcome, str) or self._is_in(outcome) else self._describe_missing([0])

    def _is_in(self, outcome: Outcome) -> bool:
        return not isinstance(outcome, str) and bool(outcome) and list(outcome[self._rank]) == self._registration

    def _decide(self, store: Any, outcome: Outcome) -> Outcome:
        found: Outcome = json.loads(store.compare_set(f"{self.name}/outcome", "", json.dumps(outcome)))
        return found


def _read(store: Any, key: str) -> bytes:
    return bytes(store.get(key)) if store.check([key]) else b""
