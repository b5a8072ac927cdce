"""Predicted step times beside real ones: costs are profiled and schedules are run for real, in turns.

    python bench/predict.py                                # 4 CPU ranks, 12 runs: 6 schedules x 2 sizes
    python bench/predict.py --sizes small,long,wide        # 18 runs
    python bench/predict.py --ranks 2 --schedules 1f1b,zbv --sizes small --steps 2

Profiling knows nothing of the schedules: one layer of each kind, the embedding, the head and messages are measured on
all ranks at once. A prediction is the simulation of the schedule under these costs, the mean of the profiles before and
after the run, since machines change their speed; the error is relative to the median of the recorded steps. Ranks have
one thread each, on cores of their own where there are enough.

Two more columns say where an error comes from: `busy` is the error of the time that ranks spend on actions and between
them, without waiting; `between` is how much of the measured step they spent between actions, for messages above all.
`layer` is what one layer took in the profile after the run: profiles of one size that lie apart say how steady the
machine is, and no prediction can be better than that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from step import pin

import zeropipe as zp
from zeropipe.engine.profile.measure import profile
from zeropipe.engine.profile.spec import ProfileJob
from zeropipe.engine.run.job import run_job
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.engine.run.spec import Job, built_in, counts_of
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.sim.profiled import layer_costs
from zeropipe.sim.reality import lost

SIZES: dict[str, dict[str, Any]] = {
    "small": {"model": "tiny-qwen3", "num_layers": 16, "sequence": 128},
    "long": {"model": "tiny-llama", "num_layers": 16, "sequence": 256},
    "wide": {"model": "qwen3-0.6b", "num_layers": 8, "vocabulary": 2048, "sequence": 32},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved,zb-h1,zbv,dualpipev")
    parser.add_argument("--sizes", default="small,long", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a folder for the costs and the results as JSON")
    args = parser.parse_args()
    print(f"{args.ranks} ranks on {os.cpu_count()} cores, {args.microbatches} microbatches, {args.steps} steps")
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    print(
        f"{'size':6} {'schedule':12} {'measured ms':>12} {'spread':>7} {'predicted ms':>13} {'error':>7} {'memory':>7} "
        f"{'busy':>7} {'between':>7} {'layer ms':>8}",
        flush=True,
    )
    with LocalRanks(args.ranks) as ranks:
        ranks.run(pin)
        for size in args.sizes.split(","):
            after = profiled(ranks, size, args.steps)
            layers = [layer_time(after)]
            for name in args.schedules.split(","):
                schedule = zp.build(name, ranks=args.ranks, microbatches=args.microbatches)
                job, before = replace(Job(**SIZES[size]), steps=args.steps), after
                measured = ranks.run(run_job, schedule, job, timeout=300)[0].measured
                after = profiled(ranks, size, args.steps)
                layers.append(layer_time(after))
                row = {"size": size, "schedule": name, "layer": layers[-1]}
                row |= compared(measured, schedule, job, (before, after))
                rows.append(row)
                print(
                    f"{size:6} {name:12} {1e3 * row['measured']:12.1f} {100 * row['spread']:6.1f}% "
                    f"{1e3 * row['predicted']:13.1f} {100 * row['error']:+6.1f}% {100 * row['memory_error']:+6.1f}% "
                    f"{100 * row['busy_error']:+6.1f}% {100 * row['between']:6.1f}% {1e3 * layers[-1]:8.2f}",
                    flush=True,
                )
            apart = max(layers) / min(layers) - 1
            print(f"{size:6} a layer was profiled {len(layers)} times: {100 * apart:.1f}% apart", flush=True)
    errors = [abs(row["error"]) for row in rows]
    print(
        f"{len(rows)} runs: median error {100 * statistics.median(errors):.1f}%, worst {100 * max(errors):.1f}%; "
        f"{time.perf_counter() - begun:.0f} s in all"
    )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "predict.json").write_text(json.dumps(rows, indent=1))


def layer_time(costs: LayerCosts) -> float:
    """F, I and W of a layer."""
    cost = costs.settings[0].kinds[costs.layers[0]]
    return cost.f + cost.i + cost.w


def profiled(ranks: LocalRanks, size: str, steps: int) -> LayerCosts:
    """The costs of the layers of a size, measured on all ranks at once."""
    job = Job(**SIZES[size])
    asked = ProfileJob(size, built_in(job), sequence=job.sequence, steps=steps)
    return layer_costs(ranks.run(profile, asked, timeout=300)[0])


def compared(measured: Any, schedule: zp.Schedule, job: Job, costs: Sequence[LayerCosts]) -> dict[str, Any]:
    """What was measured beside its predictions, of which the mean counts."""
    counts = counts_of(job, schedule)
    guesses = [zp.simulate(schedule, one.costs(counts, placement=schedule.placement)) for one in costs]
    guess = statistics.fmean(one.makespan for one in guesses)
    guessed_busy = statistics.fmean(sum(one.busy) for one in guesses)
    activations = zp.simulate(schedule, replace(costs[0].costs(counts), weights=0.0))
    middle = statistics.median(measured.makespans)
    between = [one.overhead for one in lost(measured.timeline)]
    busy = sum(measured.timeline.busy) + sum(between)
    real, predicted = max(measured.timeline.peak_memory), max(activations.peak_memory)
    return {
        "measured": middle,
        "spread": (max(measured.makespans) - min(measured.makespans)) / 2 / middle,
        "predicted": guess,
        "error": guess / middle - 1,
        "memory_error": predicted / real - 1 if real else 0.0,
        "busy_error": guessed_busy / busy - 1,
        "between": statistics.fmean(between) / measured.timeline.makespan,
    }


if __name__ == "__main__":
    main()
