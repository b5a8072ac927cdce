from zeropipe.core.action import Kind
from zeropipe.core.packed import JOINED
from zeropipe.core.placement import Problem, loop
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register
from zeropipe.schedules.rounds import backwards, forwards, groups, require_group_size


def _require(p: Problem, group_size: int | None) -> None:
    require_group_size(p, group_size, least=p.num_ranks, overlaps=True)


@register(
    "interleaved-overlap",
    placement=loop,
    stages_per_rank=(2, 1, 3, 4, 5, 6, 7, 8),
    overlaps=True,
    aliases=("1f1b-interleave-overlap",),
    paper="https://github.com/NVIDIA/Megatron-LM",
    limits="group_size at least ranks; a short last group must not be too short",
    require=_require,
)
def interleaved_overlap(lane: Lane, rank: int, p: Problem, *, group_size: int | None = None) -> None:
    """Interleaved with one more forward in warm-up, so that each F runs together with a B of another microbatch."""
    rounds = groups(p, group_size)
    warmup = (p.stages_per_rank - 1) * len(rounds[0]) + 2 * (p.num_ranks - 1 - rank) + 1
    f, b = forwards(rank, p, rounds), backwards(Kind.B, rank, p, rounds)
    for n in range(warmup, len(f)):
        f[n] |= JOINED
    lane.weave((0, f), (warmup, b))
