"""Stages without a process group, for torch's schedule classes."""

from __future__ import annotations

from torch.distributed.pipelining.stage import PipelineStage


def stand_ins(ranks: int, per_rank: int) -> list[PipelineStage]:
    """Stages of a rank with the attributes that torch's schedules read."""
    stages = [object.__new__(PipelineStage) for _ in range(per_rank)]  # creating a mock of the class takes long
    for stage in stages:
        stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks * per_rank, None
    return stages
