"""Score groups of candidates, in worker processes where there are many groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from zeropipe.balancing.balance import balance_task, best_counts, peak_in_flight
from zeropipe.core.jit import use_compiled
from zeropipe.core.model.layers import layer_counts
from zeropipe.core.schedule import Schedule
from zeropipe.core.workers import Worker, WorkerError, WorkerMemoryError
from zeropipe.errors import ConfigError
from zeropipe.planning.context import PlanContext
from zeropipe.planning.rows import Candidate, PlanRow
from zeropipe.planning.score import score_candidate
from zeropipe.schedules.validate import validate_user_schedule

MIN_GROUPS = 30  # fewer are scored before worker processes have started
POLL_S = 0.1

Group = Sequence[Candidate]


def score_groups(
    context: PlanContext, groups: Sequence[Group], workers: int, progress: Callable[[int], object]
) -> list[list[PlanRow]]:
    """Return the rows of every group, in order; `progress` is called with the number of groups done."""
    results: list[list[PlanRow]] = [[] for _ in groups]
    if workers == 1 or len(groups) < MIN_GROUPS:
        for index, group in enumerate(groups):
            results[index] = score_group(context, group)
            progress(index + 1)
        return results
    pending: SimpleQueue[tuple[int, Group]] = SimpleQueue()
    for item in enumerate(groups):
        pending.put(item)
    done: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    pool = [Worker(_set_context, (context,)) for _ in range(min(workers, len(groups)))]
    try:
        for worker in pool:
            Thread(target=_score_pending, args=(worker, pending, done), daemon=True).start()
        for count in range(1, len(groups) + 1):
            index, result = _get(done)
            if isinstance(result, BaseException):
                raise _explain(result, context)
            results[index] = result
            progress(count)
    finally:
        for worker in pool:
            worker.close()
    return results


def score_group(context: PlanContext, group: Sequence[Candidate]) -> list[PlanRow]:
    """Score candidates of one schedule, which is built once; returns nothing if it does not take their sizes."""
    try:
        schedule = group[0].build_schedule()
    except ConfigError:
        return []
    validate_user_schedule(schedule)
    context = context.for_schedule(schedule)
    rows: list[PlanRow] = []
    live = peak_in_flight(schedule)
    for candidate in group:
        for variant in context.with_shard_modes(candidate):
            rows += _score_cuts(context, variant, schedule, live)
            if rows and rows[-1].fits:
                break
    return rows


def _score_cuts(context: PlanContext, candidate: Candidate, schedule: Schedule, live: list[float]) -> list[PlanRow]:
    """The rows of a candidate's cuts, up to the first that fits."""
    rows: list[PlanRow] = []
    for counts in _list_cuts(context, candidate, schedule, live):
        try:
            rows.append(score_candidate(context, candidate, schedule, counts))
        except ConfigError:
            if not (candidate.offload or candidate.checkpointing):
                raise
            continue  # too large with all activations offloaded, or all F checkpointed
        if rows[-1].fits:
            break
    return rows


def _list_cuts(
    context: PlanContext, candidate: Candidate, schedule: Schedule, live: list[float]
) -> Iterator[tuple[int, ...]]:
    """Layers per stage: first the best regardless of memory; if that does not fit, the best within the limit."""
    num_layers, num_stages = context.costs.num_layers, schedule.num_stages
    if candidate.cut == "even":
        if num_stages <= num_layers:
            yield layer_counts(num_layers, num_stages)
        return
    try:
        task = balance_task(
            context.costs, schedule.problem, schedule.placement, live,
            setting=context.setting(candidate), ac=candidate.ac, shards=candidate.layout.num_shards,
        )  # fmt: skip
    except ConfigError:
        return
    unlimited = best_counts(task)[0]
    if unlimited is not None and (num_stages > num_layers or unlimited != layer_counts(num_layers, num_stages)):
        yield unlimited
    if num_stages == len(task.speed):
        limited = best_counts(replace(task, memory=(context.memory_limit,) * len(task.memory)))[0]
        if limited is not None and limited != unlimited:
            yield limited


def _score_pending(worker: Worker, pending: SimpleQueue[tuple[int, Group]], done: SimpleQueue[tuple[int, Any]]) -> None:
    """Score groups until none is left or one fails."""
    with suppress(Empty):
        while True:
            index, group = pending.get_nowait()
            try:
                done.put((index, worker.call(_score, group)))
            except BaseException as error:
                done.put((index, error))
                return


def _get(done: SimpleQueue[tuple[int, Any]]) -> tuple[int, Any]:
    """Return the next result. Polls, because a thread is interrupted (as by Ctrl-C) only between two waits."""
    while True:
        with suppress(Empty):
            return done.get(timeout=POLL_S)


def _explain(error: BaseException, context: PlanContext) -> BaseException:
    if isinstance(error, WorkerMemoryError):
        layers = context.costs.num_layers
        return ConfigError(f"not enough memory to try {layers} layers on these GPUs: use fewer GPUs or pass --pp")
    return ConfigError(f"{error}; use workers=1") if isinstance(error, WorkerError) else error


_context: PlanContext | None = None  # in a worker process


def _set_context(context: PlanContext) -> None:
    global _context
    use_compiled()
    _context = context


def _score(group: Group) -> list[PlanRow]:
    assert _context is not None
    return score_group(_context, group)
