"""Mixture-of-experts layers of transformers whose weight gradients wait for W."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.exchange import Exchange
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.stacks import convert, create_deferred_class, expert_linear
from zeropipe.engine.transformers_private import apply_expert_gate, experts_implementation

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
    return True


def find_divided(module: nn.Module) -> list[Any]:
    """The stacks of experts in a module that are divided over processes."""
    return [child for child in module.modules() if getattr(child, "exchange", None) is not None]


def is_routed_stack(module: nn.Module) -> bool:
    """Whether this is a stack of transformers' experts, deferred, that takes each token's experts and weights."""
    return hasattr(type(module), "exchange") and not _is_dense(type(module))


def num_local_experts(module: Any) -> int:
    """The number of experts whose weights a stack has in this process."""
    return int(to_local(getattr(module, module.defers[0])).shape[0])


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
            return _run_divided_experts(self, hidden, *routing)
        if self.shard is not None:
            return run_local(self, hidden, *routing)
        is_parametrized = not all(isinstance(getattr(self, name), nn.Parameter) for name in names)
        if is_parametrized or self.has_hooks or not (torch.is_grad_enabled() and hidden.requires_grad):
            return base.forward(self, hidden, *routing)
        return run_all(self, hidden, *routing)

    return create_deferred_class(base, names, forward, shard=None, exchange=None)


def _run_all_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sort tokens by expert, so that each of the two products is one call for all experts."""
    order, offsets = _sort_by_expert(index, module.num_experts)
    x = _run_experts(module, hidden[order // index.shape[-1]], offsets, _experts_for_bias(module, index, order))
    return _sum_choices(x * weights.flatten()[order, None].to(x.dtype), order, index)


def _run_experts(module: Any, x: Tensor, offsets: Tensor, experts: Tensor | None) -> Tensor:
    """The outputs of rows that are sorted by expert."""
    x = _add_bias(module, 0, expert_linear(module, 0, x, offsets), experts)
    return _add_bias(module, 1, expert_linear(module, 1, _apply_activation(module, x), offsets), experts)


def _run_divided_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Dispatch each row to the process that has its expert, run the experts of this process, and combine the results.

    Rows arrive sorted by process and then by expert: they are grouped by expert for the products, and ungrouped
    before they are sent back. Where `tp` shards the experts too, this process sends the rows of its shard of them only,
    which come first; the results of all other rows are zeros.
    """
    exchange = module.exchange
    if module.shard is not None:
        index = module.shard.renumber(index, module.num_experts)
    order, offsets = _sort_by_expert(index, module.num_experts)
    counts = offsets.diff(prepend=offsets.new_zeros(1))[: num_local_experts(module) * exchange.size]
    arriving, splits = exchange.exchange_counts(counts)  # rows by (process, expert)
    rows = exchange.exchange_rows(hidden[order // index.shape[-1]], splits)
    expert = torch.arange(arriving.shape[1], device=rows.device).repeat(len(arriving))
    expert = expert.repeat_interleave(arriving.flatten(), output_size=len(rows))  # of each row
    grouping = expert.argsort(stable=True)
    offsets = arriving.sum(0).cumsum(0, dtype=torch.int32)
    x = _run_experts(module, rows[grouping], offsets, expert[grouping] if module.has_bias else None)
    x = exchange.exchange_rows(x[_inverse(grouping)], splits.flip(0), len(order))
    return _sum_choices(x * weights.flatten()[order, None].to(x.dtype), order, index)


def _run_local_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sum over the experts of this process; the rows of all others, which come last, are zeros.

    A grouped kernel does not write these rows, so they are cleared before anything is added to them, in forward and
    in backward.
    """
    index = module.shard.renumber(index, module.num_experts)
    order, offsets = _sort_by_expert(index, module.num_experts)
    offsets = offsets[: num_local_experts(module)]
    experts = _experts_for_bias(module, index, order)
    is_local = (torch.arange(len(order), device=order.device) < offsets[-1])[:, None]
    x = torch.where(is_local, hidden[order // index.shape[-1]], 0)
    x = _add_bias(module, 0, torch.where(is_local, expert_linear(module, 0, x, offsets), 0), experts)
    x = _add_bias(module, 1, expert_linear(module, 1, _apply_activation(module, x), offsets), experts)
    return _sum_choices(torch.where(is_local, x, 0) * weights.flatten()[order, None].to(x.dtype), order, index)


def _run_dense_experts(module: Any, hidden: Tensor) -> Tensor:
    """One block of rows for each expert; the blocks of experts of other processes are zeros."""
    first, num_local = module.shard.first if module.shard else 0, num_local_experts(module)
    x = hidden.view(module.num_experts, -1, hidden.shape[-1])[first : first + num_local]
    x = expert_linear(module, 1, _apply_activation(module, expert_linear(module, 0, x, None)), None)
    return functional.pad(x, (0, 0, 0, 0, first, module.num_experts - first - num_local)).view(-1, hidden.shape[-1])


def _apply_activation(module: Any, x: Tensor) -> Tensor:
    if not hasattr(module, "has_gate"):
        gate, up = x.chunk(2, dim=-1)
        return up * module.act_fn(gate)
    return apply_expert_gate(module, x) if module.has_gate else module.act_fn(x)


def _experts_for_bias(module: Any, index: Tensor, order: Tensor) -> Tensor | None:
    """The expert of each sorted row, if there are biases."""
    return index.flatten()[order] if module.has_bias else None


def _add_bias(module: Any, stack: int, x: Tensor, experts: Tensor | None) -> Tensor:
    """Add to each row the bias of its expert, if that is in this process.

    As a product: the gradient of an index lookup adds thousands of rows to few, one after the other.
    """
    if experts is None:
        return x
    bias = to_local(getattr(module, f"{module.defers[stack]}_bias"))
    one_hot = experts[:, None] == torch.arange(len(bias), device=experts.device)
    return x + one_hot.to(x.dtype) @ bias.to(x.dtype)


def _sort_by_expert(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The permutation that sorts (token, choice) by expert, and the end of each expert's rows."""
    order = index.flatten().argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=index.device)
    counts = counts.scatter_add(0, index.flatten(), torch.ones_like(index.flatten(), dtype=torch.int32))
    return order, counts.cumsum(0, dtype=torch.int32)


def _sum_choices(x: Tensor, order: Tensor, index: Tensor) -> Tensor:
    """Undo the sort and sum over each token's choices."""
    return x[_inverse(order)].view(*index.shape, -1).sum(1)


def _inverse(permutation: Tensor) -> Tensor:
    """The permutation that undoes another."""
    positions = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter(0, permutation, positions)
