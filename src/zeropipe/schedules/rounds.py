"""Functions of the interleaved schedules: microbatches go through a rank's stages in groups, one group per round."""

from __future__ import annotations

from array import array
from itertools import pairwise

from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem
from zeropipe.errors import ConfigError
from zeropipe.schedules.lane import run


def groups(p: Problem, group_size: int | None = None) -> list[range]:
    """The microbatches of each round: all groups have `group_size`, the last one has the rest.

    By default there are as many groups as possible with at least one slice of a microbatch per rank; their sizes differ
    by at most one.
    """
    if group_size is not None:
        return [range(p.num_microbatches)[at : at + group_size] for at in range(0, p.num_microbatches, group_size)]
    rounds = max(1, p.num_microbatches // -(-p.num_ranks // p.num_slices))
    size, larger = divmod(p.num_microbatches, rounds)
    starts = [n * size + min(n, larger) for n in range(rounds + 1)]
    return [range(*pair) for pair in pairwise(starts)]


def require_group_size(p: Problem, group_size: int | None, least: int, overlaps: bool = False) -> None:
    """ConfigError for a group size with a deadlock: below `least`, or with too small a last group.

    With too small a group, the first rank waits for the input of its next stage. The last rank computes that input
    after a backward of the previous group, which waits for a later backward of the first rank. If each F `overlaps` a
    B, that B waits, too, and the group needs one microbatch more.
    """
    if group_size is None:
        return
    if not isinstance(group_size, int) or group_size < min(least, p.num_microbatches):
        raise ConfigError(
            f"group_size={group_size!r}: with {p.num_ranks} ranks a group needs {least} microbatches; "
            "use at least that, or leave it out"
        )
    rest = p.num_microbatches % group_size
    needed = (p.num_ranks - 1) * (2 if group_size >= p.num_ranks else 1) + overlaps - group_size
    # backwards of the last stage wait for no other rank: with two stages and one microbatch these are all
    waits = p.stages_per_rank > 2 or (p.stages_per_rank == 2 and rest > 1)
    if 0 < rest < needed and waits and group_size < p.num_microbatches:
        raise ConfigError(
            f"group_size={group_size} leaves {rest} of {p.num_microbatches} microbatches for the last group, "
            f"which needs {needed}: leave group_size out for groups of equal size"
        )


def forwards(rank: int, p: Problem, rounds: list[range]) -> array[int]:
    """A rank's forwards: each group through all its stages before the next group."""
    return _in_rounds(Kind.F, range(rank, p.num_stages, p.num_ranks), rounds, p.num_slices)


def backwards(kind: Kind, rank: int, p: Problem, rounds: list[range]) -> array[int]:
    """A rank's backwards of one kind: groups in the same order, stages from the last."""
    return _in_rounds(kind, range(rank, p.num_stages, p.num_ranks)[::-1], rounds, p.num_slices)


def _in_rounds(kind: Kind, stages: range, rounds: list[range], num_slices: int) -> array[int]:
    codes = array("q")
    for group in rounds:
        for stage in stages:
            codes.extend(run(stage, kind, group, num_slices))
    return codes
