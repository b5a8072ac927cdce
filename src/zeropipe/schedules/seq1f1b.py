from zeropipe.core.placement import Problem, linear
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


@register("seq1f1b", placement=linear, sliced=True, paper="https://arxiv.org/abs/2406.03488")
def seq1f1b(lane: Lane, rank: int, p: Problem, *, slices: int = 1) -> None:
    """1F1B of slices of sequences: a smaller bubble, and less memory of activations (Seq1F1B)."""
    # the first backward is that of a microbatch's last slice: it needs the forwards of all of them
    warmup = min(p.num_ranks - 1 - rank + slices - 1, p.total_slices)
    lane.f(rank, times=warmup)
    for _ in range(p.total_slices - warmup):
        lane.f(rank)
        lane.b(rank)
    lane.b(rank, times=warmup)
