"""Costs taken from a measured timeline, so that the simulator predicts the same machine; and from costs files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from math import inf
from statistics import median
from typing import Any, NamedTuple

from zeropipe.core.action import Kind
from zeropipe.core.complete import check_complete
from zeropipe.core.explain import find_reasons, idle_times
from zeropipe.core.formats.json import from_data
from zeropipe.core.limits import require_costs, require_times
from zeropipe.core.packed import is_joined
from zeropipe.core.schedule import Schedule
from zeropipe.core.shard_timeline import Sharding
from zeropipe.core.timeline import Span, Timeline
from zeropipe.errors import ConfigError, ScheduleError
from zeropipe.sim.costs import Costs, costs_from, read_costs
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.sim.layer_file import from_layer_data, is_layer_data


class Residual(NamedTuple):
    """How far a prediction is from the run, for one kind of action: means in the timeline's unit."""

    kind: str
    number: int
    measured: float  # mean duration
    predicted: float
    late: float  # mean of measured start - predicted start


def load_costs(path: str) -> Costs | LayerCosts:
    """Costs from a .toml or .json file, from a recorded timeline in zeropipe's JSON, or those of a model's layers."""
    data = read_costs(path)
    if is_layer_data(data):
        return from_layer_data(data, path)
    if "zeropipe" not in data and "traceEvents" not in data:
        require_costs(data, f"{path}: ")
        return costs_from(data, path)
    try:
        found = from_data(data)
        if isinstance(found, Timeline):
            require_times(found)
            check_complete(found.schedule)
            return fit(found)
    except ScheduleError as error:
        raise ConfigError(f"{path}: {error}") from None
    raise ConfigError(f"{path} is a schedule without times: give a costs file, or a timeline of a run")


def fit(timeline: Timeline) -> Costs:
    """Costs whose simulation should look like `timeline`: means per kind and stage, the typical message, memory.

    What a rank spends between two actions without waiting for data (the executor's own time) is shared out over its
    actions.
    """
    num_stages = timeline.schedule.num_stages
    steps = [step for rank in range(timeline.num_ranks) for step in steps_of(timeline, rank)]
    singles: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for step in steps:
        if len(step) == 1:
            singles[step[0].action.kind, step[0].action.stage].append(step[0].end - step[0].start)
    overhead = sum(causes.other for causes in idle_times(timeline)) / max(1, len(steps))
    f, b, i, w = (
        [time + overhead for time in _column(kind, singles, steps, num_stages)]
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
    )
    w = [time * timeline.schedule.problem.num_weight_parts for time in w]
    seen = {span.action.kind for step in steps for span in step}
    if Kind.I not in seen:
        i = w = [time / 2 for time in b]  # a guess, for schedules that split what this one does not
    else:
        b = [time if (Kind.B, s) in singles else i[s] + w[s] for s, time in enumerate(b)]
    activation, stash, weights = _memory(timeline)
    sharding = {} if timeline.sharding is None else _sharding(timeline.sharding, timeline.schedule)
    return Costs(
        f=f, i=i, w=w, b=b, overlap=_overlap(steps, f, b, overhead), p2p=find_reasons(timeline).message,
        activation=activation, stash=stash, weights=weights, memory_limit=timeline.memory_limit,
        unit=timeline.unit, memory_unit=timeline.memory_unit, **sharding,
    )  # fmt: skip


def _sharding(sharding: Sharding, schedule: Schedule) -> dict[str, Any]:
    """The fields of Costs for sharded stages.

    A measured gathering ends when somebody waited for it, so the fastest one says how long the others take: the fastest
    of all, relative to its size, or of the stage's own where sizes are not known.
    """
    kinds = (Kind.UNSHARD, Kind.REDUCE_GRAD)
    sizes = {kind: [0.0] * schedule.num_stages for kind in kinds}
    speed = dict.fromkeys(kinds, 0.0)
    shortest = {kind: [inf] * schedule.num_stages for kind in kinds}
    most = 0
    for rank in range(schedule.num_ranks):
        begin, stop = sharding.packed.offsets[rank : rank + 2]
        gathered = Counter[int]()
        for (action, start, end), size in zip(
            sharding.events(rank), memoryview(sharding.size).cast("d")[begin:stop], strict=True
        ):
            sizes[action.kind][action.stage] = size
            speed[action.kind] = max(speed[action.kind], size / (end - start) if end > start else 0.0)
            shortest[action.kind][action.stage] = min(shortest[action.kind][action.stage], end - start)
            gathered[action.stage] += action.kind is Kind.UNSHARD
        most = max(most, *gathered.values(), 0)
    times = {}
    for kind in kinds:
        own = [0.0 if time == inf else time for time in shortest[kind]]
        times[kind] = [size / speed[kind] for size in sizes[kind]] if speed[kind] else own
    return {
        "shards": "regather" if most > 1 else "keep", "units": sharding.units,
        "unshard": times[Kind.UNSHARD], "reduce": times[Kind.REDUCE_GRAD],
        "whole_weights": sizes[Kind.UNSHARD], "whole_gradients": sizes[Kind.REDUCE_GRAD],
    }  # fmt: skip


