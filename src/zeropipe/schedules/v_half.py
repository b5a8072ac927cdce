from zeropipe.core.placement import Problem, vee
from zeropipe.errors import ConfigError
from zeropipe.schedules.blocks import Block, write
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


def _require(p: Problem, extra: int) -> None:
    if not isinstance(extra, int) or not 0 <= extra <= p.num_ranks:
        raise ConfigError(f"extra={extra!r}: must be 0 to {p.num_ranks} (the number of ranks) half-stage microbatches")


@register(
    "v-half",
    placement=vee,
    stages_per_rank=2,
    splits_backward=True,
    aliases=("vhalf",),
    paper="https://arxiv.org/abs/2405.15362",
    limits="extra, the half-stage microbatches kept beyond the block's, goes from 0 (the default) to ranks",
    require=_require,
)
def v_half(lanes: list[Lane], p: Problem, *, extra: int = 0) -> None:
    """Half of 1F1B's activation memory, and a smaller bubble than 1F1B: stages on a V."""
    # without a bubble in steady state as long as W + 2 I >= 2 F and W + 2 F >= 2 I
    write(lanes, p, Block(down=2, up=1, turn=2, loss=4 if p.num_ranks % 2 == 0 else 1, back=1), extra)
