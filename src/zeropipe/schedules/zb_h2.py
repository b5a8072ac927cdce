from zeropipe.core.placement import Problem, linear
from zeropipe.errors import ConfigError
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register
from zeropipe.schedules.zb_h1 import write


def _require(p: Problem, extra: int | None) -> None:
    if extra is not None and (not isinstance(extra, int) or not 0 <= extra < p.num_ranks):
        raise ConfigError(f"extra={extra!r}: must be from 0 (as zb-h1) to {p.num_ranks - 1} (ranks - 1) microbatches")


@register(
    "zb-h2",
    placement=linear,
    splits_backward=True,
    paper="https://arxiv.org/abs/2401.10241",
    limits="extra, the microbatches kept beyond 1F1B's, goes from 0 to ranks - 1 (the default)",
    require=_require,
)
def zb_h2(lane: Lane, rank: int, p: Problem, *, extra: int | None = None) -> None:
    """More forwards in warm-up than 1F1B, until no bubble is left at equal costs: up to twice the memory."""
    write(lane, rank, p, p.num_ranks - 1 if extra is None else extra)
