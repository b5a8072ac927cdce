"""Rows of tokens sorted by expert, and back."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeropipe.engine.backward.expert_rows import sort_by_expert, sorted_tokens, sorted_weights, sum_choices

TOKENS, CHOICES, EXPERTS, WIDTH = 7, 3, 5, 4


class Names(TorchDispatchMode):
    """Collects the names of operators."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


def draw(tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(tokens)])
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, CHOICES, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, index.view(tokens, CHOICES), weights


def by_function(hidden, index, weights):
    order, _ = sort_by_expert(index, EXPERTS)
    rows = sorted_tokens(hidden, order, CHOICES).square()
    return sum_choices(rows * sorted_weights(weights, order), order, index)


def by_index(hidden, index, weights):
    order, _ = sort_by_expert(index, EXPERTS)
    rows = hidden[order // CHOICES].square() * weights.flatten()[order, None]
    return rows[order.argsort()].view(*index.shape, -1).sum(1)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_are_those_of_index_lookups(compiled):
    hidden, index, weights = draw()
    run = torch.compile(by_function, fullgraph=True, backend="aot_eager") if compiled else by_function
    found, wanted = run(hidden, index, weights), by_index(hidden, index, weights)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(found, (hidden, weights), gradient),
        torch.autograd.grad(wanted, (hidden, weights), gradient),
    ):
        torch.testing.assert_close(one, other)


def test_gradients_of_gradients():
    hidden, index, weights = draw()
    assert torch.autograd.gradgradcheck(lambda x, w: by_function(x, index, w), (hidden, weights))


def test_no_rows_are_added_by_index():
    hidden, index, weights = draw()
    out = by_function(hidden, index, weights)
    with Names() as names:
        out.sum().backward()
    assert not any("index_put" in name or "index_add" in name or "scatter" in name for name in names.seen), names.seen


def test_no_tokens():
    hidden, index, weights = (each[:0].detach() for each in draw(1))
    hidden.requires_grad_()
    by_function(hidden, index.long(), weights).sum().backward()
    assert hidden.grad.shape == (0, WIDTH)
