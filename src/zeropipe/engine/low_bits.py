"""float32 copies of bfloat16 parameters that need 2 bytes each between two steps of an optimizer.

The 16 bits of a parameter are the upper half of its copy, rounded to nearest. Only the lower half is kept, as a signed
offset from the rounded value, so that both together give all bits of the copy again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_SIZE = 2**27  # elements that are in float32 at the same time, if no parameter has more


class Part(NamedTuple):
    """A parameter, its float32 copy as the optimizer knows it, and the lower half of that copy."""

    parameter: Tensor
    copy: Tensor
    low: Tensor


class LowBits:
    """The lower halves of the float32 copies of some bfloat16 parameters, of one device.

    `pairs` are parameters and their copies. Copies have values from `expand` until `compress`, and else no memory.
    """

    def __init__(self, parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        self.pairs = tuple(zip(parameters, copies))
        ends = torch.tensor([p.numel() for p in parameters]).cumsum(0).tolist()
        self._ranges = list(pairwise([0, *ends]))
        self.low = torch.zeros(ends[-1], dtype=torch.int16, device=parameters[0].device)
        self._full: Tensor | None = None
        self._free_copies()

    @property
    def is_expanded(self) -> bool:
        """Whether the copies have values."""
        return self._full is not None

    @torch.no_grad()
    def expand(self) -> None:
        """Give the copies their values in float32."""
        if self._full is None:
            high = torch.cat([bits.flatten() for bits in self._high_bits()])
            self._full = full = _functions(high.device.type)[0](high, self.low)
            for (_, copy), (start, end) in zip(self.pairs, self._ranges):
                copy.data = full[start:end].view(copy.shape)
            self.low = self.low[:0]

    @torch.no_grad()
    def compress(self) -> None:
        """Round the copies to the parameters, keep the lower halves, and free the copies' memory."""
        if self._full is not None:
            high, self.low = _functions(self._full.device.type)[1](self._full)
            bits = self._high_bits()
            torch._foreach_copy_(bits, [high[start:end].view(p.shape) for p, (start, end) in zip(bits, self._ranges)])
            self._full = None
            self._free_copies()

    @torch.no_grad()
    def restart(self, ids: set[int]) -> set[int]:
        """Let the copies of parameters with these ids have the parameters' values; returns those that are here."""
        found = {id(parameter): place for (parameter, _), place in zip(self.pairs, self._ranges)}
        for key in found.keys() & ids:
            start, end = found[key]
            self.low[start:end].zero_()
        return found.keys() & ids

    def parts(self) -> list[Part]:
        """The parameters and copies with the lower halves of each, between `compress` and `expand`."""
        return [
            Part(parameter, copy, self.low[start:end].view(parameter.shape))
            for (parameter, copy), (start, end) in zip(self.pairs, self._ranges)
        ]

    def _high_bits(self) -> list[Tensor]:
        return [parameter.detach().view(torch.int16) for parameter, _ in self.pairs]

    def _free_copies(self) -> None:
        for parameter, copy in self.pairs:
            copy.data = torch.empty((), device=parameter.device).expand(parameter.shape)


def make_chunks(parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> Iterator[LowBits]:
    """Parameters and their copies in chunks of at most CHUNK_SIZE elements; larger parameters have one of their own."""
    start, size = 0, 0
    for end, parameter in enumerate(parameters):
        if end > start and (size + parameter.numel() > CHUNK_SIZE or parameter.device != parameters[start].device):
            yield LowBits(parameters[start:end], copies[start:end])
            start, size = end, 0
        size += parameter.numel()
    if start < len(parameters):
        yield LowBits(parameters[start:], copies[start:])


def join(high: Tensor, low: Tensor) -> Tensor:
    """The float32 numbers of these halves."""
    return ((high.int() << 16) + low.int()).view(torch.float32)


def split(full: Tensor) -> tuple[Tensor, Tensor]:
    """The upper halves of float32 numbers, rounded to nearest, and the lower ones."""
    bits = full.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)


@cache
def _functions(device_type: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`join` and `split`; on a GPU each is one kernel."""
    if device_type == "cuda":
        return torch.compile(join, dynamic=True), torch.compile(split, dynamic=True)
    return join, split
