"""Costs of layers from what a profile measured.

A stage of n layers takes what every stage takes (masks, rotary embeddings, the executor's own time between actions) and
n times what a layer takes. One layer alone, and several together, tell the two apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple

from zeropipe.core.action import Kind
from zeropipe.core.explain import find_reasons
from zeropipe.core.model.probe import LayerGroup, Ping, Probe, Profile
from zeropipe.core.packed import kind_of, stage_of
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import INSIDE, Link
from zeropipe.sim.fit import steps_of
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting, State

STAGE = "stage"  # the kind that every stage has once
TIMES = ("f", "i", "w", "b", "overlap")
SIZES = ("activation", "stash")
_NAMES = {"F": "f", "I": "i", "W": "w", "B": "b", "F+B": "overlap"}
_MORE = 0.25  # of an F is the most that it takes longer before a split backward: what seems to be more is noise
_TRIM = 0.1  # of the measurements at either end: a machine has other things to do


class Measured(NamedTuple):
    """What one piece takes: times and sizes by name, and how far the times lie apart, relative to them."""

    values: Mapping[str, float]
    spread: Mapping[str, float]
    workspace: float


def layer_costs(profile: Profile) -> LayerCosts:
    """The costs of a model's layers, as measured."""
    link, inter_node = links(profile.pings, profile.nodes)
    first = profile.probes[0]
    sending, receiving = handling(profile.streams, _between([*first.split, *first.full]))
    # a ping takes what its sender and its receiver spend on it, and then some
    link, inter_node = (_without(one, sending + receiving) for one in (link, inter_node))
    size = profile.bytes_per_number
    return LayerCosts(
        profile.model, "profile", profile.layers, tuple(map(_setting, profile.probes)), after=("head",),
        each=(STAGE,), tied=profile.tied, sequence=profile.sequence, dtype=profile.dtype, link=link,
        inter_node=inter_node, sending=sending, receiving=receiving,
        state=State() if size == 2 else State(size, size, 2 * size),
        machine=profile.machine, versions=profile.versions,
    )  # fmt: skip


def _setting(probe: Probe) -> Setting:
    if not probe.split or not probe.full:
        raise ConfigError("a profile needs at least one recorded step: give steps=1 or more")
    measured = [_measured(probe, stage) for stage in range(len(probe.groups))]
    between = max(0.0, middle(_between([*probe.split, *probe.full])))
    shared = {name: _shared(probe.groups, [one.values[name] for one in measured]) for name in (*TIMES, *SIZES)}
    kinds: dict[str, LayerCost] = {}
    for piece, one in zip(probe.groups, measured, strict=True):
        if len(piece.kinds) == 1:
            kinds[piece.kinds[0]] = _layer(piece, one, shared)
    for piece, one in zip(probe.groups, measured, strict=True):  # an end that has a layer with it
        own = [kind for kind in piece.kinds if kind not in kinds]
        if own:
            rest = [kinds[kind] for kind in piece.kinds if kind in kinds]
            kinds[own[0]] = _less(_layer(piece, one, shared), rest)
    stage: dict[str, Any] = {name: shared[name] + (between if name in TIMES else 0.0) for name in shared}
    kinds[STAGE] = LayerCost(**stage)
    return Setting(kinds, probe.ac, probe.microbatch_size, 1, probe.compile)


def _layer(piece: LayerGroup, one: Measured, shared: Mapping[str, float]) -> LayerCost:
    values: dict[str, Any] = {name: max(0.0, value - shared[name]) for name, value in one.values.items()}
    return LayerCost(
        **values, workspace=one.workspace, message=piece.message, parameters=piece.parameters, flops=piece.flops,
        spread=one.spread,
    )  # fmt: skip


def _less(whole: LayerCost, parts: Sequence[LayerCost]) -> LayerCost:
    """What is left of a piece without some of its layers."""
    for part in parts:
        left: dict[str, Any] = {
            name: max(0.0, (getattr(whole, name) or 0.0) - (getattr(part, name) or 0.0))
            for name in (*TIMES, *SIZES, "flops")
        }
        whole = replace(whole, **left, parameters=whole.parameters - part.parameters)
    return whole


def _shared(pieces: Sequence[LayerGroup], values: Sequence[float]) -> float:
    """What every stage takes once: from the pieces of several layers, whose layers are known alone.

    It is at most half of what a layer takes alone: measured on a busy machine it may seem to be all of it.
    """
    alone = {piece.kinds[0]: value for piece, value in zip(pieces, values, strict=True) if len(piece.kinds) == 1}
    found = [
        (sum(alone[kind] for kind in piece.kinds) - value) / (len(piece.kinds) - 1)
        for piece, value in zip(pieces, values, strict=True)
        if len(piece.kinds) > 1 and all(kind in alone for kind in piece.kinds)
    ]
    layers = [value for kind, value in alone.items() if kind not in ("embedding", "head")]
    return min(max(0.0, fmean(found)), *(value / 2 for value in layers)) if found else 0.0


def _measured(probe: Probe, stage: int) -> Measured:
    times, whole = _durations(probe.split, stage), _durations(probe.full, stage)
    # an F whose backward will be split takes longer than one before a B: B gets what is left of the two
    more = min(max(0.0, middle(times["f"]) - middle(whole["f"])), _MORE * middle(whole["f"]))
    times["b"] = [max(0.0, time - more) for time in whole["b"]]
    values = {name: middle(times[name]) for name in TIMES}
    spread = {name: _spread(times[name], values[name]) for name in TIMES}
    sizes = [_sizes(timeline, stage) for timeline in probe.split]
    values["activation"] = fmean(taken for taken, _, _ in sizes)
    values["stash"] = fmean(kept for _, kept, _ in sizes)
    workspaces = [_sizes(timeline, stage)[2] for timeline in (*probe.split, *probe.full)]
    return Measured(values, spread, max(workspaces))


