"""Our classes with torch.distributed.pipelining's interface: equal to torch's own, and to the plain model."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import pipelining_cases as cases
import torch
from engine_helpers import TOLERANCE, ranks
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.pipelining.schedules import CLASSES
from zeropipe.schedules.registry import find

# with gloo torch 2.11 runs no two stages in a row on one rank, and its split backward takes tensors only
since_2_13 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch's own class does not run this"
)
BOTH = [
    ("ScheduleGPipe", 4, 1),
    ("Schedule1F1B", 6, 1),
    ("ScheduleLoopedBFS", 4, 2),
    ("ScheduleInterleaved1F1B", 8, 2),
    ("ScheduleInterleavedZeroBubble", 4, 2),
    pytest.param("ScheduleZBVZeroBubble", 5, 2, marks=since_2_13),
    pytest.param("ScheduleDualPipeV", 8, 2, marks=since_2_13),
]


@pytest.mark.parametrize(("name", "microbatches", "per_rank"), BOTH)
def test_equal_to_torchs_class(name, microbatches, per_rank):
    assert max(ranks(4).run(cases.beside_torch, name, microbatches, per_rank)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "per_rank"), [("Schedule1F1B", 1), pytest.param("ScheduleZBVZeroBubble", 2, marks=since_2_13)]
)
def test_losses_that_are_sums(name, per_rank):
    assert max(ranks(2).run(cases.beside_torch, name, 4, per_rank, 2, False)) < TOLERANCE


AS_TORCHS = ("gpipe", "looped-bfs", "interleaved", "interleaved-zb", "dualpipev")  # test_equal_to_torchs_class has them


@pytest.mark.parametrize(
    "name", mark_rest_full([name for name in zp.names() if name in CLASSES], lambda name: name not in AS_TORCHS)
)
def test_every_schedule_equals_the_plain_model(name):
    per_rank = find(name).stages_per_rank[0]
    assert max(ranks(4).run(cases.beside_plain, name, 5, per_rank)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "per_rank"), [("Schedule1F1B", 1), ("ScheduleZBVZeroBubble", 2), ("ScheduleInterleavedZeroBubble", 2)]
)
def test_tied_weights(name, per_rank):
    assert max(ranks(4).run(cases.ties, name, per_rank)) < TOLERANCE


@pytest.mark.parametrize(("both_trained", "fact"), [(True, "has other values"), (False, "has requires_grad")])
def test_ties_that_are_none(both_trained, fact):
    for outcome in ranks(2).outcomes(cases.unequal_ties, both_trained):
        assert f"up.weight of stage 0, tied to up.weight of stage 1, {fact}" in outcome.text


@pytest.mark.parametrize("name", mark_rest_full(["1f1b", "zbv", "dualpipev"], ["1f1b", "dualpipev"]))
def test_frozen_stages(name):
    per_rank = find(name).stages_per_rank[0]
    assert max(ranks(4).run(cases.beside_plain, name, 4, per_rank, cases.half_frozen)) < TOLERANCE


@pytest.mark.parametrize(("name", "per_rank"), [("Schedule1F1B", 1), ("ScheduleZBVZeroBubble", 2)])
def test_eval_leaves_gradients_and_modes_alone(name, per_rank):
    for seen in ranks(2).run(cases.evaluates, name, per_rank):
        assert seen["seen"] < TOLERANCE
        assert seen["same"] == 0.0
        assert seen["training"]


@pytest.mark.parametrize(
    ("name", "per_rank"), [("ScheduleGPipe", 1), pytest.param("ScheduleInterleavedZeroBubble", 2, marks=since_2_13)]
)
def test_keywords_and_lists_of_microbatches(name, per_rank):
    assert max(ranks(2).run(cases.takes_keywords, name, per_rank)) < TOLERANCE


def test_chunk_specs():
    assert max(ranks(2).run(cases.cut_by_specs)) < TOLERANCE


@pytest.mark.parametrize("name", ["1F1B", "zb-h1"])
def test_traced_stages(name):
    assert max(ranks(4).run(cases.traced, name)) < TOLERANCE


UNEVEN = """0F0,0F1,0F2,,0B0,0B1,0B2
1F0,2F0,3F0,3B0,2B0,1B0,1F1,2F1,3F1,3B1,2B1,1B1,1F2,2F2,3F2,3I2,2I2,1I2,3W2,2W2,1W2
"""
REORDERED = """0F0,0F1,0F2,,,0B1,0B0,0B2
1F0,1F1,1B1,1B0,1F2,1B2
"""


@pytest.mark.parametrize(
    ("csv", "placement"),
    [
        pytest.param(UNEVEN, [(0,), (1, 2, 3)], marks=since_2_13, id="uneven"),
        pytest.param(REORDERED, [(0,), (1,)], id="reordered"),
    ],
)
def test_custom_schedules(csv, placement, tmp_path):
    assert max(ranks(2).run(cases.custom, csv, placement, 3, str(tmp_path))) < TOLERANCE


@pytest.mark.parametrize(("name", "per_rank"), [("Schedule1F1B", 1), ("ScheduleInterleavedZeroBubble", 2)])
def test_inputs_that_need_gradients(name, per_rank):
    assert max(ranks(2).run(cases.inputs_that_need_gradients, name, per_rank)) < TOLERANCE


@pytest.mark.parametrize(("name", "per_rank"), [("Schedule1F1B", 1), ("ScheduleZBVZeroBubble", 2)])
def test_weight_gradients_that_stages_put_off_themselves(name, per_rank):
    assert max(seen["seen"] for seen in ranks(2).run(cases.builders, name, per_rank)) < TOLERANCE


def test_new_shapes_and_numbers_between_steps():
    assert max(ranks(4).run(cases.new_shapes)) < TOLERANCE


@pytest.mark.parametrize(
    ("where", "own", "rank", "others"),
    [
        ("module", "seven is bad luck", 0, "seven is bad luck"),
        (
            "batch",
            "argument 0 has 3 rows for 4 microbatches: must have at",
            0,
            "ConfigError: rank 0: argument 0 has 3 rows",
        ),
        (
            "keyword",
            "mask has no rows for 4 microbatches: must have at",
            3,
            "mask has no rows for 4 microbatches: must have at",
        ),
        (
            "target rows",
            "target has 3 rows for 4 microbatches: must have at",
            3,
            "ConfigError: rank 3: target has 3 rows",
        ),
        ("outputs", "3F0: TypeError: the last stage returned a Tensor without dimensions", 3, "output_merge_spec=, or"),
        ("lengths", "returned Tensors of shapes [2, 1, 6] and [2, 2, 6], which cannot", 3, "(return_outputs=False)"),
        ("pair", "3F0: TypeError: loss_fn returned a tuple: return a Tensor", 3, "loss_fn returned a tuple"),
        ("shape", "3F0: TypeError: loss_fn returned a Tensor of shape [", 3, "return a Tensor with one number"),
        (
            "detached",
            "3F0: TypeError: the loss has no gradient, so that nothing would learn",
            3,
            "without detach(), item",
        ),
        ("target", "no target: pass target=", 3, "ConfigError: rank 3: the rank with the last stage"),
        (
            "target kind",
            "target is a dict: step() divides a Tensor",
            3,
            "pass one, or lists of microbatches (arg_mbs=, ",
        ),
    ],
)
def test_an_error_on_one_rank_reaches_all(where, own, rank, others):
    texts = ranks(4).run(cases.fails, where)
    assert own in texts[rank]
    assert all(others in text for place, text in enumerate(texts) if place != rank)


def test_lists_and_named_tuples():
    assert max(ranks(4).run(cases.odd_values)) < TOLERANCE


@pytest.mark.parametrize(
    "name, options",
    mark_rest_full(
        [(name, options) for name in ("1f1b", "zbv", "interleaved-zb") for options in ({}, {"shapes": "dynamic"})],
        lambda it: it[0] != "1f1b" if it[1] else it[0] != "interleaved-zb",
    ),
    ids=str,
)
def test_what_nobody_uses_has_no_gradient(name, options):
    assert max(ranks(4).run(cases.nobodys_gradients, name, find(name).stages_per_rank[0], options)) < TOLERANCE
