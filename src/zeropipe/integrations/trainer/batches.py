"""Batches of a data collator, in microbatches for the Engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zeropipe.errors import ConfigError

ROWS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels")
# what collators add for packed rows; the Engine computes it from the position ids
_PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
BATCH = "batch"  # key of a microbatch: the index of its batch among those of the step


def divide(batch: Mapping[str, Any], parts: int, index: int = 0) -> Iterator[dict[str, Any]]:
    """The microbatches of a batch: at most `parts`, each with some of its rows."""
    found = {name: value for name, value in batch.items() if name not in _PACKED and value is not None}
    for name, value in found.items():
        if name not in ROWS:
            raise ConfigError(
                f"a batch has {name}, which stages do not take: must be {', '.join(ROWS)}; leave it out in the collator"
            )
        if not isinstance(value, Tensor):
            raise ConfigError(f"a batch has {name} of type {type(value).__name__}: must be a Tensor")
    if "input_ids" not in found:
        raise ConfigError(f"a batch has {sorted(found)}: must have input_ids")
    num_rows = len(found["input_ids"])
    pieces = {name: value.tensor_split(min(parts, num_rows)) for name, value in found.items()}
    for number in range(min(parts, num_rows)):
        microbatch: dict[str, Any] = {name: piece[number] for name, piece in pieces.items()}
        if "position_ids" in microbatch and "attention_mask" not in microbatch:
            microbatch["cu_seqlens"] = borders(microbatch["position_ids"])
        yield microbatch | {BATCH: index}


def borders(position_ids: Tensor) -> Tensor:
    """The start of each sample in packed rows, and the number of all tokens: a sample ends where positions do not grow.

    >>> borders(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]))
    tensor([ 0,  3,  5, 10], dtype=torch.int32)
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=-1) != 1
    end = torch.tensor([position_ids.numel()], device=position_ids.device)
    return torch.cat([starts.flatten().nonzero().flatten(), end]).to(torch.int32)
