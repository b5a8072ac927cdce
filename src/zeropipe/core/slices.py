"""The sizes of the slices of a sequence, as shares of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import fsum, isfinite, sqrt

from zeropipe.core.schedule import Schedule
from zeropipe.core.units import to_python
from zeropipe.errors import ConfigError, short


def balanced_shares(num_slices: int, attention: float) -> tuple[float, ...]:
    """The shares of slices that take equal time, if `attention` is the part of a sequence's time that is attention.

    The first c of a sequence take (1 - attention) c + attention c^2 of its time, since a token attends to all before
    it. This is Seq1F1B's computation-wise partition: later slices are shorter.
    """
    if type(num_slices) is not int or num_slices < 1:
        raise ConfigError(f"num_slices={short(num_slices)}: must be a positive integer")
    if not (isinstance(attention, (int, float)) and 0 <= attention <= 1):
        raise ConfigError(f"attention={short(attention)}: must be from 0 to 1, the part of the time that is attention")
    linear, ends = 1.0 - attention, []
    for n in range(num_slices + 1):
        part = n / num_slices
        # the positive root of attention c^2 + linear c - part, in the form that does not divide by attention
        ends.append(2 * part / (linear + sqrt(linear * linear + 4 * attention * part)) if n else 0.0)
    return tuple(b - a for a, b in pairwise(ends))


def parse_shares(sizes: object, num_slices: int) -> tuple[float, ...]:
    """The share of each slice, from sizes in any unit; equal ones for None. ConfigError for other sizes."""
    if sizes is None:
        return (1 / num_slices,) * num_slices
    numbers = require_sizes(sizes)
    if len(numbers) != num_slices:
        raise ConfigError(f"slice_sizes={short(sizes)}: must be {num_slices} numbers, one for each slice")
    total = fsum(numbers)
    return tuple(number / total for number in numbers)


def require_sizes(sizes: object) -> tuple[float, ...]:
    """The sizes as numbers; ConfigError unless they are positive."""
    listed = to_python(sizes)
    if isinstance(listed, Sequence) and not isinstance(listed, (str, bytes)) and listed:
        numbers = [to_python(number) for number in listed]
        if all(type(n) in (int, float) and isfinite(n) and n > 0 for n in numbers):
            return tuple(map(float, numbers))
    raise ConfigError(f"slice_sizes={short(sizes)}: must be positive numbers, one for each slice, like [5, 3]")


def token_bounds(length: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Where each slice of a sequence of `length` tokens begins, and its end; each slice has a token at least."""
    if length < len(shares):
        raise ConfigError(f"a sequence of {length} tokens: too short for {len(shares)} slices; use fewer slices")
    ends = [round(length * part) for part in accumulate(shares, initial=0.0)]
    for n in range(1, len(ends)):
        ends[n] = min(max(ends[n], ends[n - 1] + 1), length - (len(shares) - n))
    ends[-1] = length
    return tuple(ends)


def slices_as_microbatches(schedule: Schedule) -> Schedule:
    """The same rows for an executor: each slice is a microbatch, numbered in order over all microbatches."""
    if schedule.num_slices == 1:
        return schedule
    problem = replace(schedule.problem, num_microbatches=schedule.problem.total_slices, num_slices=1)
    placement = schedule.placement
    if placement.second_from is not None:
        placement = replace(placement, second_from=schedule.second_slice_from)
    return replace(schedule, problem=problem, placement=placement, rebuild=None)
