from zeropipe.core.placement import Problem, vee
from zeropipe.schedules.blocks import Block, write
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


@register(
    "v-half",
    placement=vee,
    stages_per_rank=2,
    splits_backward=True,
    aliases=("vhalf",),
    paper="https://arxiv.org/abs/2405.15362",
)
def v_half(lanes: list[Lane], p: Problem) -> None:
    """Half of 1F1B's activation memory, and a smaller bubble than 1F1B: stages on a V."""
    write(lanes, p, Block(down=2, up=1, turn=2, loss=4 if p.num_ranks % 2 == 0 else 1, back=1))
