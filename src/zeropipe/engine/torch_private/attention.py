"""Attention of packed rows: torch's block-sparse and variable-length kernels, whose interfaces differ by version."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

_VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters) if varlen_attn is not None else frozenset()
HAS_VARLEN = {"scale", "window_size"} <= _VARLEN_OPTIONS  # torch 2.11
# the operators behind the functions of this file
OPERATORS = (
    torch.ops.higher_order.flex_attention,
    *([torch.ops.torch_attn._varlen_attn.default] if varlen_attn is not None else []),
)
BLOCK = 128  # tokens per block of a mask
_LN2 = math.log(2.0)


class BlockTable(NamedTuple):
    """The blocks of scores that a row has, for `attend_blocks`: the token q attends to the keys first[q] .. q."""

    first: Tensor  # (rows, tokens)
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def build_block_table(first: Tensor) -> BlockTable:
    """From the first key of each token, (rows, tokens) in int32: never more than a number per block of scores."""
    rows, tokens = first.shape
    number = -(-tokens // BLOCK)
    padding = (0, number * BLOCK - tokens)
    lowest = functional.pad(first, padding, value=tokens).view(rows, number, BLOCK).amin(-1)[..., None]
    highest = functional.pad(first, padding, value=0).view(rows, number, BLOCK).amax(-1)[..., None]
    index = torch.arange(number, device=first.device, dtype=first.dtype)
    query, key = index[:, None], index[None, :]
    is_used = (key <= query) & (lowest < (key + 1) * BLOCK)
    is_full = (key < query) & (highest <= key * BLOCK) & ((query + 1) * BLOCK <= tokens)
    partial, full = (is_used & ~is_full)[:, None], (is_used & is_full)[:, None]
    by_query = (*_list_blocks(partial), *_list_blocks(full))
    by_key = (*_list_blocks(partial.mT), *_list_blocks(full.mT))
    return BlockTable(first, *by_query, *by_key)


def _list_blocks(is_used: Tensor) -> tuple[Tensor, Tensor]:
    """The number of used blocks per row of blocks, and their indices, used ones first."""
    order = torch.argsort(is_used.to(torch.int8), dim=-1, descending=True, stable=True)
    return is_used.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: BlockTable,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over the blocks of a table, (rows, heads, tokens, size); keys may have fewer heads.

    `softcap` bounds the scores by c * tanh(score / c). `sinks` has a score per head that takes part in the softmax and
    has no value. On a GPU it is compiled; the lengths of the samples are data, so new ones compile nothing.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.device.type == "cpu":
        run = _attend_on_cpu
    else:
        run = _attend_blocks if torch.compiler.is_compiling() else _compiled_attend()
    out, sums = run(query, key, value, table, scale, softcap)
    if sinks is not None:
        share = torch.sigmoid(sums - sinks.to(sums.dtype)[:, None])
        out = (out * share[..., None]).to(out.dtype)
    return out


@functools.cache
def _compiled_attend() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_attend_blocks, fullgraph=True)


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, table: BlockTable, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of each token's sum of exponentials."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, aux = flex_attention(
        query, key, value, _score_function(softcap), _block_mask(table), scale, key.shape[1] != query.shape[1],
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # rows shorter than a block, too
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    assert aux.lse is not None
    return out, aux.lse


def _attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, table: BlockTable, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The same with all scores in memory: the public function has no gradients on a CPU, its operator has."""
    score = _score_function(softcap) or _same_score
    operator = torch.ops.higher_order.flex_attention
    out, sums, *_ = operator(query, key, value, score, _block_mask(table).as_tuple(), scale, {})
    return out, sums * _LN2


def _block_mask(table: BlockTable) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    first, *blocks = table
    tokens = first.shape[-1]

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= first[row, query])

    return BlockMask((tokens, tokens), *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=is_visible)


def _score_function(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def bounded(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return bounded


def _same_score(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score


class Borders(NamedTuple):
    """The samples of packed rows, for `attend_varlen`."""

    cu_seqlens: Tensor  # int32, over all rows
    longest: int
    window: int = 0  # tokens that one attends to, itself included; 0: all of its sample up to itself


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, borders: Borders, *, scale: float | None = None) -> Tensor:
    """Causal attention within each sample, (rows, heads, tokens, size); keys may have fewer heads.

    On a GPU by flash attention, in 16 bits; on a CPU sample by sample.
    """
    if query.device.type == "cpu":
        return _attend_each(query, key, value, borders, scale)
    rows, heads, tokens, _ = query.shape
    ends, longest, window = borders
    # before torch 2.12 it takes keys with fewer heads without being told
    options = {"enable_gqa": heads != key.shape[1]} if "enable_gqa" in _VARLEN_OPTIONS else {}
    out = varlen_attn(
        _flatten(query), _flatten(key), _flatten(value), ends, ends, longest, longest,
        scale=scale, window_size=(window - 1 if window else -1, 0), **options,
    )  # fmt: skip
    return out.view(rows, tokens, heads, -1).transpose(1, 2)


def _flatten(states: Tensor) -> Tensor:
    """(rows, heads, tokens, size) as (rows * tokens, heads, size)."""
    return states.transpose(1, 2).flatten(0, 1)


def _attend_each(query: Tensor, key: Tensor, value: Tensor, borders: Borders, scale: float | None) -> Tensor:
    """Attention of one sample after the other."""
    ends, window = borders.cu_seqlens.tolist(), borders.window
    rows, heads, tokens, _ = query.shape
    repeats = heads // key.shape[1]
    states = [_flatten(query), *(_flatten(each).repeat_interleave(repeats, 1) for each in (key, value))]
    outputs = []
    for start, end in itertools.pairwise(ends):
        sample = [each[start:end].transpose(0, 1) for each in states]
        near = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        near = near.triu(1 - window) if window else near
        attended = functional.scaled_dot_product_attention(*sample, attn_mask=near, scale=scale)
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs).view(rows, tokens, heads, -1).transpose(1, 2)


def triangle_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """The causal mask of the last queries of all keys.

    A compiled graph cannot make the one that flash attention takes without memory, nor can a block under selective
    checkpointing: its modes make tensors of another class.
    """
    if torch.compiler.is_compiling():
        return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    with _disable_current_modes():
        return causal_lower_right(queries, keys)
