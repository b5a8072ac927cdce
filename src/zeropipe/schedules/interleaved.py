from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem, loop
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register
from zeropipe.schedules.rounds import backwards, forwards, groups, require_group_size


def _require(p: Problem, group_size: int | None) -> None:
    require_group_size(p, group_size, least=(p.num_ranks + 1) // 2)


@register(
    "interleaved",
    placement=loop,
    stages_per_rank=(2, 1, 3, 4, 5, 6, 7, 8),
    aliases=("Interleaved1F1B", "interleave", "1f1b-interleave"),
    paper="https://arxiv.org/abs/2104.04473",
    limits="group_size at least half the ranks; a short last group must not be too short",
    require=_require,
)
def interleaved(lane: Lane, rank: int, p: Problem, *, group_size: int | None = None) -> None:
    """1F1B over several stages per rank: a smaller bubble for more messages (Megatron-LM)."""
    rounds = groups(p, group_size)
    # groups smaller than the number of ranks save memory (https://arxiv.org/abs/2503.01328), with 1F1B's own warm-up
    ahead = 1 if len(rounds) > 1 and len(rounds[0]) < p.num_ranks else 2
    warmup = (p.stages_per_rank - 1) * len(rounds[0]) + ahead * (p.num_ranks - 1 - rank)
    lane.weave((0, forwards(rank, p, rounds)), (warmup, backwards(Kind.B, rank, p, rounds)))
