"""Measure a model: run its layer groups through the engine, record the steps, and time messages."""

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
from zeropipe.engine.stages.packed_attention import resolve_attention
from zeropipe.engine.step.clock import machine_name
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.profiling.groups import GroupedModel, describe_groups, open_groups
from zeropipe.profiling.spec import ProfileJob, ProfileSetting

NUM_WARM_UP_STEPS = 2  # they compile, and allocate memory
# microbatches in flight besides the measured one, on a CPU: their activations evict its tensors from the caches, as in
# training
NUM_IN_FLIGHT = 4
NUM_PINGS = 8
EXTRA_WORK_S = 0.002  # by which each rank works longer than its neighbour: more than a message takes


def profile(job: ProfileJob) -> Profile:
    """Measure a model. Every rank calls this and gets the same result; all measure at the same time."""
    device, solo = select_device(job.device), create_solo_group()
    attention = "sdpa" if job.sample is None else resolve_attention("auto", device)
    model = open_groups(job.source, DTYPES[job.dtype], job.seed, attention)
    probes = []
    for index, setting in enumerate(job.settings):
        _report(f"{job.name}: {index + 1} of {len(job.settings)}: {setting}")
        probes.append(_probe(job, model, setting, device, solo))
    return create_profile(job, model, probes, device)


def create_solo_group() -> Any:
    """Create a process group with this rank only."""
    return [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())][dist.get_rank()]


def create_profile(job: ProfileJob, model: GroupedModel, probes: Sequence[Probe], device: torch.device) -> Profile:
    """Measure messages between the ranks, and create the profile of a model whose groups were measured."""
    message, has_messages = probes[0].groups[1].message, dist.get_world_size() > 1
    pings = _measure_pings(message, device) if has_messages else ()
    # on a GPU messages have streams of their own, and a rank does not wait for their launch
    streams = _measure_streams(message, device) if has_messages and device.type == "cpu" else ()
    return Profile(
        job.name, model.layers, tuple(probes), pings, tuple(gather_objects(machine_name())),
        bool(getattr(model.model.config, "tie_word_embeddings", False)), job.sequence, job.dtype,
        DTYPES[job.dtype].itemsize, _machine(device), _versions(device), job.sample, streams,
    )  # fmt: skip


def profile_under_torchrun(job: ProfileJob) -> Profile | None:
    """`profile` on the processes torchrun started; None on all ranks but the first."""
    join_torchrun(choose_backend(Job(device=job.device), local_world_size()))
    try:
        found = profile(job)
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _probe(job: ProfileJob, model: GroupedModel, setting: ProfileSetting, device: torch.device, solo: Any) -> Probe:
    microbatch = random_microbatch(job, model, setting, device)
    apart = {name: tensor.view(-1, job.sample or job.sequence) for name, tensor in microbatch.items()}
    microbatch |= pack(microbatch["input_ids"], job.sample)
    groups: tuple[LayerGroup, ...] = ()
    found: dict[str, tuple[Timeline, ...]] = {}
    for name, build in (("split", split_schedule), ("full", full_schedule)):
        stages = model.build(device)
        groups = groups or describe_groups(model, stages, apart)
        steps = record_groups(job, stages, microbatch, setting, device, solo, build)
        found[name] = tuple(timeline for own in gather_objects(list(steps)) for timeline in own)
        is_fused = getattr(stages[len(stages) - 1], "fused_head", None) is not None
        del stages, steps
        gc.collect()
    return Probe(groups, found["split"], found["full"], setting.ac, setting.microbatch_size, setting.compile, is_fused)


def record_groups(
    job: ProfileJob, stages: Mapping[int, HFStage], microbatch: Mapping[str, Tensor], setting: ProfileSetting,
    device: torch.device, solo: Any, build: Callable[[int, int, int], Schedule],
) -> Iterator[Timeline]:  # fmt: skip
    """Record steps in which all groups run on this rank, the only one of the process group `solo`."""
    schedule = build(len(stages), job.microbatches, NUM_IN_FLIGHT if device.type == "cpu" else 0)
    return _record_steps(
        schedule, stages, [microbatch] * schedule.num_microbatches, CausalLMLoss(), job.steps, group=solo,
        device=device, compile=setting.compile, ac=setting.ac,
    )  # fmt: skip


