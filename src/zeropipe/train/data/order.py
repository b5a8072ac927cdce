"""Random numbers without state: the same on every machine and for every version of numpy, at any place at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_WORD = 2**64 - 1

Ints = NDArray[np.int64]


def mixed(values: NDArray[np.uint64], *keys: int) -> NDArray[np.uint64]:
    """Numbers that look random, a pure function of each value and the keys (the finaliser of splitmix64)."""
    found = values.astype(np.uint64)
    for key in keys:
        found = _scrambled(found + np.uint64(int(_scrambled(np.uint64(key & _WORD))) & _WORD))
    return found


def _scrambled(x: Any) -> Any:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def shuffled(places: Ints, size: int, *keys: int) -> Ints:
    """What stands at some places of a random order of 0 .. size-1.

    A Feistel network permutes the numbers of an even number of bits; one that lands at `size` or above is sent through
    it again until it does not. So no order is ever held in memory, however many rows there are.
    """
    half = np.uint64(max(2, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    found = places.astype(np.uint64)
    outside = np.ones(found.shape, dtype=bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (mixed(right, *keys, number) & mask)
        found[outside] = (left << half) | right
        outside[outside] = found[outside] >= size
    return found.astype(np.int64)
