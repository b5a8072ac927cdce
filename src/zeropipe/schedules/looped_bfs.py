from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem, loop
from zeropipe.schedules.lane import Lane, run
from zeropipe.schedules.registry import register


@register(
    "looped-bfs",
    placement=loop,
    stages_per_rank=(2, 1, 3, 4, 5, 6, 7, 8),
    aliases=("LoopedBFS",),
    paper="https://arxiv.org/abs/2211.05953",
)
def looped_bfs(lane: Lane, rank: int, p: Problem) -> None:
    """All microbatches through one stage, then through the next; backwards in reverse order (breadth first)."""
    stages = range(rank, p.num_stages, p.num_ranks)
    for stage in stages:
        lane.f(stage, times=p.num_microbatches)
    for stage in reversed(stages):
        lane.weave((0, run(stage, Kind.B, range(p.num_microbatches)[::-1])))
