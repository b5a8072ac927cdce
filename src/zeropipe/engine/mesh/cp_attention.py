"""Attention of a part of the tokens: what it needs of the others comes from the other processes of `cp`.

transformers' models call their attention through one interface, so `attend` stands in for it in all of them. It
exchanges tensors and calls the model's own attention function, with masks of whole rows (`transformers_private`).

heads   each process attends with some heads for all tokens: two all-to-alls, of queries, keys and values, and of the
        result (DeepSpeed-Ulysses). With fewer key heads than processes, several get the same one.
gather  each process gathers the keys and values of all tokens, and attends with its own queries.
ring    keys and values are passed round a ring (`ring_attention`): each process has those of two others at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeropipe.core.model.cp_exchange import HEADS, RING, AttentionHeads, Exchange, parse_exchange
from zeropipe.engine.mesh.ring_attention import attend_around_ring
from zeropipe.engine.mesh.tp_collectives import TPGroup, all_gather, all_to_all, reduce_scatter
from zeropipe.engine.stages.sequence_parts import SequenceParts
from zeropipe.engine.stages.small_model import nonzero_dropout
from zeropipe.engine.torch_private.attention import triangle_mask
from zeropipe.engine.transformers_private import base_implementation
from zeropipe.errors import ConfigError

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class SplitAttention(NamedTuple):
    """How the attention modules of a stage attend; each has it as `split_attention`."""

    group: TPGroup
    exchange: str
    run: Attention  # the model's own function

    @property
    def parts(self) -> SequenceParts:
        return SequenceParts(self.group.rank, self.group.size)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention of transformers' interface: tensors are (rows, heads, tokens, width)."""
    split: SplitAttention = module.split_attention  # type: ignore[assignment]
    kwargs.pop("position_ids", None)  # of its own tokens: flash attention would look for packed sequences in them
    if split.exchange == RING:
        return attend_around_ring(module, split.group, (query, key, value), attention_mask, kwargs), None
    run = _attend_by_heads if split.exchange == HEADS else _attend_with_all_keys
    return run(module, split, (query, key, value), attention_mask, kwargs), None


Tensors = tuple[Tensor, Tensor, Tensor]


