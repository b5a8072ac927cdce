"""Our pipelining classes against torch's of the same name, on the same stages: time and memory of a step.

    python bench/drop_in.py                                    # 2 CPU ranks, one thread each
    python bench/drop_in.py --ranks 4 --width 384 --rounds 30

Both classes live in the same processes and take turns, so a ratio is that of two steps under the same load; the figure
is the median over the rounds, with the range of its middle half. A step is forward, backward and the scaling of
gradients, as users call it; its time is the slowest rank's. "CPU" is the ratio of the processor time of all ranks:
other programs on the machine disturb it less. Memory is what a process needs at most in a step beyond what it had
before, of the rank that needs most, measured by the kernel with each class alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

import zeropipe.pipelining as ours
from zeropipe.engine.run.launch import LocalRanks

NAMES = {
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}


class Block(nn.Module):
    """A transformer's layer without its embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.heads = width, 8
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Runner:
    """One class on stages of its own; every class gets the same weights."""

    def __init__(self, home: Any, name: str, args: dict[str, Any]) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        kind, number = getattr(home, name), ranks * NAMES[name]
        numbers = getattr(ours, name).stages_of(rank, ranks, number)
        self.stages = []
        for stage in numbers:
            torch.manual_seed(stage)
            module = nn.Sequential(*(Block(args["width"]) for _ in range(args["layers"] // NAMES[name])))
            self.stages.append(PipelineStage(module, stage, number, torch.device("cpu")))
        single = issubclass(kind, torchs.PipelineScheduleSingle)
        self.schedule = kind(self.stages[0] if single else self.stages, args["microbatches"], loss_fn=loss_fn)
        torch.manual_seed(1000)
        batch = torch.randn(2, args["microbatches"] * args["batch"], args["sequence"], args["width"])
        self.inputs = [batch[0]] if any(stage.is_first for stage in self.stages) else []
        self.target = batch[1] if any(stage.is_last for stage in self.stages) else None

    def step(self) -> tuple[float, float]:
        """Seconds of the slowest rank, and seconds of processors on all of them."""
        for stage in self.stages:
            stage.submod.zero_grad(set_to_none=True)
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        self.schedule.step(*self.inputs, target=self.target, return_outputs=False)
        taken, work = torch.tensor([[time.perf_counter() - start], [time.process_time() - worked]], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        dist.all_reduce(work)
        return float(taken), float(work)

    def norm(self) -> float:
        return float(sum(p.grad.square().sum() for stage in self.stages for p in stage.submod.parameters()))


def race(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Rounds of both classes."""
    torch.set_num_threads(1)
    ours.configure(direct_gradients=args["direct"])
    runners = [Runner(ours, name, args), Runner(torchs, name, args)]
    for runner in runners:
        for _ in range(3):
            runner.step()
    mine, theirs = (runner.norm() for runner in runners)
    assert abs(mine - theirs) < 1e-4 * theirs, f"gradients differ: {mine} and {theirs}"
    times: list[tuple[float, float]] = []
    works: list[float] = []
    for turn in range(args["rounds"]):
        order = runners if turn % 2 == 0 else runners[::-1]
        taken = {id(runner): runner.step() for runner in order}
        (mine, work), (theirs, others) = (taken[id(runner)] for runner in runners)
        times.append((mine, theirs))
        works.append(work / others)
    ratios = sorted(a / b for a, b in times)
    quarter = len(ratios) // 4
    return {
        "ours": statistics.median(a for a, _ in times),
        "torch": statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios),
        "low": ratios[quarter],
        "high": ratios[-1 - quarter],
        "work": statistics.median(works),
    }


def peak(which: str, name: str, args: dict[str, Any]) -> float:
    """MiB that a step needs at most beyond what the process had."""
    torch.set_num_threads(1)
    ours.configure(direct_gradients=args["direct"])
    runner = Runner(ours if which == "ours" else torchs, name, args)
    runner.step()  # connections and buffers that stay
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    runner.step()
    needed = torch.tensor([(_status("VmHWM") - before) / 1024])
    dist.all_reduce(needed, dist.ReduceOp.MAX)
    return float(needed)


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default=",".join(NAMES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4, help="per rank")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1, help="rows of a microbatch")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--direct", action="store_true", help="with configure(direct_gradients=True)")
    parser.add_argument("--json", type=Path)
    args = vars(parser.parse_args())
    names, ranks, out = args.pop("names").split(","), args.pop("ranks"), args.pop("json")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # freed tensors go back at once, so that peaks are of a step
    print(f"{ranks} ranks on {os.cpu_count()} cores, torch {torch.__version__}, {args}", flush=True)
    columns = ("ours ms", 9), ("torch ms", 9), ("ratio", 7), ("middle half", 14), ("CPU", 6), ("MiB", 7), ("torch", 7)
    print(f"{'class':32} " + " ".join(f"{title:>{width}}" for title, width in columns), flush=True)
    results = {}
    for name in names:
        with LocalRanks(ranks) as local:
            found = local.run(race, name, args, timeout=600.0)[0]
        for which in ("ours", "torch"):
            with LocalRanks(ranks) as local:
                found[f"peak_{which}"] = local.run(peak, which, name, args, timeout=300.0)[0]
        results[name] = found
        times = f"{1000 * found['ours']:9.1f} {1000 * found['torch']:9.1f} {found['ratio']:7.3f}"
        spread = f"{found['low']:.3f} to {found['high']:.3f}"
        print(
            f"{name:32} {times} {spread:>14} {found['work']:6.3f} {found['peak_ours']:7.1f} {found['peak_torch']:7.1f}",
            flush=True,
        )
    if out:
        out.write_text(json.dumps({"ranks": ranks, **args, "results": results}, indent=1))


if __name__ == "__main__":
    main()
