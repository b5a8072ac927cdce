from zeropipe.core.placement import Problem, linear
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


@register("gpipe", placement=linear, paper="https://arxiv.org/abs/1811.06965")
def gpipe(lane: Lane, rank: int, p: Problem) -> None:
    """All forwards, then all backwards."""
    lane.f(rank, times=p.num_microbatches)
    lane.b(rank, times=p.num_microbatches)
