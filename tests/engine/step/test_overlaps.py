"""Overlaps whose F and B take turns at every exchange, equal to one process."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("transformers")

import expert_cases
from engine_helpers import PRELOAD, TOLERANCE, largest, ranks
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.core.action import Overlap

SHARDED, REPLICATED = {"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2}


def train(name, sizes, kind, options, *more):
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=6)
    args = (schedule, sizes, 2, kind, {"overlap": "turns"} | options, *more)
    seen = largest(ranks(math.prod(sizes.values())).run(expert_cases.train_with_ep, *args))
    seen.pop("kept")
    return seen


CASES = [
    (name, sizes, kind, {"ac": ac})
    for name in ("dualpipev", "dualpipe", "1f1b-overlap", "interleaved-overlap")
    for sizes in (SHARDED, REPLICATED)
    for kind in ("qwen3_moe", "deepseek_v3", "gpt_oss")
    for ac in ("none", "full", "selective:op")
]
QUICK = [("dualpipev", SHARDED, "deepseek_v3", {"ac": "none"})]


@pytest.mark.parametrize("name, sizes, kind, options", mark_rest_full(CASES, QUICK.__contains__), ids=str)
def test_training_with_experts_equals_one_process(name, sizes, kind, options):
    seen = train(name, sizes, kind, options)
    seen.pop("idle")
    assert max(seen.values()) < TOLERANCE, seen


JOINED = [("zbv", REPLICATED), ("1f1b", {"dp_replicate": 2}), ("interleaved", SHARDED), ("zb-h1", SHARDED)]


@pytest.mark.parametrize("name, sizes", mark_rest_full(JOINED, lambda case: case[0] == "1f1b"), ids=str)
def test_neighbours_of_other_schedules_take_turns(name, sizes):
    schedule = zp.with_overlaps(zp.build(name, ranks=sizes.get("pp", 1), microbatches=6))
    assert any(isinstance(step, Overlap) for row in schedule.rows for step in row)
    args = (schedule, sizes, 2, "qwen3_moe", {"overlap": "turns"})
    seen = largest(ranks(math.prod(sizes.values())).run(expert_cases.train_with_ep, *args))
    assert max(value for key, value in seen.items() if key not in ("kept", "idle")) < TOLERANCE, seen


@pytest.mark.full
def test_experts_without_a_token():
    seen = train(
        "1f1b-overlap", {"dp_replicate": 2}, "mixtral", {}, 3, {"num_experts_per_tok": 1, "num_hidden_layers": 2}, True
    )
    assert seen.pop("idle") > 0
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.parametrize("ac", mark_rest_full(("none", "full", "selective:op"), ("none",)))
def test_the_order_of_exchanges(ac):
    """Of each pair of layers: combine of B, counts of F, dispatch of F, dispatch of B, combine of F.

    That is the order of DeepSeek's published trace. With ac=full, B first repeats the three of its forward.
    """
    schedule = zp.build("1f1b-overlap", ranks=1, microbatches=2)
    first, second = ranks(2).run(expert_cases.order_of_exchanges, schedule, {"ac": ac})
    assert first == second
    if ac == "full":
        assert first.startswith("cCrRrRr")
        assert sorted(first) == sorted(4 * ("CRR" + "crr" + "rr"))
    else:
        assert first == 4 * "rCRrR"


COMPILED = [
    (name, sizes, ac, dispatch, backend)
    for name, sizes in (("dualpipev", SHARDED), ("dualpipe", REPLICATED), ("1f1b-overlap", {"dp_replicate": 2}))
    for ac in ("none", "full", "selective:op")
    for dispatch in ("expert", "process")
    for backend in ("aot_eager", None)
]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, sizes, ac, dispatch, backend", COMPILED, ids=str)
def test_compiled_blocks_take_turns(name, sizes, ac, dispatch, backend):
    """Exchanges are operators of a block's one graph. None: inductor."""
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=6)
    options = {"compile": True, "ac": ac, "overlap": "turns", "dispatch": dispatch}
    changes = {"num_hidden_layers": schedule.num_stages, "output_router_logits": False}
    group = ranks(math.prod(sizes.values()), PRELOAD if backend else (*PRELOAD, "torch._inductor.compile_fx"))
    args = (schedule, sizes, 2, backend, options, 2, changes, True)
    seen = largest(group.run(expert_cases.train_compiled_with_ep, *args, timeout=550))
    assert max(seen[key] for key in seen.keys() - {"kept", "idle"}) < TOLERANCE, seen


@pytest.mark.parametrize("seed", mark_rest_full(range(200), ()))
def test_random_cases_with_random_delays(seed):
    """No deadlock, whichever process is late; gradients equal one process's."""
    seen = largest(ranks(4).run(expert_cases.random_run, seed))
    assert max(seen[key] for key in seen.keys() - {"kept", "idle"}) < TOLERANCE, seen
