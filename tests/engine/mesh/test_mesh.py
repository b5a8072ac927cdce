"""Pipelines with data parallelism around them: equal to one process, whatever the layout."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

import mesh_cases as cases
from engine_helpers import TOLERANCE, blocks, largest, ranks
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.core.action import SHARDING, actions_of
from zeropipe.engine.layout import Layout
from zeropipe.engine.stages.contract import describe_stage
from zeropipe.engine.step import equal

SHARDED, REPLICATED, HYBRID = {"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}


def differences(
    name: str,
    sizes: dict[str, int],
    steps: int = 2,
    microbatches: int = 4,
    tied: bool = False,
    numbers: tuple[int, ...] = (),
    **options: Any,
) -> dict[str, float]:
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=microbatches)
    return largest(ranks(4).run(cases.train_on_mesh, schedule, sizes, options, steps, tied, numbers))


@pytest.mark.parametrize(
    "name, sizes",
    mark_rest_full(
        [
            (name, sizes)
            for name in ("1f1b", "interleaved", "zbv", "dualpipev", "dualpipe")
            for sizes in (SHARDED, REPLICATED, {"pp": 4})
        ],
        lambda it: it[1] == SHARDED or it[0] == ("zbv" if "dp_replicate" in it[1] else "dualpipe"),
    ),
    ids=str,
)
def test_training_equals_one_process(name, sizes):
    seen = differences(name, sizes, microbatches=8 if "pp" in sizes and sizes["pp"] == 4 else 4)
    assert max(seen.values()) < TOLERANCE, seen


def test_outputs_reach_every_rank_of_their_pipeline():
    assert max(ranks(4).run(cases.forward_on_mesh, zp.build("1f1b", ranks=2, microbatches=4), REPLICATED)) < TOLERANCE


@pytest.mark.parametrize("sizes", [{"dp_shard": 4}, HYBRID], ids=str)
def test_without_a_pipeline(sizes):
    seen = differences("1f1b", sizes)
    assert max(seen.values()) < TOLERANCE, seen


def test_blocks_that_share_something_are_sharded_right_or_refused():
    for error, said in ranks(2).run(cases.shared_between_blocks, zp.build("1f1b", ranks=1, microbatches=4)):
        assert error < TOLERANCE
        shared, order, twice, listed, nowhere, dtype = said
        assert "blocks 0 and 1 of a stage share a parameter (down.weight, down.weight)" in shared
        assert "dp_replicate must be before dp_shard" in order
        assert twice == "a stage is already sharded; call parallelize() once, or leave out fully_shard"
        assert listed == "stages are a list: must be a dict, as of module_stages and hf_stages"
        assert nowhere.startswith("mesh=None: must be a DeviceMesh, like init_device_mesh('cpu'")
        assert dtype == "dtype='bf16': must be a torch.dtype, like torch.bfloat16"


def test_a_sharded_stage_may_be_called_by_itself_between_steps():
    assert max(ranks(2).run(cases.called_outside, zp.build("1f1b", ranks=1, microbatches=4))) < TOLERANCE


def test_a_backward_through_a_sharded_stage_between_steps_is_refused():
    for said, error in ranks(2).run(cases.trained_outside, zp.build("1f1b", ranks=1, microbatches=4)):
        assert "a backward outside of a step gave its sharded weights gradients" in said
        assert error < TOLERANCE


def test_evaluation_in_inference_mode_before_training():
    assert max(ranks(2).run(cases.after_inference_mode, zp.build("1f1b", ranks=1, microbatches=4))) < TOLERANCE


@pytest.mark.parametrize(
    "dimension, words",
    [
        ("dp_replicate", "up.weight of stage 0, of which every replica has a copy, has other values on rank 1"),
        ("dp_shard", "up.weight of stage 0, of which every replica has a copy, has other values on rank 1"),
        ("tp", "up.weight of stage 0, which is replicated over tp, has other values on rank 1 than on rank 0"),
    ],
)
def test_weights_that_several_processes_hold_whole_begin_equal(dimension, words):
    """Also those of stages that a mesh leaves whole; of tp's, each process rounds by itself."""

    def facts(rank, change):
        (block,) = blocks(1)
        block.up.weight.data[0, 0] += rank * change
        layout = Layout((0, 1), rank, (rank,), {dimension: 2}, {dimension: rank})
        return equal.describe_shared_weights(
            zp.build("1f1b", ranks=1, microbatches=1), {0: describe_stage(0, block)}, layout, True
        )

    assert words in equal.find_difference([facts(rank, 1.0) for rank in range(2)])
    assert (equal.find_difference([facts(rank, 1e-12) for rank in range(2)]) is None) == (dimension == "tp")


