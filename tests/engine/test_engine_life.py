"""An engine's life: made and closed many times, with frozen, thawed, tied and 16-bit weights."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

import engine_life_cases as cases
import torch
from engine_helpers import TOLERANCE, largest, ranks

import zeropipe as zp
from zeropipe.engine.comm.messages import TensorSpec, decode_header, encode_header
from zeropipe.engine.run.launch import LocalRanks, model_modules
from zeropipe.engine.step.agreement import hash_state
from zeropipe.engine.step.cell_runner import as_tuple, to_device
from zeropipe.engine.step.losses import LossAccumulator, StepResult, require_counted
from zeropipe.engine.step.sums import require_dense
from zeropipe.engine.torch_private.tensors import squared_norm
from zeropipe.errors import ConfigError


def test_closed_engines_leave_no_connection_and_no_thread():
    for seen in ranks(2).run(cases.many_engines, zp.build("dualpipe", ranks=2, microbatches=4), 4):
        assert seen[-1].as_few_as(seen), seen


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo's threads have no names in torch 2.11")
def test_an_engine_has_one_thread_for_sockets_and_it_takes_no_core_from_senders():
    for added, policies in ranks(2).run(cases.gloo_threads, zp.build("dualpipe", ranks=2, microbatches=4)):
        assert added == 1
        assert policies
        assert set(policies) == {os.SCHED_BATCH}


def test_outputs_belong_to_the_caller():
    assert ranks(2).run(cases.outputs_kept, zp.build("zbv", ranks=2, microbatches=4)) == [0, 0]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_float32_gradients_of_a_bf16_model(name, late):
    """Also of a parameter that only one of DualPipe's two copies uses, so that the other has no gradient to add."""
    assert max(ranks(2).run(cases.bf16, zp.build(name, ranks=2, microbatches=4), late)) < 0.03


@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_a_tie_in_the_middle_counts_once(name):
    """Of 4 ranks' 8 stages in a V, 1 and 6 share a rank; of DualPipe's 4 stages, 1 and 2 do."""
    schedule = zp.build(name, ranks=4, microbatches=8)
    found = largest(ranks().run(cases.inner_tie, schedule, 1, schedule.num_stages - 2))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_a_frozen_tie_gets_no_gradient(name):
    assert all(ranks(2).run(cases.frozen_tie, zp.build(name, ranks=2, microbatches=4)))


@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_weights_that_thaw_later(name):
    assert max(ranks(2).run(cases.thaw, zp.build(name, ranks=2, microbatches=4))) < TOLERANCE


def test_stages_that_thaw_later():
    """Their output needs a gradient from then on, which the rank that takes it has to hear of."""
    assert max(ranks(2).run(cases.thaw_all, zp.build("zb-h1", ranks=2, microbatches=4))) < TOLERANCE


def test_messages_are_of_another_kind_when_weights_or_autocast_change():
    weight = torch.nn.Parameter(torch.ones(1))
    seen = {hash_state([weight], torch.device("cpu")), hash_state([weight.requires_grad_(False)], torch.device("cpu"))}
    with torch.autocast("cpu", torch.bfloat16):
        seen.add(hash_state([weight], torch.device("cpu")))
    seen |= {hash_state([weight.half()], torch.device("cpu")), hash_state([weight], torch.device("cpu"))}
    assert len(seen) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_16_bit_gradients_is_not_rounded_to_16_bits(dtype):
    tensors = [torch.full((1000,), 3000.0, dtype=dtype), torch.full((7,), 1.5, dtype=torch.float64)]
    wanted = sum(float(t.double().square().sum()) for t in tensors)
    assert squared_norm(tensors) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_many_gradients_is_not_a_sum_in_float32(dtype):
    """torch's own is 0.1 to 1% off on a CPU, by the width of its registers."""
    tensor = torch.full((1 << 12, 1 << 12), 1.1).to(dtype).T[:-1]
    assert squared_norm([tensor]) == pytest.approx(tensor.numel() * float(tensor[0, 0]) ** 2, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e5m2, torch.uint16, torch.uint64], ids=str)
