"""Mixture-of-experts layers whose weight gradients wait for W."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.gradients import local
from zeropipe.engine.backward.stacks import deferring, product, take_over

_USUAL = (None, "eager", "grouped_mm", "batched_mm")


def defer_experts(module: nn.Module) -> None:
    """Let transformers' stacks of experts leave their weight gradients to W."""
    for child in module.modules():
        names = _names(child)
        if names is not None:
            take_over(child, _deferred(type(child), names))


def keep_experts(module: Any, place: int, number: int) -> bool:
    """Let a stack compute its share of the experts only, number `place` of `number` shares; False if it cannot.

    The caller then leaves it the weights and biases of these experts, and sums the outputs.
    """
    defer_experts(module)
    if not getattr(module, "defers_experts", False):
        return False
    module.first_expert = module.num_experts // number * place
    return True


def _names(module: nn.Module) -> tuple[str, str] | None:
    """The two stacks of weights of experts that are computed in one of the usual ways, and not deferred yet."""
    facts = vars(module)
    names = ("gate_up_proj" if facts.get("has_gate", True) else "up_proj", "down_proj")
    biases = tuple(f"{name}_bias" for name in names) if facts.get("has_bias", False) else ()
    held = {name for name, parameter in module._parameters.items() if parameter is not None}
    if getattr(module, "defers_experts", False) or held != {*names, *biases}:
        return None
    if _is_dense(type(module)):
        return names
    is_usual = "has_gate" in facts and not facts.get("has_post_expert_norm", False)
    return names if is_usual and facts["config"]._experts_implementation in _USUAL else None


def _is_dense(kind: type[nn.Module]) -> bool:
    """Experts that each take all tokens; known by its name, so that transformers need not be imported."""
    return kind.__name__ == "Llama4TextExperts" and kind.__module__ == "transformers.models.llama4.modeling_llama4"


@functools.cache
def _deferred(kind: type[nn.Module], names: tuple[str, str]) -> type[nn.Module]:
    """A subclass that defers both products."""
    some_experts = _dense_experts if _is_dense(kind) else _some_experts
    all_experts = _dense_experts if _is_dense(kind) else _all_experts

    def forward(self: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
        if self.first_expert is not None:
            return some_experts(self, hidden, *routing)
        computed = not all(isinstance(getattr(self, name), nn.Parameter) for name in names)  # by a parametrization
        if computed or self.is_watched or not (torch.is_grad_enabled() and hidden.requires_grad):
            return kind.forward(self, hidden, *routing)
        return all_experts(self, hidden, *routing)

    return deferring(kind, names, forward, first_expert=None)


def _all_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Tokens sorted by expert, so that each product is one for all experts."""
    order, offsets = _sorted(index, module.num_experts)
    chosen = _chosen(module, index, order)
    x = _biased(module, 0, product(module, 0, hidden[order // index.shape[-1]], offsets), chosen)
    x = _biased(module, 1, product(module, 1, _between(module, x), offsets), chosen)
    return _back(x * weights.flatten()[order, None].to(x.dtype), order, index)


def _some_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The sum over those experts that are here; the rows of all others, which come last, are zeros.

    A grouped kernel leaves in them what was there, so they are cleared on both ways before anything is added to them.
    """
    index = (index - module.first_expert) % module.num_experts
    order, offsets = _sorted(index, module.num_experts)
    offsets = offsets[: local(getattr(module, module.defers[0])).shape[0]]
    chosen = _chosen(module, index, order)
    is_here = (torch.arange(len(order), device=order.device) < offsets[-1])[:, None]
    x = torch.where(is_here, hidden[order // index.shape[-1]], 0)
    x = _biased(module, 0, torch.where(is_here, product(module, 0, x, offsets), 0), chosen)
    x = _biased(module, 1, product(module, 1, _between(module, x), offsets), chosen)
    return _back(torch.where(is_here, x, 0) * weights.flatten()[order, None].to(x.dtype), order, index)


def _dense_experts(module: Any, hidden: Tensor) -> Tensor:
    """One block of rows for each expert; the blocks of experts that are not here are zeros."""
    first, here = module.first_expert or 0, local(getattr(module, module.defers[0])).shape[0]
    x = hidden.view(module.num_experts, -1, hidden.shape[-1])[first : first + here]
    x = product(module, 1, _between(module, product(module, 0, x, None)), None)
    return functional.pad(x, (0, 0, 0, 0, first, module.num_experts - first - here)).view(-1, hidden.shape[-1])


def _between(module: Any, x: Tensor) -> Tensor:
    """What is done between the two products."""
    if not hasattr(module, "has_gate"):
        gate, up = x.chunk(2, dim=-1)
        return up * module.act_fn(gate)
    return module._apply_gate(x) if module.has_gate else module.act_fn(x)


def _chosen(module: Any, index: Tensor, order: Tensor) -> Tensor | None:
    """The expert of each sorted row, where biases need it."""
    return index.flatten()[order] if module.has_bias else None


def _biased(module: Any, number: int, x: Tensor, chosen: Tensor | None) -> Tensor:
    """Each row plus its expert's bias, if that is here.

    As a product: the gradient of looking rows up adds thousands of rows to few, one after the other.
    """
    if chosen is None:
        return x
    bias = local(getattr(module, f"{module.defers[number]}_bias"))
    is_of = chosen[:, None] == torch.arange(len(bias), device=chosen.device)
    return x + is_of.to(x.dtype) @ bias.to(x.dtype)


def _sorted(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order that sorts (token, choice) by expert, and where the rows of each expert end."""
    order = index.flatten().argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=index.device)
    counts = counts.scatter_add(0, index.flatten(), torch.ones_like(index.flatten(), dtype=torch.int32))
    return order, counts.cumsum(0, dtype=torch.int32)


def _back(x: Tensor, order: Tensor, index: Tensor) -> Tensor:
    """The rows in their own order, summed over each token's choices."""
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return x[back].view(*index.shape, -1).sum(1)
