"""The rows of a step, shared out to pipelines and made into microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeropipe.train.data.store import NO_LOSS, Samples


@dataclass(frozen=True)
class Batch:
    """What one pipeline is given for a step, and what all of them together have."""

    microbatches: list[dict[str, Tensor]]  # of this pipeline, on the CPU
    num_tokens: int  # with a loss, of all pipelines
    num_positions: int  # of all pipelines, padding included
    samples: tuple[int, ...]  # of all pipelines, in the order of the data
    epoch: float  # passes over the data when this batch is done


@dataclass(frozen=True)
class Form:
    """How rows are made into microbatches."""

    num_pipelines: int
    microbatch: int  # rows
    sequence: int
    is_packed: bool  # rows of several samples: all as long as `sequence`, so that shapes stay the same
    multiple: int = 1  # lengths are padded to a multiple of this
    is_even: bool = False  # pipelines must have the same number of microbatches

    def width(self, longest: int) -> int:
        """The length of a microbatch."""
        return self.sequence if self.is_packed else -(-longest // self.multiple) * self.multiple


def make_batch(rows: Sequence[int], samples: Samples, form: Form, pipeline: int, epoch: float) -> Batch:
    """The microbatches of one pipeline for the rows of a step."""
    inside = [samples.samples_of(row) for row in rows]
    lengths = [int(samples.lengths(one).sum()) for one in inside]
    own: list[dict[str, Tensor]] = []
    num_positions = 0
    for number, groups in enumerate(share(lengths, form.num_pipelines, form.microbatch, form.is_even)):
        for group in groups:
            width = form.width(max((lengths[index] for index in group), default=2))
            num_positions += width * max(1, len(group))
            if number == pipeline:
                own.append(_tensors([inside[index] for index in group], samples, width, form.is_packed))
    everyone = np.concatenate(inside)
    return Batch(own, int(samples.losses(everyone).sum()), num_positions, tuple(everyone.tolist()), epoch)


def share(
    lengths: Sequence[int], num_pipelines: int, microbatch: int, is_even: bool = False
) -> list[list[tuple[int, ...]]]:
    """For each pipeline the rows of its microbatches. One without rows stands for a row that has no loss.

    Rows of similar lengths are put together: that pads least, and the largest microbatch is no larger than in any other
    way. Then, from the largest on, each microbatch goes to the pipeline with the fewest tokens. All pipelines have the
    same number of microbatches, or one more; none has none. If it is to be even, one without rows stands for that one.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    number = max(-(-len(order) // microbatch), min(len(order), num_pipelines))
    ends = [len(order) * (index + 1) // number for index in range(number)]
    groups = [tuple(order[start:end]) for start, end in zip([0, *ends], ends)]
    costs = [len(group) * lengths[group[0]] for group in groups]
    pipelines: list[list[tuple[int, ...]]] = [[] for _ in range(num_pipelines)]
    load = [0] * num_pipelines
    fewest, larger = divmod(number, num_pipelines)
    for index in sorted(range(number), key=lambda index: -costs[index]):
        is_open = larger > sum(len(groups) > fewest for groups in pipelines)
        room = [p for p in range(num_pipelines) if len(pipelines[p]) < fewest + is_open]
        chosen = min(room, key=lambda p: (load[p], p))
        pipelines[chosen].append(groups[index])
        load[chosen] += costs[index]
    least = max(map(len, pipelines)) if is_even else 1
    return [groups + [()] * (least - len(groups)) for groups in pipelines]


def _tensors(rows: Sequence[Any], samples: Samples, width: int, is_packed: bool) -> dict[str, Tensor]:
    """A microbatch as the stages of Hugging Face models take it."""
    shape = (max(1, len(rows)), width)
    ids, labels = np.zeros(shape, dtype=np.int64), np.full(shape, NO_LOSS, dtype=np.int64)
    positions, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    borders = [0]
    for row in range(shape[0]):
        end = 0
        for sample in rows[row] if rows else ():
            tokens, wanted = samples.read(int(sample))
            start, end = end, end + len(tokens)
            ids[row, start:end], labels[row, start:end] = tokens, wanted
            positions[row, start:end] = np.arange(len(tokens))
            mask[row, start:end] = 1
            borders.append(row * width + end)
        if end < width:  # what fills the row counts as a sequence of its own
            positions[row, end:] = np.arange(width - end)
            borders.append((row + 1) * width)
    made = {"input_ids": ids, "labels": labels}
    if is_packed:
        made |= {"position_ids": positions, "cu_seqlens": np.array(borders, dtype=np.int32)}
    elif rows and not mask.all():
        made["attention_mask"] = mask
    return {name: torch.from_numpy(array) for name, array in made.items()}
