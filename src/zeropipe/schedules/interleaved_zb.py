from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem, loop
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register
from zeropipe.schedules.rounds import backwards, forwards, groups


@register(
    "interleaved-zb",
    placement=loop,
    stages_per_rank=(2, 1, 3, 4, 5, 6, 7, 8),
    splits_backward=True,
    aliases=("InterleavedZeroBubble",),
    paper="https://arxiv.org/abs/2401.10241",
)
def interleaved_zb(lane: Lane, rank: int, p: Problem) -> None:
    """Interleaved with split backward: rank r puts off r weight gradients to fill its bubble."""
    rounds = groups(p)
    warmup = (p.stages_per_rank - 1) * len(rounds[0]) + p.num_ranks - 1 - rank
    lane.weave(
        (0, forwards(rank, p, rounds)),
        (warmup, backwards(Kind.I, rank, p, rounds)),
        (warmup + rank, backwards(Kind.W, rank, p, rounds)),
    )
