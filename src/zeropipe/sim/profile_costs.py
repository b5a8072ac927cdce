"""Costs of layers from the measurements of a profile.

The time of a stage with n layers is the time that every stage takes (masks, rotary embeddings, the executor's time
between actions) plus n times that of a layer. One layer alone, and several layers in one stage, determine both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple

from zeropipe.core.action import Kind
from zeropipe.core.explain import find_reasons
from zeropipe.core.model.operators import ENDS, FULL_HEAD, HEAD
from zeropipe.core.model.probe import LayerGroup, Ping, Probe, Profile
from zeropipe.core.packed import kind_of, stage_of
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import SAME_LINK, TIME_FIELDS, Link
from zeropipe.sim.layer_costs import BF16_STATE, STAGE, LayerCost, LayerCosts, ParameterBytes, Setting

MEMORY_FIELDS = ("activation", "stash")
_TIME_NAMES = {"F": "f", "I": "i", "W": "w", "B": "b", "F+B": "overlap"}
_MAX_SPLIT_OVERHEAD = 0.25  # fraction of an F by which a split backward may slow it down: more is noise
_TRIM = 0.1  # fraction of the measurements at either end that is ignored: other processes disturb them


class GroupCosts(NamedTuple):
    """The measured costs of a group: times and sizes by name, relative errors of the times, and workspaces."""

    values: Mapping[str, float]
    spread: Mapping[str, float]
    workspace: float
    f_workspace: float


class MemoryChanges(NamedTuple):
    """The memory that a group takes in one step."""

    activation: float
    stash: float
    workspace: float
    f_workspace: float


def costs_from_profile(profile: Profile) -> LayerCosts:
    """The measured costs of a model's layers."""
    link, inter_node = _fit_links(profile.pings, profile.nodes)
    first = profile.probes[0]
    sending, receiving = _fit_message_overhead(profile.streams, _gaps([*first.split, *first.full]))
    # the time of a ping includes that of its sender and its receiver
    link, inter_node = (_reduce_latency(one, sending + receiving) for one in (link, inter_node))
    size = profile.bytes_per_number
    return LayerCosts(
        profile.model, "profile", profile.layers, tuple(map(_fit_setting, profile.probes)), after=(HEAD,),
        after_full=(FULL_HEAD,) if first.fused_head else (), fused_head=first.fused_head, each=(STAGE,),
        tied=profile.tied, sequence=profile.sequence, dtype=profile.dtype, sample=profile.sample,
        link=link, inter_node=inter_node, sending=sending, receiving=receiving,
        state=BF16_STATE if size == 2 else ParameterBytes(size, size, 2 * size, size),
        machine=profile.machine, versions=profile.versions,
    )  # fmt: skip


def _fit_setting(probe: Probe) -> Setting:
    if not probe.split or not probe.full:
        raise ConfigError("a profile needs at least one recorded step: steps must be a positive integer")
    groups = [(group, _measure_group(probe, stage)) for stage, group in enumerate(probe.groups)]
    shared = {
        name: _fit_shared([(group.kinds, costs.values[name]) for group, costs in groups])
        for name in (*TIME_FIELDS, *MEMORY_FIELDS)
    }
    kinds = {group.kinds[0]: _layer_cost(group, costs, shared) for group, costs in groups if len(group.kinds) == 1}
    if probe.fused_head:  # F adds weight gradients, unless W does
        last = probe.groups[-1]
        end = replace(last, kinds=(*last.kinds[:-1], FULL_HEAD)), _measure_full(probe, len(groups) - 1)
        groups.append(end)
        kinds |= {FULL_HEAD: _layer_cost(*end, shared)} if len(last.kinds) == 1 else {}
    for group, costs in groups:  # an end of the model that was measured together with a layer
        unknown = [kind for kind in group.kinds if kind not in kinds]
        if unknown:
            known = [kinds[kind] for kind in group.kinds if kind in kinds]
            kinds[unknown[0]] = _subtract(_layer_cost(group, costs, shared), known)
    gap = max(0.0, trimmed_mean(_gaps([*probe.split, *probe.full])))
    stage: dict[str, Any] = {name: value + (gap if name in TIME_FIELDS else 0.0) for name, value in shared.items()}
    kinds[STAGE] = LayerCost(**stage)
    return Setting(kinds, probe.ac, probe.microbatch_size, 1, probe.compile)


def _layer_cost(group: LayerGroup, costs: GroupCosts, shared: Mapping[str, float]) -> LayerCost:
    values: dict[str, Any] = {name: max(0.0, value - shared[name]) for name, value in costs.values.items()}
    return LayerCost(
        **values, workspace=costs.workspace, f_workspace=costs.f_workspace, message=group.message,
        parameters=group.parameters, flops=group.flops, spread=costs.spread,
    )  # fmt: skip


