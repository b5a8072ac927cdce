"""Memory that is written later: gradients, what waits for W, what stages return, what checkpointing runs again."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("torch")

import in_place_cases as cases
from engine_helpers import TOLERANCE, ranks
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.engine.run.rank import Failed
from zeropipe.errors import EngineError

SPLITTING = ("zb-h1", "zb-h2", "interleaved-zb")
LATE = "0F0,0I0,0F1,0W0,0I1,0F2,0W1,0I2,0W2"  # every W after the next forward
COMPILED = {"compile": True, "backend": "aot_eager"}
OPTIONS = (
    {"ac": "full"}, {"ac": "selective:op"}, COMPILED, {"dynamic_weights": True}, {"split": "whole"},
    pytest.param({"compile": True}, marks=pytest.mark.full),
)  # fmt: skip


def build(name: str) -> zp.Schedule:
    return zp.build(name, ranks=2, microbatches=6)


@pytest.mark.parametrize(
    "name, kind",
    mark_rest_full(
        product(["1f1b", "zbv", *SPLITTING], [cases.Table, cases.Bias, cases.TwoViews, cases.HandedBack]),
        lambda it: it[0] == "zb-h1" or it in (("interleaved-zb", cases.Table), ("1f1b", cases.TwoViews)),
    ),
)
def test_a_gradient_that_is_a_view_of_an_output_gradient(name, kind):
    assert max(ranks(2).run(cases.train, build(name), kind, (), {})) < TOLERANCE


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_such_a_gradient_with_options(options):
    assert max(ranks(2).run(cases.train, build("zb-h1"), cases.Table, (), options)) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"regather": True}], ids=str)
def test_such_a_gradient_of_a_sharded_stage(options):
    schedule = zp.build("zb-h1", ranks=1, microbatches=4)
    assert max(ranks(2).run(cases.train_sharded, schedule, [cases.Table, cases.Bias], options)) < TOLERANCE


def test_an_input_that_is_a_sharded_weight():
    """W needs it after the weights were let go."""
    schedule = zp.build("zb-h1", ranks=1, microbatches=4)
    assert max(ranks(2).run(cases.train_sharded, schedule, [cases.Query] * 2, {})) < TOLERANCE
    line = r"1\.linear of stage 0: its input is a view of a weight of a sharded stage, which regather=True frees"
    with LocalRanks(2) as two, pytest.raises(EngineError, match=line):
        two.run(cases.train_sharded, schedule, [cases.Query] * 2, {"regather": True})


def test_such_a_gradient_of_a_leaf_outside_the_stages():
    assert max(ranks(2).run(cases.loss_with_a_table, build("zb-h1"))) < TOLERANCE


def test_such_a_gradient_in_the_drop_in():
    assert max(ranks(2).run(cases.drop_in)) < TOLERANCE


def test_a_buffer_that_waits_for_w_is_copied():
    assert max(ranks(1).run(cases.train, zp.from_csv(LATE), cases.Reading, (), {})) < TOLERANCE


@pytest.mark.parametrize(
    "kind, name, where, line",
    [
        (cases.Reading, "1f1b", "0B0", r"a tensor that this backward needs \(DoubleTensor of shape \[3, 6\]\) was"),
        (cases.Reading, "zb-h1", "0I0", "0.linear of stage 0: its input or its output gradient was"),
        (cases.Through, "zb-h1", "0I0", "0.linear of stage 0: its input or its output gradient was"),
    ],
)
def test_what_backward_still_needs_is_refused_by_name(kind, name, where, line):
    with pytest.raises(
        EngineError, match=rf"failed at {where}: EngineError: {line} modified in place .*: modify a copy"
    ):
        ranks(2).run(cases.train, build(name), kind, (), {})


def test_what_w_still_needs_is_refused_by_name():
    with pytest.raises(EngineError, match=r"failed at 0W0: EngineError: 0\.linear of stage 0: its input or its output"):
        ranks(1).run(cases.train, zp.from_csv(LATE), cases.Held, (), {})


@pytest.mark.parametrize(
    "name, what",
    mark_rest_full(
        product(["gpipe", "1f1b", "interleaved", "zbv", "zb-h2", "dualpipev"], ["buffer", "view", "attribute"]),
        [("gpipe", "buffer"), ("1f1b", "buffer"), ("interleaved", "view"), ("zbv", "attribute")],
    ),
)
def test_a_stage_returns_values_that_stay(name, what):
    assert max(ranks(2).run(cases.train, build(name), cases.Returning, (what,), {})) < TOLERANCE


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_what_else_a_stage_returns_and_modifies_is_refused(name):
    """Or it was sent before that: then the result is right, or the backward that needs it refuses it."""
    lines = (
        "was modified in place before it was used: return a copy (x.clone()), or register it as a buffer",
        "a tensor that this backward needs (DoubleTensor of shape [6]) was modified in place after the forward",
    )
    for outcome in ranks(2).outcomes(cases.train, build(name), cases.Returning, ("list",), {}):
        if isinstance(outcome, Failed):
            assert any(line in str(outcome) for line in lines), outcome
        else:
            assert outcome < TOLERANCE


@pytest.mark.parametrize("what", ["buffer", "view"])
def test_results_stay(what):
    first = [1.25 + 0.25 * index for index in range(6)]
    assert sorted(ranks(2).run(cases.outputs, build("gpipe"), what), key=len) == [[], first]


def test_results_that_are_modified_are_refused():
    with pytest.raises(EngineError, match=r"a tensor that \dF\d returned was modified in place before it was used"):
        ranks(2).run(cases.outputs, build("gpipe"), "list")


def test_metrics_are_those_of_their_microbatch():
    assert ranks(2).run(cases.metrics, build("1f1b")) == [21.0, 21.0]


@pytest.mark.parametrize(
    "name, family, options",
    [
        ("zb-h1", "qwen3", {}),
        ("zb-h1", "qwen3", {"ac": "full"}),
        ("zb-h1", "qwen3", {"ac": "selective:op"}),
        ("zb-h1", "qwen3", COMPILED),
        pytest.param("zb-h1", "qwen3", {"compile": True}, marks=pytest.mark.full),
        ("zbv", "gpt2", {}),
    ],
)
def test_transformers_copy_nothing(name, family, options):
    assert ranks(2).run(cases.copies, name, family, options) == [0, 0]


@pytest.mark.parametrize("ac", ["full", "selective:op"])
@pytest.mark.parametrize("kind", [cases.Modified, cases.Norm, cases.Hooked])
def test_checkpointing_runs_a_block_again_on_what_it_had(kind, ac):
    """Buffers too end as those of the plain model: they are not modified twice."""
    assert max(ranks(2).run(cases.train, build("zb-h1"), kind, (), {"ac": ac})) < TOLERANCE


@pytest.mark.parametrize(
    "kind, line",
    [
        (cases.Given, "recompute a Block: an input was modified in place after its forward"),
        (cases.Sometimes, "recompute a Sometimes: it modifies its buffer seen in some forwards and not in others"),
        (cases.Aliased, "recompute a Aliased: it modifies its buffer seen also under another name"),
    ],
)
def test_blocks_that_checkpointing_cannot_recompute_are_refused(kind, line):
    with pytest.raises(EngineError, match=f"activation checkpointing cannot {line}; .*, or use ac='none'"):
        ranks(2).run(cases.train, build("1f1b"), kind, (), {"ac": "full"})


def test_a_block_that_reads_the_buffer_it_modifies_is_not_compiled():
    """torch.compile computes its gradients wrongly; compiled once torch does not, this fails."""
    assert (
        max(ranks(1).run(cases.train, zp.from_csv("0F0,0B0,0F1,0B1"), cases.Direct, (), {"compile": True})) < TOLERANCE
    )
    assert max(ranks(1).run(cases.compiled_by_torch)) > 0.01
