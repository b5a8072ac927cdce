from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem, loop
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register
from zeropipe.schedules.rounds import backwards, forwards, groups, require_group_size


@register(
    "interleaved",
    placement=loop,
    stages_per_rank=(2, 1, 3, 4, 5, 6, 7, 8),
    aliases=("Interleaved1F1B",),
    paper="https://arxiv.org/abs/2104.04473",
    limits="a group_size must be at least the number of ranks, and so must what it leaves for the last group",
    require=require_group_size,
)
def interleaved(lane: Lane, rank: int, p: Problem, *, group_size: int | None = None) -> None:
    """1F1B over several stages per rank: a smaller bubble for more messages (Megatron-LM)."""
    rounds = groups(p, group_size)
    warmup = (p.stages_per_rank - 1) * len(rounds[0]) + 2 * (p.num_ranks - 1 - rank)
    lane.weave((0, forwards(rank, p, rounds)), (warmup, backwards(Kind.B, rank, p, rounds)))