def _subtract(total: LayerCost, layers: Sequence[LayerCost]) -> LayerCost:
    """The costs of a group without some of its layers."""
    for layer in layers:
        rest: dict[str, Any] = {
            name: max(0.0, (getattr(total, name) or 0.0) - (getattr(layer, name) or 0.0))
            for name in (*TIME_FIELDS, *MEMORY_FIELDS, "flops")
        }
        total = replace(total, **rest, parameters=total.parameters - layer.parameters)
    return total


def _fit_shared(groups: Sequence[tuple[tuple[str, ...], float]]) -> float:
    """The cost that every stage has once, from (kinds, cost) of groups.

    It is at most half of that of a single layer: measurements on a busy machine may attribute all of it to the stage.
    """
    single = {kinds[0]: value for kinds, value in groups if len(kinds) == 1}
    estimates = [
        (sum(single[kind] for kind in kinds) - value) / (len(kinds) - 1)
        for kinds, value in groups
        if len(kinds) > 1 and all(kind in single for kind in kinds)
    ]
    layers = [value for kind, value in single.items() if kind not in ENDS]
    return min(max(0.0, fmean(estimates)), *(value / 2 for value in layers)) if estimates else 0.0


def _measure_group(probe: Probe, stage: int) -> GroupCosts:
    times, full = _durations(probe.split, stage), _durations(probe.full, stage)
    # an F before a split backward is slower than one before a B: subtract the difference from B
    full_f = trimmed_mean(full["f"])
    overhead = min(max(0.0, trimmed_mean(times["f"]) - full_f), _MAX_SPLIT_OVERHEAD * full_f)
    is_fused = probe.fused_head and stage == len(probe.groups) - 1
    if is_fused:  # F does less than one before a B, and B so much more
        overhead = trimmed_mean(times["f"]) - full_f
    times["b"] = [max(0.0, time - overhead) for time in full["b"]]
    values = {name: trimmed_mean(times[name]) for name in TIME_FIELDS}
    spread = {name: _relative_spread(times[name], values[name]) for name in TIME_FIELDS}
    memory = [_memory_changes(timeline, stage) for timeline in probe.split]
    values["activation"] = fmean(one.activation for one in memory)
    values["stash"] = fmean(one.stash for one in memory)
    every = memory if is_fused else [*memory, *(_memory_changes(timeline, stage) for timeline in probe.full)]
    return GroupCosts(values, spread, max(one.workspace for one in every), max(one.f_workspace for one in every))


def _measure_full(probe: Probe, stage: int) -> GroupCosts:
    """The costs of a group in steps with full backwards only."""
    full = _durations(probe.full, stage)
    memory = [_memory_changes(timeline, stage) for timeline in probe.full]
    times = {"f": full["f"], "i": full["b"], "w": [0.0], "b": full["b"]}
    values = {name: trimmed_mean(own) for name, own in times.items()}
    spread = {name: _relative_spread(own, values[name]) for name, own in times.items()}
    values |= {"overlap": values["f"] + values["b"], "stash": 0.0}
    values["activation"] = fmean(one.activation for one in memory)
    return GroupCosts(values, spread, max(one.workspace for one in memory), max(one.f_workspace for one in memory))


def _durations(timelines: Iterable[Timeline], stage: int) -> dict[str, list[float]]:
    """The durations of a stage's actions, by the name of their cost."""
    times: dict[str, list[float]] = defaultdict(list)
    for timeline in timelines:
        for step in timeline.steps(0):
            if step[0].action.stage == stage:
                name = _TIME_NAMES["+".join(span.action.kind.name for span in step)]
                times[name].append(step[0].end - step[0].start)
    return times


def _memory_changes(timeline: Timeline, stage: int) -> MemoryChanges:
    """What a stage takes and needs."""
    if timeline.memory is None:
        return MemoryChanges(0.0, 0.0, 0.0, 0.0)
    during, after = (memoryview(column).cast("d") for column in timeline.memory)
    allocated, freed, at = [], [], 0
    workspace = forward = 0.0
    for step in timeline.steps(0):
        kind = step[0].action.kind
        before = after[at - 1] if at else after[len(after) - 1]  # a step ends with the level that it started with
        if len(step) == 1 and step[0].action.stage == stage:
            if kind is Kind.F:
                allocated.append(after[at] - before)
                forward = max(forward, during[at] - after[at])
            else:
                freed += [after[at] - before] if kind is Kind.I else []
                workspace = max(workspace, during[at] - before)
        at += len(step)
    activation = max(0.0, fmean(allocated))
    stash = max(0.0, activation + fmean(freed)) if freed else activation
    return MemoryChanges(activation, stash, workspace, forward)


