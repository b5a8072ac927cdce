"""Activations on the host: peak memory and time of a step with OFFLOAD and RELOAD, beside the same step without.

    python bench/offload.py                              # one GPU: about a minute
    python bench/offload.py --device cpu --width 64 --mlp 128 --tokens 64    # whether all of it runs

One rank runs the row that the first of eight ranks has in 1f1b, so that eight microbatches are in flight. Layers are
those of Qwen3-8B. Ways of a step:

none    without copies
auto    zp.with_offload(schedule, costs): all whose copies hide, by costs of a recorded step of `none` and of `all`
all     all of them

A way hides 1 - (its step - that of none) / the time of its copies to the host and back. Peaks are of what a step
allocates. The simulator's makespan and peak are those of the recorded costs. Gradients are compared with those of
`none`: the largest relative difference, beside that of a second run of `none`, whose kernels may add in another order.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zeropipe as zp
from zeropipe.core.action import Kind
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine import CausalLMLoss, Engine, hf_stages
from zeropipe.sim.costs import Costs
from zeropipe.sim.fit import fit

GB = 1e9
STEPS = 3


def config_of(args: argparse.Namespace) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=args.width, intermediate_size=args.mlp, num_hidden_layers=args.layers, vocab_size=32_000,
        num_attention_heads=max(1, args.width // 128), num_key_value_heads=max(1, args.width // 512), head_dim=128,
        max_position_embeddings=2 * args.tokens,
    )  # fmt: skip


def row_of_1f1b(in_flight: int, microbatches: int) -> Schedule:
    """One rank with the row that rank 0 of `in_flight` ranks has."""
    row = zp.build("1f1b", ranks=in_flight, microbatches=microbatches).rows[0]
    problem = zp.Problem(1, 1, microbatches)
    return zp.Schedule.of(problem, zp.linear(problem), [row], "row of 1f1b")


def link_speeds(device: str) -> tuple[float, float]:
    """Bytes per second from the device to pinned memory, and back."""
    here = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    there = torch.empty(here.shape, dtype=torch.uint8, pin_memory=device == "cuda")
    speeds = []
    for source, target in ((here, there), (there, here)):
        times = []
        for _ in range(4):
            synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize(device)
            times.append(time.perf_counter() - start)
        speeds.append(len(here) / min(times))
    return speeds[0], speeds[1]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Step:
    """What a way of a step measured."""

    def __init__(self, seconds: float, peak: float, timeline: Timeline, gradients: list[Tensor]) -> None:
        self.seconds, self.peak, self.timeline, self.gradients = seconds, peak, timeline, gradients

    @property
    def copy_seconds(self) -> float:
        return sum(span.end - span.start for span in self.timeline.offloading_spans(0))

    def difference(self, other: Step, device: str) -> float:
        pairs = ([one.to(device).float() for one in pair] for pair in zip(self.gradients, other.gradients, strict=True))
        return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def measure(args: argparse.Namespace, schedule: Schedule, stages: Any, ac: str, data: list[dict[str, Tensor]]) -> Step:
    gc.collect()  # of earlier engines
    with Engine(schedule, stages, ac=ac, direct_gradients=True, record=False) as engine:
        times = []
        for _ in range(STEPS):
            for parameter in engine.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            synchronize(args.device)
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
            start = time.perf_counter()
            engine.train_step(data, CausalLMLoss())
            synchronize(args.device)
            times.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() - base if args.device == "cuda" else 0
        gradients = [parameter.grad.to("cpu", copy=True) for parameter in engine.parameters()]
        for parameter in engine.parameters():
            parameter.grad.zero_()
        engine.record = True
        engine.train_step(data, CausalLMLoss())
        timeline = engine.timeline()
    return Step(statistics.median(times[1:]), peak, timeline, gradients)


def show(args: argparse.Namespace, stages: Any, plain: Schedule, ac: str, speeds: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(32_000, (args.microbatches, 1, args.tokens), generator=generator).to(args.device)
    data = [{"input_ids": row, "labels": row} for row in rows]
    none = measure(args, plain, stages, ac, data)
    again = measure(args, plain, stages, ac, data)
    everything = zp.with_offload(plain, offload=1.0)
    steps = {"none": none, "all": measure(args, everything, stages, ac, data)}
    costs = costs_of(none, steps["all"])
    schedules = {"none": plain, "auto": zp.with_offload(plain, costs), "all": everything}
    steps["auto"] = measure(args, schedules["auto"], stages, ac, data)
    kept, size, out, back = (
        costs.column(name, 1)[0] for name in ("activation", "offload_size", "offload_time", "reload_time")
    )
    rates = [f"{rate / GB:.1f}" for rate in (size / out, size / back, *speeds)]
    print(
        f"\nac={ac}: an F keeps {kept / GB:.2f} GB, {size / GB:.2f} GB of them can be copied, at {rates[0]} and "
        f"{rates[1]} GB/s (one large copy: {rates[2]} and {rates[3]})"
    )
    print(
        f"{'':6} {'copied':>7} {'peak GB':>8} {'simulated':>10} {'ms':>8} {'of none':>8} {'simulated':>10} "
        f"{'hidden':>7} {'simulated':>10} {'gradient':>10}"
    )
    first = zp.simulate(plain, costs)
    for way in ("none", "auto", "all"):
        step, simulated = steps[way], zp.simulate(schedules[way], costs)
        copies = sum(span.action.kind is Kind.OFFLOAD for span in step.timeline.offloading_spans(0))
        lasts = sum(span.end - span.start for span in simulated.offloading_spans(0))
        hidden = f"{1 - (step.seconds - none.seconds) / step.copy_seconds:7.1%}" if copies else f"{'':7}"
        predicted = f"{1 - (simulated.makespan - first.makespan) / lasts:10.1%}" if copies else f"{'':10}"
        difference = (again if way == "none" else step).difference(none, args.device)
        print(
            f"{way:6} {copies:4}/{args.microbatches:<2} {step.peak / GB:8.2f} "
            f"{(max(simulated.peak_memory) - max(first.peak_memory) + none.peak) / GB:10.2f} "
            f"{1e3 * step.seconds:8.0f} {step.seconds / none.seconds:8.3f} "
            f"{simulated.makespan / first.makespan:10.3f} {hidden} {predicted} {difference:10.1e}"
        )


def costs_of(none: Step, everything: Step) -> Costs:
    """Times and memory of the step without copies, and the copies of the step with all of them."""
    copies = fit(everything.timeline)
    own = {name: copies.column(name, 1) for name in ("offload_time", "reload_time", "offload_size")}
    return replace(fit(none.timeline), **own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    for name, number in (("layers", 4), ("width", 4096), ("mlp", 12288), ("tokens", 4096), ("microbatches", 12)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--in-flight", type=int, default=8)
    args = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29613", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(
        f"{where}, torch {torch.__version__}; {args.layers} layers of width {args.width}, {args.microbatches} "
        f"microbatches of {args.tokens} tokens, {args.in_flight} in flight"
    )
    speeds = link_speeds(args.device)
    plain = row_of_1f1b(args.in_flight, args.microbatches)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    stages = hf_stages(config_of(args), plain, 0, device=args.device, dtype=dtype)
    for ac in ("none", "full"):
        show(args, stages, plain, ac, speeds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