def _durations(timelines: Iterable[Timeline], stage: int) -> dict[str, list[float]]:
    """How long the actions of a stage took, by the name of their time."""
    times: dict[str, list[float]] = defaultdict(list)
    for timeline in timelines:
        for step in steps_of(timeline, 0):
            if step[0].action.stage == stage:
                times[_NAMES["+".join(span.action.kind.name for span in step)]].append(step[0].end - step[0].start)
    return times


def _sizes(timeline: Timeline, stage: int) -> tuple[float, float, float]:
    """What F takes, what of it is left after I, and what is there only while an action runs."""
    if timeline.memory is None:
        return 0.0, 0.0, 0.0
    during, after = (memoryview(column).cast("d") for column in timeline.memory)
    taken, freed, workspace, at = [], [], 0.0, 0
    for step in steps_of(timeline, 0):
        kind = step[0].action.kind
        before = after[at - 1] if at else after[len(after) - 1]  # a step ends where it began
        if len(step) == 1 and step[0].action.stage == stage:
            if kind is Kind.F:
                taken.append(after[at] - before)
            elif kind is Kind.I:
                freed.append(after[at] - before)
            workspace = max(workspace, during[at] - (after[at] if kind is Kind.F else before))
        at += len(step)
    held = max(0.0, fmean(taken))
    return held, max(0.0, held + fmean(freed)) if freed else held, workspace


def _between(timelines: Iterable[Timeline]) -> list[float]:
    """Times between two actions of a rank that waits for nothing."""
    gaps = []
    for timeline in timelines:
        ended: float | None = None
        for step in steps_of(timeline, 0):
            if ended is not None:
                gaps.append(step[0].start - ended)
            ended = step[0].end
    return gaps


def middle(values: Sequence[float]) -> float:
    """The mean without the extremes."""
    cut = int(len(values) * _TRIM)
    kept = sorted(values)[cut : len(values) - cut]
    return fmean(kept) if kept else 0.0


def _spread(values: Sequence[float], middle: float) -> float:
    """Half of what lies between the first and the ninth tenth of the values, relative to them."""
    if len(values) < 2 or not middle:
        return 0.0
    ordered, cut = sorted(values), int(len(values) * _TRIM)
    return (ordered[-1 - cut] - ordered[cut]) / 2 / middle


# --- links


def links(pings: Sequence[Ping], nodes: Sequence[str]) -> tuple[Link, Link]:
    """What a message between two ranks of one machine takes, and between two machines."""

    def between(inside: bool) -> Link:
        return _link(pings, lambda a, b: (nodes[a] == nodes[b]) is inside)

    return between(True), between(False)


def _link(pings: Sequence[Ping], chosen: Callable[[int, int], bool]) -> Link:
    points = []
    for ping in pings:
        times = [
            time for timeline in ping.steps for (a, b), found in edge_times(timeline).items() if chosen(a, b)
            for time in found
        ]  # fmt: skip
        if times:
            points.append((ping.message, max(0.0, middle(times))))
    if not points:
        return INSIDE
    (small, early), (large, late) = min(points), max(points)
    if large <= small or late <= early:  # too small to see a bandwidth
        return Link(late, None)
    bandwidth = (large - small) / (late - early)
    return Link(max(0.0, late - large / bandwidth), bandwidth)


def _without(link: Link, time: float) -> Link:
    return link if link.p2p is None else link._replace(p2p=max(0.0, link.p2p - time))


def handling(streams: Iterable[Timeline], between: Sequence[float]) -> tuple[float, float]:
    """A rank's own time for a message that it sends and for one that it takes, beside `between`, as without any.

    Where all that an action needs is there, the gap before it is spent on the messages of the action before it, which
    it sends, and on its own, which it takes. The ends of the line only do one of the two. These are short times, so
    medians count: a machine that is busy with something else adds more to some of them than they are.
    """
    gaps: dict[tuple[bool, bool], list[float]] = defaultdict(list)
    for timeline in streams:
        why, codes = find_reasons(timeline), timeline.schedule.packed.codes
        start, end = memoryview(timeline.start).cast("d"), memoryview(timeline.end).cast("d")
        actions = memoryview(codes).cast("q")
        last = timeline.schedule.num_stages - 1
        for at in range(timeline.schedule.num_actions):
            before, source = int(why.previous[at]), int(why.remote[at])
            if before < 0 or kind_of(actions[before]) != kind_of(actions[at]):
                continue
            if source >= 0 and end[source] > start[before]:  # it may still have been on its way
                continue
            forward, stage = kind_of(actions[at]) == Kind.F, stage_of(actions[at])
            ends = stage < last, stage > 0
            gaps[ends if forward else ends[::-1]].append(start[at] - end[before])
    usual = median(between or [0.0])
    sent, taken = (max(0.0, median(gaps[key] or [usual]) - usual) for key in ((True, False), (False, True)))
    return sent, taken


def edge_times(timeline: Timeline) -> dict[tuple[int, int], list[float]]:
    """How long the messages of each edge took, where their receiver was waiting."""
    why = find_reasons(timeline)
    start, end = memoryview(timeline.start).cast("d"), memoryview(timeline.end).cast("d")
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for at in range(timeline.schedule.num_actions):
        source, before = int(why.remote[at]), int(why.previous[at])
        if source < 0 or before < 0 or why.ranks[source] == why.ranks[at]:
            continue
        if end[source] >= end[before]:
            found[int(why.ranks[source]), int(why.ranks[at])].append(start[at] - end[source])
    return dict(found)
