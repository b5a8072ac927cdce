"""Status and heartbeats of ranks, and the diagnosis of a wait that lasts too long. Values only, no connections.

Every rank's watchdog publishes at intervals what its main thread does, for how long, and which ranks it waits for. A
rank that waits too long follows these heartbeats from rank to rank: the one at the end, which waits for no other or has
no heartbeat any more, is the culprit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

EVERYONE = (-1,)  # in `waits_for`: all ranks that have not reached the same exchange
BETWEEN_STEPS = "a point between steps"
MAX_BUSY_S = 3600.0  # a rank that announced long work is not stuck before


class RunsActions(Protocol):
    """An executor: it runs one action after another."""

    @property
    def current_action(self) -> str: ...


class RankStatus:
    """What this rank does now: its main thread writes, one attribute at a time, its watchdog reads."""

    __slots__ = ("call", "executor", "is_busy", "num_calls", "num_exchanges", "phase", "waits_for")

    def __init__(self) -> None:
        self.phase = "set-up"
        self.call: str | None = self.phase  # the call that all ranks make now; None: any call fits
        self.executor: RunsActions | None = None  # while it runs, its action replaces `phase`
        self.waits_for: tuple[int, ...] = ()  # the ranks that the main thread waits for
        self.num_exchanges = 0
        self.num_calls = 0  # of the engine
        self.is_busy = False  # with long work of its own: it loads weights or prepares data

    def enter(self, name: str, busy: bool = False) -> None:
        """Begin another call."""
        self.executor, self.phase, self.call, self.is_busy = None, name, name, busy
        self.num_calls += 1

    @contextmanager
    def waiting_for(self, peers: tuple[int, ...]) -> Iterator[None]:
        """Around a wait for other ranks."""
        self.waits_for = peers
        try:
            yield
        finally:
            self.waits_for = ()

    @contextmanager
    def executing(self, executor: RunsActions) -> Iterator[None]:
        """Around the actions of a step. After an error the status still names the action that failed."""
        self.executor = executor
        yield
        self.executor, self.phase = None, "the end of the step"

    @property
    def where(self) -> str:
        """The action or phase, for error texts."""
        executor = self.executor
        return self.phase if executor is None else executor.current_action

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes whenever the main thread makes progress."""
        return (self.num_calls, self.where, self.waits_for, self.num_exchanges)


class Heartbeat(NamedTuple):
    """The status that a rank publishes."""

    number: int
    where: str
    stalled_for: float  # seconds without progress
    waits_for: tuple[int, ...]
    num_exchanges: int
    is_busy: bool

    def to_json(self) -> str:
        return json.dumps(self)

    @staticmethod
    def from_json(text: str | bytes) -> Heartbeat:
        number, where, stalled_for, waits_for, num_exchanges, is_busy = json.loads(text)
        return Heartbeat(number, where, stalled_for, tuple(waits_for), num_exchanges, is_busy)


class Observation(NamedTuple):
    """The newest heartbeat of a rank, as another rank observed it."""

    heartbeat: Heartbeat | None  # None: there was none yet
    age: float  # seconds since it was new, on the observer's clock

    @property
    def where(self) -> str:
        return "its start" if self.heartbeat is None else self.heartbeat.where

    @property
    def stalled_for(self) -> float:
        return self.age + (self.heartbeat.stalled_for if self.heartbeat else 0.0)

    def is_stuck(self, timeout: float) -> bool:
        is_busy = self.heartbeat is not None and self.heartbeat.is_busy
        return self.stalled_for >= (max(timeout, MAX_BUSY_S) if is_busy else timeout)


def heartbeat_limit(timeout: float) -> float:
    """Seconds without a heartbeat until a rank counts as lost: half of the timeout, since observing begins halfway.

    Long on purpose: the thread that publishes may have to wait for other Python code of its process.
    """
    return max(timeout / 2, 3.0)


def _find_dependencies(rank: int, ranks: Mapping[int, Observation], limit: float) -> dict[int, tuple[int, ...]]:
    """The ranks that `rank` waits for, directly or through others, and what each waits for; silent ones for none."""
    found: dict[int, tuple[int, ...]] = {}
    pending = [rank]
    while pending:
        other = pending.pop()
        if other not in found:
            is_silent = other != rank and ranks[other].age >= limit
            found[other] = () if is_silent else _dependencies_of(other, ranks, limit)
            pending += found[other]
    return found


def _dependencies_of(rank: int, ranks: Mapping[int, Observation], limit: float) -> tuple[int, ...]:
    own = ranks[rank].heartbeat
    if own is None or own.waits_for != EVERYONE:
        return () if own is None else own.waits_for
    # a silent rank may have reached the exchange and stopped inside
    return tuple(
        other
        for other, (theirs, age) in ranks.items()
        if other != rank and (theirs is None or theirs.num_exchanges < own.num_exchanges or age >= limit)
    )


def diagnose(rank: int, ranks: Mapping[int, Observation], timeout: float) -> str | None:
    """The error of `rank`, which has waited for `timeout` seconds; None while the ranks it waits for make progress."""
    limit = heartbeat_limit(timeout)
    dependencies = _find_dependencies(rank, ranks, limit)
    ends = sorted(other for other, waits_for in dependencies.items() if not waits_for and other != rank)
    lost = [end for end in ends if ranks[end].age >= limit]
    if lost:
        why = f"no heartbeat for {limit:g} s, it is stopped or its machine is gone"
        return "; ".join(lost_text(end, ranks[end].heartbeat, why) for end in lost)
    if any(ranks[end].age >= limit / 2 for end in ends):
        return None  # it may be lost: a later diagnosis decides
    stuck = [end for end in ends if ranks[end].is_stuck(timeout)]
    if stuck:
        worst = max(stuck, key=lambda end: ranks[end].stalled_for)
        return (
            f"rank {worst} is stuck at {ranks[worst].where}: no progress for {timeout:g} s, and rank {rank} waits at "
            f"{ranks[rank].where}; if this work takes that long, pass Engine a longer timeout"
        )
    if not ends and len(dependencies) > 1 and all(ranks[other].is_stuck(timeout) for other in dependencies):
        return "ranks wait for each other: " + ", ".join(f"{r} at {ranks[r].where}" for r in sorted(dependencies))
    return None


def lost_text(rank: int, heartbeat: Heartbeat | None, why: str) -> str:
    """The error for a rank that is gone."""
    return f"rank {rank} was lost: {why}" + (f" (last seen at {heartbeat.where})" if heartbeat is not None else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