def test_a_message_tells_its_dtype(dtype):
    spec = (TensorSpec(dtype, (2, 3), needs_grad=False),)
    assert decode_header(encode_header(spec)) == spec


def test_the_norm_counts_both_parts_of_complex_numbers():
    assert squared_norm([torch.tensor([[3 + 4j, 1j]]), torch.tensor([2.0])]) == 25 + 1 + 4


@pytest.mark.parametrize("value", [1.5, "x", torch.ones(3), (torch.ones(2), 3), (torch.ones(()),), None], ids=str)
def test_a_loss_that_is_none_is_named(value):
    with pytest.raises(TypeError, match=r"the loss is .*: return a scalar Tensor \(a mean\), \(sum, count\)"):
        LossAccumulator(lambda out, _: value, [{}]).add(None, {}, 0)


@pytest.mark.parametrize(
    "rest, line",
    [
        ((torch.ones(2),), r"the count of the loss is a Tensor of shape \[2\]: must be a number"),
        ((3, {"size": "big"}), "the metric 'size' of the loss is a str: must be a number"),
        ((3, [1]), "the metrics of the loss are a list: must be a dict of numbers"),
    ],
)
def test_counts_and_metrics_that_are_none_are_named(rest, line):
    with pytest.raises(TypeError, match=line):
        LossAccumulator(lambda out, _: (out.sum(), *rest), [{}]).add(torch.ones(2, requires_grad=True), {}, 0)


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), torch.tensor(-3)])
def test_counts_below_zero_or_without_end_are_refused(count):
    losses = LossAccumulator(lambda out, _: (out.sum(), count), [{}])
    losses.add(torch.ones(2, requires_grad=True), {}, 0)
    with pytest.raises(ConfigError, match=r"the count of the loss is .*: must be a non-negative number"):
        losses.sums()


def test_a_loss_that_counts_otherwise_than_it_said_is_refused():
    require_counted(StepResult(1.0, 24.0, {}), None)
    require_counted(StepResult(1.0, 24.0, {}), 24)
    with pytest.raises(ConfigError, match=r"counted 24 in this step, its count\(\) returned 7 before"):
        require_counted(StepResult(1.0, 24.0, {}), 7.0)


@pytest.mark.parametrize(
    "output, line",
    [
        (None, "0F3 returned NoneType: a stage returns a Tensor or a tuple of Tensors"),
        ((), "0F3 returned an empty tuple: a stage returns a Tensor or a tuple of Tensors"),
        (torch.eye(2).to_sparse(), "0F3 returned a Tensor of layout torch.sparse_coo: a stage returns dense ones"),
    ],
)
def test_outputs_that_cannot_be_handed_on_are_named(output, line):
    with pytest.raises(TypeError, match=line):
        as_tuple(output, "0F3")


def test_sparse_gradients_are_refused_where_they_have_no_norm():
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones(3, 2)
    require_dense([parameter, torch.nn.Parameter(torch.ones(1))], "in a norm")
    parameter.grad = parameter.grad.to_sparse()
    with pytest.raises(ConfigError, match=r"shape \[3, 2\] has a sparse gradient, which cannot be in a norm: create"):
        require_dense([parameter], "in a norm")


def test_metrics_hold_no_graph():
    x = torch.ones(3, requires_grad=True)
    losses = LossAccumulator(lambda out, _: (out.sum(), 3, {"size": out.square().sum()}), [{}])
    losses.add(x * 2, {}, 0)
    ((_, _, metrics),) = losses._losses.values()
    assert not metrics["size"].requires_grad
    assert losses.sums()[2] == {"size": 12.0}


def test_moving_goes_into_lists():
    (inside,) = to_device([torch.ones(2)], torch.device("meta"))
    assert inside.device.type == "meta"


def test_ranks_on_the_cpu_train_where_a_gpu_is():
    """Model code may have looked for GPUs before the ranks were forked: an optimizer looks again."""
    with LocalRanks(1, preload=model_modules("cpu")) as one:
        assert one.run(cases.one_step_of_adamw)[0] < 1.0
