"""What ranks do under torch.profiler, for the tests of traces."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from engine_helpers import SquareLoss, blocks, microbatches, own
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch_runtime import torch_runtime

from zeropipe.core.formats.json import to_json
from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine


def profiled(schedule: Schedule, folder: str, steps: int = 2) -> str:
    """Train under the profiler; each rank writes its trace. Gives the engine's own timeline of the last step."""
    with Engine(schedule, own(blocks(schedule.num_stages), schedule), record=True) as engine:
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
        profiler.export_chrome_trace(str(Path(folder) / f"rank{dist.get_rank()}.json"))
        return to_json(engine.timeline())


def profiled_by_torch(schedule: Schedule, folder: str) -> None:
    """The same schedule in torch's runtime, which names its actions itself."""
    stages = own(blocks(schedule.num_stages), schedule)
    runtime = torch_runtime(schedule, stages, lambda out, target: (out - target).square().sum())
    batches = microbatches(schedule.num_microbatches, lengths=(3,))
    inputs, targets = (torch.cat([batch[name] for batch in batches]) for name in ("inputs", "target"))
    first = schedule.placement.rank_of(0) == dist.get_rank()
    last = schedule.placement.rank_of(schedule.num_stages - 1) == dist.get_rank()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        runtime.step(*([inputs] if first else []), **({"target": targets, "losses": []} if last else {}))
    path = Path(folder) / f"torch{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(path))
    assert "PP:" in json.dumps([e["name"] for e in json.loads(path.read_text())["traceEvents"] if "name" in e])


def profiled_gpipe(folder: str, num_microbatches: int) -> None:
    """torch's own GPipe, which names its actions `Forward 0`, `Backward 0`, and waits for messages inside of them."""
    rank = dist.get_rank()
    stage = PipelineStage(blocks(2)[rank], rank, 2, torch.device("cpu"))
    runtime = ScheduleGPipe(stage, num_microbatches, loss_fn=lambda out, target: (out - target).square().sum())
    batches = microbatches(num_microbatches, lengths=(3,))
    inputs, targets = (torch.cat([batch[name] for batch in batches]) for name in ("inputs", "target"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        runtime.step(*([inputs] if rank == 0 else []), **({"target": targets, "losses": []} if rank == 1 else {}))
    profiler.export_chrome_trace(str(Path(folder) / f"gpipe{rank}.json"))
