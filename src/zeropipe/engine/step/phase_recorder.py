"""The phases of layers with divided experts, measured in the actions that run alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zeropipe.core.action import Action, Kind
from zeropipe.core.phases import PHASES, LayerPhases, Phases, PhaseTimes
from zeropipe.engine.backward.exchange_times import COUNTS, RETURN, TimedExchange, record_exchanges
from zeropipe.engine.backward.turn_times import COMBINE, DISPATCH
from zeropipe.engine.step.cell_runner import Call
from zeropipe.engine.timing import elapsed_seconds, mark_time

Seconds = dict[str, float]  # of each phase of one layer
Measured = dict[tuple[int, Kind], list[list[Seconds]]]  # by stage and kind: of each action, of each layer


class PhaseRecorder:
    """Times the exchanges of every F, B and I that is in no Overlap: there, the times are of two actions.

    `exchanging` are this rank's stages with divided experts; actions of others are not timed.
    """

    def __init__(self, device: torch.device, last_stage: int, exchanging: Collection[int]) -> None:
        self._device, self._last_stage, self._exchanging = device, last_stage, exchanging
        self._marks: list[tuple[Action, Any, Sequence[TimedExchange], Any]] = []

    def begin(self) -> None:
        """Start recording a step; the previous one is deleted."""
        self._marks.clear()

    def wrap(self, call: Call, actions: Sequence[Action]) -> Call:
        """Time the exchanges of a call."""
        if len(actions) > 1 or actions[0].kind is Kind.W or actions[0].stage not in self._exchanging:
            return call
        return partial(self._run, call, actions[0])

    def _run(self, call: Call, action: Action) -> None:
        start = mark_time(self._device)
        with record_exchanges(self._device) as exchanges:
            call()
        if exchanges:
            self._marks.append((action, start, exchanges, mark_time(self._device)))

    def measured(self) -> Measured:
        """The phases of each action; of a last stage without what it has beside its layers."""
        found: Measured = defaultdict(list)
        for action, start, exchanges, end in self._marks:
            layers, rest = divide_action(action.kind, exchanges, start, end, elapsed_seconds)
            if action.stage != self._last_stage:
                layers[-1]["attention"] += rest
            found[action.stage, action.kind].append(layers)
        return dict(found)


def divide_action(
    kind: Kind, exchanges: Sequence[TimedExchange], start: Any, end: Any, elapsed: Callable[[Any, Any], float]
) -> tuple[list[Seconds], float]:
    """The phases of each layer of an F, B or I, and the rest: after the last layer in an F, before it in a backward.

    Attention is what an F computes before the exchanges of a layer, and a backward after them. A layer that is
    recomputed exchanges forward, too, before its gradients do.
    """
    layers, before, previous = list[Seconds](), start, ""
    rest = 0.0
    for one in exchanges:
        gap, before = elapsed(before, one.start), one.end
        if previous == RETURN:
            layers[-1]["attention"] += gap
        if previous in ("", RETURN) if kind is not Kind.F else one.name == COUNTS:
            layers.append(dict.fromkeys(PHASES, 0.0))
        if kind is not Kind.F and not previous:
            rest = gap
        elif previous != RETURN:
            layers[-1][_computation(previous, one.name)] += gap
        layers[-1][COMBINE if one.name == COMBINE else DISPATCH] += elapsed(one.start, one.end)
        previous = one.name
    last = elapsed(before, end)
    if kind is Kind.F:
        return layers, last
    layers[-1]["attention"] += last
    return layers[::-1], rest


def _computation(before: str, after: str) -> str:
    """The phase of what is computed between two exchanges of a layer."""
    if (before, after) == (COUNTS, DISPATCH):
        return DISPATCH
    return "experts" if (before, after) in ((DISPATCH, COMBINE), (COMBINE, RETURN)) else "attention"


def join_phases(measured: Iterable[Measured], weights: Mapping[int, float], num_stages: int) -> Phases | None:
    """The mean phases of the layers of each stage; None where no experts are divided, or a kind never ran alone.

    `weights` are the mean times of the W of each stage. A W is divided among the computations of its layers like their
    I, and of a B half is taken for W. A stage without divided experts has one layer without times.
    """
    found: Measured = defaultdict(list)
    for some in measured:
        for key, actions in some.items():
            found[key] += actions
    if not found:
        return None
    stages = []
    for stage in range(num_stages):
        forward, whole, first = (_mean_layers(found.get((stage, kind), [])) for kind in (Kind.F, Kind.B, Kind.I))
        backward = first or whole
        if len(forward) != len(backward):
            return None
        computed = sum(layer["attention"] + layer["experts"] for layer in backward)
        share = 0.5 if not first else weights.get(stage, 0.0) / computed if computed else 0.0
        layers = tuple(_layer(f, b, share, bool(first)) for f, b in zip(forward, backward))
        stages.append(layers or (LayerPhases(),))
    return Phases(tuple(stages))


def _layer(forward: Seconds, backward: Seconds, share: float, is_split: bool) -> LayerPhases:
    """One layer; a W takes that share of the time of an I, or of a B."""

    def times(name: str) -> PhaseTimes:
        if name in (DISPATCH, COMBINE):
            return PhaseTimes(forward[name], backward[name])
        w = share * backward[name]
        return PhaseTimes(forward[name], backward[name] - (0.0 if is_split else w), w)

    return LayerPhases(*map(times, PHASES))


def _mean_layers(actions: Sequence[Sequence[Seconds]]) -> list[Seconds]:
    """The mean phases of each layer, over actions."""
    if not actions:
        return []
    return [{name: sum(layer[name] for layer in layers) / len(layers) for name in PHASES} for layers in zip(*actions)]
