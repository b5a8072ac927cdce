"""Experts that are divided over processes: rows of tokens are dispatched to them, and their results combined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.backward.expert_rows import (
    invert,
    num_local_experts,
    run_experts,
    sort_by_expert,
    sorted_tokens,
    sorted_weights,
    sum_choices,
)


def run_divided_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Dispatch each row to the process that has its expert, run the experts of this process, and combine the results.

    Where `tp` shards the experts too, this process sends the rows of its shard of them only; the results of all other
    rows are zeros.
    """
    if module.shard is not None:  # its experts come first
        index = module.shard.renumber(index, module.num_experts)
    run = _run_by_process if module.exchange.once_per_process else _run_by_expert
    return run(module, hidden, index, weights)


def _run_by_expert(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Send a token once for each of its experts.

    Rows arrive sorted by process and then by expert: they are grouped by expert for the products, and ungrouped
    before they are sent back. The results are weighted here.
    """
    exchange = module.exchange
    order, offsets = sort_by_expert(index, module.num_experts)
    counts = _count_rows(module, offsets)
    rows = sorted_tokens(hidden, order, index.shape[-1])
    arriving, splits, _ = exchange.exchange_counts(torch.cat([counts.sum(1, keepdim=True), counts], 1), rows)
    rows = exchange.exchange_rows(rows, splits)
    by_expert = arriving[:, 1:]  # (process, expert)
    expert = torch.arange(by_expert.shape[1], device=rows.device).repeat(len(by_expert))
    expert = expert.repeat_interleave(by_expert.flatten(), output_size=len(rows))  # of each row
    grouping = expert.argsort(stable=True)
    offsets = by_expert.sum(0).cumsum(0, dtype=torch.int32)
    x = run_experts(module, rows[grouping], offsets, expert[grouping] if module.has_bias else None)
    x = exchange.exchange_rows(x[invert(grouping)], splits.flip(0), len(order))
    return sum_choices(x * sorted_weights(weights, order).to(x.dtype), order, index)


def _run_by_process(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Send a token once to each process that has some of its experts, with their numbers and weights.

    These are columns behind those of the token. The process sums the weighted results of its experts, so one row for
    each process comes back.
    """
    exchange, num_local, dtype = module.exchange, num_local_experts(module), hidden.dtype
    (num_tokens, num_choices), width = index.shape, hidden.shape[-1]
    process = (index // num_local).clamp(max=exchange.size)  # the last one stands for other shards of tp
    goes = torch.zeros(num_tokens, exchange.size + 1, dtype=torch.bool, device=index.device)
    goes = goes.scatter(1, process, torch.ones_like(process, dtype=torch.bool))[:, :-1]
    order = goes.t().flatten().logical_not().int().argsort(stable=True)  # by process; what does not go is last
    order = order[: num_tokens * min(num_choices, exchange.size)]
    token, target = order % num_tokens, order // num_tokens
    number = torch.where(process[token] == target[:, None], index[token] % num_local + 1, 0)  # 0: another process's
    _, offsets = sort_by_expert(index, module.num_experts)
    counts = torch.cat([goes.sum(0, dtype=torch.int32)[:, None], _count_rows(module, offsets)], 1)
    sent = torch.cat([hidden[token], weights[token].to(dtype), number.to(dtype)], 1)
    arriving, splits, total = exchange.exchange_counts(counts, sent)
    rows, row_weights, number = exchange.exchange_rows(sent, splits).split([width, num_choices, num_choices], 1)
    expert = (number.detach().long().flatten() - 1) % (num_local + 1)  # of each choice of a row; the last: not here
    choice = first_rows(expert.argsort(stable=True), total)
    row = choice // num_choices
    offsets = arriving[:, 1:].sum(0).cumsum(0, dtype=torch.int32)
    x = run_experts(module, rows[row], offsets, expert[choice] if module.has_bias else None)
    x = _sum_rows(x * row_weights.flatten()[choice, None], row, rows)
    x = exchange.exchange_rows(x, splits.flip(0), len(order))  # zeros for what did not go
    return _sum_rows(x, token, hidden)


def _count_rows(module: Any, offsets: Tensor) -> Tensor:
    """The rows for each expert (second dimension) of each process (first), without other shards of tp."""
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    return counts[: num_local_experts(module) * module.exchange.size].view(module.exchange.size, -1)


def _sum_rows(x: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Add each row to the one of its index, of as many as `like` has; in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(len(like), x.shape[1], dtype=dtype, device=x.device)
    return total.index_put((index,), x.to(dtype), accumulate=True).to(x.dtype)


@torch.library.custom_op("zeropipe::first_rows", mutates_args=())
def first_rows(x: Tensor, number: Tensor) -> Tensor:
    """The first rows; their number is in CPU memory, and an unknown size in a graph."""
    return x[: int(number)].clone()


@first_rows.register_fake
def _(x: Tensor, number: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), *x.shape[1:])
