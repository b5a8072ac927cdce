"""Rules for the dispatch: the likely ones, and any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product

import numpy as np

from zeropipe.searching.judge import SHARES, Judge, Rule, Start
from zeropipe.searching.model import Array, Task, alone, with_microbatches
from zeropipe.searching.starts.stretch import stretched

LARGE = 20_000  # passes; rules for larger problems are tried on fewer microbatches first


def likely(task: Task) -> Iterator[Rule]:
    """Ways to dispatch that often lead to something good."""
    return _of_a_line(task) if len(task.model.weight) == task.num_ranks else _of_turns(task)


def _of_a_line(task: Task) -> Iterator[Rule]:
    """One stage per rank: I before F, and as many F before the first I as it takes it to come back."""
    model, begins, last = task.model, alone(task.model), 2 * task.num_stages - 1
    stages = np.arange(task.num_stages)
    order = model.mine.reshape(-1, 2)[:, ::-1].ravel()
    fit, ranks = most_alive(task), np.ones(task.num_ranks)
    for late in np.linspace(0.0, 1.5, 13):  # how much later than possible the first I may be, in F
        times = np.maximum(model.lasts[stages], 1e-12)
        caps = np.floor((begins[last - stages] - begins[stages]) / times + late)
        more = [np.clip(caps + more, 1, fit).astype(np.int64) for more in range(3)]
        for cap, look, share in product(_different(more), (0.0, 0.25, 0.5, 1.0), SHARES):
            yield Rule(order, cap, (1.0 - late) * ranks, look * ranks, share * ranks)


def _of_turns(task: Task) -> Iterator[Rule]:
    """Several stages per rank: orders of their passes, with several caps on all but the last stage."""
    ranks, fit = np.ones(task.num_ranks), most_alive(task)
    ends = [task.placement.stages_of(rank)[-1] for rank in range(task.num_ranks)]
    parts = [np.maximum(1, np.floor(fit * part)).astype(np.int64) for part in (0.8, 0.9, 1.0, 0.7, 0.6, 0.5, 0.25)]
    for cap in parts:
        cap[ends] = fit[ends]
    for cap, look, share, order in product(_different(parts), (0.0, 0.5, 1.0), SHARES, list(_orders(task))):
        yield Rule(order, cap, look * ranks, look * ranks, share * ranks)


def _different(caps: list[Array]) -> list[Array]:
    """Each once, in their order: where little memory is left, many are the same."""
    return list({cap.tobytes(): cap for cap in caps}.values())


def _orders(task: Task) -> Iterator[Array]:
    """Orders of every rank's passes: all there are, or with many stages I first, F first or in turns."""
    mine = task.passes_by_rank
    count = len(mine[0])
    if count <= 4 and all(len(passes) == count for passes in mine):
        for order in permutations(range(count)):
            yield np.concatenate([passes[list(order)] for passes in mine])
        return
    for f, i, turns in product((1, -1), (1, -1), range(3)):
        rows = []
        for passes in mine:
            half = len(passes) // 2
            forward, backward = passes[:half][::f], passes[half:][::i]
            pair = np.stack([backward, forward], 1).ravel()
            rows.append((np.append(backward, forward), np.append(forward, backward), pair)[turns])
        yield np.concatenate(rows)


def anyhow(task: Task, random: np.random.Generator) -> Rule:
    """A rule by chance: the same order and looks for all ranks, or others for each."""
    mine, p = task.passes_by_rank, task.num_ranks
    size = p if random.random() < 0.5 else 1

    def choose(values: tuple[float, ...]) -> Array:
        return np.resize(random.choice(values, size), p)

    keys = np.resize(random.random((size, max(map(len, mine)))), (p, max(map(len, mine))))
    order = np.concatenate([passes[np.argsort(key[: len(passes)])] for passes, key in zip(mine, keys)])
    cap = random.integers(1, most_alive(task).astype(np.int64) + 1)
    return Rule(order, cap, choose((-0.5, 0.0, 0.25, 0.5, 1.0)), choose((0.0, 0.25, 0.5, 1.0)), choose(SHARES))


def most_alive(task: Task) -> Array:
    """How many activations of each stage fit alone."""
    model = task.model
    size = model.needs[: task.num_stages]
    room = np.maximum(model.limit[model.home[: task.num_stages]], 0.0)
    most = np.full(len(size), float(task.num_microbatches))
    fits: Array = np.maximum(1, np.minimum(most, np.floor(np.divide(room, size, out=most.copy(), where=size > 0))))
    return fits


def shortened(task: Task) -> Task:
    """The task itself, or with fewer microbatches where it is large: what is good there is good here."""
    size = 3 * task.num_ranks
    if int(task.model.begin[-1]) <= LARGE or task.num_microbatches <= size:
        return task
    return with_microbatches(task, size)


def lengthened(judge: Judge, short: Task, start: Start) -> Iterator[Start | None]:
    """What a start of a shortened task leads to in the task itself: by its rule, and by repeating its middle."""
    if short is judge.task:
        yield start
        return
    if start.rule is not None:
        yield judge.dispatch(start.rule)
    rows = stretched(short, start.rows, judge.task)
    if rows is not None:
        yield judge.plays(rows)


def dispatched(
    task: Task, keep: int, enough: float = 0.0, stopped: Callable[[], bool] = lambda: False
) -> list[Start | None]:
    """The best rows of all likely rules; the others are left out once one reaches `enough`, or if `stopped`."""
    short = shortened(task)
    judge, full = Judge(short), Judge(task)
    found: dict[float, Start] = {}
    for rule in likely(short):
        start = judge.dispatch(rule)
        if start is None:
            continue
        found.setdefault(round(start.value, 9), start)
        if len(found) > 4 * keep:
            found = dict(sorted(found.items())[:keep])
        if (start.value <= enough and short is task) or stopped():
            break
    return [longer for value in sorted(found)[:keep] for longer in lengthened(full, short, found[value])]
