"""Slices of the sequences of a microbatch, which a stage runs one after the other.

A slice attends to the slices before it: their keys and values are kept by layer (`slice_attention`). Positions are
explicit, and masks are those of the rows up to the end of the slice. Gradients of kept keys are added up by the
backwards of later slices, which run first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeropipe.core.slices import token_bounds
from zeropipe.engine.stages.contract import Microbatch
from zeropipe.engine.stages.packing import rotary_of_rows
from zeropipe.engine.transformers_private import SplitRows, masks_of_rows

SLICE = "slice"  # the key of a microbatch's slice


class Slice(NamedTuple):
    """One slice of a microbatch: number `index` of those that begin and end at `bounds`."""

    index: int
    bounds: tuple[int, ...]

    @property
    def begin(self) -> int:
        return self.bounds[self.index]

    @property
    def end(self) -> int:
        return self.bounds[self.index + 1]

    @property
    def is_whole(self) -> bool:
        """Whether it has all tokens: nothing is kept for others."""
        return len(self.bounds) == 2

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Its tokens of whole rows."""
        return x.narrow(dim, self.begin, self.end - self.begin)

    def next_labels(self, labels: Tensor, ignore: int) -> Tensor:
        """For each of its tokens the label of the token after it, which for the last one is in the next slice."""
        return self.take(nn.functional.pad(labels[..., 1:], (0, 1), value=ignore), -1)


def cut_microbatches(microbatches: Sequence[Microbatch], shares: Sequence[float]) -> list[Microbatch]:
    """Each microbatch once per slice, with the slice; ConfigError for one that is too short."""
    cut: list[Microbatch] = []
    for microbatch in microbatches:
        bounds = token_bounds(microbatch["input_ids"].shape[-1], shares)
        cut += [{**microbatch, SLICE: Slice(index, bounds)} for index in range(len(shares))]
    return cut


class KeptKeys:
    """The keys and values of one layer and microbatch, of all slices so far, and sums of their gradients."""

    def __init__(self) -> None:
        self.whole: tuple[Tensor, ...] = ()
        self.sums: tuple[Tensor, ...] = ()

    def add(self, tensors: Sequence[Tensor], part: Slice) -> tuple[Tensor, ...]:
        """Write those of a slice, (rows, heads, tokens, width); returns those of all tokens up to its end."""
        if not self.whole:
            self.whole = tuple(x.new_empty(*x.shape[:2], part.bounds[-1], x.shape[3]) for x in tensors)
        # Through `data`, because autograd would take a view of earlier tokens for modified: later ones are written.
        for whole, x in zip(self.whole, tensors):
            part.take(whole.data, 2).copy_(x)
        return tuple(whole.data.narrow(2, 0, part.end) for whole in self.whole)

    def add_gradients(self, gradients: Sequence[Tensor], part: Slice) -> tuple[Tensor, ...]:
        """Add the gradients of all tokens up to the end of a slice; returns the sums for its own tokens."""
        if not self.sums and part.begin:
            self.sums = tuple(_zeros(x.narrow(2, 0, part.begin)) for x in gradients)
        own = []
        for number, gradient in enumerate(gradients):
            mine = part.take(gradient, 2)
            if self.sums:
                total, before = self.sums[number], min(part.begin, self.sums[number].shape[2])
                total.narrow(2, 0, before).add_(gradient.narrow(2, 0, before))
                if part.end <= total.shape[2]:
                    mine = (mine + part.take(total, 2)).to(gradient.dtype)
            own.append(mine)
        return tuple(own)


def _zeros(like: Tensor) -> Tensor:
    """Sums of 16-bit gradients are made in 32 bits."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


class StageSlices:
    """The slices of a stage: the one that runs, and what its microbatch's slices have kept."""

    def __init__(self, rotary: Sequence[nn.Module]) -> None:
        self._rotary = rotary
        self._kept: dict[int, dict[nn.Module, KeptKeys]] = {}  # by microbatch and attention module
        self._current: tuple[Slice, dict[nn.Module, KeptKeys]] | None = None

    def clear(self) -> None:
        """Release what a step has kept that did not end."""
        self._kept.clear()

    @contextmanager
    def during(self, part: Slice, microbatch: int, backward: bool) -> Iterator[None]:
        """Around the forward of a slice, or its backward, which may compute the forward again."""
        self._current = part, self._kept.setdefault(microbatch, {})
        try:
            yield
        finally:
            self._current = None
            if backward and part.index == 0:
                self._kept.pop(microbatch, None)

    def of(self, module: nn.Module) -> tuple[Slice, KeptKeys] | None:
        """The slice that runs, and what an attention module has kept; None for whole rows."""
        if self._current is None or self._current[0].is_whole:
            return None
        part, kept = self._current
        return part, kept.setdefault(module, KeptKeys())

    def pick(self, inputs: Mapping[str, Any], part: Slice | None) -> dict[str, Any]:
        """The inputs of HFStage.forward for a slice, of those for whole rows; None: for whole rows."""
        ids = inputs["input_ids"]
        length = ids.shape[-1]
        part = part or Slice(0, (0, length))
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        rows = torch.arange(length, device=ids.device)[None] if positions is None else positions
        picked = {**inputs, "input_ids": part.take(ids, -1), "position_ids": part.take(rows, -1), "part": part}
        picked |= {"row_positions": positions, "row_length": length}
        picked.pop("samples", None)  # kernels for packed samples know whole rows only: masks keep them apart
        if mask is not None:
            picked |= {"attention_mask": mask[..., : part.end], "token_mask": part.take(mask, -1)}
        return picked

    @contextmanager
    def rows(
        self, part: Slice, length: int, positions: Tensor | None, is_packed: bool, sample_lengths: Tensor | None
    ) -> Iterator[None]:
        """Run a forward of a slice with the masks and rotary embeddings of whole rows of `length` tokens."""
        seen = None if positions is None else positions[..., : part.end]
        with ExitStack() as stack:
            stack.enter_context(masks_of_rows(SplitRows(part.end, (range(part.begin, part.end),), seen, is_packed)))
            if self._rotary:
                whole = torch.arange(length)[None] if positions is None else positions
                stack.enter_context(rotary_of_rows(self._rotary, whole, sample_lengths, lambda x: part.take(x, -2)))
            yield

    def refusal(self, microbatch: Mapping[str, Any]) -> str | None:
        """Why the slices of a microbatch cannot run; None if they can."""
        if microbatch.get("token_type_ids") is not None:
            return "a microbatch has token_type_ids: must have none in a schedule with slices"
        mask = microbatch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() != 2:
            return (
                f"a microbatch has an attention_mask of shape {tuple(mask.shape)}: must be (sequences, tokens) in a "
                "schedule with slices"
            )
        return None
