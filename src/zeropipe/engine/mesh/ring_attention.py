"""Attention of a part of the tokens with keys and values that are passed round a ring of the processes of `cp`.

Each process attends to the keys that it has, and passes them on meanwhile; so it never has those of more than two
processes. What it has attended to is merged by the logarithms of sums of exponentials. In the backward keys go round
again, and their gradients with them. Without a mask, work of parts that nobody attends to is left out: of a process
with earlier chunks the second one is later, of one with later chunks the first queries are earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.mesh.tp_collectives import TPGroup, rotate
from zeropipe.engine.stages.sequence_parts import SequenceParts
from zeropipe.engine.torch_private.compile import GraphBreak
from zeropipe.engine.torch_private.partial_attention import Part, attend_part, attend_part_backward
from zeropipe.errors import ConfigError

_REFUSED = {"softcap": "soft-caps", "s_aux": "sinks", "position_bias": "position biases"}


@GraphBreak
def attend_around_ring(
    module: nn.Module, group: TPGroup, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The attention of transformers' interface, (rows, tokens, heads, width); ConfigError for what it cannot do."""
    for name, words in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"cp_exchange='ring': attention has {words} ({name}); use heads or gather")
    if kwargs.get("dropout"):
        raise ConfigError(f"cp_exchange='ring': attention has dropout={kwargs['dropout']:g}; use heads or gather")
    if mask is None and not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ConfigError("cp_exchange='ring': tokens attend to later ones; use heads or gather")
    scale = kwargs.get("scaling")
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else float(scale)
    return _RingAttention.apply(group, scale, mask, *tensors).transpose(1, 2).contiguous()  # type: ignore[no-any-return]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TPGroup, scale: float, mask: Tensor | None, *tensors: Tensor) -> Tensor:
        query, *own = tensors
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:3], own[1].shape[-1], dtype=dtype)
        sums = query.new_full(query.shape[:3], float("-inf"), dtype=dtype)
        ctx.more = []
        for source, (key, value) in _pass_round(own, group):
            queries, keys, part = _choose(query.shape[2], source, group, scale, mask)
            found = attend_part(query[:, :, queries], key[:, :, keys], value[:, :, keys], part)
            _merge(out[:, :, queries], sums[:, :, queries], *found[:2])
            ctx.more.append(found[2])
        ctx.group, ctx.scale = group, scale
        out = out.to(query.dtype)
        ctx.save_for_backward(mask, *tensors, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        mask, query, *own, out, sums = ctx.saved_tensors
        group, scale, dtype = ctx.group, ctx.scale, sums.dtype
        dq = torch.zeros_like(query, dtype=dtype)
        totals = [torch.zeros_like(x, dtype=dtype) for x in own]
        arriving: Callable[[], Tensor] | None = None  # the sums of the process before
        for (source, (key, value)), more in zip(_pass_round(own, group), ctx.more, strict=True):
            queries, keys, part = _choose(query.shape[2], source, group, scale, mask)
            some = tuple(x[:, :, queries] for x in (gradient, query, out, sums))
            found = attend_part_backward(
                some[0], (some[1], key[:, :, keys], value[:, :, keys]), some[2], some[3], part, more
            )
            dq[:, :, queries] += found[0]
            if arriving is not None:
                totals = _unpack(arriving(), totals)
            for total, dx in zip(totals, found[1:], strict=True):
                total[:, :, keys] += dx
            arriving = rotate(_pack(totals), group)  # while the next part is computed
        assert arriving is not None
        totals = _unpack(arriving(), totals)  # after the last part they are home
        return None, None, None, dq.to(query.dtype), *(dx.to(x.dtype) for dx, x in zip(totals, own, strict=True))


def _pass_round(own: Sequence[Tensor], group: TPGroup) -> Iterator[tuple[int, list[Tensor]]]:
    """The keys and values of each process, with its rank: its own ones first. The next ones are sent meanwhile."""
    here = list(own)
    for step in range(group.size):
        arriving = rotate(_pack(here), group) if step + 1 < group.size else None
        yield (group.rank - step) % group.size, here
        if arriving is not None:
            here = _unpack(arriving(), own)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [x.view(other.shape) for x, other in zip(flat.split([x.numel() for x in like]), like, strict=True)]


def _choose(length: int, source: int, group: TPGroup, scale: float, mask: Tensor | None) -> tuple[slice, slice, Part]:
    """The queries and the keys of process `source` that attend to each other, and how."""
    every, half = slice(None), length // 2
    if mask is not None:
        return every, every, Part(scale, mask=SequenceParts(source, group.size).take(mask, -1))
    if source == group.rank:  # its two chunks are in order
        return every, every, Part(scale, is_causal=True)
    return (every, slice(half), Part(scale)) if source < group.rank else (slice(half, None), every, Part(scale))


def _merge(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> None:
    """Add the attention to other keys, in place."""
    total = torch.logaddexp(sums, other_sums)
    safe = total.masked_fill(total == float("-inf"), 0.0)  # of a token that attends to nothing yet
    own_share, share = ((one - safe).exp()[..., None] for one in (sums, other_sums))
    out.mul_(own_share).add_(other * share)
    sums.copy_(total)