def _gaps(timelines: Iterable[Timeline]) -> list[float]:
    """The times between two actions of a rank that waits for nothing."""
    gaps = []
    for timeline in timelines:
        end: float | None = None
        for step in timeline.steps(0):
            if end is not None:
                gaps.append(step[0].start - end)
            end = step[0].end
    return gaps


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the extremes; 0 without values."""
    trimmed = int(len(values) * _TRIM)
    kept = sorted(values)[trimmed : len(values) - trimmed]
    return fmean(kept) if kept else 0.0


def _relative_spread(values: Sequence[float], mean: float) -> float:
    """Half of the distance between the first and the last decile, relative to the mean."""
    if len(values) < 2 or not mean:
        return 0.0
    ordered, trimmed = sorted(values), int(len(values) * _TRIM)
    return (ordered[-1 - trimmed] - ordered[trimmed]) / 2 / mean


# links


def _fit_links(pings: Sequence[Ping], nodes: Sequence[str]) -> tuple[Link, Link]:
    """The link between two ranks of one machine, and between two machines."""
    return (
        _fit_link(pings, lambda a, b: nodes[a] == nodes[b]),
        _fit_link(pings, lambda a, b: nodes[a] != nodes[b]),
    )


def _fit_link(pings: Sequence[Ping], is_chosen: Callable[[int, int], bool]) -> Link:
    points = []
    for ping in pings:
        times = [
            time for timeline in ping.steps
            for (a, b), edge_times in _message_times(timeline).items() if is_chosen(a, b) for time in edge_times
        ]  # fmt: skip
        if times:
            points.append((ping.message, max(0.0, trimmed_mean(times))))
    if not points:
        return SAME_LINK
    (small, small_time), (large, large_time) = min(points), max(points)
    if large <= small or large_time <= small_time:  # too small to show a bandwidth
        return Link(large_time, None)
    bandwidth = (large - small) / (large_time - small_time)
    return Link(max(0.0, large_time - large / bandwidth), bandwidth)


def _reduce_latency(link: Link, time: float) -> Link:
    return link if link.p2p is None else link._replace(p2p=max(0.0, link.p2p - time))


def _fit_message_overhead(streams: Iterable[Timeline], usual_gaps: Sequence[float]) -> tuple[float, float]:
    """The time that a rank spends on sending a message and on receiving one, beyond the usual gap between actions.

    If the inputs of an action have arrived, the gap before it is spent on sending the result of the previous action and
    on receiving its own input. The first and the last rank do only one of the two. These times are short, so medians
    are used: a busy machine delays some of them by more than their length.
    """
    gaps: dict[tuple[bool, bool], list[float]] = defaultdict(list)
    for timeline in streams:
        reasons, codes = find_reasons(timeline), timeline.schedule.packed.view
        start, end = memoryview(timeline.start).cast("d"), memoryview(timeline.end).cast("d")
        last = timeline.schedule.num_stages - 1
        for at in range(timeline.schedule.num_actions):
            previous, source = int(reasons.previous[at]), int(reasons.remote[at])
            if previous < 0 or kind_of(codes[previous]) != kind_of(codes[at]):
                continue
            if source >= 0 and end[source] > start[previous]:  # its input may still have been in flight
                continue
            is_forward, stage = kind_of(codes[at]) == Kind.F, stage_of(codes[at])
            neighbours = stage < last, stage > 0
            gaps[neighbours if is_forward else neighbours[::-1]].append(start[at] - end[previous])
    usual = median(usual_gaps or [0.0])
    sending, receiving = (max(0.0, median(gaps[key] or [usual]) - usual) for key in ((True, False), (False, True)))
    return sending, receiving


def _message_times(timeline: Timeline) -> dict[tuple[int, int], list[float]]:
    """The times of the messages of each edge whose receiver was waiting."""
    reasons = find_reasons(timeline)
    start, end = memoryview(timeline.start).cast("d"), memoryview(timeline.end).cast("d")
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for at in range(timeline.schedule.num_actions):
        source, previous = int(reasons.remote[at]), int(reasons.previous[at])
        if source < 0 or previous < 0 or reasons.ranks[source] == reasons.ranks[at]:
            continue
        if end[source] >= end[previous]:
            times[int(reasons.ranks[source]), int(reasons.ranks[at])].append(start[at] - end[source])
    return dict(times)