def residuals(measured: Timeline, predicted: Timeline) -> list[Residual]:
    """The prediction held against the run, kind by kind."""
    pairs: dict[str, list[tuple[Span, Span]]] = defaultdict(list)
    for rank in range(measured.num_ranks):
        for real, guess in zip(steps_of(measured, rank), steps_of(predicted, rank), strict=True):
            name = "+".join(span.action.kind.name for span in real)
            pairs[name].append((real[0], guess[0]))
    begin = measured.first_start - predicted.first_start
    return [
        Residual(
            kind,
            len(both),
            _mean(real.end - real.start for real, _ in both),
            _mean(guess.end - guess.start for _, guess in both),
            _mean(real.start - begin - guess.start for real, guess in both),
        )
        for kind, both in sorted(pairs.items())
    ]


def steps_of(timeline: Timeline, rank: int) -> Iterable[tuple[Span, ...]]:
    """The rank's steps: one span each, or the two of an Overlap."""
    forward: Span | None = None
    for code, span in zip(timeline.schedule.packed.row(rank), timeline.spans(rank), strict=True):
        if is_joined(code):
            forward = span
        elif forward is not None:
            yield forward, span
            forward = None
        else:
            yield (span,)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _column(
    kind: Kind, singles: dict[tuple[Kind, int], list[float]], steps: list[tuple[Span, ...]], num_stages: int
) -> list[float]:
    """Mean time of a kind per stage; a stage that never runs it alone gets the mean of the others."""
    everywhere = [t for (k, _), times in singles.items() if k is kind for t in times]
    if not everywhere and kind is not Kind.W:
        # only inside Overlaps: a forward is about a third of the pair
        share = 1 / 3 if kind is Kind.F else 2 / 3
        everywhere = [share * (step[0].end - step[0].start) for step in steps if len(step) == 2]
    return [_mean(singles.get((kind, stage), everywhere)) for stage in range(num_stages)]


def _overlap(steps: list[tuple[Span, ...]], f: list[float], b: list[float], overhead: float) -> list[float]:
    """What an F and a B of one stage take together, from pairs that may be of two stages."""
    savings: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if len(step) == 2:
            forward, backward = (span.action.stage for span in step)
            saved = f[forward] + b[backward] - (step[0].end - step[0].start) - overhead
            savings[forward].append(saved)
            savings[backward].append(saved)
    return [max(0.0, f[s] + b[s] - _mean(savings[s])) for s in range(len(f))]


def _still_whole(timeline: Timeline, rank: int) -> float:
    """Memory of weights and gradients that the level after a rank's last action counts, and that then go."""
    sharding = timeline.sharding
    if sharding is None:
        return 0.0
    begin, stop = sharding.packed.offsets[rank : rank + 2]
    sizes = memoryview(sharding.size).cast("d")[begin:stop]
    *_, last = timeline.spans(rank)
    weights, gathered, gradients = 0.0, 0, 0.0
    for (action, _, end), size in zip(sharding.events(rank), sizes, strict=True):
        if action.kind is Kind.REDUCE_GRAD:
            gradients += size if end > last.start else 0.0
        elif action.stage == last.action.stage and last.action.kind is not Kind.W:  # RESHARD comes behind it
            weights, gathered = size, gathered + 1
    if gathered > 1:  # regathered: a measured level is that behind RESHARD
        weights *= 0.0 if timeline.measured else min(2, sharding.units) / sharding.units
    return weights + gradients


def _memory(timeline: Timeline) -> tuple[list[float], list[float], list[float]]:
    """What F takes, what is left of it after I, and what was there before: per stage."""
    num_stages = timeline.schedule.num_stages
    if timeline.memory is None:
        return [0.0] * num_stages, [0.0] * num_stages, [0.0] * num_stages
    changes: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    firsts: dict[tuple[Kind, int], list[float]] = {}
    weights = [0.0] * num_stages
    during, after = (memoryview(column).cast("d") for column in timeline.memory)
    for rank in range(timeline.num_ranks):
        begin, end = timeline.schedule.packed.offsets[rank : rank + 2]
        stages = timeline.schedule.placement.stages_of(rank)
        base = after[end - 1] - _still_whole(timeline, rank)
        for stage in stages:  # the row ends where it began
            weights[stage] = max(0.0, base) / len(stages)
        at = begin
        for step in steps_of(timeline, rank):
            kind, stage = step[0].action.kind, step[0].action.stage
            if at == begin:
                firsts[kind, stage] = [after[at] - base]
            elif len(step) == 1:  # the two halves of an Overlap have one level
                # weights may have been gathered since the action before; a measured level has more in it than those
                is_exact = kind is Kind.I and not timeline.measured
                changes[kind, stage].append(after[at] - (during[at] if is_exact else after[at - 1]))
            at += len(step)
    for key, change in firsts.items():  # less exact in a real run, which allocates gradients on the way
        changes.setdefault(key, change)
    # whole weights and gradients of sharded stages come and go once: most changes are those of a microbatch
    typical = _mean if timeline.sharding is None else median
    activation = [max(0.0, typical(changes[Kind.F, s] or [0.0])) for s in range(num_stages)]
    stash = [
        max(0.0, taken + typical(changes[Kind.I, s])) if changes[Kind.I, s] else taken  # recomputed, it may be more
        for s, taken in enumerate(activation)
    ]
    return activation, stash, weights
