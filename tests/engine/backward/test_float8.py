"""Layers in float8 against a rounding to float8 that is written out here."""

from __future__ import annotations

import copy
import itertools
import math
from contextlib import nullcontext

import peft
import pytest
import torch
from stage_models import CONFIGS
from torch import nn
from transformers import pytorch_utils

import zeropipe as zp
from zeropipe.engine.backward.linear import update_hooks
from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.blocks.compiling import set_blocks, warn_once
from zeropipe.engine.float8 import require_float8, set_float8
from zeropipe.engine.options import Options
from zeropipe.engine.stages.build import hf_model, hf_stages
from zeropipe.engine.stages.contract import describe_stage
from zeropipe.engine.torch_private import float8 as torch_float8
from zeropipe.engine.torch_private.float8 import E4M3, E5M2, Float8
from zeropipe.errors import ConfigError, EngineError

FORMATS = {E4M3: (7, 3, 8), E5M2: (15, 2, 15)}  # bias, bits of the mantissa, largest exponent


def numbers_of(dtype):
    """All numbers of a format that are not negative, in order: every second one is even."""
    bias, bits, largest = FORMATS[dtype]
    found = [m * 2.0 ** (1 - bias - bits) for m in range(2**bits)]
    found += [(1 + m / 2**bits) * 2.0**e for e in range(1 - bias, largest + 1) for m in range(2**bits)]
    return torch.tensor([number for number in found if number <= 1.75 * 2.0**largest], dtype=torch.float64)


def rounded(x, dtype, dim=None):
    """The matrix in float64 after rounding: to nearest, ties to even, times the smallest power of two that fits."""
    numbers, largest = numbers_of(dtype), 1.75 * 2.0 ** FORMATS[dtype][2]
    vectors = [x.double()] if dim is None else list(x.double().split(1, 1 - dim))
    out = []
    for vector in vectors:
        power = 2.0 ** math.ceil(math.log2(float(vector.abs().max()) / largest)) if vector.any() else 1.0
        place = vector.abs() / power
        above = torch.searchsorted(numbers, place.contiguous()).clamp(max=len(numbers) - 1)
        below = (above - 1).clamp(min=0)
        over, under = numbers[above] - place, place - numbers[below]
        nearest = torch.where((over < under) | ((over == under) & (above % 2 == 0)), numbers[above], numbers[below])
        out.append(nearest * vector.sign() * power)
    return out[0] if dim is None else torch.cat(out, 1 - dim)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_rounded_as_the_format_says(dtype, dim, of):
    torch.manual_seed(0)
    x = torch.randn(40, 24) * torch.logspace(-6, 3, 24)
    x[3], x[:, 5] = 0, 0
    x[1, 1], x[2, 2] = 7, 3.5  # 1.75 times a power of two: the largest number
    x = x.to(of)
    data, power = torch_float8.quantize(x, dtype, dim)
    assert data.dtype == dtype
    assert torch.equal(data.double() * power, rounded(x, dtype, dim))
    assert torch.equal(power.log2(), power.log2().round())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dim", [None, 1])
def test_infinities_and_nans_stay_visible(value, dim):
    x, other = torch.ones(4, 16), torch_float8.quantize(torch.ones(16, 16), E4M3, dim)
    x[2, 3] = value
    y = torch_float8.multiply(torch_float8.quantize(x, E4M3, dim), other, torch.float32, fast=False)
    assert y[2].isnan().all()
    assert y[0].isnan().all() == (dim is None)


def test_transposed_numbers_are_filled_up_with_zeros():
    data = torch.randn(21, 32).to(E4M3)
    found = torch_float8.transpose(data)
    assert found.shape == (32, 32)
    assert found.is_contiguous()
    assert torch.equal(found.float()[:, :21], data.float().t())
    assert not found.float()[:, 21:].any()


def test_few_numbers_can_be_as_small_as_gradients_are():
    x = torch.randn(4, 16).double() * 1e-25
    data, power = torch_float8.quantize(x.float(), E5M2)
    assert float((data.double() * power - x).norm() / x.norm()) < 0.1


class Block(nn.Module):
    def __init__(self, transposed=False):
        super().__init__()
        torch.manual_seed(1)
        self.up = pytorch_utils.Conv1D(48, 32) if transposed else nn.Linear(32, 48)
        self.narrow = nn.Linear(48, 20)
        self.down = nn.Linear(48, 32, bias=False)

    def forward(self, x):
        y = torch.tanh(self.up(x))
        return x + self.down(y) + self.narrow(y).sum(-1, keepdim=True)


