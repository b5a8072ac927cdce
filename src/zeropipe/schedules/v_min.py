from zeropipe.core.placement import Problem, vee
from zeropipe.schedules.blocks import Block, write
from zeropipe.schedules.lane import Lane
from zeropipe.schedules.registry import register


@register(
    "v-min",
    placement=vee,
    stages_per_rank=2,
    splits_backward=True,
    aliases=("vmin",),
    paper="https://arxiv.org/abs/2405.15362",
)
def v_min(lanes: list[Lane], p: Problem) -> None:
    """A third of 1F1B's activation memory, the least a V can do with; best when F, I and W take equally long."""
    write(lanes, p, Block(down=1, up=1, turn=1, loss=3 if p.num_ranks % 3 == 0 else 1, back=1))
