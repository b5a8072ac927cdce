"""A long run: does memory or the number of open files grow, and how long a step takes beside what was predicted.

    python bench/train.py                                # a Qwen3-0.6B with random weights, 4 ranks that share one GPU
    python bench/train.py --device cpu --steps 40        # a tiny Qwen3

The prediction is made from one recorded step: its schedule simulated with the costs that fit it, plus what the step
took outside of the pipeline (data, norm, optimizer). It is compared with the median of the steps not recorded.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeropipe.engine import LocalRanks
from zeropipe.sim.fit import fit
from zeropipe.sim.simulate import simulate
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.steps import StepRecord
from zeropipe.train.loop.trainer import train

WARM_UP = 5  # steps that count for nothing


class Usage(NamedTuple):
    """Memory and open files of one process after a step."""

    step: int
    allocated: int  # bytes; 0 on the CPU
    peak: int  # bytes
    num_files: int


def observe(config: RunConfig, measured_steps: tuple[int, ...]) -> tuple[list[Usage], list[StepRecord]]:
    """Train; the usage of this process after some steps, and the records of all steps."""
    usage: list[Usage] = []
    steps: list[StepRecord] = []

    def after_step(record: StepRecord) -> None:
        steps.append(record)
        if record.step in measured_steps:
            on_gpu = torch.cuda.is_available() and config.engine.device != "cpu"
            now = torch.cuda.memory_allocated() if on_gpu else 0
            peak = torch.cuda.max_memory_allocated() if on_gpu else _peak_resident()
            usage.append(Usage(record.step, now, peak, len(list(Path("/proc/self/fd").iterdir()))))

    train(config, after_step)
    return usage, steps


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def config_of(args: argparse.Namespace, output: str) -> RunConfig:
    """The training file of the run."""
    on_gpu = args.device == "cuda"
    size: dict[str, Any] = {} if on_gpu else {"num_layers": 8, "vocabulary": 512}
    return RunConfig.model_validate({
        "model": {"path": "qwen3-0.6b" if on_gpu else "tiny-qwen3", "weights": "random", **size,
                  "dtype": "bfloat16" if on_gpu else "float32"},
        "mesh": {"pp": 4},
        "schedule": {"name": args.schedule, "last_less": args.last_less},
        "engine": {"device": args.device, "compile": args.compile},
        "data": {"sequence": args.sequence, "batch": args.microbatches, "microbatch": 1},
        "train": {"output": output, "steps": args.steps, "record_every": args.record_every},
        "checkpoint": {"export": False, "every": args.checkpoint_every},
        "log": {"every": max(1, args.steps // 10)},
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=0, help="tokens; 1024 on a GPU, 64 on the CPU")
    parser.add_argument("--last-less", type=int, default=0, help="layers the last stage has less")
    parser.add_argument("--record-every", type=int, default=20)
    parser.add_argument("--checkpoint-every", type=int, help="steps; without it the end is saved only")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--output", help="where to train; a temporary folder by default")
    args = parser.parse_args()
    args.sequence = args.sequence or (1024 if args.device == "cuda" else 64)
    measured_steps = tuple(sorted({min(step, args.steps) for step in (10, 50, 100, 200)} | {args.steps}))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, LocalRanks(4, preload=["zeropipe.train.loop.trainer"]) as ranks:
        results = ranks.run(observe, config_of(args, args.output or folder), measured_steps, timeout=600)
    print(f"torch {torch.__version__}, {args.device}, {args.schedule}, 4 ranks, {args.microbatches} x {args.sequence} "
          f"tokens a step; {time.monotonic() - began:.0f} s in all")  # fmt: skip
    show_usage([usage for usage, _ in results])
    show_times(results[0][1])


def show_usage(ranks: list[list[Usage]]) -> None:
    """Memory and open files of every rank at some steps."""
    print(f"\n{'rank':>4} {'step':>5} {'allocated, MiB':>15} {'peak, MiB':>13} {'open files':>11}")
    for rank, usage in enumerate(ranks):
        for one in usage:
            print(f"{rank:4} {one.step:5} {one.allocated / 2**20:15.1f} {one.peak / 2**20:13.1f} {one.num_files:11}")
    flat = all(
        usage[-1].num_files <= usage[0].num_files and usage[-1].allocated <= 1.01 * usage[0].allocated
        for usage in ranks
    )
    print("flat: open files and allocated memory do not grow" if flat else "NOT FLAT")


def show_times(steps: list[StepRecord]) -> None:
    """The prediction from each recorded step beside the median of the others."""
    others = [one.seconds for one in steps[WARM_UP:] if one.timeline is None]
    median = statistics.median(others)
    tenths = statistics.quantiles(others, n=10)
    print(f"\n{len(others)} steps that were not recorded: median {median:.4f} s, "
          f"8 of 10 within {tenths[0]:.4f} and {tenths[-1]:.4f} s")  # fmt: skip
    print(f"{'step':>5} {'recorded, s':>12} {'outside, s':>11} {'simulated, s':>13} {'predicted, s':>13} {'error':>7}")
    for one in steps:
        if one.timeline is not None:
            outside = one.seconds - one.timeline.makespan
            simulated = simulate(one.timeline.schedule, fit(one.timeline)).makespan
            error = (simulated + outside) / median - 1
            print(f"{one.step:5} {one.seconds:12.4f} {outside:11.4f} {simulated:13.4f} {simulated + outside:13.4f} "
                  f"{error:7.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
