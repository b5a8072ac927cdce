"""Attention of a slice of the tokens to all tokens up to its end, through transformers' attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.slices import KeptKeys, Slice, StageSlices
from zeropipe.engine.torch_private.attention import triangle_mask
from zeropipe.engine.torch_private.compile import GraphBreak
from zeropipe.engine.transformers_private import attention_function, split_attention

Attention = Callable[..., tuple[Tensor, Tensor | None]]


class SliceAttention(NamedTuple):
    """How the attention modules of a stage with slices attend; each has it as `slice_attention`."""

    slices: StageSlices
    run: Attention  # the model's own function


def slice_stage(stage: HFStage) -> None:
    """Let a stage run slices of sequences, in place."""
    stage.slices = slices = StageSlices(stage.packing.rotary)
    split_attention(stage.lm, attend, "slices")
    for block in stage.blocks:
        for module in block.modules():
            if (run := attention_function(module)) is not None:
                module.slice_attention = SliceAttention(slices, run)  # type: ignore[assignment]


@GraphBreak
def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention of transformers' interface: tensors are (rows, heads, tokens, width)."""
    sliced: SliceAttention = module.slice_attention  # type: ignore[assignment]
    kwargs.pop("position_ids", None)  # of its own tokens: flash attention would look for packed sequences in them
    found = sliced.slices.of(module)
    if found is not None:
        part, kept = found
        key, value = _KeepKeys.apply(kept, part, key, value)
        if attention_mask is None and part.begin:
            attention_mask = triangle_mask(query.shape[2], part.end, query.device)
    return sliced.run(module, query, key, value, attention_mask, **kwargs)


class _KeepKeys(torch.autograd.Function):
    """Of the keys and values of a slice, those of all tokens up to its end."""

    @staticmethod
    def forward(ctx: Any, kept: KeptKeys, part: Slice, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.kept, ctx.part = kept, part
        return kept.add(tensors, part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.kept.add_gradients(gradients, ctx.part))
