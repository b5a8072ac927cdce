"""Runs the pieces of a model through the engine and records them."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropipe import __version__
from zeropipe.core.model.probe import (
    LayerGroup,
    Ping,
    Probe,
    Profile,
    full_schedule,
    ping_schedule,
    split_schedule,
    stream_schedule,
)
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine.engine import Engine
from zeropipe.engine.run.job import DTYPES, choose_backend, select_device
from zeropipe.engine.run.spec import Job
from zeropipe.engine.run.torchrun import join_torchrun, local_world_size
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.step.clock import machine_name
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.profiling.pieces import Pieces, facts, open_pieces
from zeropipe.profiling.spec import ProfileJob, Setting

WARM_UP = 2  # steps: the first ones compile, and find memory
# microbatches under way beside the one that is measured, on a CPU: what they hold pushes its tensors out of the caches;
# it would only fill a GPU's memory
AHEAD = 4
PINGS = 8
WORK = 0.002  # seconds that a rank works longer than its neighbour: more than a message needs


def profile(job: ProfileJob) -> Profile:
    """Measure a model; every rank calls this, measures at the same time as the others, and gets the same answer."""
    device, alone = select_device(job.device), group_of_one()
    pieces = open_pieces(job.source, DTYPES[job.dtype], job.seed)
    probes = []
    for number, setting in enumerate(job.settings):
        _tell(f"{job.name}: {number + 1} of {len(job.settings)}: {setting}")
        probes.append(_probe(job, pieces, setting, device, alone))
    return with_messages(job, pieces, probes, device)


def group_of_one() -> Any:
    """A group with this rank only."""
    return [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())][dist.get_rank()]


def with_messages(job: ProfileJob, pieces: Pieces, probes: Sequence[Probe], device: torch.device) -> Profile:
    """The profile of a model whose pieces were measured: messages between the ranks are measured now."""
    message, several = probes[0].groups[1].message, dist.get_world_size() > 1
    pings = _pings(message, device) if several else ()
    # on a GPU messages have streams of their own, and their launch is not what a rank waits for
    streams = _streams(message, device) if several and device.type == "cpu" else ()
    return Profile(
        job.name, pieces.layers, tuple(probes), pings, tuple(everyone(machine_name())),
        bool(getattr(pieces.model.config, "tie_word_embeddings", False)), job.sequence, job.dtype,
        DTYPES[job.dtype].itemsize, _machine(device), _versions(device), streams,
    )  # fmt: skip


def profile_under_torchrun(job: ProfileJob) -> Profile | None:
    """`profile` on the processes torchrun started; None on all ranks but the first."""
    join_torchrun(choose_backend(Job(device=job.device), local_world_size()))
    try:
        found = profile(job)
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _probe(job: ProfileJob, pieces: Pieces, setting: Setting, device: torch.device, alone: Any) -> Probe:
    microbatch = piece_tokens(job, pieces, setting, device)
    known: tuple[LayerGroup, ...] = ()
    found: dict[str, tuple[Timeline, ...]] = {}
    for name, make in (("split", split_schedule), ("whole", full_schedule)):
        stages = pieces.build(device)
        known = known or facts(pieces, stages, microbatch)
        steps = piece_steps(job, stages, microbatch, setting, device, alone, make)
        found[name] = tuple(timeline for own in everyone(list(steps)) for timeline in own)
        del stages, steps
        gc.collect()
    return Probe(known, found["split"], found["whole"], setting.ac, setting.microbatch_size, setting.compile)


def piece_steps(
    job: ProfileJob, stages: Mapping[int, HFStage], microbatch: Mapping[str, Tensor], setting: Setting,
    device: torch.device, alone: Any, make: Callable[[int, int, int], Schedule],
) -> Iterator[Timeline]:  # fmt: skip
    """Recorded steps of a schedule of the pieces. The group `alone` has this rank only."""
    schedule = make(len(stages), job.microbatches, AHEAD if device.type == "cpu" else 0)
    return _steps(
        schedule, stages, [microbatch] * schedule.num_microbatches, CausalLMLoss(), job.steps, group=alone,
        device=device, compile=setting.compile, ac=setting.ac,
    )  # fmt: skip


def _steps(
    schedule: Schedule, stages: Any, microbatches: list[Any], loss_fn: Any, number: int, **options: Any
) -> Iterator[Timeline]:
    """Some recorded steps. Gradients are added up, not cleared: they are allocated in the warm-up, and never again."""
    with Engine(schedule, stages, record=True, **options) as engine:
        for step in range(WARM_UP + number):
            dist.barrier()  # all ranks measure at the same time, as they will run
            engine.train_step(microbatches, loss_fn)
            if step >= WARM_UP:
                yield engine.timeline()


def piece_tokens(job: ProfileJob, pieces: Pieces, setting: Setting, device: torch.device) -> dict[str, Tensor]:
    """A microbatch."""
    generator = torch.Generator().manual_seed(job.seed)
    vocabulary = pieces.model.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, (setting.microbatch_size, job.sequence), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


class Hand(nn.Module):
    """Hands its input on, and takes its gradient, after some seconds of work each."""

    def __init__(self, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, *self.seconds) * self.scale  # type: ignore[no-any-return, no-untyped-call]


class _Work(torch.autograd.Function):
    """Its input, after so many seconds of work, and as many others in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, again: float) -> Tensor:
        ctx.again = again
        _work(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _work(ctx.again)
        return gradients[0], None, None


def _work(seconds: float) -> None:
    """Products, as in a model: the threads that feed sockets run beside them."""
    until, a = time.perf_counter() + seconds, torch.ones(64, 64)
    while time.perf_counter() < until:
        torch.mm(a, a)


def _sum(output: Tensor, microbatch: Any) -> tuple[Tensor, int]:
    return output.sum(), output.numel()


def _pings(message: float, device: torch.device) -> tuple[Ping, ...]:
    """Messages of a quarter of the size and of the whole size: they tell latency and bandwidth apart."""
    schedule, rank, found = ping_schedule(dist.get_world_size(), PINGS), dist.get_rank(), []
    for share in (4, 1):
        count = max(1, int(message) // 4 // share)
        _tell(f"messages of {4 * count:,} bytes between {schedule.num_ranks} ranks")
        batch = {"inputs": torch.ones(count, device=device)}
        steps = _steps(schedule, {rank: Hand().to(device)}, [batch] * PINGS, _sum, 3, device=device)
        found.append(Ping(4.0 * count, tuple(steps)))
    return tuple(found)


def _streams(message: float, device: torch.device) -> tuple[Timeline, ...]:
    """Messages that nobody waits for: each rank works longer than the one that sends to it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    schedule = stream_schedule(size, PINGS)
    _tell(f"what {size} ranks spend on messages")
    hand = Hand(WORK * (rank + 1), WORK * (size - rank)).to(device)
    batch = {"inputs": torch.ones(max(1, int(message) // 4), device=device)}
    return tuple(_steps(schedule, {rank: hand}, [batch] * PINGS, _sum, 3, device=device))


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"profile: {text}", file=sys.stderr, flush=True)


def _machine(device: torch.device) -> dict[str, object]:
    ranks = {"ranks": dist.get_world_size()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"gpu": properties.name, "memory": properties.total_memory, **ranks}
    return {
        "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(), **ranks,
    }  # fmt: skip


def _versions(device: torch.device) -> dict[str, str]:
    import transformers

    found = {"zeropipe": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return found | ({"cuda": str(torch.version.cuda)} if device.type == "cuda" else {})