@pytest.mark.parametrize("sizes", [SHARDED, REPLICATED], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_ties(name, sizes):
    seen = differences(name, sizes, tied=True)
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.parametrize(
    "name, sizes",
    mark_rest_full(
        [(name, sizes) for name in ("1f1b", "interleaved", "zbv", "dualpipe") for sizes in ({"pp": 4}, SHARDED)],
        lambda it: it[0] == "zbv" if it[1] == SHARDED else it[0] != "zbv",
    ),
    ids=str,
)
def test_any_number_of_microbatches(name, sizes):
    """Below, above and far above the 8 of the schedule, and 1; other numbers on other pipelines."""
    seen = differences(name, sizes, steps=4, microbatches=8, numbers=(3, 9, 16, 1))
    assert max(seen.values()) < TOLERANCE, seen


OPTIONS = [{"regather": True}, {"ac": "full"}, {"split": "whole"}, {"shapes": "dynamic"}]


@pytest.mark.parametrize(
    "name, options",
    mark_rest_full(
        [(name, options) for name in ("1f1b", "zbv") for options in OPTIONS],
        lambda it: it[0] == "zbv" or "regather" in it[1],
    ),
    ids=str,
)
def test_options_on_sharded_stages(name, options):
    seen = differences(name, SHARDED, **options)
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.parametrize("regather", [False, True], ids=["keep", "regather"])
def test_the_program_says_when_stages_are_gathered_and_reduced(regather):
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    program = zp.lower(schedule, shards="regather" if regather else "keep")
    for rank, train, forward, whole in ranks(4).run(cases.sharding_calls, schedule, {"regather": regather}):
        wanted = [str(a) for a in actions_of(program.rows[rank]) if a.kind in SHARDING]
        once = [call for at, call in enumerate(train) if "REDUCE" not in call or call not in train[:at]]
        assert once == wanted
        assert len(train) - len(once) == sum("REDUCE" in call for call in wanted)  # two units each
        assert Counter(call[1:] for call in forward) == Counter(
            UNSHARD=8 if regather else 2, RESHARD=8 if regather else 2
        )
        assert not any(whole)  # between steps nothing is whole


@pytest.mark.parametrize(
    "name, sizes, qwen3",
    [
        pytest.param(name, sizes, qwen3, marks=pytest.mark.full if rare else ())
        for name, sizes in [("1f1b", {"tp": 4}), ("1f1b", {"pp": 2, "tp": 2}), ("zbv", {"pp": 2, "tp": 2})]
        for qwen3 in (False, True)
        for rare in [qwen3 != (name == "zbv") or (name, "pp" in sizes) == ("1f1b", True)]  # more in test_tensor.py
    ],
)
def test_tensor_parallelism(name, sizes, qwen3):
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4 if "pp" in sizes else 2)
    layers = max(2, schedule.num_stages)
    model = {
        "qwen3": qwen3, "tie_word_embeddings": False, "num_key_value_heads": sizes["tp"], "num_hidden_layers": layers,
    }  # fmt: skip
    seen = largest(ranks(4).run(cases.train_hf_on_mesh, schedule, sizes, model, {}, 1))
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.parametrize("name", ["1f1b", pytest.param("zbv", marks=pytest.mark.full)])  # zbv has twice the stages
def test_sharded_and_spread(name):
    """Eight processes: every dimension but replicas at once."""
    sizes = {"pp": 2, "dp_shard": 2, "tp": 2}
    schedule = zp.build(name, ranks=2, microbatches=2)
    model = {"qwen3": True, "num_hidden_layers": schedule.num_stages}
    seen = largest(ranks(8).run(cases.train_hf_on_mesh, schedule, sizes, model, {}, 1))
    assert max(seen.values()) < TOLERANCE, seen


EVERY = [
    {"pp": 4}, SHARDED, REPLICATED, {"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2, "tp": 2}, {"tp": 4}, {"dp_shard": 4},
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("ac", ["none", "full"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("sizes", EVERY, ids=str)
def test_the_whole_product(sizes, name, compile, tied, ac):
    """Five steps of a Hugging Face model with AdamW and clipping; pipelines have unequal numbers of tokens."""
    try:
        schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=8 if "dual" in name else 4)
    except zp.ConfigError as error:
        pytest.skip(str(error))
    heads = max(2, sizes.get("tp", 1))
    model = {"qwen3": True, "tie_word_embeddings": tied, "num_key_value_heads": heads}
    model["num_hidden_layers"] = max(2, schedule.num_stages)
    options = {"compile": compile, "ac": ac}
    number = math.prod(sizes.values())
    train = cases.train_compiled_on_mesh if compile else cases.train_hf_on_mesh
    seen = largest(ranks(number).run(train, schedule, sizes, model, options, 5, timeout=300))
    assert max(seen.values()) < TOLERANCE, seen
