"""Dynamic W: the same gradients, whatever comes late, and a timeline that says what ran."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import dynamic_cases as cases
import mesh_cases
import torch
from engine_helpers import TOLERANCE, largest, ranks
from torch import nn

import zeropipe as zp
from zeropipe.core.action import Kind, actions_of, parse_action
from zeropipe.core.check import check
from zeropipe.engine.stages.contract import describe_stage
from zeropipe.engine.step.dynamic import IdleTime, find_movable
from zeropipe.errors import EngineError

SPLIT = [
    "zb-h1",
    "zbv",
    "dualpipe",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("dualpipev", "interleaved-zb")),
]


def owed(row: str, shared: bool = False) -> dict[str, str]:
    """What `find_movable` says about a row of stages 0 and 1, in texts."""
    one = nn.Linear(2, 2)
    stages = {0: describe_stage(0, one), 1: describe_stage(1, nn.Sequential(one) if shared else nn.Linear(2, 2))}
    found = find_movable([parse_action(text) for text in row.split()], stages)
    return {str(action): " ".join(map(str, some)) for action, some in found.items() if some}


def test_a_w_moves_between_its_i_and_its_place():
    assert owed("0F0 0F1 0I0 0F2 0I1 0W0 0F3 0W1") == {"0F2": "0W0", "0I1": "0W0", "0F3": "0W1"}


def test_ws_of_a_stage_keep_their_order():
    """1 before 0, as the row says; the other stage's goes its own way."""
    assert owed("0F0 0F1 1F0 0I0 1I0 0F2 0I1 0F3 0W1 0W0 1W0") == {
        "0F2": "1W0", "0I1": "1W0", "0F3": "0W1 0W0 1W0"
    }  # fmt: skip


def test_a_w_does_not_pass_a_whole_backward_of_its_stage():
    assert owed("0F0 0F1 0F2 0I0 0F3 0B1 0F4 0W0 1F0 1B0") == {"0F4": "0W0"}


def test_a_w_does_not_pass_an_i_that_adds_to_its_weights():
    row = "0F0 1F0 1I0 1F1 0I0 1F2 1W0 1F3 0W0"
    assert owed(row) == {"1F1": "1W0", "0I0": "1W0", "1F2": "1W0 0W0", "1F3": "0W0"}
    assert owed(row, shared=True) == {"1F2": "1W0 0W0", "1F3": "0W0"}


def test_a_w_in_parts_is_owed_until_its_last():
    assert owed("0F0 0I0 0F1 0W0 0F2 0W0 0F3") == {"0F1": "0W0", "0F2": "0W0"}


@pytest.mark.parametrize("idle_at, here_at, over", [(3, 9, False), (3, 2, True), (9, 4, True)])
def test_a_gpu_gets_a_product_when_it_has_nothing_else_to_do(monkeypatch, idle_at, here_at, over):
    """Products cost the host no time: without this it would issue them all at once."""
    looks = []

    class Event:
        def record(self):
            assert not looks

        def query(self):
            return len(looks) >= idle_at

    monkeypatch.setattr("torch.cuda.Event", Event)
    idle_time = IdleTime(torch.device("cuda"))
    idle_time.has_arrived = lambda: looks.append(0) or len(looks) >= here_at
    assert idle_time.is_over() == over
    assert len(looks) == min(idle_at, here_at)


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_are_those_of_the_static_order(name):
    """Bit for bit, with stages, losses and messages that are late at random; and Ws did move."""
    found = ranks().run(cases.both_orders, zp.build(name, ranks=4, microbatches=8), {})
    assert all(same for same, _ in found)
    assert any(moved for _, moved in found)


@pytest.mark.parametrize(
    "options",
    [
        {"recv_ahead": 0},
        {"check_finite": True},
        {"ac": "full"},
        pytest.param({"compile": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_other_options(options):
    found = ranks(2).run(cases.both_orders, zp.build("zb-h1", ranks=2, microbatches=6), options)
    assert all(same for same, _ in found)
    assert any(moved for _, moved in found)


def test_ws_in_parts():
    plan = zp.build("zb-h1", ranks=4, microbatches=8)
    schedule = zp.fill_gaps(plan, zp.Costs(p2p=0.3), weight_parts=2)
    found = ranks().run(cases.both_orders, schedule, {})
    assert all(same for same, _ in found)
    assert any(moved for _, moved in found)


def beside_one_process(train, *args):
    found = ranks().run(cases.on_a_mesh, train, *args)
    seen = largest([differences for differences, _ in found])
    assert max(seen.values()) < TOLERANCE, seen
    assert sum(moved for _, moved in found)


@pytest.mark.parametrize("regather", [False, True], ids=["keep", "regather"])
@pytest.mark.parametrize("name", ["zb-h1", pytest.param("zbv", marks=pytest.mark.full)])
def test_sharded_stages(name, regather):
    """Every process decides by itself, and all reduce in one order."""
    schedule, options = zp.build(name, ranks=2, microbatches=8), {"dynamic_weights": True, "regather": regather}
    beside_one_process(mesh_cases.train_on_mesh, schedule, {"pp": 2, "dp_shard": 2}, options, 2, False, ())


def test_spread_layers():
    sizes, model = {"pp": 2, "tp": 2}, {"qwen3": True, "tie_word_embeddings": False, "num_hidden_layers": 2}
    schedule = zp.build("zb-h1", ranks=2, microbatches=6)
    beside_one_process(mesh_cases.train_hf_on_mesh, schedule, sizes, model, {"dynamic_weights": True})


def test_the_timeline_shows_what_ran():
    """A rank that waits for a message of a late rank runs its W meanwhile."""
    schedule = zp.build("zb-h1", ranks=2, microbatches=6)
    planned, ran = ranks(2).run(cases.timelines, schedule)[0]
    assert planned.schedule == schedule
    assert ran.schedule != schedule
    check(ran.schedule)
    assert [a for a in actions_of(ran.schedule.rows[1]) if a.kind is not Kind.W] == [
        a for a in actions_of(schedule.rows[1]) if a.kind is not Kind.W
    ]
    for rank in range(2):
        ends = 0.0
        for span in ran.spans(rank):
            assert ends <= span.start <= span.end
            ends = span.end
    assert zp.from_json(zp.to_json(ran)) == ran


@pytest.mark.parametrize(
    "options, line",
    [
        ({"split": "whole"}, "dynamic_weights=True cannot run split='whole', whose W cannot run in parts; "),
        ({"shapes": "dynamic"}, "dynamic_weights=True cannot run shapes='dynamic': "),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(options, line):
    with pytest.raises(EngineError, match=line):
        ranks(2).run(cases.both_orders, zp.build("zb-h1", ranks=2, microbatches=4), options)
