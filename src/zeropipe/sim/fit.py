"""Costs fitted to a timeline, so that a simulation predicts the same machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from statistics import median
from typing import Any

from zeropipe.core.action import BACKWARD, Action, Kind
from zeropipe.core.explain import find_reasons, idle_times
from zeropipe.core.gradient_policy import GRADIENTS, REDUCES_AT_ONCE
from zeropipe.core.packed import decode
from zeropipe.core.phases import Phases
from zeropipe.core.schedule import Schedule
from zeropipe.core.shard_actions import with_shards
from zeropipe.core.shard_timeline import Sharding
from zeropipe.core.timeline import Span, Timeline
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Costs


def fit(timeline: Timeline, use_phases: bool = True) -> Costs:
    """Costs whose simulation resembles `timeline`: mean times per kind and stage, the mean message, memory.

    The time that a rank spends between two actions without waiting for data (the executor's overhead) is divided evenly
    among its actions. With slices, a microbatch costs as much as so many mean slices.
    Overlaps follow from the phases of layers if these were measured, else, or without `use_phases`, from Overlaps.
    """
    num_stages, num_slices = timeline.schedule.num_stages, timeline.schedule.num_slices
    steps = [step for rank in range(timeline.num_ranks) for step in timeline.steps(rank)]
    durations = _durations_without_waits(timeline)
    recompute = [num_slices * time for time in _take_recomputation(timeline, durations)]
    overhead = overhead_per_action(timeline)
    f, b, i, w = (
        [num_slices * (time + overhead) for time in _mean_durations(kind, durations, steps, num_stages)]
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
    )
    w = [time * timeline.schedule.problem.num_weight_parts for time in w]
    is_split = any(span.action.kind is Kind.I for step in steps for span in step)
    if not is_split:
        i = w = [time / 2 for time in b]  # an assumption, for schedules with split backward
    else:
        b = [time if (Kind.B, s) in durations else i[s] + w[s] for s, time in enumerate(b)]
    activation, stash, weights, less = _fit_memory(timeline)
    activation, stash, less = ([num_slices * size for size in sizes] for sizes in (activation, stash, less))
    checkpointing: dict[str, Any] = {}
    if timeline.schedule.checkpointed:
        checkpointing = {"recompute": recompute, "checkpointed_activation": less}
    sharding = {} if timeline.sharding is None else _fit_sharding(timeline, timeline.sharding, durations)
    phases = timeline.phases if use_phases else None
    return Costs(
        **_fit_times(phases, steps, (f, b, i, w), overhead, is_split), p2p=find_reasons(timeline).message,
        activation=activation, stash=stash, weights=weights, memory_limit=timeline.memory_limit,
        unit=timeline.unit, memory_unit=timeline.memory_unit, **sharding, **_fit_offloading(timeline),
        **checkpointing,
    )  # fmt: skip


def _fit_times(
    phases: Phases | None, steps: list[tuple[Span, ...]], times: Sequence[list[float]], overhead: float, is_split: bool
) -> dict[str, Any]:
    """The fields of Costs for F, B, I and W of each stage, and for Overlaps: by phases if they are known."""
    f, b, i, w = times
    if phases is None:
        return {"f": f, "b": b, "i": i, "w": w, "overlap": _fit_overlap(steps, f, b, overhead)}
    stages = phases.stages
    least_f, least_i, least_w = (
        [sum(layer.total(kind) for layer in layers) for layers in stages] for kind in (Kind.F, Kind.I, Kind.W)
    )
    if not is_split:
        w = least_w
        i = [whole - part for whole, part in zip(b, w)]
    return {
        "f": list(map(max, f, least_f)), "i": list(map(max, i, least_i)), "w": list(map(max, w, least_w)),
        "phases": stages, "sm_tax": phases.sm_tax,
    }  # fmt: skip


def overhead_per_action(timeline: Timeline) -> float:
    """The mean time between two actions of a rank that does not wait for data; an Overlap is one action."""
    num_steps = sum(1 for rank in range(timeline.num_ranks) for _ in timeline.steps(rank))
    return sum(causes.other for causes in idle_times(timeline)) / max(1, num_steps)


def _take_recomputation(timeline: Timeline, durations: dict[tuple[Kind, int], list[float]]) -> list[float]:
    """The time that a backward of a checkpointed F takes more, by stage.

    Where all backwards of a stage compute their F again, that is assumed to take as long as F, or as the shortest of
    them, and `durations` get the rest.
    """
    again = _durations_without_waits(timeline, recomputing=True) if timeline.schedule.checkpointed else {}
    recompute = [_mean(durations.get((Kind.F, stage), ())) for stage in range(timeline.schedule.num_stages)]
    for (kind, stage), times in again.items():
        if (kind, stage) in durations:
            recompute[stage] = max(0.0, _mean(times) - _mean(durations[kind, stage]))
        else:
            recompute[stage] = min(recompute[stage], *times)
            durations[kind, stage] = [time - recompute[stage] for time in times]
    return recompute


def _recomputes(timeline: Timeline, action: Action) -> bool:
    """Whether an action computes a checkpointed F again."""
    return action.kind in BACKWARD and timeline.schedule.is_checkpointed(action)


def _durations_without_waits(timeline: Timeline, recomputing: bool = False) -> dict[tuple[Kind, int], list[float]]:
    """Durations of the actions that are not in an Overlap, by kind and stage; of those that compute an F again, or not.

    An action during which its stage is gathered or reduced may include a wait for that. It counts as at most the mean
    of the others, if there are others.
    """
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    with_waits: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank in range(timeline.num_ranks):
        events = [] if timeline.sharding is None else list(timeline.sharding_spans(rank))
        for step in timeline.steps(rank):
            if len(step) == 1 and _recomputes(timeline, step[0].action) == recomputing:
                span = step[0]
                waits = any(
                    event.action.stage == span.action.stage and event.start < span.end and span.start < event.end
                    for event in events
                )
                times = with_waits if waits else durations
                times[span.action.kind, span.action.stage].append(span.end - span.start)
    for key, waited in with_waits.items():
        others = durations.get(key, [])
        typical = _mean(others) if others else inf
        durations[key] = [*others, *(time if time < typical else typical for time in waited)]
    return durations


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _mean_durations(
    kind: Kind, durations: dict[tuple[Kind, int], list[float]], steps: list[tuple[Span, ...]], num_stages: int
) -> list[float]:
    """Mean time of a kind per stage; stages that never run it alone get the mean of all stages."""
    all_stages = [t for (k, _), times in durations.items() if k is kind for t in times]
    if not all_stages and kind is not Kind.W:
        # the kind is in Overlaps only: a forward is about a third of them
        fraction = 1 / 3 if kind is Kind.F else 2 / 3
        all_stages = [fraction * (step[0].end - step[0].start) for step in steps if len(step) == 2]
    return [_mean(durations.get((kind, stage), all_stages)) for stage in range(num_stages)]


def _fit_overlap(steps: list[tuple[Span, ...]], f: list[float], b: list[float], overhead: float) -> list[float]:
    """The time of an F and a B of one stage as one step, from Overlaps that may be of two stages."""
    savings: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if len(step) == 2:
            forward, backward = (span.action.stage for span in step)
            saved = f[forward] + b[backward] - (step[0].end - step[0].start) - overhead
            savings[forward].append(saved)
            savings[backward].append(saved)
    return [max(0.0, f[s] + b[s] - _mean(savings[s])) for s in range(len(f))]


def _fit_offloading(timeline: Timeline) -> dict[str, Any]:
    """The fields of Costs for copies to the host and back: means per stage."""
    if timeline.offloading is None:
        return {}
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    sizes: dict[int, list[float]] = defaultdict(list)
    for rank in range(timeline.num_ranks):
        begin, stop = timeline.offloading.packed.offsets[rank : rank + 2]
        own_sizes = memoryview(timeline.offloading.size).cast("d")[begin:stop]
        for (action, start, end), size in zip(timeline.offloading.events(rank), own_sizes, strict=True):
            times[action.kind, action.stage].append(end - start)
            sizes[action.stage].append(size)
    stages = range(timeline.schedule.num_stages)
    return {
        "offload_time": [_mean(times[Kind.OFFLOAD, stage]) for stage in stages],
        "reload_time": [_mean(times[Kind.RELOAD, stage]) for stage in stages],
        "offload_size": [_mean(sizes[stage]) for stage in stages],
    }


def _fit_sharding(
    timeline: Timeline, sharding: Sharding, durations: dict[tuple[Kind, int], list[float]]
) -> dict[str, Any]:
    """The fields of Costs for sharded stages.

    A measured gather ends when an action waited for it, so only the fastest one shows its time: the one with the
    highest rate of all, or the fastest of the stage if sizes are unknown.
    """
    num_stages = timeline.schedule.num_stages
    sizes = {kind: [0.0] * num_stages for kind in (Kind.UNSHARD, Kind.REDUCE_GRAD)}
    max_rate, fastest = 0.0, [inf] * num_stages  # of gathers
    reduces: dict[int, list[float]] = defaultdict(list)
    max_gathers = 0  # of a stage on a rank
    for rank in range(timeline.num_ranks):
        begin, stop = sharding.packed.offsets[rank : rank + 2]
        gathers = Counter[int]()
        gradients = _gradient_ends(timeline, rank, durations)
        event_sizes = memoryview(sharding.size).cast("d")[begin:stop]
        for ((stage, kind, *_), start, end), size in zip(sharding.events(rank), event_sizes, strict=True):
            sizes[kind][stage] = size
            if kind is Kind.UNSHARD:
                max_rate = max(max_rate, size / (end - start) if end > start else 0.0)
                fastest[stage] = min(fastest[stage], end - start)
                gathers[stage] += 1
            else:
                computed = [last for first, last in gradients[stage] if first < start]
                reduces[stage].append(_reduce_time(start, end, max(computed, default=start), sharding.units))
        max_gathers = max(max_gathers, *gathers.values(), 0)
    gather_sizes = sizes[Kind.UNSHARD]
    unshard = [size / max_rate for size in gather_sizes] if max_rate else [0.0 if t == inf else t for t in fastest]
    return {
        "shards": "regather" if max_gathers > 1 else "keep", "units": sharding.units,
        "unshard": unshard, "reduce": [median(reduces[stage] or [0.0]) for stage in range(num_stages)],
        "full_weights": gather_sizes, "full_gradients": sizes[Kind.REDUCE_GRAD],
        "gradients": _find_policy(timeline.schedule, sharding),
    }  # fmt: skip


def _find_policy(schedule: Schedule, sharding: Sharding) -> str:
    """The policy of gradients that gives a Program with the reduces of `sharding`; "whole" if there is none."""
    ranks = range(schedule.num_ranks)
    found = [[a for a, _, _ in sharding.events(rank) if a.kind is Kind.REDUCE_GRAD] for rank in ranks]
    if max(map(len, found)) <= schedule.num_stages:
        return "whole"
    for policy in GRADIENTS:
        try:
            program = with_shards(schedule, "keep", policy)
        except ConfigError:  # a W in parts
            continue
        rows = ([decode(code) for code in program.row(rank)] for rank in ranks)
        if found == [[a for a in row if a.kind is Kind.REDUCE_GRAD] for row in rows]:
            return policy
    return "whole"


def _gradient_ends(
    timeline: Timeline, rank: int, durations: dict[tuple[Kind, int], list[float]]
) -> dict[int, list[tuple[float, float]]]:
    """When the gradients of each stage on a rank begin, and when they are computed.

    A B or W of a measured run may include a wait for the reduce: it is taken to last as long as the others.
    """
    ends: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for step in timeline.steps(rank):
        for span in step:
            kind, stage = span.action.kind, span.action.stage
            if kind in (Kind.B, Kind.W):
                typical = _mean(durations.get((kind, stage), ())) or inf
                end = min(span.end, span.start + typical) if len(step) == 1 else span.end
                ends[stage].append((span.start, end))
    return ends


def _reduce_time(start: float, end: float, last_gradient: float, units: int) -> float:
    """The time of a reduce that ran from `start` to `end`, unit by unit while the last gradients were computed.

    If the link was always busy, it is all of this time. If the link waited for gradients, the last unit alone ran after
    them. The smaller value is the right one in both cases.
    """
    if not start < last_gradient < end:
        return end - start
    return min(end - start, units * (end - last_gradient))


def _fit_memory(timeline: Timeline) -> tuple[list[float], ...]:
    """The activation, stash and constant memory of each stage, and the activation of a checkpointed F."""
    num_stages = timeline.schedule.num_stages
    if timeline.memory is None:
        return tuple([0.0] * num_stages for _ in range(4))
    changes: dict[tuple[Kind, int, bool], list[float]] = defaultdict(list)  # the last: whether its F is checkpointed
    first_changes: dict[tuple[Kind, int, bool], list[float]] = {}
    weights = [0.0] * num_stages
    during, after = (memoryview(column).cast("d") for column in timeline.memory)
    for rank in range(timeline.num_ranks):
        begin, end = timeline.schedule.packed.offsets[rank : rank + 2]
        stages = timeline.schedule.placement.stages_of(rank)
        base = after[end - 1] - _full_memory_at_end(timeline, rank)
        for stage in stages:  # the row ends with the level that it started with
            weights[stage] = max(0.0, base) / len(stages)
        at = begin
        for step in timeline.steps(rank):
            kind, stage = step[0].action.kind, step[0].action.stage
            is_marked = timeline.schedule.is_checkpointed(step[0].action)
            if at == begin:
                first_changes[kind, stage, is_marked] = [after[at] - base]
            elif len(step) == 1:  # the two halves of an Overlap have one level
                # weights may have been gathered since the previous action; a measured level contains more than those
                is_exact = kind is Kind.I and not timeline.measured and timeline.sharding is not None
                changes[kind, stage, is_marked].append(after[at] - (during[at] if is_exact else after[at - 1]))
            at += len(step)
    for key, change in first_changes.items():  # less exact in a measured run, which allocates gradients on the way
        changes.setdefault(key, change)
    # full weights and gradients of sharded stages change the level once: most changes are those of a microbatch
    typical = _mean if timeline.sharding is None else median
    kept, less = (
        [max(0.0, typical(changes[Kind.F, s, is_marked] or [0.0])) for s in range(num_stages)]
        for is_marked in (False, True)
    )
    activation = [kept[s] if changes[Kind.F, s, False] else less[s] for s in range(num_stages)]
    less = [less[s] if changes[Kind.F, s, True] else kept[s] for s in range(num_stages)]
    stash = []  # with recomputation it may exceed the activation
    for s in range(num_stages):
        is_marked = not changes[Kind.I, s, False]
        allocated, change = (less if is_marked else activation)[s], changes[Kind.I, s, is_marked]
        stash.append(max(0.0, allocated + typical(change)) if change else activation[s])
    return activation, stash, weights, less


def _full_memory_at_end(timeline: Timeline, rank: int) -> float:
    """Memory of full weights and gradients that the level after the rank's last action includes."""
    sharding = timeline.sharding
    if sharding is None:
        return 0.0
    begin, stop = sharding.packed.offsets[rank : rank + 2]
    sizes = memoryview(sharding.size).cast("d")[begin:stop]
    *_, last = timeline.spans(rank)
    weights, num_gathers, gradients = 0.0, 0, 0.0
    units = sharding.units
    if _find_policy(timeline.schedule, sharding) == "rolling":
        units = min(1 + REDUCES_AT_ONCE, units)
    for (action, _, end), size in zip(sharding.events(rank), sizes, strict=True):
        if action.kind is Kind.REDUCE_GRAD:
            gradients += size * units / sharding.units if end > last.start else 0.0
        elif action.stage == last.action.stage and last.action.kind is not Kind.W:  # its RESHARD follows
            weights, num_gathers = size, num_gathers + 1
    if num_gathers > 1:  # regathered: a measured level is the one after RESHARD
        weights *= 0.0 if timeline.measured else min(2, sharding.units) / sharding.units
    return weights + gradients
