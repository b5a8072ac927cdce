"""Gradients of norms and biases, which are added together after each backward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_helpers import ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from vector_cases import Additions, step_operators

import zeropipe as zp
from zeropipe.engine.backward.gradients import main_gradients
from zeropipe.engine.backward.vectors import VectorGradients

WIDTH = 4


def model(layers=3, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(layers))).to(
        dtype
    )


def inputs(dtype=torch.bfloat16, number=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, WIDTH, generator=generator).to(dtype) for _ in range(number)]


def backward(module, x, collected=None):
    loss = module(x).square().sum()
    if collected is None:
        loss.backward()
    else:
        with collected.collect():
            loss.backward()


def assert_same(module, plain):
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert one.grad_dtype == other.grad_dtype
        assert one.grad.dtype == other.grad.dtype
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    "dtype, main", [(torch.bfloat16, torch.float32), (torch.bfloat16, None), (torch.float64, None)]
)
@pytest.mark.parametrize("keeps_dtype", [False, True])
def test_gradients_are_those_of_autograd(dtype, main, keeps_dtype):
    plain, module = model(dtype=dtype), model(dtype=dtype)
    for one in (plain, module):
        main_gradients(one, main)
    vectors = VectorGradients(module.parameters, keeps_dtype=keeps_dtype)
    for x in inputs(dtype):
        backward(plain, x)
        backward(module, x, vectors)
        assert_same(module, plain)


def test_a_graph_from_before_is_used():
    """F of all microbatches runs before the first B."""
    plain, module = model(), model()
    for one in (plain, module):
        main_gradients(one, torch.float32)
        losses = [one(x).square().sum() for x in inputs()]
        for loss in losses:
            with VectorGradients(one.parameters if one is module else list).collect():
                loss.backward()
    assert_same(module, plain)


def test_the_number_of_operators_does_not_grow_with_the_number_of_vectors():
    found = []
    for layers in (2, 6):
        module, numbers = model(layers), []
        main_gradients(module, torch.float32)
        for vectors in (VectorGradients(list), VectorGradients(module.parameters)):
            backward(module, inputs()[0], vectors)  # the first gradients
            loss = module(inputs()[1]).square().sum()
            with Additions() as additions, vectors.collect():
                loss.backward()
            numbers.append(additions.number)
        found.append(numbers)
    (few_plain, few), (many_plain, many) = found
    weights, vectors = 6 - 2, 3 * (6 - 2)  # a norm has two, a layer one
    assert many_plain - few_plain == 2 * (weights + vectors)  # a cast and an addition
    assert many - few == 2 * weights


def test_gradients_stay_in_the_callers_memory():
    module = model()
    memory = torch.zeros(3, WIDTH)
    main_gradients(module, torch.float32)
    for part, block in zip(memory, module):
        block[1].weight.grad = part
    vectors = VectorGradients(module.parameters)
    backward(module, inputs()[0], vectors)
    assert all(torch.equal(part, block[1].weight.grad) for part, block in zip(memory, module))
    assert all(block[1].weight.grad.data_ptr() == part.data_ptr() for part, block in zip(memory, module))
    assert memory.abs().sum() > 0


def test_a_parameter_that_is_listed_twice():
    plain, module = model(), model()
    vectors = VectorGradients(lambda: [*module.parameters(), *module.parameters()])
    for x in inputs():
        backward(plain, x)
        backward(module, x, vectors)
    assert_same(module, plain)


def test_weights_with_hooks_and_frozen_ones_are_left_alone():
    plain, module = model(), model()
    seen = {plain: [], module: []}
    for one in (plain, module):
        main_gradients(one, torch.float32)
        one[1][1].bias.requires_grad_(False)
        one[0][1].weight.register_post_accumulate_grad_hook(lambda p, one=one: seen[one].append(p.grad.clone()))
    vectors = VectorGradients(module.parameters)
    for x in inputs():
        backward(plain, x)
        backward(module, x, vectors)
    assert len(seen[plain]) == 3
    assert all(map(torch.equal, seen[plain], seen[module]))
    assert module[1][1].bias.grad is None


def test_a_backward_that_fails_leaves_gradients_as_they_were():
    module, vectors = model(), None
    main_gradients(module, torch.float32)
    vectors = VectorGradients(module.parameters)
    backward(module, inputs()[0], vectors)
    before = [(p.grad, p.grad.clone()) for p in module.parameters() if p.dim() == 1]

    def fail(gradient):
        raise ValueError("struck")

    y = module[0](inputs()[1])
    y.register_hook(fail)
    with pytest.raises(ValueError, match="struck"), vectors.collect():
        module[2](module[1](y)).sum().backward()
    for p, (gradient, value) in zip((p for p in module.parameters() if p.dim() == 1), before):
        assert p.grad is gradient
        assert p.grad_dtype == torch.float32
        assert torch.equal(gradient, value)


def test_a_norm_that_two_layers_share():
    plain = model(dtype=torch.float64)
    plain[1][1] = plain[0][1]
    module = copy.deepcopy(plain)
    vectors = VectorGradients(module.parameters)
    for x in inputs(torch.float64):
        backward(plain, x)
        with vectors.collect():
            checkpoint(module, x, use_reentrant=False).square().sum().backward()
    assert_same(module, plain)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_the_number_of_operators_of_a_step_does_not_grow_with_the_number_of_norms(name):
    schedule = zp.build(name, ranks=2, microbatches=4)
    few, many = (ranks(2).run(step_operators, schedule, layers) for layers in (1, 4))
    assert few == many
    assert min(few) > 0
