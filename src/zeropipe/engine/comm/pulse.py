"""What ranks say about themselves, and who is to blame when one of them waits too long. Values only, no connections.

Every rank's watchdog says at intervals where its main thread is, for how long, and for whom it waits. A rank that waits
too long follows these words from rank to rank: whoever waits for nobody, or says nothing any more, is the culprit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

EVERYONE = (-1,)  # waits for all that have not come to the same exchange
BETWEEN = "a place between steps"
LONG_WORK = 3600.0  # seconds that a rank may be busy without being taken for stuck


class Walker(Protocol):
    """Something that goes from action to action."""

    @property
    def where(self) -> str: ...


class Place:
    """What this rank does now: its main thread writes, one attribute at a time, its watchdog reads."""

    __slots__ = ("busy", "call", "entered", "name", "round", "waits", "walker")

    def __init__(self) -> None:
        self.name = "set-up"
        self.call: str | None = self.name  # what all ranks do now; None: whatever the others do
        self.walker: Walker | None = None  # knows better than `name` while it is at work
        self.waits: tuple[int, ...] = ()  # the ranks that the main thread waits for
        self.round = 0  # exchanges it has come to
        self.entered = 0  # calls of the engine
        self.busy = False  # with work of its own that may take long: it loads weights, or makes data ready

    def enter(self, name: str, busy: bool = False) -> None:
        """Begin something else."""
        self.walker, self.name, self.call, self.busy = None, name, name, busy
        self.entered += 1

    @property
    def where(self) -> str:
        """Its name: an action, or a part of a step."""
        walker = self.walker
        return self.name if walker is None else walker.where

    @property
    def sign(self) -> tuple[object, ...]:
        """Changes whenever the main thread gets on."""
        return (self.entered, self.where, self.waits, self.round)


class Pulse(NamedTuple):
    """What a rank says about itself."""

    beat: int
    place: str
    stayed: float  # seconds without progress
    waits: tuple[int, ...]
    round: int
    busy: bool  # with work that may take long: it compiles, say

    def text(self) -> str:
        """For the store."""
        return json.dumps(self)

    @staticmethod
    def read(text: str | bytes) -> Pulse:
        """The other way."""
        beat, place, stayed, waits, number, busy = json.loads(text)
        return Pulse(beat, place, stayed, tuple(waits), number, busy)


class Seen(NamedTuple):
    """A rank as another one sees it."""

    pulse: Pulse | None  # None: it has not said anything yet
    silent: float  # seconds since its last new beat, on the clock of who looks


def silence(timeout: float) -> float:
    """Seconds without a beat until a rank counts as lost: half of the time-out, as nobody looks in the first half.

    Long on purpose: a thread that beats may have to wait for other Python code of its process.
    """
    return max(timeout / 2, 3.0)


def chain(rank: int, seen: Mapping[int, Seen], limit: float) -> dict[int, tuple[int, ...]]:
    """The ranks that `rank` waits for, also through others, and for whom each of them waits; silent ones for nobody."""
    found: dict[int, tuple[int, ...]] = {}
    todo = [rank]
    while todo:
        other = todo.pop()
        if other not in found:
            silent = other != rank and seen[other].silent >= limit
            found[other] = () if silent else _needs(other, seen, limit)
            todo += found[other]
    return found


def _needs(rank: int, seen: Mapping[int, Seen], limit: float) -> tuple[int, ...]:
    pulse = seen[rank].pulse
    if pulse is None or pulse.waits != EVERYONE:
        return () if pulse is None else pulse.waits
    others = ((other, theirs, silent) for other, (theirs, silent) in seen.items() if other != rank)
    # a silent one may have come to the exchange and stopped inside
    return tuple(o for o, theirs, silent in others if theirs is None or theirs.round < pulse.round or silent >= limit)


def verdict(rank: int, seen: Mapping[int, Seen], timeout: float) -> str | None:
    """Why `rank`, which has waited for `timeout` seconds, will wait for ever; None where all get on with their work."""
    limit = silence(timeout)
    found = chain(rank, seen, limit)
    ends = sorted(other for other, needs in found.items() if not needs and other != rank)
    lost = [end for end in ends if seen[end].silent >= limit]
    if lost:
        why = f"no sign of life for {limit:g} s, it is stopped or its machine is gone"
        return "; ".join(lost_text(end, seen[end].pulse, why) for end in lost)
    if any(seen[end].silent >= limit / 2 for end in ends):
        return None  # it may be lost: soon that is known
    stuck = [end for end in ends if _stuck(seen[end], timeout)]
    if stuck:
        worst = max(stuck, key=lambda end: _stayed(seen[end]))
        return (
            f"rank {worst} is stuck at {_place(seen[worst])}: no progress for {timeout:g} s, and rank {rank} waits at "
            f"{_place(seen[rank])}; if that is no fault, give Engine a longer timeout"
        )
    if not ends and len(found) > 1 and all(_stuck(seen[other], timeout) for other in found):
        return "ranks wait for each other: " + ", ".join(f"{r} at {_place(seen[r])}" for r in sorted(found))
    return None


def lost_text(rank: int, pulse: Pulse | None, why: str) -> str:
    """One line about a rank that is gone."""
    return f"rank {rank} was lost: {why}" + (f" (last seen at {pulse.place})" if pulse is not None else "")


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _place(seen: Seen) -> str:
    return "its start" if seen.pulse is None else seen.pulse.place


def _stayed(seen: Seen) -> float:
    return seen.silent + (seen.pulse.stayed if seen.pulse else 0.0)


def _stuck(seen: Seen, timeout: float) -> bool:
    busy = seen.pulse is not None and seen.pulse.busy
    return _stayed(seen) >= (max(timeout, LONG_WORK) if busy else timeout)
