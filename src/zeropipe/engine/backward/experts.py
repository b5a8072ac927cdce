"""Mixture-of-experts layers of transformers whose weight gradients wait for W."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.divided_experts import run_divided_experts
from zeropipe.engine.backward.exchange import Exchange
from zeropipe.engine.backward.expert_adapters import defer_adapters
from zeropipe.engine.backward.expert_rows import (
    add_bias,
    apply_activation,
    experts_for_bias,
    num_local_experts,
    run_experts,
    sort_by_expert,
    sorted_tokens,
    sorted_weights,
    sum_choices,
)
from zeropipe.engine.backward.stacks import convert, create_deferred_class, expert_linear
from zeropipe.engine.transformers_private import experts_implementation

_SUPPORTED_IMPLEMENTATIONS = (None, "eager", "grouped_mm", "batched_mm")


class ExpertShard(NamedTuple):
    """Of every `whole` consecutive experts, the `size` ones from number `first`."""

    first: int
    size: int
    whole: int

    def renumber(self, index: Tensor, num_experts: int) -> Tensor:
        """Other numbers of experts: those of the shard come first, in their order."""
        position = (index - self.first) % self.whole
        total = num_experts // self.whole * self.size
        return position // self.size * total + index // self.whole * self.size + position % self.size


def defer_experts(module: nn.Module) -> None:
    """Let transformers' stacks of experts leave their weight gradients to W."""
    for child in module.modules():
        names = _stack_names(child)
        if names is not None:
            convert(child, _deferred_class(type(child), names))
    defer_adapters(module, is_routed_stack)


def keep_local_experts(module: Any, index: int, num_shards: int) -> bool:
    """Let a stack compute shard number `index` of its experts only; False if it cannot.

    The caller then leaves it the weights and biases of these experts, and sums the outputs over all shards. Of a stack
    that is divided already, each of these processes' experts are sharded.
    """
    defer_experts(module)
    if not getattr(module, "defers_experts", False):
        return False
    whole = num_local_experts(module)
    module.shard = ExpertShard(whole // num_shards * index, whole // num_shards, whole)
    module.first_expert += module.shard.first
    return True


def divide_experts(module: Any, exchange: Exchange) -> bool:
    """Let a stack compute the experts of one process of `exchange` for the tokens of all; False if it cannot.

    The caller then leaves it the weights and biases of these experts. Of a stack that already computes a shard of its
    experts only, these are divided.
    """
    defer_experts(module)
    if not is_routed_stack(module):
        return False
    module.exchange = exchange
    module.first_expert += num_local_experts(module) // exchange.size * exchange.rank
    return True


def find_divided(module: nn.Module) -> list[Any]:
    """The stacks of experts in a module that are divided over processes."""
    return [child for child in module.modules() if getattr(child, "exchange", None) is not None]


def find_routed(module: nn.Module) -> dict[str, Any]:
    """The stacks of transformers' experts that take each token's experts and weights, deferred or not, by name."""
    children = module.named_modules()
    return {name: m for name, m in children if is_routed_stack(m) or (_stack_names(m) and not _is_dense(type(m)))}


def is_routed_stack(module: nn.Module) -> bool:
    """Whether this is a stack of transformers' experts, deferred, that takes each token's experts and weights."""
    return hasattr(type(module), "exchange") and not _is_dense(type(module))


def _stack_names(module: nn.Module) -> tuple[str, str] | None:
    """The two weight stacks of experts with a supported forward that are not deferred yet, else None."""
    attributes = vars(module)
    names = ("gate_up_proj" if attributes.get("has_gate", True) else "up_proj", "down_proj")
    biases = tuple(f"{name}_bias" for name in names) if attributes.get("has_bias", False) else ()
    present = {name for name, parameter in module._parameters.items() if parameter is not None}
    if getattr(module, "defers_experts", False) or present != {*names, *biases}:
        return None
    if _is_dense(type(module)):
        return names
    is_supported = "has_gate" in attributes and not attributes.get("has_post_expert_norm", False)
    return names if is_supported and experts_implementation(module) in _SUPPORTED_IMPLEMENTATIONS else None


def _is_dense(kind: type[nn.Module]) -> bool:
    """Whether each expert takes all tokens; compared by name, so that transformers need not be imported."""
    return kind.__name__ == "Llama4TextExperts" and kind.__module__ == "transformers.models.llama4.modeling_llama4"


@functools.cache
def _deferred_class(base: type[nn.Module], names: tuple[str, str]) -> type[nn.Module]:
    run_local = _run_dense_experts if _is_dense(base) else _run_local_experts
    run_all = _run_dense_experts if _is_dense(base) else _run_all_experts

    def forward(self: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
        if self.exchange is not None:
            return run_divided_experts(self, hidden, *routing)
        if self.shard is not None:
            return run_local(self, hidden, *routing)
        is_parametrized = not all(isinstance(getattr(self, name), nn.Parameter) for name in names)
        is_deferrable = not self.has_hooks and torch.is_grad_enabled() and hidden.requires_grad
        if is_parametrized or not (is_deferrable or self.adapters):
            return base.forward(self, hidden, *routing)
        return run_all(self, hidden, *routing)

    return create_deferred_class(base, names, forward, shard=None, exchange=None)


def _run_all_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sort tokens by expert, so that each of the two products is one call for all experts."""
    order, offsets = sort_by_expert(index, module.num_experts)
    x = run_experts(
        module, sorted_tokens(hidden, order, index.shape[-1]), offsets, experts_for_bias(module, index, order)
    )
    return sum_choices(x * sorted_weights(weights, order).to(x.dtype), order, index)


def _run_local_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sum over the experts of this process; the rows of all others, which come last, are zeros.

    A grouped kernel does not write these rows, so they are cleared before anything is added to them, in forward and
    in backward.
    """
    index = module.shard.renumber(index, module.num_experts)
    order, offsets = sort_by_expert(index, module.num_experts)
    offsets = offsets[: num_local_experts(module)]
    experts = experts_for_bias(module, index, order)
    is_local = (torch.arange(len(order), device=order.device) < offsets[-1])[:, None]
    x = torch.where(is_local, sorted_tokens(hidden, order, index.shape[-1]), 0)
    x = add_bias(module, 0, torch.where(is_local, expert_linear(module, 0, x, offsets), 0), experts)
    x = add_bias(module, 1, expert_linear(module, 1, apply_activation(module, x), offsets), experts)
    return sum_choices(torch.where(is_local, x, 0) * sorted_weights(weights, order).to(x.dtype), order, index)


def _run_dense_experts(module: Any, hidden: Tensor) -> Tensor:
    """One block of rows for each expert; the blocks of experts of other processes are zeros."""
    first, num_local = module.shard.first if module.shard else 0, num_local_experts(module)
    x = hidden.view(module.num_experts, -1, hidden.shape[-1])[first : first + num_local]
    x = expert_linear(module, 1, apply_activation(module, expert_linear(module, 0, x, None)), None)
    return functional.pad(x, (0, 0, 0, 0, first, module.num_experts - first - num_local)).view(-1, hidden.shape[-1])
