from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem, vee
from zeropipe.schedules.lane import Beat, Lane
from zeropipe.schedules.registry import register


@register("hanayo", placement=vee, stages_per_rank=(2, 4, 6, 8), paper="https://arxiv.org/abs/2308.15762")
def hanayo(lane: Lane, rank: int, p: Problem) -> None:
    """Microbatches run down the ranks and back up in waves, one per two stages of a rank; one copy of the model."""
    # In turns of one forward or backward: the way down uses turns of one parity, the way up those of the other
    lane.repeat(
        (
            beat
            for wave in range(0, p.num_stages, 2 * p.num_ranks)
            for stage in (wave + rank, wave + 2 * p.num_ranks - 1 - rank)
            for n in range(min(p.num_ranks, p.num_microbatches))
            for microbatches in (range(n, p.num_microbatches, p.num_ranks),)
            for beat in (
                Beat(stage + 2 * n, stage, Kind.F, microbatches),
                Beat(2 * p.num_stages - 1 - stage + 2 * n, stage, Kind.B, microbatches),
            )
        ),
        period=2 * p.num_stages,
    )
