"""Gradients beside the stages' own, in the caller's memory, and on ranks that do not agree."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

import gradient_cases as cases
import torch
from engine_helpers import TOLERANCE, ranks
from torch import nn
from torch.nn.utils import parametrize

import zeropipe as zp
from zeropipe.engine import MasterWeights, WeightStore, defer
from zeropipe.engine.run.rank import Failed
from zeropipe.engine.step.equal import checksum
from zeropipe.engine.step.sums import make_buckets
from zeropipe.errors import ConfigError, EngineError


def build(name: str) -> zp.Schedule:
    return zp.build(name, ranks=2, microbatches=4)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_loss_without_count_divides_every_gradient_it_reaches(name):
    for differences in ranks(2).run(cases.outside_gradients, build(name)):
        assert max(differences.values()) < TOLERANCE, differences


def test_inputs_computed_elsewhere_need_a_loss_with_count():
    with pytest.raises(EngineError, match="add a count"):
        ranks(2).run(cases.computed_inputs, build("1f1b"))


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_hooks_that_come_after_the_engine_see_their_gradients(name):
    assert max(ranks(2).run(cases.late_hooks, build(name))) < TOLERANCE


def test_parameters_that_came_after_the_engine_are_refused():
    for line, goes_on in ranks(2).run(cases.replaced_parameters, build("1f1b")):
        assert "stage 1: the parameter scale was added after the Engine was created" in line
        assert goes_on


@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_a_total_count_below_one(name):
    assert max(ranks(2).run(cases.light_counts, build(name))) < TOLERANCE


@pytest.mark.parametrize("name, tie", [("1f1b", False), ("zbv", True), ("1f1b", True), ("dualpipe", False)])
def test_gradients_stay_in_the_callers_buffer(name, tie):
    assert max(ranks(2).run(cases.flat_buffer, build(name), tie)) < TOLERANCE


@pytest.mark.parametrize(
    "what, name, line",
    [
        ("copies", "dualpipe", "up.weight of stage 0, of which there are two copies, has other values on rank 1"),
        ("copies frozen", "dualpipe", "of which there are two copies, has requires_grad False on rank 1 and True"),
        ("tie", "1f1b", "weight of stage 0, tied to weight of stage 1, has other values on rank 1 than on rank 0"),
        ("tie", "zbv", "weight of stage 0, tied to weight of stage 3, has other values on rank 0 than on rank 0"),
        ("tie frozen", "1f1b", "weight of stage 0, tied to weight of stage 1, has requires_grad False on rank 1"),
        ("tie one-sided", "1f1b", "stage 0 ties its weight to weight of stage 1, which names no such tie"),
        ("option", "1f1b", "rank 1 has shapes='dynamic', rank 0 has shapes='auto': every rank must have the same"),
        ("microbatch", "1f1b", "'target' of microbatch 2 has other values on rank 1 than on rank 0"),
    ],
)
def test_what_must_be_equal_on_ranks_is_compared(what, name, line):
    found = ranks(2).outcomes(cases.unequal, build(name), what)
    assert all(isinstance(item, Failed) and line in item.text for item in found), found


def test_a_stage_that_ends_in_a_collective():
    assert max(ranks(2).run(cases.collective_outputs, build("1f1b"))) < TOLERANCE


def test_master_weights_learn_what_bf16_would_lose():
    assert max(ranks(2).run(cases.master_weights, build("zbv"))) < 0.02


def test_masters_follow_weights_that_others_write():
    """As a model in float32 would; what nobody wrote keeps the steps that its 16 bits do not show."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterWeights(torch.optim.SGD, [weight], lr=1e-4)
    (master,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    nn.Module.load_state_dict(nn.ParameterList([weight]), {"0": torch.tensor([1.0, 5.0, 1.0])})
    optimizer.step()
    torch.testing.assert_close(master.detach(), torch.tensor([1 - 2e-4, 5 - 1e-4, 1 - 2e-4]))
    with torch.no_grad():
        weight[0] = 7
    assert optimizer.state_dict()["masters"][0].tolist() == pytest.approx([7, 5 - 1e-4, 1 - 2e-4])


@pytest.mark.parametrize(
    "given, line",
    [
        ({"compil": True}, "Engine has no option compil=True: did you mean compile?"),
        ({"compile": "no"}, "compile='no': must be True or False"),
        ({"recv_ahead": True}, "recv_ahead=True: must be a non-negative integer"),
        ({"timeout": "60"}, "timeout='60': must be a number of seconds above 0, at most 10,000,000"),
        ({"timeout": float("inf")}, "timeout=inf: must be a number of seconds above 0, at most 10,000,000"),
        ({"ac": None}, "activation checkpointing None: must be none, full, selective:N"),
    ],
)
def test_an_option_that_cannot_be_is_told_in_one_line(given, line):
    from zeropipe.engine import Options

    with pytest.raises(ConfigError, match=re.escape(line)):
        Options.of(given).check()


class Temporary(nn.Module):
    """A layer whose weight is computed anew in each forward, as adapters on parameters do it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(4, 4), nn.Parameter(torch.full((4, 4), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        class Add(nn.Module):
            def forward(inner, weight: torch.Tensor) -> torch.Tensor:
                return weight + self.extra

        parametrize.register_parametrization(self.layer, "weight", Add())
        try:
            return self.layer(x)
        finally:
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)


def test_a_weight_computed_in_each_forward_is_not_deferred():
    x, plain, split = torch.randn(3, 4), Temporary(), Temporary()
    split.load_state_dict(plain.state_dict())
    assert defer(split) == 1
    plain(x).square().sum().backward()
    store = WeightStore()
    output = split(x.clone().requires_grad_())
    with store.collect(0, 0):
        output.square().sum().backward()
    store.flush(0, 0)
    torch.testing.assert_close(split.extra.grad, plain.extra.grad)
    torch.testing.assert_close(split.layer.weight.grad, plain.layer.weight.grad)


def test_buckets_keep_order_and_size():
    tensors = [torch.zeros(n) for n in (10, 10, 10, 1000, 10)] + [torch.zeros(5, dtype=torch.float64)]
    made = make_buckets(tensors, 80)
    assert [[t.numel() for t in bucket] for bucket in made] == [[10, 10], [10], [1000], [10], [5]]
    assert sorted(id(t) for bucket in made for t in bucket) == sorted(map(id, tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_sees_values_and_order(dtype):
    tensor = torch.arange(8).to(dtype)
    other = tensor.clone()
    assert checksum(tensor) == checksum(other)
    assert checksum(tensor) != checksum(tensor.flip(0))
    other[-1] = 0
    assert checksum(tensor) != checksum(other)
