"""The rows of a step -> the microbatches of each pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeropipe.train.data.rows import IntArray
from zeropipe.train.data.store import IGNORE_INDEX, Samples


@dataclass(frozen=True)
class Batch:
    """The microbatches of one pipeline for a step, and facts about those of all pipelines."""

    microbatches: list[dict[str, Tensor]]  # of this pipeline, on the CPU
    num_tokens: int  # with a loss, of all pipelines
    num_processed: int  # of all pipelines, without padding
    lengths: tuple[int, ...]  # of what attends within itself, of all pipelines: samples and padding, or padded rows
    samples: tuple[int, ...]  # of all pipelines, in the order of the data
    epoch: float  # passes over the data after this batch

    @property
    def num_positions(self) -> int:
        """Of all pipelines, padding included."""
        return sum(self.lengths)


@dataclass(frozen=True)
class BatchLayout:
    """How rows are distributed over pipelines and microbatches."""

    num_pipelines: int
    microbatch: int  # rows
    sequence: int
    is_packed: bool  # then all rows are padded to `sequence`, so that shapes are constant
    multiple: int = 1  # lengths are padded to a multiple of this
    is_even: bool = False  # all pipelines must have the same number of microbatches

    def padded_length(self, longest: int) -> int:
        """The length of a microbatch whose longest row has `longest` tokens."""
        return self.sequence if self.is_packed else -(-longest // self.multiple) * self.multiple


def build_batch(rows: Sequence[int], samples: Samples, layout: BatchLayout, pipeline: int, epoch: float) -> Batch:
    """The batch of one pipeline for the rows of a step."""
    members = [samples.samples_in_row(row) for row in rows]
    lengths = [int(samples.lengths(one).sum()) for one in members]
    microbatches: list[dict[str, Tensor]] = []
    attended: list[int] = []
    assigned = assign_rows(lengths, layout.num_pipelines, layout.microbatch, layout.is_even)
    for number, groups in enumerate(assigned):
        for group in groups:
            length = layout.padded_length(max((lengths[index] for index in group), default=2))
            attended += _attended_lengths([members[index] for index in group], samples, length, layout.is_packed)
            if number == pipeline:
                own = [members[index] for index in group]
                microbatches.append(_build_microbatch(own, samples, length, layout.is_packed))
    every = np.concatenate(members)
    num_tokens = int(samples.loss_counts(every).sum())
    num_processed = int(samples.lengths(every).sum())
    return Batch(microbatches, num_tokens, num_processed, tuple(attended), tuple(every.tolist()), epoch)


def _attended_lengths(rows: Sequence[IntArray], samples: Samples, length: int, is_packed: bool) -> list[int]:
    """The lengths of the parts of a microbatch that attend within themselves."""
    if not is_packed or not rows:
        return [length] * max(1, len(rows))
    found: list[int] = []
    for row in rows:
        lengths = samples.lengths(row).tolist()
        found += lengths if sum(lengths) == length else [*lengths, length - sum(lengths)]
    return found


def assign_rows(
    lengths: Sequence[int], num_pipelines: int, microbatch: int, is_even: bool = False
) -> list[list[tuple[int, ...]]]:
    """The rows of each microbatch of each pipeline. An empty microbatch stands for one row without a loss.

    Rows of similar lengths share a microbatch: that needs the least padding, and the largest microbatch is as small as
    possible. Then each microbatch, the largest first, goes to the pipeline with the fewest tokens. The numbers of
    microbatches differ by at most one, and are at least one. With `is_even`, empty microbatches make them equal.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    number = max(-(-len(order) // microbatch), min(len(order), num_pipelines))
    ends = [len(order) * (index + 1) // number for index in range(number)]
    groups = [tuple(order[start:end]) for start, end in zip([0, *ends], ends)]
    sizes = [len(group) * lengths[group[0]] for group in groups]
    pipelines: list[list[tuple[int, ...]]] = [[] for _ in range(num_pipelines)]
    load = [0] * num_pipelines
    base, num_larger = divmod(number, num_pipelines)
    for index in sorted(range(number), key=lambda index: -sizes[index]):
        limit = base + (num_larger > sum(len(groups) > base for groups in pipelines))
        chosen = min((p for p in range(num_pipelines) if len(pipelines[p]) < limit), key=lambda p: (load[p], p))
        pipelines[chosen].append(groups[index])
        load[chosen] += sizes[index]
    least = max(map(len, pipelines)) if is_even else 1
    return [groups + [()] * (least - len(groups)) for groups in pipelines]


def _build_microbatch(rows: Sequence[IntArray], samples: Samples, length: int, is_packed: bool) -> dict[str, Tensor]:
    """The tensors of a microbatch, named as the forward of Hugging Face models takes them."""
    shape = (max(1, len(rows)), length)
    ids, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE_INDEX, dtype=np.int64)
    positions, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    boundaries = [0]  # of samples, over all rows
    for row in range(shape[0]):
        end = 0
        for sample in rows[row] if rows else ():
            tokens, targets = samples.read(int(sample))
            start, end = end, end + len(tokens)
            ids[row, start:end], labels[row, start:end] = tokens, targets
            positions[row, start:end] = np.arange(len(tokens))
            mask[row, start:end] = 1
            boundaries.append(row * length + end)
        if end < length:  # padding counts as a sequence of its own
            positions[row, end:] = np.arange(length - end)
            boundaries.append((row + 1) * length)
    arrays = {"input_ids": ids, "labels": labels}
    if is_packed:
        arrays |= {"position_ids": positions, "cu_seqlens": np.array(boundaries, dtype=np.int32)}
    elif rows and not mask.all():
        arrays["attention_mask"] = mask
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