class Stage(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def float8_stage(mode, *blocks, **prepare):
    stage = Stage(*(copy.deepcopy(block) for block in blocks))
    set_float8(describe_stage(0, stage), mode)
    if prepare:
        set_blocks(stage.blocks, 0, **prepare)
    return stage


def step(stage, x, split=False):
    """Gradients of a step, those of the input included."""
    x, store = x.clone().requires_grad_(), WeightStore()
    y = stage(x)
    if split:
        with store.collect(0, 0):
            y.square().sum().backward()
        assert stage.blocks[0].up.weight.grad is None
        store.flush(0, 0)
    else:
        y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in stage.named_parameters()}


def relative(found, wanted):
    return {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}


X = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(2))  # 21 rows: not a multiple of 16


@pytest.mark.parametrize("transposed", [False, True], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("mode", ["tensor", "row"])
def test_products_are_those_of_rounded_numbers(mode, transposed):
    """F, I and W of one layer in float64, from numbers that are rounded here."""
    layer = Block(transposed).up
    stage = float8_stage(mode, layer)
    found = step_layer(stage, X)
    rows = X.flatten(0, 1)
    weight = layer.weight.detach().t() if transposed else layer.weight.detach()  # (out, in)
    dims = (None, None) if mode == "tensor" else (1, 0)  # of F and I, and of W
    last = E5M2 if mode == "tensor" else E4M3
    y = rounded(rows, E4M3, dims[0]) @ rounded(weight, E4M3, dims[0]).t()
    y = (y.bfloat16() if mode == "row" else y).float() + layer.bias.detach()
    dy = 2 * y
    dx = rounded(dy, last, dims[0]) @ rounded(weight, E4M3, dims[1])
    dw = rounded(dy, last, dims[1]).t() @ rounded(rows, E4M3, dims[1])
    wanted = {"y": y, "x": dx, "0.weight": dw.t() if transposed else dw, "0.bias": dy.sum(0)}
    limit = 4e-3 if mode == "row" else 1e-3  # a rounding to bfloat16; sums in float32, which may round otherwise
    for name, error in relative(found, {name: tensor.float() for name, tensor in wanted.items()}).items():
        assert error < limit, name


def step_layer(stage, x):
    x = x.flatten(0, 1).requires_grad_()
    y = stage(x)
    y.square().sum().backward()
    (layer,) = stage.blocks
    return {"y": y.detach(), "x": x.grad, "0.weight": layer.weight.grad, "0.bias": layer.bias.grad}


@pytest.mark.parametrize("mode", ["tensor", "row"])
def test_split_equals_whole_with_every_checkpointing(mode):
    block = Block()
    plain = step(Stage(copy.deepcopy(block)), X)
    whole = step(float8_stage(mode, block), X)
    assert all(error < 0.12 for error in relative(whole, plain).values())
    for ac in ("none", "full", "selective:op"):
        split = step(float8_stage(mode, block, ac=ac), X, split=True)
        assert all(torch.equal(split[name], whole[name]) for name in whole), ac


@pytest.mark.parametrize("mode", ["tensor", "row"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param(None, marks=pytest.mark.full)])
def test_compiled_equals_eager(mode, backend):
    torch._dynamo.reset()
    warn_once.cache_clear()
    blocks = [Block(), Block()]
    wanted = step(float8_stage(mode, *blocks), X)
    compiles = float8_stage(mode, *blocks, compile=True, backend=backend)
    for x in (X, X[:2]):
        wanted = step(float8_stage(mode, *blocks), x)
        for parameter in compiles.parameters():
            parameter.grad = None
        assert max(relative(step(compiles, x, split=True), wanted).values()) < 1e-2
    torch._dynamo.reset()


def test_between_i_and_w_numbers_have_one_byte():
    stage, store, x = float8_stage("tensor", Block()), WeightStore(), X.clone().requires_grad_()
    with store.collect(0, 0):
        stage(x).sum().backward()
    rows = 21
    wide = 2 * rows * 32 + 2 * rows * 48  # x and dy of two layers
    assert store.pending_bytes() == wide + 4 * 4  # a power of each
    store.flush(0, 0)
    with store.collect(0, 1):
        stage(x).sum().backward()
    assert store.pending_bytes() == wide + 4 * 4


def test_frozen_weights_have_no_product():
    block = Block()
    block.up.requires_grad_(False)
    stage, store, x = float8_stage("row", block), WeightStore(), X.clone().requires_grad_()
    with store.collect(0, 0):
        stage(x).square().sum().backward()
    assert [product.parameter is stage.blocks[0].down.weight for product in store.products()] == [True]
    wanted = step(float8_stage("row", Block()), X)
    assert torch.equal(x.grad, wanted["x"])


def converted(stage):
    return {name for name, layer in stage.named_modules() if getattr(layer, "float8", "none") != "none"}


def hf_stage(family, adapter=None, **sizes):
    model = hf_model(CONFIGS[family](num_hidden_layers=2, **sizes), dtype=torch.float32)
    (stage,) = hf_stages(model, zp.build("1f1b", ranks=1, microbatches=1), 0, adapter=adapter).values()
    return stage


def test_experts_routers_adapters_and_the_head_stay_as_they_are():
    stage = hf_stage("qwen3-moe", num_experts=16)
    set_float8(describe_stage(0, stage), "tensor")
    names = {name.split(".layers.")[1] for name in converted(stage)}
    assert names == {
        *(f"{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkvo"),
        *(f"1.mlp.{part}_proj" for part in ("gate", "up", "down")),
    }
    stage = hf_stage("llama", peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    set_float8(describe_stage(0, stage), "row")
    assert len(converted(stage)) == 14
    assert all(name.endswith("base_layer") for name in converted(stage))
    set_float8(describe_stage(0, stage), "none")
    assert not converted(stage)


def test_layers_that_cannot_be_right_are_refused():
    stage = float8_stage("tensor", Block())
    stage.blocks[0].up.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match="has hooks on its gradient"):
        update_hooks([stage.blocks[0].up])
    with pytest.raises(ConfigError, match=r"up\.weight has hooks"):
        set_float8(describe_stage(0, stage), "tensor")
    with pytest.raises(ConfigError, match=r"up\.weight is float64"):
        float8_stage("tensor", Block().double())
    with pytest.raises(ConfigError, match="no linear layer in its blocks whose sizes are multiples of 16"):
        float8_stage("tensor", nn.Linear(20, 16))
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(float8_stage("row", Block())(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    with pytest.raises(EngineError, match=r"cannot run inside torch\.func"):
        torch.func.grad(lambda x: float8_stage("row", Block())(x).sum())(X)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "sizes, schedule, words",
    [
        ({"tp": 2}, "1f1b", "float8='tensor' does not run with tp=2; leave out one of them"),
        ({"cp": 2}, "1f1b", "float8='tensor' does not run with cp=2; leave out one of them"),
        ({"ep": 2}, "1f1b", "float8='tensor' does not run with ep=2; leave out one of them"),
    ],
)
def test_meshes_that_are_not_tested_are_refused(sizes, schedule, words):
    with pytest.raises(ConfigError) as found:
        require_float8("tensor", zp.build(schedule, ranks=1, microbatches=2), sizes, [], CPU)
    assert str(found.value) == words
    require_float8("none", zp.build(schedule, ranks=1, microbatches=2), sizes, [], CPU)


def test_devices_and_values_are_refused(monkeypatch):
    schedule = zp.build("1f1b", ranks=1, microbatches=2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    words = "A100 has compute capability 8.0, products of float8 need 8.9; or leave out float8"
    with pytest.raises(ConfigError, match=words):
        require_float8("row", schedule, {}, [], torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for is_right in (True, False):
        monkeypatch.setattr("zeropipe.engine.float8.has_right_products", lambda *_, found=is_right: found)
        with nullcontext() if is_right else pytest.raises(ConfigError, match="products on cuda differ from those of"):
            require_float8("row", schedule, {}, [], torch.device("cuda"))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="stage 0 names no blocks; use module_stages"):
        require_float8("row", schedule, {}, [describe_stage(0, nn.Linear(16, 16))], CPU)
    with pytest.raises(ConfigError, match="float8='fp8': must be 'none', 'tensor' or 'row'"):
        Options(float8="fp8").check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_gpu_computes_the_same(dim):
    x, y = (torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)) for rows in (40, 32))
    wanted = [torch_float8.quantize(each, E4M3, dim) for each in (x, y)]
    found = [torch_float8.quantize(each.cuda(), E4M3, dim) for each in (x, y)]
    for one, other in zip(wanted, found):
        assert torch.equal(one.data.float(), other.data.float().cpu())
        assert torch.equal(one.power, other.power.cpu())
        turned = torch_float8.transpose(other.data)
        assert torch.equal(torch_float8.transpose(one.data).float(), turned.float().cpu())
    if dim != 0:
        one = torch_float8.multiply(*wanted, torch.float32, fast=False)
        other = torch_float8.multiply(*(Float8(*each) for each in found), torch.float32, fast=False)
        torch.testing.assert_close(one, other.cpu(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("by_row", [False, True])
def test_products_of_a_device_are_compared_with_those_in_float32(by_row, monkeypatch):
    check, real, calls = torch_float8.has_right_products.__wrapped__, torch_float8.multiply, itertools.count()
    assert check(torch.device("cpu"), by_row)
    monkeypatch.setattr(
        torch_float8, "multiply", lambda *args, **more: real(*args, **more) * (1 + 0.03 * (next(calls) % 2))
    )
    assert not check(torch.device("cpu"), by_row), "the second of two is 3% too large"
