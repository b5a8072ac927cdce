from zeropipe.core.placement import Problem, linear
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


@register("1f1b", placement=linear, paper="https://arxiv.org/abs/1806.03377")
def one_f_one_b(lane: Lane, rank: int, p: Problem) -> None:
    """One forward, one backward in steady state (PipeDream-Flush)."""
    warmup = min(p.num_ranks - rank - 1, p.num_microbatches)
    lane.f(rank, times=warmup)
    for _ in range(p.num_microbatches - warmup):
        lane.f(rank)
        lane.b(rank)
    lane.b(rank, times=warmup)
