"""Schedules run for real, side by side: measured makespan, bubble and peak memory beside the simulated ones.

    python bench/pipeline.py                                  # 2 CPU ranks, tiny model
    python bench/pipeline.py --device cuda --ranks 4 --model qwen3-8b --num-layers 16 --vocabulary 8192 \\
        --sequence 2048 --microbatches 12 --dtype bfloat16 --compile --out DIR

A name with "/apart" is the schedule with the F and B of each Overlap one after the other: what does overlapping give?
With --device cuda and fewer GPUs than ranks, ranks share them (under CUDA MPS if its daemon runs) and hand tensors over
through CPU memory. --out writes every measured timeline as JSON, for `zeropipe draw x.json -o x.html`.
"""

import argparse
import os
from pathlib import Path

from overlap import apart

import zeropipe as zp
from zeropipe.engine.run.job import choose_backend, run_all
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.engine.run.spec import Job
from zeropipe.sim.fit import fit


def build(name: str, ranks: int, microbatches: int) -> zp.Schedule:
    """A schedule by name; with "/apart", without Overlaps."""
    name, slash, _ = name.partition("/")
    schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
    return apart(schedule) if slash else schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="1f1b,zbv")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ac", default="none")
    parser.add_argument("--split", default="store")
    parser.add_argument("--timeout", type=float, default=500.0)
    parser.add_argument("--out", type=Path)
    args = vars(parser.parse_args())
    names, ranks, microbatches = args.pop("schedules").split(","), args.pop("ranks"), args.pop("microbatches")
    timeout, out = args.pop("timeout"), args.pop("out")
    schedules = [build(name, ranks, microbatches) for name in names]
    print(f"{ranks} ranks on {os.cpu_count()} cores, {microbatches} microbatches, {args}", flush=True)
    job = Job(**args)
    with LocalRanks(ranks, backend=choose_backend(job, ranks)) as local:
        results = local.run(run_all, schedules, job, timeout=timeout)[0]
    first = results[0].measured.timeline.makespan
    print(f"{'schedule':14} {'measured s':>11} {'simulated s':>12} {'sim/meas':>9} {'bubble':>8} {'peak MiB':>9}"
          f" {'to ' + names[0]:>9}")  # fmt: skip
    for name, result in zip(names, results, strict=True):
        real = result.measured.timeline
        guess = zp.simulate(real.schedule, fit(real))
        times = f"{real.makespan:11.4f} {guess.makespan:12.4f} {guess.makespan / real.makespan:9.3f}"
        rest = f"{100 * real.bubble:7.1f}% {max(real.peak_memory) / 2**20:9.0f} {real.makespan / first:9.3f}"
        print(f"{name:14} {times} {rest}")
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{real.schedule.name}.json").write_text(
                zp.to_json(real.with_label(f"{real.schedule.name}, measured"))
            )


if __name__ == "__main__":
    main()
