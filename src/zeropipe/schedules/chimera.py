from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem, mirror
from zeropipe.schedules.lane import Beat, Lane
from zeropipe.schedules.registry import register


@register("chimera", placement=mirror, paper="https://arxiv.org/abs/2107.06925")
def chimera(lane: Lane, rank: int, p: Problem) -> None:
    """Two copies of the model, microbatches enter from both ends; units of one microbatch per rank follow each other."""
    d = p.num_ranks
    # a unit takes 2 d turns, a forward or backward one; the directions use turns of different parity
    split = (p.num_microbatches + 1) // 2 if d > 1 else p.num_microbatches
    ways = (
        (rank, 0, range(split)[: (d + 1) // 2], (d + 1) // 2, split),
        (d - 1 - rank, d % 2, range(split, p.num_microbatches)[: d // 2], d // 2, p.num_microbatches),
    )
    lane.repeat(
        (
            beat
            for stage, late, firsts, size, end in ways
            for n, first in enumerate(firsts)
            for beat in (
                Beat(stage + 2 * n + late, stage, Kind.F, range(first, end, size)),
                Beat(2 * d - 1 - stage + 2 * n + late, stage, Kind.B, range(first, end, size)),
            )
        ),
        period=2 * d,
    )