def _attend_with_all_keys(
    module: nn.Module, split: SplitAttention, tensors: Tensors, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    query, key, value = tensors
    key, value = (gather_tokens(x, 2, split.group) for x in (key, value))
    if mask is not None or not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        return split.run(module, query, key, value, mask, **kwargs)[0]
    found = []  # a chunk attends to all tokens up to its end
    for chunk, some in zip(split.parts.chunks(key.shape[2]), query.chunk(2, 2)):
        before = slice(chunk.stop)
        triangle = triangle_mask(len(chunk), chunk.stop, query.device)
        found.append(split.run(module, some, key[:, :, before], value[:, :, before], triangle, **kwargs)[0])
    return torch.cat(found, 1)


def _attend_by_heads(
    module: nn.Module, split: SplitAttention, tensors: Tensors, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    query, key, value = tensors
    size, heads = split.group.size, query.shape[1]
    copies = size // gcd(key.shape[1], size)
    if copies > 1:
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    own = range(heads // size * split.group.rank, heads // size * (split.group.rank + 1))
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == heads > 1:  # else a table of packed samples
        mask = mask[:, own.start : own.stop]
    kwargs = {
        name: value[own.start : own.stop] if isinstance(value, Tensor) and value.shape == (heads,) else value
        for name, value in kwargs.items()
    }
    query, key, value = _TokensToHeads.apply(split.group, query, key, value)
    found, _ = split.run(_HeadsOf(module, heads, own, copies), query, key, value, mask, **kwargs)
    return _HeadsToTokens.apply(split.group, found)


class _HeadsOf:
    """An attention module as its attention function sees it, of which only some heads are there."""

    def __init__(self, module: nn.Module, heads: int, own: range, copies: int) -> None:
        self._module, self._heads, self._own = module, heads, own
        if (groups := getattr(module, "num_key_value_groups", None)) is not None:
            self.num_key_value_groups = groups // copies

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, Tensor) and value.shape == (self._heads,):  # sinks, one for each head
            return value[self._own.start : self._own.stop]
        return value


class _TokensToHeads(torch.autograd.Function):
    """Of several (rows, heads, own tokens, width) all tokens of own heads."""

    @staticmethod
    def forward(ctx: Any, group: TPGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _to_heads(group, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_to_tokens(ctx.group, gradients, 1, 2))


class _HeadsToTokens(torch.autograd.Function):
    """Of (rows, all tokens, own heads, width) own tokens of all heads."""

    @staticmethod
    def forward(ctx: Any, group: TPGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return _to_tokens(group, (x,), 2, 1)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, _to_heads(ctx.group, (dy.transpose(1, 2),))[0].transpose(1, 2)


def _to_heads(group: TPGroup, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    parts = SequenceParts(group.rank, group.size)
    received = _exchange([x.chunk(group.size, 1) for x in tensors], group)
    return tuple(parts.join(some, 2) for some in received)


def _to_tokens(group: TPGroup, tensors: Sequence[Tensor], heads: int, tokens: int) -> tuple[Tensor, ...]:
    """The other way, of tensors with these dimensions of heads and tokens."""
    parts = SequenceParts(group.rank, group.size)
    received = _exchange([parts.cut(x, tokens) for x in tensors], group)
    return tuple(torch.cat(some, heads) for some in received)


def _exchange(sent: Sequence[Sequence[Tensor]], group: TPGroup) -> list[list[Tensor]]:
    """Send the i-th of each list to process i, in one message; returns what they sent to this one."""
    flat = torch.stack([torch.cat([some[i].reshape(-1) for some in sent]) for i in range(group.size)])
    received = all_to_all(flat, group).split([some[0].numel() for some in sent], 1)
    return [[row.view(some[0].shape) for row in rows] for rows, some in zip(received, sent)]


def gather_tokens(x: Tensor, dim: int, group: TPGroup) -> Tensor:
    """All tokens, of the parts of all processes along a dimension; gradients are summed over processes."""
    return _GatherTokens.apply(x, dim, group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TPGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return join_parts(x, dim, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        parts = torch.cat(SequenceParts(group.rank, group.size).cut(dy, ctx.dim))
        return reduce_scatter(parts, 0, group), None, None


def join_parts(x: Tensor, dim: int, group: TPGroup) -> Tensor:
    """All tokens, of the parts of all processes, without a gradient."""
    return SequenceParts(group.rank, group.size).join(all_gather(x, 0, group).chunk(group.size), dim)


def has_copied_keys(config: Any, tp: int, cp: int) -> bool:
    """Whether several processes get the same key heads, where heads are exchanged."""
    heads = getattr(config.get_text_config(), "num_key_value_heads", None)
    return isinstance(heads, int) and (heads // tp) % cp != 0


def require_exchange(
    exchange: object, config: Any, tp: int, cp: int, sequence: int | None = None, *, crosses: bool = False
) -> Exchange:
    """The exchange of attention for a model, by its config; ConfigError for one that it cannot have."""
    implementation = base_implementation(config._attn_implementation)
    heads = read_heads(config, tp)
    has_keys = implementation in ("eager", "sdpa")  # attends with other keys than those of its own tokens
    if exchange == RING and not has_keys:
        raise ConfigError(f"cp_exchange='ring' with attn_implementation={implementation!r}: use 'sdpa', or heads")
    no_ring = "" if exchange == RING else _explain_no_ring(config, sequence)
    chosen = parse_exchange(exchange, heads, cp, sequence, crosses=crosses, no_ring=no_ring)
    if chosen.name != HEADS and not has_keys:
        raise ConfigError(
            f"attn_implementation={implementation!r} with cp={cp}: its heads cannot be exchanged, as cp x tp must "
            f"divide num_attention_heads={heads.total}; use attn_implementation='sdpa', or another cp"
        )
    return chosen


def read_heads(config: Any, tp: int) -> AttentionHeads:
    """The heads of a model, by its config."""
    config = config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "qk_rope_head_dim")
    total, keys, hidden, size, rotary = (_read_integer(config, name) for name in names)
    if _read_integer(config, "kv_lora_rank"):  # latent attention: each head has a key of its own
        keys, width = total, _read_integer(config, "qk_nope_head_dim") + rotary + _read_integer(config, "v_head_dim")
    else:
        width = 2 * (size or hidden // max(1, total))
    return AttentionHeads(total or None, keys or total, width, tp)


def _read_integer(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _explain_no_ring(config: Any, sequence: int | None) -> str:
    """Why "auto" takes no ring for a model whose attention has dropout or windows; what else it has, `cp_check` finds.

    With windows a ring computes matrix products, which are slower than the kernels that attend to gathered keys.
    """
    fields = config.get_text_config().to_dict()
    drops = [f"{name}={value:g}" for name, value in nonzero_dropout(fields).items() if "att" in name]
    if drops:
        return f"attention has dropout ({', '.join(drops)})"
    window, types = fields.get("sliding_window"), fields.get("layer_types") or ["sliding"]
    has_window = isinstance(window, int) and window < (sequence or 0) and fields.get("use_sliding_window", True)
    return f"attention has windows of {window} tokens" if has_window and set(types) != {"full_attention"} else ""
