from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem, loop
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register
from zeropipe.schedules.rounds import backwards, forwards, groups


@register(
    "slimpipe",
    placement=loop,
    stages_per_rank=(1, 2, 3, 4, 5, 6, 7, 8),
    sliced=True,
    paper="https://arxiv.org/abs/2504.14519",
)
def slimpipe(lane: Lane, rank: int, p: Problem, *, slices: int = 1) -> None:
    """Interleaved 1F1B of slices: with one per rank, activations of hardly more than one microbatch (SlimPipe)."""
    rounds = groups(p)  # of one microbatch each, if it has a slice for each rank
    # the first backward is that of a microbatch's last slice; two slices per later rank are on their way there and back
    warmup = (p.stages_per_rank - 1) * len(rounds[0]) * slices + slices - 1 + 2 * (p.num_ranks - 1 - rank)
    lane.weave((0, forwards(rank, p, rounds)), (warmup, backwards(Kind.B, rank, p, rounds)))
