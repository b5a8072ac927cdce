"""Phases of layers with divided experts: how an action is divided, and those of a recorded step."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("transformers")

import expert_cases
import torch
from engine_helpers import ranks
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.core.action import Action, Kind
from zeropipe.core.phases import PHASES
from zeropipe.engine.backward.exchange_times import TimedExchange
from zeropipe.engine.step.phase_recorder import PhaseRecorder, divide_action, join_phases
from zeropipe.sim.fit import fit


def divide(kind, text):
    """Of an action like `3 counts:1 0 dispatch:5 ...`: what is computed, and exchanges."""
    now, exchanges = 0, []
    for word in text.split():
        name, _, time = word.rpartition(":")
        now += int(time)
        if name:
            exchanges.append(TimedExchange(name, now - int(time), now))
    layers, rest = divide_action(kind, exchanges, 0, now, lambda start, end: end - start)
    assert sum(sum(layer.values()) for layer in layers) + rest == now
    return [tuple(layer[phase] for phase in PHASES) for layer in layers], rest


SIZES = {"pp": 2, "dp_shard": 2}
FORWARD = "3 counts:1 2 dispatch:5 7 combine:11"
BACKWARD = "combine:13 17 return:19 23"


def test_an_action_is_divided_at_its_exchanges():
    assert divide(Kind.F, f"{FORWARD} {FORWARD} 4") == ([(3, 8, 7, 11), (3, 8, 7, 11)], 4)
    assert divide(Kind.B, f"2 {BACKWARD} {BACKWARD}") == ([(23, 19, 17, 13), (23, 19, 17, 13)], 2)
    assert divide(Kind.I, "0 combine:1 2 return:3 4 combine:10 20 return:30 40") == (
        [(40, 30, 20, 10), (4, 3, 2, 1)],
        0,
    )


def test_a_layer_that_is_recomputed_exchanges_twice():
    layers, rest = divide(Kind.B, f"2 counts:1 0 dispatch:5 7 combine:11 6 {BACKWARD} {FORWARD} 6 {BACKWARD}")
    assert rest == 2
    assert layers == [(23 + 6, 5 + 3 + 19, 7 + 17, 11 + 13), (23 + 3 + 6, 6 + 19, 7 + 17, 11 + 13)]


def layer(*times):
    return dict(zip(PHASES, times))


def test_weight_gradients_are_divided_like_their_layers():
    forward = {(0, Kind.F): [[layer(1, 2, 3, 4)], [layer(3, 2, 5, 4)]]}
    split = [forward, {(0, Kind.I): [[layer(4, 3, 6, 5)]]}]
    (found,) = join_phases(split, {0: 5.0}, 1).stages[0]
    assert found == ((2, 4, 2), (2, 3, 0), (4, 6, 3), (4, 5, 0))
    (found,) = join_phases([forward, {(0, Kind.B): [[layer(4, 3, 6, 5)]]}], {}, 1).stages[0]
    assert found == ((2, 2, 2), (2, 3, 0), (4, 3, 3), (4, 5, 0))
    assert join_phases([forward], {}, 1) is None  # backwards in Overlaps only
    assert join_phases([{}], {}, 1) is None


def test_stages_without_divided_experts_are_not_timed():
    recorder = PhaseRecorder(torch.device("cpu"), 3, [2])
    actions = [Action(stage, kind, 0) for kind in (Kind.F, Kind.I, Kind.B, Kind.W) for stage in (1, 2)]
    calls = [recorder.wrap(print, [action]) for action in actions]
    assert [action for action, call in zip(actions, calls) if call is not print] == actions[1:6:2]


def test_a_recorded_step_without_divided_experts_has_no_phases():
    (timeline,) = ranks(1).run(expert_cases.recorded_without_ep, zp.build("zb-h1", ranks=1, microbatches=2))
    assert timeline.phases is None


@pytest.mark.parametrize(
    "name, sizes, options",
    mark_rest_full(
        [
            ("zb-h1", {"dp_replicate": 2}, {"ac": "none"}),
            ("zb-h1", SIZES, {"ac": "none"}),
            ("1f1b", SIZES, {"ac": "full"}),
            ("1f1b", SIZES, {"compile": True}),
            ("dualpipev", SIZES, {"overlap": "turns"}),
        ],
        lambda case: "pp" not in case[1],
    ),
    ids=str,
)
def test_a_recorded_step_has_the_phases_of_its_layers(name, sizes, options):
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=6)
    timelines = ranks(math.prod(sizes.values())).run(expert_cases.recorded_with_ep, schedule, sizes, options)
    timeline = timelines[0]
    assert "pp" not in sizes or timelines[2].phases == timeline.phases  # of the same pipeline
    again = zp.from_json(zp.to_json(timeline))
    assert again.phases == timeline.phases
    for stage, layers in enumerate(timeline.phases.stages):
        assert all(time > 0 for layer in layers for times in layer for time in times[:2])
        alone = [
            (span.action.kind, span.end - span.start)
            for rank in range(timeline.num_ranks) for step in timeline.steps(rank) for span in step
            if len(step) == 1 and span.action.stage == stage
        ]  # fmt: skip
        for kind in (Kind.F, Kind.I):
            times = [time for one, time in alone if one is kind] or [time for one, time in alone if one is Kind.B]
            assert sum(layer.total(kind) for layer in layers) <= sum(times) / len(times) + 1e-9
    costs = fit(timeline)
    assert costs.phases == timeline.phases.stages
    simulated = zp.simulate(zp.with_overlaps(schedule, costs), costs)
    assert simulated.phases.stages == timeline.phases.stages
