"""One stage of which each process of `cp` runs a part of every sequence: its inputs, masks and sums.

Every process gets the whole microbatch. It takes its tokens of it, with their positions; masks are made of the whole
rows. Sequences are padded where their length does not divide: a token at the end changes none before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropipe.core.model.cp_exchange import HEADS
from zeropipe.engine.mesh.cp_attention import SplitAttention, attend, join_parts
from zeropipe.engine.mesh.tp_collectives import Copy, Reduce, TPGroup
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.packed_attention import Samples, attend_within
from zeropipe.engine.stages.packing import rotary_of_rows
from zeropipe.engine.stages.sequence_parts import SequenceParts
from zeropipe.engine.transformers_private import SplitRows, attention_function, masks_of_rows, split_attention

_PER_TOKEN = {"position_ids": 0, "sample_lengths": 1, "attention_mask": 0}  # inputs of whole rows, and their padding


def split_stage(stage: HFStage, group: TPGroup, exchange: str) -> None:
    """Let a stage run this process's part of every sequence, in place."""
    split_attention(stage.lm, attend)
    for block in stage.blocks:
        for module in block.modules():
            if (run := attention_function(module)) is not None:
                module.split_attention = SplitAttention(group, exchange, run)  # type: ignore[assignment]
    stage.context = ContextPart(group, stage, exchange)


class ContextPart:
    """This process's part of the sequences that a stage gets."""

    def __init__(self, group: TPGroup, stage: HFStage, exchange: str) -> None:
        self.group, self.parts, self.exchange = group, SequenceParts(group.rank, group.size), exchange
        self._stage = stage

    def take(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """This process's tokens of whole rows, which are padded with `fill`."""
        length = x.shape[dim]
        missing = self._padded(length) - length
        if missing:
            shape = [*x.shape]
            shape[dim] = missing
            x = torch.cat([x, x.new_full(shape, fill)], dim)
        return self.parts.take(x, dim)

    def _padded(self, length: int) -> int:
        return self.parts.padded(length, self._stage.sequence_shards)

    def pick(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of HFStage.forward for this process's tokens, of those for whole rows."""
        ids = inputs["input_ids"]
        length = ids.shape[-1]
        missing = self._padded(length) - length
        rows = {
            name: nn.functional.pad(inputs[name], (0, missing), value=fill)
            for name, fill in _PER_TOKEN.items()
            if inputs.get(name) is not None
        }
        positions = rows.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=ids.device)[None]
        picked = {**inputs, **rows, "input_ids": self.take(ids, -1), "position_ids": self.take(positions, -1)}
        picked["row_positions"] = rows.get("position_ids")
        if missing and "cu_seq_lens_q" in picked:  # the padding is a sequence of its own
            end = picked["cu_seq_lens_q"].new_tensor([length + missing])
            picked |= {f"cu_seq_lens_{side}": torch.cat([picked[f"cu_seq_lens_{side}"], end]) for side in "qk"}
        if missing and picked.get("samples") is not None:
            picked["samples"] = picked["samples"].padded(length + missing)
        mask = rows.get("attention_mask")
        if mask is None and missing:
            mask = nn.functional.pad(torch.ones_like(ids), (0, missing))
        if mask is not None:
            picked["token_mask"] = self.parts.take(mask, -1)
        return picked

    def refusal(self, microbatch: Mapping[str, Any]) -> str | None:
        """Why a part of a microbatch cannot run; None if it can."""
        if microbatch.get("token_type_ids") is not None:
            return f"a microbatch has token_type_ids: must have none with cp={self.group.size}"
        mask = microbatch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() != 2:
            return (
                f"a microbatch has an attention_mask of shape {tuple(mask.shape)}: must be (sequences, tokens) with "
                f"cp={self.group.size}"
            )
        return None

    @contextmanager
    def whole_rows(
        self,
        length: int,
        positions: Tensor | None,
        is_packed: bool,
        sample_lengths: Tensor | None,
        samples: Samples | None,
    ) -> Iterator[None]:
        """Run a forward of a part of `length` tokens, with the masks and rotary embeddings of whole rows."""
        packing = self._stage.packing
        total = length * self.group.size
        with ExitStack() as stack:
            chunks = self.parts.chunks(total) if self.exchange != HEADS else None
            stack.enter_context(masks_of_rows(SplitRows(total, chunks, positions, is_packed)))
            if samples is not None and packing.attention is not None and chunks is None:
                stack.enter_context(attend_within(samples, packing.attention))
            if packing.rotary:
                rows = torch.arange(total)[None] if positions is None else positions
                stack.enter_context(
                    rotary_of_rows(packing.rotary, rows, sample_lengths, lambda x: self.parts.take(x, -2))
                )
            yield

    def sum(self, x: Tensor) -> Tensor:
        """The sum over processes, each of which has a loss of its own made of it."""
        return Copy.apply(Reduce.apply(x, self.group), self.group)

    # losses

    def next_labels(self, labels: Tensor, ignore: int) -> Tensor:
        """For each token of this process the label of the token after it."""
        return self.take(nn.functional.pad(labels[..., 1:], (0, 1), value=ignore), -1, ignore)

    def gather(self, x: Tensor, length: int) -> Tensor:
        """Whole rows of (rows, tokens, ...), without a gradient."""
        return join_parts(x, 1, self.group)[:, :length]

    def gather_output(self, output: Any, length: int) -> Any:
        """Whole rows of a last stage's output, for a loss that every process computes alike."""
        first, *rest = output if isinstance(output, tuple) else (output,)
        local = first.to_local() if isinstance(first, DTensor) else first
        whole = _GatherAlike.apply(local, self.group)[:, :length]
        if isinstance(first, DTensor):  # sharded over the vocabulary
            shape = (*whole.shape[:-1], first.shape[-1])
            stride = torch.empty(shape, device="meta").stride()
            whole = DTensor.from_local(
                whole, first.device_mesh, first.placements, run_check=False, shape=shape, stride=stride
            )
        return (whole, *(_Alike.apply(one, self.group.size) for one in rest)) if rest else whole


class _GatherAlike(torch.autograd.Function):
    """Whole rows, whose gradient is the same on every process: each takes its tokens of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TPGroup) -> Tensor:
        ctx.group = group
        return join_parts(x, 1, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return SequenceParts(ctx.group.rank, ctx.group.size).take(dy, 1), None


class _Alike(torch.autograd.Function):
    """A value of which every process has the same gradient, where gradients are summed: each passes its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy / ctx.size, None
