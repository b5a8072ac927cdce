"""Candidates by dispatch rules (row_kernels.dispatch_rows): those that are often good, and random ones.

For large tasks rows are written for fewer microbatches, and the part of them that repeats is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product

import numpy as np

from zeropipe.searching.evaluator import MIN_FITS, Candidate, Evaluator
from zeropipe.searching.tables import Array, DispatchRule
from zeropipe.searching.task import SearchTask

MAX_PASSES = 20_000  # of all microbatches; rules of larger tasks are tried with fewer microbatches
SHORT_TASK = 3  # times the number of ranks: its microbatches
MAX_REPEATED = 4  # microbatches in the part of short rows that is repeated


def dispatched_candidates(
    task: SearchTask, count: int, target: float = 0.0, stopped: Callable[[], bool] = lambda: False
) -> list[Candidate | None]:
    """Return the best rows of all heuristic rules. No more are tried once one reaches `target`, or if `stopped`."""
    short = shorten_task(task)
    evaluator, full = Evaluator(short), Evaluator(task)
    found: dict[float, Candidate] = {}
    for rule in heuristic_rules(short):
        candidate = evaluator.dispatch(rule)
        if candidate is None:
            continue
        found.setdefault(round(candidate.value, 9), candidate)
        if len(found) > 4 * count:
            found = dict(sorted(found.items())[:count])
        if (candidate.value <= target and short is task) or stopped():
            break
    return [longer for value in sorted(found)[:count] for longer in extend_candidate(full, short, found[value])]


def heuristic_rules(task: SearchTask) -> Iterator[DispatchRule]:
    """Return rules that are often good."""
    return _rules_of_line(task) if task.problem.stages_per_rank == 1 else _rules_of_stages(task)


def _rules_of_line(task: SearchTask) -> Iterator[DispatchRule]:
    """Return rules for one stage per rank: I before F, and as many F before the first I as fit before its arrival."""
    tables, starts, stages = task.tables, task.solo_starts, np.arange(task.num_stages)
    order = tables.rank_passes.reshape(-1, 2)[:, ::-1].ravel()
    fitting, ranks = fitting_activations(task), np.ones(task.num_ranks)
    path = (starts[task.last_pass - stages] - starts[stages]) / np.maximum(tables.duration[stages], 1e-12)
    for delay in np.linspace(0.0, 1.5, 13):  # of the first I, in F
        caps = [np.clip(np.floor(path + delay) + more, 1, fitting).astype(np.int64) for more in range(3)]
        for cap, lookahead, min_fit in product(_unique(caps), (0.0, 0.25, 0.5, 1.0), MIN_FITS):
            yield DispatchRule(order, cap, (1.0 - delay) * ranks, lookahead * ranks, min_fit * ranks)


def _rules_of_stages(task: SearchTask) -> Iterator[DispatchRule]:
    """Return rules for several stages per rank: orders of their passes, with several caps on all but the last stage."""
    ranks, fitting = np.ones(task.num_ranks), fitting_activations(task)
    last_stages = [task.placement.stages_of(rank)[-1] for rank in range(task.num_ranks)]
    caps = [np.maximum(1, np.floor(fitting * part)).astype(np.int64) for part in (0.8, 0.9, 1.0, 0.7, 0.6, 0.5, 0.25)]
    for cap in caps:
        cap[last_stages] = fitting[last_stages]
    for cap, lookahead, min_fit, order in product(_unique(caps), (0.0, 0.5, 1.0), MIN_FITS, list(_orders(task))):
        yield DispatchRule(order, cap, lookahead * ranks, lookahead * ranks, min_fit * ranks)


def _unique(caps: list[Array]) -> list[Array]:
    """Return each cap once: with little memory many are equal."""
    return list({cap.tobytes(): cap for cap in caps}.values())


def _orders(task: SearchTask) -> Iterator[Array]:
    """Return orders of every rank's passes: all there are, or with many stages I first, F first or alternating."""
    passes_by_rank = task.passes_by_rank
    count = len(passes_by_rank[0])
    if count <= 4 and all(len(passes) == count for passes in passes_by_rank):
        for order in permutations(range(count)):
            yield np.concatenate([passes[list(order)] for passes in passes_by_rank])
        return
    for f_step, i_step, kind in product((1, -1), (1, -1), range(3)):
        rows = []
        for passes in passes_by_rank:
            half = len(passes) // 2
            f, i = passes[:half][::f_step], passes[half:][::i_step]
            rows.append((np.append(i, f), np.append(f, i), np.stack([i, f], 1).ravel())[kind])
        yield np.concatenate(rows)


