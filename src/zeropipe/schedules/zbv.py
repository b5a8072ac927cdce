from zeropipe.core.placement import Problem, vee
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


@register(
    "zbv",
    placement=vee,
    stages_per_rank=2,
    splits_backward=True,
    aliases=("ZBVZeroBubble", "zb-v"),
    paper="https://arxiv.org/abs/2401.10241",
)
def zbv(lane: Lane, rank: int, p: Problem) -> None:
    """No bubble at equal costs with 1F1B's memory: stages go down the ranks and back up (a V)."""
    num_ranks, down, up = p.num_ranks, rank, p.num_stages - 1 - rank
    behind = num_ranks - rank
    # the pattern needs 2 num_ranks - 1 microbatches; those that do not exist are removed at the end
    steady = max(2 * num_ranks - 1, p.num_microbatches) - (2 * behind - 1 + rank)
    lane.f(down, times=2 * behind - 1)
    for _ in range(rank):
        lane.f(up)
        lane.f(down)
    for _ in range(behind):
        lane.f(up)
        lane.i(up)
        lane.w(up)
    for _ in range(steady):
        lane.f(down)
        lane.i(down)
        lane.w(down)
        lane.f(up)
        lane.i(up)
        lane.w(up)
    # the last forwards up have no forward down beside them
    for _ in range(behind - 1):
        lane.i(down)
        lane.w(down)
        lane.f(up)
        lane.i(up)
        lane.w(up)
    for _ in range(rank):
        lane.i(down)
        lane.i(up)
    for _ in range(behind):
        lane.i(down)
        lane.w(down)
    lane.w(up, times=lane.pending_w(up))
    lane.w(down, times=lane.pending_w(down))
    if p.num_microbatches < 2 * num_ranks - 1:
        lane.trim()
