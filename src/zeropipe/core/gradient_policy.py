"""When the gradients of sharded stages are reduced: once per step, or as the step goes on.

whole        once, after the last B or W of a stage
rolling      after every microbatch: between two actions no gradients of a stage are whole
rolling:N    between two actions the gradients of at most N stages of a rank are whole
"""

from __future__ import annotations

import re
from typing import NamedTuple

from zeropipe.core.action import REDUCE_GRAD, B, W
from zeropipe.core.jit import Ints, arrays
from zeropipe.core.packed import kind_of, stage_of
from zeropipe.core.schedule import Program
from zeropipe.errors import ConfigError, ScheduleError, short

GRADIENTS = ("whole", "rolling", "rolling:1", "rolling:2", "rolling:3")  # those that matter to plans
REDUCES_AT_ONCE = 1  # units of a rank whose rolling gradients are reduced while those of others are computed
_ROLLING = re.compile(r"rolling(?::([1-9][0-9]{0,5}))?")


class GradientPolicy(NamedTuple):
    """How many stages of a rank may have whole gradients between two actions; None: all."""

    limit: int | None

    @staticmethod
    def parse(text: object) -> GradientPolicy:
        """From "whole", "rolling" or "rolling:N"; ConfigError for anything else."""
        if text == "whole":
            return GradientPolicy(None)
        found = _ROLLING.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ConfigError(f"gradients={short(text)}: must be 'whole', 'rolling', or 'rolling:N' with N from 1")
        return GradientPolicy(int(found[1] or 0))

    @property
    def is_rolling(self) -> bool:
        """Whether gradients are reduced as the step goes on."""
        return self.limit is not None

    @property
    def max_reduces(self) -> int | None:
        """How many units of a rank are reduced at the same time; None: any number."""
        return REDUCES_AT_ONCE if self.is_rolling else None

    def max_stages(self, num_stages: int) -> int:
        """The limit as a number of stages."""
        return num_stages if self.limit is None else min(self.limit, num_stages)

    def require_parts(self, num_weight_parts: int) -> None:
        """ConfigError where a W has several parts: between them the gradients of its stage are whole."""
        if self.limit == 0 and num_weight_parts > 1:
            raise ConfigError(
                f"gradients='rolling' cannot reduce after each of the {num_weight_parts} parts of a W; use "
                "'rolling:1', or weight_parts=1"
            )


def reduce_kernel(
    codes: Ints, offsets: Ints, limit: int, reduces: Ints, following: Ints, latest: Ints, next_gradient: Ints
) -> None:
    """Set `reduces` at each B and W after which its stage is reduced.

    A stage is reduced after its last gradient. Before a stage that would be one too many, that one is reduced whose
    next gradient is farthest away, right after its latest gradient: no fewer reduces keep the limit.
    `following`: the position of the next gradient of the same stage; `latest`: of a stage with whole gradients, or -1.
    """
    num_codes = len(codes)
    for rank in range(len(offsets) - 1):
        begin, stop = offsets[rank], offsets[rank + 1]
        for at in range(begin, stop):
            next_gradient[stage_of(codes[at])] = num_codes
        for at in range(stop - 1, begin - 1, -1):
            if kind_of(codes[at]) in (B, W):
                stage = stage_of(codes[at])
                following[at] = next_gradient[stage]
                next_gradient[stage] = at
        num_whole = 0
        for at in range(begin, stop):
            if kind_of(codes[at]) not in (B, W):
                continue
            stage = stage_of(codes[at])
            if latest[stage] < 0:
                if limit > 0 and num_whole == limit:
                    farthest = -1
                    for other in latest:
                        if other >= 0 and (farthest < 0 or following[other] > following[farthest]):
                            farthest = other
                    reduces[farthest] = 1
                    latest[stage_of(codes[farthest])] = -1
                    num_whole -= 1
                num_whole += 1
            latest[stage] = at
            if limit == 0 or following[at] == num_codes:
                reduces[at] = 1
                latest[stage] = -1
                num_whole -= 1


def check_gradients(program: Program, gradients: str) -> None:
    """ScheduleError if more stages of a rank have whole gradients between two actions than a policy allows."""
    policy = GradientPolicy.parse(gradients)
    if policy.limit is None:
        return
    for rank, number in enumerate(count_whole_gradients(program)):
        if number > policy.limit:
            raise ScheduleError(
                f"rank {rank} has whole gradients of {number} stages between two actions: gradients={gradients!r} "
                f"allows {policy.limit}"
            )


def count_whole_gradients(program: Program) -> list[int]:
    """The largest number of stages of each rank that have gradients and are not reduced, between two actions."""
    packed = program.packed
    xp = arrays(packed.num_codes)
    counts = xp.full_ints(program.schedule.num_ranks)
    is_whole = xp.full_ints(program.schedule.num_stages)
    xp.call(count_kernel, xp.ints(packed.codes), xp.list_ints(packed.offsets), is_whole, counts)
    return [int(count) for count in counts]


def count_kernel(codes: Ints, offsets: Ints, is_whole: Ints, counts: Ints) -> None:
    """Fill `counts`. A REDUCE_GRAD starts with the action before it."""
    for rank in range(len(offsets) - 1):
        num_whole = 0
        for at in range(offsets[rank], offsets[rank + 1]):
            kind, stage = kind_of(codes[at]), stage_of(codes[at])
            if kind <= W:
                counts[rank] = max(counts[rank], num_whole)
            if kind in (B, W) and not is_whole[stage]:
                is_whole[stage] = 1
                num_whole += 1
            elif kind == REDUCE_GRAD and is_whole[stage]:
                is_whole[stage] = 0
                num_whole -= 1
        counts[rank] = max(counts[rank], num_whole)