def random_rule(task: SearchTask, random: np.random.Generator) -> DispatchRule:
    """Return a random rule: the same order and lookahead on all ranks, or different ones."""
    passes_by_rank, p = task.passes_by_rank, task.num_ranks
    num_choices = p if random.random() < 0.5 else 1

    def choose(values: tuple[float, ...]) -> Array:
        return np.resize(random.choice(values, num_choices), p)

    most = max(map(len, passes_by_rank))
    keys = np.resize(random.random((num_choices, most)), (p, most))
    order = np.concatenate([passes[np.argsort(key[: len(passes)])] for passes, key in zip(passes_by_rank, keys)])
    cap = random.integers(1, fitting_activations(task) + 1)
    return DispatchRule(
        order, cap, choose((-0.5, 0.0, 0.25, 0.5, 1.0)), choose((0.0, 0.25, 0.5, 1.0)), choose(MIN_FITS)
    )


def fitting_activations(task: SearchTask) -> Array:
    """Return how many activations of each stage fit if its rank holds no others; at least 1."""
    tables = task.tables
    size = tables.memory[: task.num_stages]
    limit = np.maximum(tables.limit[tables.rank[: task.num_stages]], 0.0)
    counts = np.full(len(size), float(task.num_microbatches))
    np.divide(limit, size, out=counts, where=size > 0)
    fitting: Array = np.clip(np.floor(counts), 1, task.num_microbatches).astype(np.int64)
    return fitting


def shorten_task(task: SearchTask) -> SearchTask:
    """Return the task itself, or one with fewer microbatches where it is large."""
    num_microbatches = SHORT_TASK * task.num_ranks
    if int(task.tables.row_start[-1]) <= MAX_PASSES or task.num_microbatches <= num_microbatches:
        return task
    return task.with_microbatches(num_microbatches)


def extend_candidate(evaluator: Evaluator, short: SearchTask, candidate: Candidate) -> Iterator[Candidate | None]:
    """Return candidates of a task from one of the shortened task: by its rule, and by repeating its middle."""
    if short is evaluator.task:
        yield candidate
        return
    if candidate.rule is not None:
        yield evaluator.dispatch(candidate.rule)
    rows = stretch_rows(short, candidate.rows, evaluator.task)
    if rows is not None:
        yield evaluator.best_fit(rows)


def stretch_rows(short: SearchTask, rows: Array, task: SearchTask) -> Array | None:
    """Return the rows of `short` with a part of their middle repeated until `task` has all its microbatches.

    None where the row of some rank has no part that holds every pass equally often.
    """
    missing = task.num_microbatches - short.num_microbatches
    longer: list[Array] = []
    for rank in range(task.num_ranks):
        row = rows[short.tables.row_start[rank] : short.tables.row_start[rank + 1]]
        counts = [count for count in range(1, MAX_REPEATED + 1) if missing % count == 0]
        windows = [(at, count, repeats) for count in counts for at, repeats in _windows(row, count)]
        if not windows:
            return None
        # best is a part that is repeated already, then a short one, then one near the middle
        _, count, _, at = min((not repeats, count, abs(2 * at - len(row)), at) for at, count, repeats in windows)
        size = count * len(row) // short.num_microbatches
        longer.append(np.concatenate([row[:at], np.tile(row[at : at + size], missing // count), row[at:]]))
    return np.concatenate(longer)


def _windows(row: Array, count: int) -> Iterator[tuple[int, bool]]:
    """Return the index of every window that holds each pass `count` times, and whether it repeats at once."""
    names, passes = np.unique(row, return_inverse=True)
    size = len(names) * count
    one_hot = np.eye(len(names), dtype=np.int64)[passes]
    sums = np.concatenate([np.zeros((1, len(names)), np.int64), np.cumsum(one_hot, 0)])
    for at in np.flatnonzero((sums[size:] - sums[:-size] == count).all(axis=1)):
        yield int(at), bool(np.array_equal(row[at : at + size], row[at + size : at + 2 * size]))
