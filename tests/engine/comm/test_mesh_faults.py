"""One process of a mesh fails: all end with its name, also those that wait for it inside torch's own groups."""

from __future__ import annotations

import random
import re

import pytest

pytest.importorskip("torch")

import mesh_fault_cases as cases
from full_marker import mark_rest_full
from test_chaos import TEXTS
from test_faults import LIMIT, gone

import zeropipe as zp
from zeropipe.engine.run.launch import LocalRanks

SHARDED, SPREAD, REPLICATED = {"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp_replicate": 2}
MESHES = {"sharded": SHARDED, "spread": SPREAD, "replicated": REPLICATED, "no pipeline": {"pp": 1, "dp_shard": 4}}


def strike(name, sizes, kind, culprit, when, timeout, backend="gloo"):
    schedule = zp.build(name, ranks=sizes["pp"], microbatches=4)
    strike_in(cases.struck, (schedule, sizes, kind, culprit, when, timeout), kind, culprit, backend)


def strike_in(function, args, kind, culprit, backend="gloo"):
    with LocalRanks(4, grace=30 if kind == "kill" else 1, backend=backend) as ranks:
        found = ranks.outcomes(function, *args, timeout=LIMIT)
        pids = ranks.pids
    assert gone(pids)
    survivors = [item for rank, item in enumerate(found) if rank != culprit]
    wanted = TEXTS[kind].format(culprit)
    assert all(item.kind == "EngineError" and re.fullmatch(wanted, item.text) for item in survivors), found
    assert len({item.text for item in survivors}) == 1, found
    return survivors[0].text


@pytest.mark.parametrize(
    "mesh, kind, culprit, when", [("sharded", "raise", 1, 9), ("spread", "kill", 2, 6), ("sharded", "kill", 3, 30)]
)
def test_all_processes_end_with_the_name_of_the_one_that_failed(mesh, kind, culprit, when):
    strike("zbv", MESHES[mesh], kind, culprit, when, 60.0)


def test_a_process_that_is_stopped_is_named_by_those_that_wait_for_it_inside_torch():
    strike("zbv", SPREAD, "stop", 1, 6, 4.0)


@pytest.mark.parametrize(
    "kind, when", [("raise", 9), *(pytest.param(kind, 21, marks=pytest.mark.full) for kind in ("kill", "stop"))]
)
def test_a_process_that_fails_while_others_wait_for_its_rows_of_experts(kind, when):
    pytest.importorskip("transformers")
    import expert_cases

    schedule = zp.build("zbv", ranks=2, microbatches=4)
    args = (schedule, kind, 1, when, 4.0 if kind == "stop" else 60.0)
    strike_in(expert_cases.struck_in_experts, args, kind, 1)


@pytest.mark.parametrize(
    "kind, inside",
    mark_rest_full([(kind, inside) for kind in ("raise", "kill", "stop") for inside in "FB"], [("raise", "B")]),
)
def test_a_process_that_fails_in_an_overlap_whose_computations_take_turns(kind, inside):
    pytest.importorskip("transformers")
    import expert_cases

    schedule = zp.build("dualpipev", ranks=2, microbatches=6)
    when = 20 if inside == "F" else 16  # the eighth F of the second step, the fourth B
    args = (schedule, kind, 1, when, 4.0 if kind == "stop" else 60.0, inside, "turns")
    text = strike_in(expert_cases.struck_in_experts, args, kind, 1)
    assert kind != "raise" or "OVERLAP_F_B" in text


def test_a_broken_mesh_is_refused():
    with LocalRanks(4) as ranks:
        found = ranks.run(cases.again, zp.build("zbv", ranks=2, microbatches=4), SHARDED, timeout=LIMIT)
    assert set(found) == {"the mesh was aborted when an Engine on it failed: restart the processes"}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize("kind", ["raise", "kill", "stop"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_process_in_every_place(mesh, kind, culprit, seed):
    chance = random.Random(f"{mesh} {kind} {culprit} {seed}")
    name = chance.choice(["1f1b", "zbv", "zb-h1"])
    strike(name, MESHES[mesh], kind, culprit, chance.randrange(1, 40), 4.0 if kind == "stop" else 60.0)


@pytest.mark.parametrize(
    "kind, when", [("kill", 13), *(pytest.param(kind, 30, marks=pytest.mark.full) for kind in ("raise", "stop"))]
)
def test_a_process_that_fails_in_a_reduce_of_rolling_gradients(kind, when):
    schedule = zp.build("zb-h1", ranks=2, microbatches=4)
    strike_in(cases.struck_in_a_reduce, (schedule, kind, 2, when, 4.0 if kind == "stop" else 60.0), kind, 2)
