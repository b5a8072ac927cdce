"""What ranks do under torch.profiler, for the tests of traces."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from engine_helpers import SquareLoss, blocks, microbatches, own
from torch.distributed.pipelining import PipelineStage, schedules
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


def profiled_single(folder: str, num_microbatches: int, kind: str = "ScheduleGPipe") -> None:
    """torch's own schedules of one stage per rank, as torchtitan runs them.

    GPipe names its actions `Forward 0`, `Backward 0`, and waits for messages inside of them. 1F1B names none: the
    stacks of the profile have the functions of the stage.
    """
    rank = dist.get_rank()
    stage = PipelineStage(blocks(2)[rank], rank, 2, torch.device("cpu"))
    runtime = getattr(schedules, kind)(
        stage, num_microbatches, loss_fn=lambda out, target: (out - target).square().sum()
    )
    batches = microbatches(num_microbatches, lengths=(3,))
    inputs, targets = (torch.cat([batch[name] for batch in batches]) for name in ("inputs", "target"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profiler:
        runtime.step(*([inputs] if rank == 0 else []), **({"target": targets, "losses": []} if rank == 1 else {}))
    profiler.export_chrome_trace(str(Path(folder) / f"{kind}{rank}.json"))


def profiled_megatron(folder: str, num_microbatches: int, num_steps: int) -> None:
    """1F1B as Megatron-LM runs and profiles it: with stacks, functions without numbers, and a step() per iteration."""
    rank = dist.get_rank()
    block = blocks(2)[rank]
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    sent = []

    def forward_step(received: torch.Tensor) -> torch.Tensor:
        output = block(received)
        waiting.append((received, output))
        return output

    def backward_step(gradient: torch.Tensor) -> torch.Tensor:
        received, output = waiting.pop(0)
        output.backward(gradient)
        return received.grad

    def receive(other: int) -> torch.Tensor:
        dist.recv(tensor := torch.empty_like(example), other)
        return tensor

    example = microbatches(1, lengths=(3,))[0]["inputs"]
    order = ["F"] * (2 - rank) + ["B", "F"] * num_microbatches
    row, left = [], {"F": num_microbatches, "B": num_microbatches}
    for kind in [*order, "B", "B"]:
        if left[kind]:
            left[kind] -= 1
            row.append(kind)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=num_steps, repeat=1),
        on_trace_ready=lambda one: one.export_chrome_trace(str(Path(folder) / f"megatron{rank}.json")),
    ) as profiler:  # fmt: skip
        for _ in range(1 + num_steps):
            for kind in row:
                if kind == "F":
                    received = torch.ones_like(example) if rank == 0 else receive(0)
                    output = forward_step(received.requires_grad_())
                    if rank == 0:
                        sent.append(dist.isend(output.detach(), 1))
                else:
                    gradient = torch.ones_like(example) if rank == 1 else receive(1)
                    found = backward_step(gradient)
                    if rank == 1:
                        sent.append(dist.isend(found, 0))
            for message in sent:
                message.wait()
            sent.clear()
            profiler.step()
