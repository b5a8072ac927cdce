from zeropipe.core.placement import Problem, mirror
from zeropipe.errors import ConfigError
from zeropipe.schedules.dualpipev import write
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


def _require(p: Problem) -> None:
    if p.num_ranks % 2:
        raise ConfigError(f"dualpipe needs an even number of ranks, got ranks={p.num_ranks}: use dualpipev")
    least = 2 * p.num_ranks - 2
    if p.num_microbatches % 2 or p.num_microbatches < least:
        raise ConfigError(
            f"dualpipe needs an even number of microbatches, at least 2 x ranks - 2, got microbatches="
            f"{p.num_microbatches}; use {max(least, p.num_microbatches + 1)}"
        )


@register(
    "dualpipe",
    placement=mirror,
    splits_backward=True,
    overlaps=True,
    paper="https://arxiv.org/abs/2412.19437",
    limits="ranks and microbatches even, microbatches >= 2 x ranks - 2",
    require=_require,
)
def dualpipe(lane: Lane, rank: int, p: Problem) -> None:
    """Two copies of the model, microbatches enter from both ends, each F overlapped with a B (DeepSeek-V3)."""
    half = p.num_ranks // 2
    here, there = rank, p.num_ranks - 1 - rank  # the stages of the two copies on this rank
    near, far = (here, there) if rank < half else (there, here)
    write(lane, min(here, there), half, p.num_microbatches // 2, near, far)
