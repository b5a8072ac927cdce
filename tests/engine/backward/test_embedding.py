"""Embeddings that add their gradient row by row: the gradient is autograd's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from zeropipe.engine import WeightStore, defer, main_gradients
from zeropipe.engine.backward.store import accumulate_directly

IDS = torch.tensor([[3, 1, 3, 0], [5, 3, 0, 2]])


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, ids):
        return super().forward(ids) * 2.5


def pair(kind=nn.Embedding, dtype=torch.float64, **options):
    torch.manual_seed(0)
    plain = kind(7, 4, dtype=dtype, **options)
    mine = copy.deepcopy(plain)
    defer(nn.Sequential(mine))
    return plain, mine


def backward(embedding, ids=IDS):
    y = embedding(ids)
    (y * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)).sum().backward()


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": 0}], ids=str)
def test_two_microbatches(kind, options):
    """Added in W, in a full backward, and by autograd outside of a step."""
    plain, mine = pair(kind, **options)
    for _ in range(2):
        backward(plain)
    store = WeightStore()
    for number in range(2):
        with store.collect(0, number):
            backward(mine)
    assert mine.weight.grad is None
    store.flush(0, 1)
    store.flush(0, 0)
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad)
    mine.weight.grad = None
    for _ in range(2):
        with accumulate_directly():
            backward(mine)
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad)
    mine.weight.grad = None
    backward(mine)
    backward(mine)
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad)


def test_no_tensor_of_the_size_of_the_weight_is_made(monkeypatch):
    _, mine = pair()
    mine.weight.grad = torch.zeros_like(mine.weight)
    gradient = mine.weight.grad
    monkeypatch.setattr(torch.ops.aten, "embedding_dense_backward", None)
    with accumulate_directly():
        backward(mine)
    assert mine.weight.grad is gradient
    assert gradient.abs().sum() > 0


def test_16_bit_weights_with_float32_gradients():
    plain, mine = pair(dtype=torch.bfloat16)
    main_gradients(mine, torch.float32)
    for _ in range(50):
        with accumulate_directly():
            backward(mine)
    exact = copy.deepcopy(plain).double()
    for _ in range(50):
        backward(exact)
    torch.testing.assert_close(mine.weight.grad.double(), exact.weight.grad, rtol=5e-3, atol=1e-2)


def test_16_bit_gradients_are_autograds():
    """Rounded once per microbatch, not at every row."""
    plain, mine = pair(dtype=torch.bfloat16)
    with accumulate_directly():
        backward(mine)
    backward(plain)
    assert torch.equal(mine.weight.grad, plain.weight.grad)


def test_hooks_fire():
    _, mine = pair()
    seen = []
    mine.weight.register_post_accumulate_grad_hook(seen.append)
    with accumulate_directly():
        backward(mine)
    assert len(seen) == 1


def test_tied_weights_add_up():
    plain = nn.Embedding(7, 4, dtype=torch.float64)
    head = nn.Linear(4, 7, bias=False, dtype=torch.float64)
    head.weight = plain.weight
    both = nn.ModuleList([plain, head])
    mine = copy.deepcopy(both)
    defer(mine)

    def run(model):
        model[1](model[0](IDS).tanh()).square().sum().backward()

    run(both)
    store = WeightStore()
    with store.collect(0, 0):
        run(mine)
    store.flush(0, 0)
    torch.testing.assert_close(mine[0].weight.grad, both[0].weight.grad)
    assert mine[0].weight.grad is mine[1].weight.grad


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_other_embeddings_stay_as_they_are(options):
    _, mine = pair(**options)
    assert type(mine) is nn.Embedding
