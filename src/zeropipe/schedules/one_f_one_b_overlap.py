from zeropipe.core.placement import Problem, linear
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


@register("1f1b-overlap", placement=linear, overlaps=True, paper="https://github.com/NVIDIA/Megatron-LM")
def one_f_one_b_overlap(lane: Lane, rank: int, p: Problem) -> None:
    """1F1B with a deeper warm-up, so that each F runs together with a B of another microbatch."""
    # two per rank behind: a pair waits for the next rank's pair of the turn before, not of the same turn
    warmup = min(2 * (p.num_ranks - 1 - rank) + 1, p.num_microbatches)
    lane.f(rank, times=warmup)
    for _ in range(p.num_microbatches - warmup):
        lane.overlap(rank, rank)
    lane.b(rank, times=warmup)
