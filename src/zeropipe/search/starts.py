"""Where the search begins: schedules with a name, and rows written by dispatching under many rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, permutations, product

import numpy as np

from zeropipe.core.action import W
from zeropipe.core.packed import kind_of
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ZeropipeError
from zeropipe.schedules.registry import build_entry, entries
from zeropipe.search.judge import SHARES, Judge, Rule, Start
from zeropipe.search.model import Array, Task, alone, pass_of, with_microbatches
from zeropipe.search.stretch import stretched

LARGE = 20_000  # passes; rules for larger problems are tried on fewer microbatches first


def named(task: Task) -> list[Schedule]:
    """Every schedule with a name that has this placement."""
    problem, found = task.problem, []
    per_rank = problem.stages_per_rank
    for entry in sorted(entries(), key=lambda entry: entry.stages_per_rank[0] != per_rank):
        if per_rank not in entry.stages_per_rank:
            continue
        try:
            schedule = build_entry(
                entry,
                ranks=problem.num_ranks,
                microbatches=problem.num_microbatches,
                stages_per_rank=per_rank,
            )
        except ZeropipeError:
            continue
        if schedule.placement.copies == task.placement.copies:
            found.append(replace(schedule, placement=task.placement))
    return found


def passes_of(schedule: Schedule) -> Array:
    """The rows of a schedule as passes: F, and I or B."""
    codes = np.frombuffer(schedule.packed.codes, np.int64)
    return pass_of(codes[kind_of(codes) != W], schedule.num_stages)


def one_by_one(task: Task) -> Array:
    """One microbatch after the other: whatever can fit at all fits so."""
    begin, m = task.model.begin, task.num_microbatches
    return np.concatenate([np.tile(task.model.mine[a // m : b // m], m) for a, b in pairwise(begin)])


def rules(task: Task) -> Iterator[Rule]:
    """Ways to dispatch; the first ones are the most likely."""
    return _rules_of_a_line(task) if task.num_stages == task.num_ranks else _rules_of_turns(task)


def _rules_of_a_line(task: Task) -> Iterator[Rule]:
    """One stage per rank: I before F, and as many F before the first I as it takes it to come back."""
    model, begins, last = task.model, alone(task.model), 2 * task.num_stages - 1
    stages = np.arange(task.num_stages)
    order = model.mine.reshape(-1, 2)[:, ::-1].ravel()
    fit = _fit(task)
    for late in np.linspace(0.0, 1.5, 13):  # how much later than possible the first I may be, in F
        times = np.maximum(model.lasts[stages], 1e-12)
        caps = np.floor((begins[last - stages] - begins[stages]) / times + late)
        for more, look, share in product((0, 1, 2), (0.0, 0.25, 0.5, 1.0), SHARES):
            cap = np.clip(caps + more, 1, fit).astype(np.int64)
            yield Rule(order, cap, 1.0 - float(late), look, share)


def _rules_of_turns(task: Task) -> Iterator[Rule]:
    """Several stages per rank: every order of their passes, with several caps on all but the last stage."""
    model = task.model
    count = 2 * task.problem.stages_per_rank
    mine = model.mine.reshape(-1, count)
    orders = list(permutations(range(count))) if count <= 4 else _some_orders(count)
    fit, ends = _fit(task), mine[:, count // 2 - 1]
    for part, look, share, order in product((0.8, 0.9, 1.0, 0.7, 0.6, 0.5, 0.25), (0.0, 0.5, 1.0), SHARES, orders):
        cap = np.maximum(1, np.floor(fit * part))
        cap[ends] = fit[ends]
        yield Rule(mine[:, order].ravel(), cap.astype(np.int64), look, look, share)


def _some_orders(count: int) -> list[tuple[int, ...]]:
    """I first or F first, and of each the last or the first stages first."""
    half = count // 2
    forward, backward = range(half), range(half, count)
    orders = []
    for f in (forward, forward[::-1]):
        for i in (backward, backward[::-1]):
            orders += [(*i, *f), (*f, *i), tuple(x for pair in zip(i, f) for x in pair)]
    return orders


def _fit(task: Task) -> Array:
    """How many activations of each stage fit alone."""
    model = task.model
    size = model.needs[: task.num_stages]
    room = np.maximum(model.limit[model.home[: task.num_stages]], 0.0)
    most = np.full(len(size), float(task.num_microbatches))
    fits: Array = np.maximum(1, np.minimum(most, np.floor(np.divide(room, size, out=most.copy(), where=size > 0))))
    return fits


def dispatched(
    task: Task, keep: int, enough: float = 0.0, stopped: Callable[[], bool] = lambda: False
) -> list[Start | None]:
    """The best rows of all rules; the others are left out once one reaches `enough`, or `stopped` says so."""
    judge, size = Judge(task), 3 * task.num_ranks
    if int(task.model.begin[-1]) <= LARGE or task.num_microbatches <= size:
        return [start for start, _ in _tried(judge, keep, enough, stopped)]
    short = Judge(with_microbatches(task, size))
    found: list[Start | None] = []
    for start, rule in _tried(short, 2 * keep, 0.0, stopped):
        found.append(judge.dispatch(rule))
        longer = stretched(short.task, start.rows, task)
        found.append(None if longer is None else judge.plays(longer))
    return found


def _tried(judge: Judge, keep: int, enough: float, stopped: Callable[[], bool]) -> list[tuple[Start, Rule]]:
    """The best of what all rules lead to, one of each value."""
    found: dict[float, tuple[Start, Rule]] = {}
    for rule in rules(judge.task):
        start = judge.dispatch(rule)
        if start is None:
            continue
        found.setdefault(round(start.value, 9), (start, rule))
        if len(found) > 4 * keep:
            found = dict(sorted(found.items())[:keep])
        if start.value <= enough or stopped():
            break
    return [found[value] for value in sorted(found)[:keep]]
