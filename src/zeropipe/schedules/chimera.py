from collections.abc import Iterator
from dataclasses import replace

from zeropipe.core.action import Kind
from zeropipe.core.placement import Placement, Problem, mirror
from zeropipe.schedules.lane import Beat, Lane
from zeropipe.schedules.registry import register


def _placement(p: Problem) -> Placement:
    """Mirror; with an odd number of ranks one microbatch more of each unit goes down than up."""
    placement = mirror(p)
    if placement.second_from is None or p.num_ranks % 2 == 0:
        return placement
    units, rest = divmod(p.num_microbatches, p.num_ranks)
    return replace(placement, second_from=units * (p.num_ranks + 1) // 2 + (rest + 1) // 2)


@register("chimera", placement=_placement, paper="https://arxiv.org/abs/2107.06925")
def chimera(lane: Lane, rank: int, p: Problem) -> None:
    """Two copies of the model, microbatches enter from both ends, in units of one microbatch per rank."""
    lane.repeat(_beats(rank, p), period=2 * p.num_ranks)


def _beats(rank: int, p: Problem) -> Iterator[Beat]:
    """A unit: a forward or a backward takes one turn; the directions use turns of different parity."""
    d = p.num_ranks
    second_from = _placement(p).second_from or p.num_microbatches
    down = (rank, 0, (d + 1) // 2, range(second_from))
    up = (d - 1 - rank, d % 2, d // 2, range(second_from, p.num_microbatches))
    for stage, late, size, microbatches in (down, up):
        for n, first in enumerate(microbatches[:size]):
            every = range(first, microbatches.stop, size)
            yield Beat(stage + 2 * n + late, stage, Kind.F, every)
            yield Beat(2 * d - 1 - stage + 2 * n + late, stage, Kind.B, every)
