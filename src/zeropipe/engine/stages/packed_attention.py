"""Attention of packed rows without a dense mask, whose size is the square of a row's length.

A model's layers call transformers' attention interface with a mask that its mask functions made. `use` registers one
implementation of both: in packed rows the mask is a small table and attention runs a kernel of
`torch_private.attention`; everything else runs the implementation that the model had.

With all masks that are known here a token attends to the tokens from a first one up to itself: the first of its sample,
of its window or of its chunk. Another mask stays dense. `Samples` makes the tables, once per microbatch for all layers
and stages of a rank.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zeropipe.engine.torch_private import attention as torch_attention
from zeropipe.engine.torch_private.attention import BlockTable, Borders
from zeropipe.engine.torch_private.tensors import sum_versions
from zeropipe.engine.transformers_private import Reach, has_flash, read_reach, wrap_attention
from zeropipe.errors import ConfigError

ATTENTION = ("auto", "sdpa", "flex", "varlen", "flash")
KERNELS = ("flex", "varlen")
MAX_VARLEN_HEAD, MIN_FLEX_HEAD = 256, 16  # elements of a head that the kernels can have


def resolve_attention(attention: str, device: torch.device) -> str:
    """The option `attention` on a device; ConfigError for a value that cannot run there."""
    if attention not in ATTENTION:
        raise ConfigError(f"attention={attention!r}: must be one of {', '.join(ATTENTION)}")
    if attention == "auto" and device.type != "cuda":
        return "sdpa"
    if attention == "varlen" and device.type == "cuda" and not torch_attention.HAS_VARLEN:
        raise ConfigError(f"attention='varlen': torch {torch.__version__} lacks it; use 'flex', or torch 2.11")
    if attention == "flash" and device.type != "cuda":
        raise ConfigError("attention='flash': it runs on a GPU only; use 'auto'")
    if attention == "flash" and not has_flash():
        raise ConfigError("attention='flash': the package flash-attn is missing; use 'auto', or pip install flash-attn")
    return attention


@dataclass(frozen=True)
class PackedAttention:
    """The kernels that keep a model's packed samples apart, and the option that chooses among them."""

    option: str
    refusals: Mapping[str, str | None] = field(default_factory=dict)  # kernel -> why it cannot run, or None
    head_sizes: frozenset[int] = frozenset()

    @property
    def is_possible(self) -> bool:
        """Whether a kernel can run the model: else it is left as it is."""
        return any(self.refusals.get(kernel) is None for kernel in KERNELS)

    def warn(self) -> None:
        """Say once that packed rows have a dense mask."""
        _warn_of_mask(f"packed rows have a dense mask, as with attention='sdpa': {self.refusals['flex']}")

    def choose(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """The kernel for packed rows; None for a dense mask. `flex` was never slower in bench/attention.py."""
        if self.option != "auto":
            return self.option
        if device.type != "cuda" or dtype.itemsize > 2:
            return None
        refusal = self._refuse("flex", all(size >= MIN_FLEX_HEAD for size in self.head_sizes))
        if refusal is None:
            return "flex"
        if torch_attention.HAS_VARLEN and self._refuse("varlen", self._has_varlen_heads) is None:
            return "varlen"
        _warn_of_mask(f"packed rows have a dense mask, as with attention='sdpa': {refusal}")
        return None

    @property
    def _has_varlen_heads(self) -> bool:
        return len(self.head_sizes) == 1 and all(size <= MAX_VARLEN_HEAD and size % 8 == 0 for size in self.head_sizes)

    def _refuse(self, kernel: str, has_sizes: bool) -> str | None:
        return self.refusals.get(kernel) or (None if has_sizes else f"heads of {sorted(self.head_sizes)} elements")


@functools.cache
def _warn_of_mask(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def find_head_sizes(config: Any) -> frozenset[int]:
    """The sizes of a model's heads: of queries and keys, and of values where these have others."""
    fields = config.to_dict()
    sizes = {value for name, value in fields.items() if name.endswith("head_dim") and isinstance(value, int)}
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not sizes and isinstance(hidden, int) and isinstance(heads, int):
        sizes = {hidden // heads}
    return frozenset(sizes)


class Samples:
    """The samples of a packed microbatch, and the tables made of them."""

    def __init__(self, cu_seqlens: Tensor, rows: int, tokens: int) -> None:
        starts = torch.arange(0, rows * tokens, tokens, dtype=torch.int32)
        self._shape = rows, tokens
        self._starts = starts[:, None]  # of the rows
        self._ends = torch.cat([cu_seqlens.detach().cpu().int(), starts]).unique()
        self._padded: dict[int, Samples] = {}
        self._tables: dict[tuple[str, Reach, torch.device], BlockTable | Borders] = {}

    def padded(self, tokens: int) -> Samples:
        """The samples of rows that are padded to so many tokens: the padding of a row is a sample of its own."""
        if tokens not in self._padded:
            rows, length = self._shape
            before, after = (end // length * (tokens - length) for end in (self._ends, (self._ends - 1).clamp(0)))
            row_ends = torch.arange(1, rows + 1, dtype=torch.int32) * tokens
            ends = torch.cat([self._ends + before, self._ends + after, row_ends])
            self._padded[tokens] = Samples(ends, rows, tokens)
        return self._padded[tokens]

    @property
    def are_packed(self) -> bool:
        """Whether a row has several samples."""
        return len(self._ends) - 1 > self._shape[0]

    @property
    def is_used(self) -> bool:
        """Whether a table was made."""
        return bool(self._tables)

    def table(self, kernel: str, reach: Reach, device: torch.device) -> BlockTable | Borders:
        """What a kernel needs to know about the samples."""
        key = kernel, reach, device
        if key not in self._tables:
            build = self._build_borders if kernel == "varlen" else self._build_block_table
            self._tables[key] = build(reach, device)
        return self._tables[key]

    def first_keys(self, reach: Reach) -> Tensor:
        """The first token that each token attends to, by its index in the row, (rows, tokens)."""
        rows, tokens = self._shape
        start = self._ends[:-1].repeat_interleave(self._ends.diff()).view(rows, tokens) - self._starts
        index = torch.arange(tokens, dtype=torch.int32)
        first = start if not reach.chunk else index - (index - start) % reach.chunk
        return torch.maximum(first, index + 1 - reach.window) if reach.window else first

    def _build_block_table(self, reach: Reach, device: torch.device) -> BlockTable:
        return torch_attention.build_block_table(self.first_keys(reach).to(device, non_blocking=True))

    def _build_borders(self, reach: Reach, device: torch.device) -> Borders:
        longest = int(self._ends.diff().max())
        return Borders(self._ends.to(device, non_blocking=True), longest, reach.window if reach.window < longest else 0)


_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # cu_seqlens -> its version and Samples


def find_samples(cu_seqlens: Tensor, rows: int, tokens: int) -> Samples:
    """The samples of a microbatch: the same object for all stages, as long as its `cu_seqlens` is not changed."""
    version = sum_versions([cu_seqlens])
    if cu_seqlens not in _found or _found[cu_seqlens][0] != version:
        _found[cu_seqlens] = version, Samples(cu_seqlens, rows, tokens)
    return _found[cu_seqlens][1]


_current: tuple[Samples, PackedAttention] | None = None


@contextmanager
def attend_within(samples: Samples, attention: PackedAttention) -> Iterator[None]:
    """Let mask functions make tables of these samples."""
    global _current
    before, _current = _current, (samples, attention)
    try:
        yield
    finally:
        _current = before


def use(lm: nn.Module) -> bool:
    """Let a model attend with this module's functions; False if it does not use transformers' interface."""
    name = wrap_attention(lm, _attend, _make_mask)
    if name is not None:
        lm.config._attn_implementation = name
    return name is not None


def _make_mask(base: Callable[..., Any], **given: Any) -> Any:
    """The mask function: a table for packed rows, and else the mask of the model's own implementation."""
    if _current is None or given.get("attention_mask") is not None:
        return base(**given)
    samples, attention = _current
    reach = read_reach(given["mask_function"])
    kernel = attention.choose(given["device"], given["dtype"])
    if kernel is None or (reach is None and attention.option == "auto"):
        return base(**given)
    if reach is None:
        raise ConfigError(f"attention={attention.option!r}: the model has a mask that is not causal; use 'sdpa'")
    if kernel == "varlen" and reach.chunk:
        raise ConfigError("attention='varlen': the model attends in chunks; use 'flex'")
    return samples.table(kernel, reach, torch.device(given["device"]))


def _attend(
    base: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **given: Any,
) -> tuple[Tensor, Any]:
    """The attention function: a kernel where the mask is a table, and else the model's own implementation."""
    mask = attention_mask
    if not isinstance(mask, BlockTable | Borders):
        return base(module, query, key, value, mask, **given)
    scale, softcap, sinks = given.get("scaling"), given.get("softcap"), given.get("s_aux")
    if given.get("dropout"):
        raise ConfigError("attention: kernels for packed rows have no dropout; use 'sdpa'")
    if isinstance(mask, BlockTable):
        out = torch_attention.attend_blocks(query, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
    elif softcap is None and sinks is None:
        out = torch_attention.attend_varlen(query, key, value, mask, scale=scale)
    else:
        raise ConfigError("attention='varlen': the model bounds scores, or has attention sinks; use 'flex'")
    return out.transpose(1, 2).contiguous(), None
