from zeropipe.core.action import Kind
from zeropipe.core.placement import Problem, linear
from zeropipe.schedules.lane import Lane, run
from zeropipe.schedules.registry import register


@register(
    "zb-h1",
    placement=linear,
    splits_backward=True,
    aliases=("zb1p",),
    paper="https://arxiv.org/abs/2401.10241",
)
def zb_h1(lane: Lane, rank: int, p: Problem, *, slices: int = 1) -> None:
    """1F1B with split backward: a third of its bubble at the same memory."""
    write(lane, rank, p, extra=0)


def write(lane: Lane, rank: int, p: Problem, extra: int) -> None:
    """The first rank keeps num_ranks + extra microbatches; a later one needs fewer and puts off W for the others.

    Without those W the last ranks run ahead at first; the time won is there when the first rank waits at the end.
    With slices, these are microbatches of one slice, and all ranks keep the other slices of a microbatch, too.
    """
    behind = p.num_ranks - 1 - rank
    warmup = behind + min(extra, behind)
    put_off = p.num_ranks - 1 + extra - warmup
    f, i, w = (run(rank, kind, range(p.num_microbatches), p.num_slices) for kind in (Kind.F, Kind.I, Kind.W))
    warmup += p.num_slices - 1
    lane.weave((0, f), (warmup, i), (warmup + put_off, w))
