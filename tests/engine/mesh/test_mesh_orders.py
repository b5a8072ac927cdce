"""Pipelines that share sharded stages and do not do the same work, beside one process in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import order_cases as cases
from engine_helpers import PRELOAD, TOLERANCE, largest, ranks

import zeropipe as zp
from zeropipe.engine import LocalRanks

SHARDED = {"pp": 2, "dp_shard": 2}
COUNTS = [(1, 5), (5, 1), (1, 2), (2, 1), (3, 1), (2, 4), (1, 1), (3, 3)]


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    "name, options",
    [
        full("zbv", {}),
        ("dualpipe", {"record": True, "dynamic_weights": True}),
        *(full(name, {}) for name in zp.names() if name != "zbv"),
        full("dualpipe", {"split": "whole"}),
        full("dualpipe", {"ac": "full"}),
        full("zbv", {"record": True, "dynamic_weights": True}),
    ],
    ids=str,
)
def test_any_numbers_of_microbatches(name, options):
    """A mirrored placement uses one of its two copies of a stage for one microbatch, and both for more."""
    schedule = zp.build(name, ranks=2, microbatches=4)
    seen = largest(ranks(4).run(cases.train_unlike, schedule, SHARDED, options, COUNTS))
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.full
@pytest.mark.parametrize("name", ["dualpipe", "chimera", "zbv"])
def test_any_numbers_of_microbatches_on_replicas_of_sharded_pipelines(name):
    schedule = zp.build(name, ranks=2, microbatches=4)
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 2}
    seen = largest(ranks(8).run(cases.train_unlike, schedule, sizes, {}, [(1, 5, 2, 1), (1, 1, 1, 3)]))
    assert max(seen.values()) < TOLERANCE, seen


WAYS = ("skips", "turns", "loops")
MORE = ("skips all", "either", "repeats", "never")


@pytest.mark.parametrize(
    "name, options, ways",
    [
        ("1f1b", {"regather": True}, WAYS),
        full("zbv", {"regather": True}, WAYS[:2]),
        full("1f1b-overlap", {"regather": True}, WAYS[:1]),
        ("1f1b", {}, WAYS[:1]),
        *(full(name, {}, WAYS + MORE) for name in ("1f1b", "zbv", "dualpipe", "interleaved", "dualpipev")),
        *(full(name, {"regather": True}, WAYS + MORE) for name in zp.names()),
        *(full(name, {"regather": True, "ac": "full"}, WAYS + MORE) for name in ("1f1b", "zbv", "dualpipe")),
        *(full(name, {"regather": True, "split": "whole"}, WAYS + MORE) for name in ("zbv", "dualpipe")),
        full("zbv", {"regather": True, "dynamic_weights": True, "record": True}, WAYS + MORE),
    ],
    ids=str,
)
def test_units_that_a_microbatch_does_not_use(name, options, ways):
    """Blocks that depend on the data: one process would gather or reduce what the other does not."""
    schedule = zp.build(name, ranks=2, microbatches=4)
    for seen in ranks(4).run(cases.train_branching, schedule, SHARDED, options, ways):
        for way, errors in seen.items():
            assert max(errors.values()) < TOLERANCE, (way, errors)


def test_blocks_that_are_come_back_to_for_some_data_only():
    schedule = zp.build("1f1b", ranks=2, microbatches=6)
    (seen, *_) = ranks(4).run(cases.train_branching, schedule, SHARDED, {}, ("returns",))
    assert max(seen["returns"].values()) < TOLERANCE, seen
    with LocalRanks(4, preload=PRELOAD) as own:  # an engine that fails breaks their mesh
        said = own.run(cases.train_branching, schedule, SHARDED, {"regather": True}, ("returns",))
    for seen in said:
        assert "stage 0 enters blocks.0 again after other units, and did not in its first pass" in seen["returns"]
        assert "leave out regather=True" in seen["returns"]


def test_processes_that_would_not_agree_are_refused():
    """Both ranks and the first difference are named on all of them, and the engine goes on."""
    for said, error in ranks(4).run(cases.unlike_orders, zp.build("dualpipe", ranks=2, microbatches=4)):
        frozen, order = said
        assert frozen.startswith("ranks 0 and 1 share stages and would not gather and reduce the same: rank 0 has ")
        assert "'blocks.0.up.weight in unit 0 of stage 0, float64 [12, 6]' where rank 1 has" in frozen
        assert "[12, 6], frozen': shard and freeze the same weights on both" in frozen
        assert "rank 0 has 'reduce unit 0 of stage 0' where rank 1 has 'gather unit 1 of stage 1'" in order
        assert error < TOLERANCE


@pytest.mark.parametrize(
    "name, sizes, options",
    [
        full("1f1b", SHARDED, {}),
        ("zbv", SHARDED, {"split": "whole"}),
        ("1f1b", {"dp_replicate": 2, "dp_shard": 2}, {}),
        full("dualpipe", SHARDED, {}),
        full("zbv", SHARDED, {"ac": "full"}),
        full("zb-h1", SHARDED, {"dynamic_weights": True}),
    ],
    ids=str,
)
def test_parameters_that_cannot_be_sharded_stay_whole(name, sizes, options, tmp_path):
    """Scalars, and a router in float32 among weights in float64; through a checkpoint."""
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    for seen in ranks(4).run(cases.train_odd, schedule, sizes, options, str(tmp_path / "saved")):
        kinds = seen.pop("kinds")
        assert kinds == [
            ("block", True), ("block.down", True), ("block.up", True), ("gain", False), ("offset", False),
            ("router", False),
        ]  # fmt: skip
        assert seen.pop("float32") < 1e-4
        assert max(seen.values()) < 1e-6, seen


@pytest.mark.parametrize("name, options", [("1f1b", {}), full("zbv", {"regather": True})], ids=str)
def test_a_model_with_routers_in_float32(name, options):
    schedule = zp.build(name, ranks=2, microbatches=4)
    for loss, gradient, kept_whole in ranks(4).run(cases.train_ernie, schedule, options):
        assert kept_whole == {"gate.weight"}
        assert loss < TOLERANCE
        assert gradient < 1e-6  # the router's is in float32


def test_what_fsdp_cannot_sum_in_one_message_is_refused():
    given, thawed, strided = ranks(2).run(cases.not_sharded_alike, zp.build("1f1b", ranks=1, microbatches=2))[0]
    for said in (given, thawed):
        assert said.startswith("rank 0: stage 0: ")
        assert "blocks.1.scale is trained in torch.float32, blocks.1.up.weight of the same FSDP unit in" in said
    assert "block 0 of stage 0 cannot be sharded: FSDP does not support non-contiguous parameters yet" in strided
