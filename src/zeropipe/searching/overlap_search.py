"""Search for the F and B of each rank that run together, as Overlaps.

Each rank keeps the order of its F and that of its B from a known schedule. What is searched is its pattern, a text of
"F", "B" and "P": the next F, the next B, or both as one Overlap. docs/search-method.md has the patterns that are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from random import Random
from typing import NamedTuple

from zeropipe.core.action import B, F, I, W
from zeropipe.core.packed import JOINED, PackedRows, is_joined, kind_of, with_kind
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import DeadlockError
from zeropipe.searching.task import SearchTask, timeline_value
from zeropipe.sim.fill import fill_gaps
from zeropipe.sim.overlaps import with_overlaps
from zeropipe.sim.simulate import simulate

NAME = "searched"
LEAD_RATIOS = (1, 2)  # of the F before the first B, to those of the known schedule ...
LEAD_CHANGES = (0, -1)  # ... and one fewer
MOVE_LEAD, MOVE_PAIR, MOVE_PAIRS = 0.25, 0.5, 0.75  # parts of the moves, cumulated; the others exchange two neighbours
MAX_PERIOD = 4  # of the Overlaps that one move divides

Patterns = tuple[str, ...]  # of each rank


class Order(NamedTuple):
    """The codes of the F of one rank, and of its B, each in their order."""

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]


class OverlapSearch:
    """The search for one task: patterns of known schedules, then changes of the best one step by step."""

    def __init__(self, task: SearchTask, seed: int, offer: Callable[[Timeline], None]) -> None:
        self._task, self._random, self._offer = task, Random(seed), offer
        self._value = float("inf")
        self._orders: tuple[Order, ...] = ()
        self._patterns: Patterns = ()
        self._known = set[tuple[Order, ...]]()

    def add_schedules(self, schedules: Iterable[Schedule], stopped: Callable[[], bool]) -> None:
        """Try the patterns that follow from schedules: their own, joined, and with other numbers of F in advance."""
        for schedule in schedules:
            self._offer(simulate(with_overlaps(schedule, self._task.costs), self._task.costs))
            orders, own = find_patterns(schedule)
            self._try(orders, own)
            if orders not in self._known:
                self._known.add(orders)
                for variants in list_lead_patterns(own):
                    self._try_first(orders, variants, stopped)
            if stopped():
                return

    def improve(self, steps: float, stopped: Callable[[], bool]) -> None:
        """Change the best patterns, as long as they do not become slower; then defer the W of B that run alone."""
        done = 0
        while self._patterns and done < steps and not stopped():
            done += 1
            patterns = self._move()
            if patterns != self._patterns:
                self._try(self._orders, patterns)
        if self._patterns and not self._task.minimizes_span:
            self._offer(simulate(self._defer_weights(), self._task.costs))

    def _try_first(self, orders: tuple[Order, ...], variants: Iterable[Patterns], stopped: Callable[[], bool]) -> None:
        """Try patterns until one fits."""
        for patterns in variants:
            if stopped() or self._try(orders, patterns) < float("inf"):
                return

    def _try(self, orders: tuple[Order, ...], patterns: Patterns) -> float:
        """Simulate patterns, and keep them if they fit and are no slower; return the value, infinite if not."""
        try:
            timeline = simulate(self._build(orders, patterns), self._task.costs)
        except DeadlockError:
            return float("inf")
        if not self._task.fits(timeline):
            return float("inf")
        value = timeline_value(timeline, self._task.minimizes_span)
        if value <= self._value:
            self._orders, self._patterns, self._value = orders, patterns, value
            self._offer(timeline)
        return value

    def _build(self, orders: tuple[Order, ...], patterns: Patterns) -> Schedule:
        return self._to_schedule(map(_write_row, orders, patterns))

    def _defer_weights(self) -> Schedule:
        """The best patterns with I and W in place of each B alone, and W where the rank would wait."""
        rows = map(_split_alone, map(_write_row, self._orders, self._patterns))
        return fill_gaps(self._to_schedule(rows), self._task.costs, weight_parts=self._task.problem.num_weight_parts)

    def _to_schedule(self, rows: Iterable[Iterable[int]]) -> Schedule:
        problem = replace(self._task.problem, num_weight_parts=1)
        return Schedule(problem, self._task.placement, PackedRows.of(rows), NAME)

    def _move(self) -> Patterns:
        """Change the pattern of one rank, or of several neighbouring ones."""
        chance, ranks = self._random, len(self._patterns)
        first = chance.randrange(ranks)
        last = chance.randrange(first, ranks) if chance.random() < 0.5 else first
        kind, change, period = chance.random(), chance.choice((-1, 1)), chance.randint(1, MAX_PERIOD)
        patterns = list(self._patterns)
        for rank in range(first, last + 1):
            pattern = patterns[rank]
            if kind < MOVE_LEAD:
                patterns[rank] = _change_lead(pattern, change)
            elif kind < MOVE_PAIR:
                patterns[rank] = _change_pair(pattern, chance.randrange(len(pattern)), change > 0)
            elif kind < MOVE_PAIRS:
                patterns[rank] = _change_pairs(pattern, period, change > 0)
            else:
                patterns[rank] = _exchange(pattern, chance.randrange(len(pattern)))
        return tuple(patterns)


def find_patterns(schedule: Schedule) -> tuple[tuple[Order, ...], Patterns]:
    """The orders and patterns of a schedule, with B in place of I and W."""
    orders, patterns = [], []
    for rank in range(schedule.num_ranks):
        codes = [code for code in schedule.packed.row(rank) if kind_of(code) != W]
        forwards = tuple(code & ~JOINED for code in codes if kind_of(code) == F)
        backwards = tuple(with_kind(code, B) for code in codes if kind_of(code) != F)
        joined = [is_joined(code) for code in codes]
        letters = ["P" if one else "F" if kind_of(code) == F else "B" for code, one in zip(codes, joined)]
        orders.append(Order(forwards, backwards))
        patterns.append("".join(letter for letter, after in zip(letters, [0, *joined]) if not after))
    return tuple(orders), tuple(patterns)


def list_lead_patterns(own: Patterns) -> Iterator[Iterator[Patterns]]:
    """Patterns of F, Overlaps and B, by their number of F before the first B; each with fewer and fewer of them."""
    for ratio in LEAD_RATIOS:
        for change in LEAD_CHANGES:
            leads = [int(_count_lead(pattern) * ratio) + change for pattern in own]
            yield (
                tuple(_lead_by(min(lead, most), pattern) for pattern, lead in zip(own, leads))
                for most in range(max(leads), 0, -1)
            )


def _count_lead(pattern: str) -> int:
    """The number of F before the first B."""
    return len(pattern) - len(pattern.lstrip("F"))


def _lead_by(lead: int, pattern: str) -> str:
    """As many F, then Overlaps, then B, with the F and B of a pattern."""
    most = pattern.count("F") + pattern.count("P")
    lead = min(max(lead, 1), most)
    return "F" * lead + "P" * (most - lead) + "B" * lead


def _change_lead(pattern: str, change: int) -> str:
    """The pattern with one F more, or fewer, before the first B: each F joins the B after, or before, its own."""
    lead = _count_lead(pattern)
    if change > 0 and "P" in pattern:
        return pattern.replace("P", "F", 1) + "B"
    if change < 0 and lead > 1 and pattern.endswith("B"):
        return pattern[: lead - 1] + "P" + pattern[lead:-1]
    return pattern


def _change_pair(pattern: str, at: int, forward_first: bool) -> str:
    """The pattern with the Overlap there as two actions, or two neighbours there as an Overlap."""
    if pattern[at] == "P":
        return pattern[:at] + ("FB" if forward_first else "BF") + pattern[at + 1 :]
    if pattern[at : at + 2] in ("FB", "BF"):
        return pattern[:at] + "P" + pattern[at + 2 :]
    return pattern


def _change_pairs(pattern: str, period: int, joins: bool) -> str:
    """The pattern with every B and its next F as an Overlap, or every n-th Overlap as two actions, B first."""
    if joins:
        return pattern.replace("BF", "P")
    pairs = count(1)
    return "".join("BF" if letter == "P" and next(pairs) % period == 0 else letter for letter in pattern)


def _exchange(pattern: str, at: int) -> str:
    """The pattern with two neighbours in the other order."""
    return pattern[:at] + pattern[at : at + 2][::-1] + pattern[at + 2 :]


def _write_row(order: Order, pattern: str) -> Iterator[int]:
    """The codes of one rank."""
    forwards, backwards = iter(order.forwards), iter(order.backwards)
    for letter in pattern:
        if letter != "B":
            yield next(forwards) | (JOINED if letter == "P" else 0)
        if letter != "F":
            yield next(backwards)


def _split_alone(row: Iterable[int]) -> Iterator[int]:
    """A row with I and W in place of each B that is in no Overlap."""
    joined = False
    for code in row:
        if kind_of(code) == B and not joined:
            yield with_kind(code, I)
            yield with_kind(code, W)
        else:
            yield code
        joined = bool(is_joined(code))
