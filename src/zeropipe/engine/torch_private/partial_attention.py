"""Attention to some of the keys, with the logarithm of each token's sum of exponentials, by which parts are merged.

By torch's flash kernels where there is no mask, else by matrix products of a few queries at a time. The backward takes
the output and the sums over all keys, so it needs nothing of the other parts. Before its first use on a GPU, a kernel
is compared with the products: one that differs is not used.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_SCORES = 1 << 24  # that the products have in memory at a time
_aten = torch.ops.aten


class Part(NamedTuple):
    """Which keys queries attend to: all, those before them (of as many keys), or what a mask says."""

    scale: float
    is_causal: bool = False
    mask: Tensor | None = None  # (rows, 1 or heads, queries, keys): whether they attend, or what is added to scores


def attend_part(query: Tensor, key: Tensor, value: Tensor, part: Part) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """The output, the sums, and what the backward needs. Tensors are (rows, heads, tokens, width)."""
    if not _has_kernel(query, value, part):
        return (*_attend_in_blocks(query, key, value, part), ())
    return _run_kernel(query, key, value, part)


def _run_kernel(query: Tensor, key: Tensor, value: Tensor, part: Part) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    key, value = (_repeat(x, query) for x in (key, value))
    if query.device.type == "cpu":
        out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, part.is_causal, attn_mask=None, scale=part.scale
        )
        return out, sums, ()
    out, sums, *more = _aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, part.is_causal, False, scale=part.scale
    )
    return out, sums, tuple(more[:6])


def attend_part_backward(
    gradient: Tensor, tensors: tuple[Tensor, Tensor, Tensor], out: Tensor, sums: Tensor, part: Part,
    more: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values. `out` and `sums` are over all parts."""
    query, _, value = tensors
    if not _has_kernel(query, value, part):
        return _differentiate_in_blocks(gradient, tensors, out, sums, part)
    return _run_kernel_backward(gradient, tensors, out, sums, part, more)


def _run_kernel_backward(
    gradient: Tensor, tensors: tuple[Tensor, Tensor, Tensor], out: Tensor, sums: Tensor, part: Part,
    more: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    query, key, value = tensors
    heads = key.shape[1]
    key, value = (_repeat(x, query) for x in (key, value))
    gradient, query, out, sums = (x.contiguous() for x in (gradient, query, out, sums))  # kernels read sums in order
    if query.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, sums, 0.0, part.is_causal, attn_mask=None, scale=part.scale
        )
    else:
        cu_queries, cu_keys, max_queries, max_keys, state, unused = more
        found = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, sums, cu_queries, cu_keys, max_queries, max_keys, 0.0, part.is_causal,
            state, unused, scale=part.scale,
        )  # fmt: skip
    dq, dk, dv = found
    return dq, *(x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))


def _has_kernel(query: Tensor, value: Tensor, part: Part) -> bool:
    width = query.shape[-1]
    if part.mask is not None or value.shape[-1] != width:
        return False
    if query.device.type == "cpu":
        return True
    fits = query.dtype.itemsize == 2 and width % 8 == 0 and width <= 256
    return fits and is_kernel_right(query.device, query.dtype, width)


@functools.cache
def is_kernel_right(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether a kernel agrees with the products, for the second half of some queries; a warning if not."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(2, 4, 64, width, generator=generator).to(device, dtype) for _ in range(4))
    gradient, query, key, value = (x[:, :, 32:] for x in drawn)
    for part in (Part(width**-0.5), Part(width**-0.5, is_causal=True)):
        out, sums, more = _run_kernel(query, key, value, part)
        wide = [x.float() for x in (query, key, value)]
        wanted, wanted_sums = _attend_in_blocks(wide[0], wide[1], wide[2], part)
        found = _run_kernel_backward(gradient, (query, key, value), out, sums, part, more)
        gradients = _differentiate_in_blocks(gradient.float(), (wide[0], wide[1], wide[2]), wanted, wanted_sums, part)
        for one, other in zip((out, sums, *found), (wanted, wanted_sums, *gradients), strict=True):
            if not bool((one - other).abs().max() <= 0.02 * other.abs().max()):
                warnings.warn(f"torch's flash kernel differs for {dtype} on {device}: not used for parts", stacklevel=2)
                return False
    return True


def _repeat(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values for all heads."""
    repeats = query.shape[1] // x.shape[1]
    return x.repeat_interleave(repeats, 1) if repeats > 1 else x


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
    for some in _blocks(query, key):
        scores = _scores(query, key, part, some)
        sums.append(scores.logsumexp(-1))
        outs.append(_weights(scores, sums[-1]) @ value.to(scores.dtype)[:, :, None])
    return torch.cat(outs, 3).flatten(1, 2), torch.cat(sums, 3).flatten(1, 2)


def _differentiate_in_blocks(
    gradient: Tensor, tensors: tuple[Tensor, Tensor, Tensor], out: Tensor, sums: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = tensors
    heads, dtype = key.shape[1], sums.dtype
    keys, values = (x.to(dtype)[:, :, None] for x in (key, value))
    dk, dv, found = torch.zeros_like(keys), torch.zeros_like(values), []
    for some in _blocks(query, key):
        queries, dy, y = (_take(x, heads, some).to(dtype) for x in (query, gradient, out))
        weights = _weights(_scores(query, key, part, some), sums.unflatten(1, (heads, -1))[:, :, :, some])
        dscores = weights * (dy @ values.mT - (dy * y).sum(-1, keepdim=True)) * part.scale
        found.append(dscores @ keys)
        dk += (dscores.mT @ queries).sum(2, keepdim=True)
        dv += (weights.mT @ dy).sum(2, keepdim=True)
    return torch.cat(found, 3).flatten(1, 2), dk[:, :, 0], dv[:, :, 0]


def _blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Queries whose scores are in memory at the same time."""
    rows, heads, length, _ = query.shape
    size = max(1, MAX_SCORES // (rows * heads * key.shape[2]))
    for begin in range(0, length, size):
        yield slice(begin, begin + size)


def _take(x: Tensor, heads: int, some: slice) -> Tensor:
    """Some tokens of (rows, heads of queries, ...) as (rows, heads of keys, heads of queries of each, ...)."""
    return x.unflatten(1, (heads, -1))[:, :, :, some]


def _scores(query: Tensor, key: Tensor, part: Part, some: slice) -> Tensor:
    """Those of some queries, (rows, heads of keys, heads of queries of each, queries, keys), in 32 bits at least."""
    heads, dtype = key.shape[1], torch.promote_types(query.dtype, torch.float32)
    scores = _take(query, heads, some).to(dtype) @ key.to(dtype)[:, :, None].mT * part.scale
    mask = part.mask
    if part.is_causal:
        index = torch.arange(key.shape[2], device=key.device)
        mask = (index <= index[some, None])[None, None]
        return scores.masked_fill(~mask[:, :, None], float("-inf"))
    if mask is None:
        return scores
    mask = mask[:, :, None, some] if mask.shape[1] == 1 else _take(mask, heads, some)
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(dtype)


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    """Exponentials of scores over the sums; 0 for a token that attends to nothing."""
    return (scores - sums.masked_fill(sums == float("-inf"), 0.0)[..., None]).exp()
