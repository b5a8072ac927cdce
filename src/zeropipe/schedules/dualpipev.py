from zeropipe.core.placement import Problem, vee
from zeropipe.errors import ConfigError
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


def _require(p: Problem) -> None:
    least = p.num_stages - 1
    if p.num_microbatches < least:
        raise ConfigError(
            f"dualpipev needs 2 x ranks - 1 microbatches, got microbatches={p.num_microbatches}: "
            f"use {least} or more, or zbv"
        )


@register(
    "dualpipev",
    placement=vee,
    stages_per_rank=2,
    splits_backward=True,
    overlaps=True,
    aliases=("DualPipeV", "dualpipe-v"),
    paper="https://github.com/deepseek-ai/DualPipe",
    limits="microbatches >= 2 x ranks - 1",
    require=_require,
)
def dualpipev(lane: Lane, rank: int, p: Problem) -> None:
    """DualPipe cut in half: one copy of the model on a V, each F overlapped with a B."""
    write(lane, rank, p.num_ranks, p.num_microbatches, rank, p.num_stages - 1 - rank)


def write(lane: Lane, rank: int, num_ranks: int, num_microbatches: int, near: int, far: int) -> None:
    """One rank of DualPipe: `near` is its stage in the first half of the model, `far` the one in the second half.

    `rank` counts from the end of the pipeline that microbatches of `near` come from, `num_ranks` up to its middle.
    """
    behind = num_ranks - 1 - rank
    lane.f(near, times=2 * behind)
    for _ in range(rank + 1):
        lane.f(near)
        lane.f(far)
    for _ in range(behind):
        lane.i(far)
        lane.w()
        lane.f(far)
    for turn in range(num_microbatches - 2 * num_ranks + rank + 1):
        if turn == 0 and behind == 0:
            # not overlapped, so that the next rank need not wait for both
            lane.f(near)
            lane.b(far)
        else:
            lane.overlap(near, far)
        lane.overlap(far, near)
    for _ in range(behind):
        lane.b(far)
        lane.overlap(far, near)
    # from the middle of the last rank + 1 pairs on, the backward is split, because other ranks wait for I
    for turn in range(rank + 1):
        (lane.b if 2 * turn < rank + 1 else lane.i)(far)
        (lane.b if 2 * turn < rank else lane.i)(near)
    for _ in range(behind):
        lane.w()
        lane.i(near)
    lane.w(times=lane.pending_w())
