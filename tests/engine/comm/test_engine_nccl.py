"""NCCL, between ranks that share one GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import checkpoint_cases
import fault_cases as cases
import mesh_cases
import mesh_fault_cases
import torch
from checkpoint_chain import chain
from dynamic_cases import both_orders_over_nccl
from engine_helpers import TOLERANCE, largest, train_on_nccl
from test_mesh_faults import MESHES, strike

import zeropipe as zp
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.schedules.registry import entries

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def nccl_ranks():
    with LocalRanks(4, backend="nccl") as ranks:
        yield ranks


@pytest.mark.parametrize("entry", entries(), ids=str)
def test_every_schedule_over_nccl(nccl_ranks, entry):
    differences = largest(nccl_ranks.run(train_on_nccl, zp.build(entry.name, ranks=4, microbatches=8), 2, timeout=40))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("stage, kind, where", [(2, "raise", "2F3: ValueError"), (5, "raise-back", "5I1: ValueError")])
def test_an_error_stops_ranks_that_wait_inside_kernels(stage, kind, where):
    name, when = ("1f1b", 3) if kind == "raise" else ("zbv", 1)
    with LocalRanks(4, backend="nccl") as ranks:
        schedule = zp.build(name, ranks=4, microbatches=8)
        found = ranks.outcomes(cases.fail_over_nccl, schedule, stage, kind, when, timeout=40)
    assert all(item[0] == "EngineError" and item[1].startswith(f"rank 2 failed at {where}") for item in found), found


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipe"])
def test_dynamic_weights_over_nccl(nccl_ranks, name):
    found = nccl_ranks.run(both_orders_over_nccl, zp.build(name, ranks=4, microbatches=8), timeout=60)
    assert all(same for same, _ in found)
    assert any(moved for _, moved in found)


@pytest.mark.parametrize("mesh, kind, culprit", [("sharded", "raise", 1), ("spread", "kill", 2), ("spread", "stop", 0)])
def test_faults_span_a_mesh_over_nccl(mesh, kind, culprit):
    strike("zbv", MESHES[mesh], kind, culprit, 9, 6.0 if kind == "stop" else 60.0, "nccl")


@pytest.mark.parametrize("where, kind", [("_sums_of_mesh", "stop"), ("_word", "kill"), ("summing_group", "stop")])
def test_a_process_that_is_lost_while_nccl_connects_is_named(where, kind):
    with LocalRanks(4, grace=5, backend="nccl") as ranks:
        schedule, sizes = zp.build("zbv", ranks=2, microbatches=4), {"pp": 2, "dp_shard": 2}
        args = (where, kind, 3, 10**9, 6.0)
        found = ranks.outcomes(mesh_fault_cases.struck_in_set_up, schedule, sizes, *args, timeout=60)
    assert found[3].kind in ("Died", "TimedOut")
    assert all(item.kind == "EngineError" and "rank 3 was lost: " in item.text for item in found[:3]), found


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_mesh_over_nccl(name, sizes):
    with LocalRanks(4, backend="nccl") as four:
        found = four.run(mesh_cases.train_hf_on_nccl, zp.build(name, ranks=2, microbatches=4), sizes)
    assert max(max(seen.values()) for seen in found) < 1e-9, found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["now", "in the background"])
def test_checkpoints_over_nccl(tmp_path, asynchronous):
    model = checkpoint_cases.Model(tied=False, config={}, device="cuda")
    layouts = [("zbv", {"pp": 2, "dp_shard": 2}), ("1f1b", {"pp": 2, "tp": 2}), ("1f1b", {"pp": 4})]
    with LocalRanks(4, backend="nccl") as four:
        seen = chain(
            tmp_path, model, layouts, asynchronous, lambda *args: four.run(checkpoint_cases.link_over_nccl, *args)
        )
    assert max(seen) < 1e-9, seen


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_full_weights_over_nccl(sizes):
    model = checkpoint_cases.Model(tied=False, config={}, device="cuda")
    with LocalRanks(4, backend="nccl") as four:
        found = four.run(checkpoint_cases.weights_over_nccl, zp.build("zbv", ranks=2, microbatches=4), sizes, model)
    assert found == [(39, 0.0)] * 4
