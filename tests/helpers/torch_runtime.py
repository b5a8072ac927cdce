"""The same Schedule in torch's own pipeline runtime: a second, independent executor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from zeropipe.core.formats.csv import to_csv
from zeropipe.core.lower import lower
from zeropipe.core.schedule import Schedule


def torch_runtime(
    schedule: Schedule, stages: Mapping[int, nn.Module], loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> _PipelineScheduleRuntime:
    """torch's runtime with this schedule, lowered by us, and this rank's stages on the CPU.

    `loss_fn(output, target)` is summed over the microbatches, not averaged. Call `.step(x, target=..., losses=[...])`:
    inputs on the rank with the first stage, targets on the one with the last.
    """
    assert len(schedule.placement.copies) == 1
    assert schedule.problem.num_weight_parts == 1
    runtime = _PipelineScheduleRuntime(
        [
            PipelineStage(module, stage, schedule.num_stages, torch.device("cpu"))
            for stage, module in sorted(stages.items())
        ],
        schedule.num_microbatches,
        loss_fn=loss_fn,
        scale_grads=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(to_csv(lower(schedule)))
        runtime._load_csv(str(path), format="compute_comms")
    return runtime