def _record_steps(
    schedule: Schedule, stages: Any, microbatches: list[Any], loss_fn: Any, num_steps: int, **options: Any
) -> Iterator[Timeline]:
    """Record steps after a warm-up. Gradients are not cleared, so that only the warm-up allocates them."""
    with Engine(schedule, stages, record=True, **options) as engine:
        for step in range(NUM_WARM_UP_STEPS + num_steps):
            dist.barrier()  # all ranks measure at the same time, as they will run
            engine.train_step(microbatches, loss_fn)
            if step >= NUM_WARM_UP_STEPS:
                yield engine.timeline()


def random_microbatch(
    job: ProfileJob, model: GroupedModel, setting: ProfileSetting, device: torch.device
) -> dict[str, Tensor]:
    """A microbatch of random tokens, equal on all ranks."""
    generator = torch.Generator().manual_seed(job.seed)
    vocabulary = model.model.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, (setting.microbatch_size, job.sequence), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def pack(tokens: Tensor, sample: int | None) -> dict[str, Tensor]:
    """What a microbatch needs whose rows are packed samples of equal length."""
    if sample is None:
        return {}
    number = tokens.numel() // sample
    positions = torch.arange(sample, device=tokens.device).repeat(number).view(tokens.shape)
    return {"position_ids": positions, "cu_seqlens": torch.arange(number + 1, dtype=torch.int32) * sample}


class PassThrough(nn.Module):
    """Returns its input, and its gradient, after some seconds of work each."""

    def __init__(self, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return _BusyWork.apply(x, *self.seconds) * self.scale  # type: ignore[no-any-return, no-untyped-call]


class _BusyWork(torch.autograd.Function):
    """Identity that works for `seconds` in the forward and `backward_seconds` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward_seconds: float) -> Tensor:
        ctx.backward_seconds = backward_seconds
        _work(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _work(ctx.backward_seconds)
        return gradients[0], None, None


def _work(seconds: float) -> None:
    """Run matrix products, as a model does: the threads of sockets run at the same time."""
    end, a = time.perf_counter() + seconds, torch.ones(64, 64)
    while time.perf_counter() < end:
        torch.mm(a, a)


def _sum(output: Tensor, microbatch: Any) -> tuple[Tensor, int]:
    return output.sum(), output.numel()


def _measure_pings(message: float, device: torch.device) -> tuple[Ping, ...]:
    """Time messages of a quarter of the size and of the full size, to separate latency and bandwidth."""
    schedule, rank, found = ping_schedule(dist.get_world_size(), NUM_PINGS), dist.get_rank(), []
    for divisor in (4, 1):
        count = max(1, int(message) // 4 // divisor)
        _report(f"messages of {4 * count:,} bytes between {schedule.num_ranks} ranks")
        batch = {"inputs": torch.ones(count, device=device)}
        steps = _record_steps(schedule, {rank: PassThrough().to(device)}, [batch] * NUM_PINGS, _sum, 3, device=device)
        found.append(Ping(4.0 * count, tuple(steps)))
    return tuple(found)


def _measure_streams(message: float, device: torch.device) -> tuple[Timeline, ...]:
    """Time messages that arrive before they are needed: each rank works longer than the one that sends to it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    schedule = stream_schedule(size, NUM_PINGS)
    _report(f"time that {size} ranks spend on messages")
    stage = PassThrough(EXTRA_WORK_S * (rank + 1), EXTRA_WORK_S * (size - rank)).to(device)
    batch = {"inputs": torch.ones(max(1, int(message) // 4), device=device)}
    return tuple(_record_steps(schedule, {rank: stage}, [batch] * NUM_PINGS, _sum, 3, device=device))


def gather_objects(value: Any) -> list[Any]:
    """The values of all ranks, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _report(text: str) -> None:
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
