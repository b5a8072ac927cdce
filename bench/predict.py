"""Predicted step times beside real ones: costs are profiled and schedules are run for real, in turns.

    python bench/predict.py                                # 4 CPU ranks, 12 runs: 6 schedules x 2 sizes
    python bench/predict.py --sizes small,long,wide        # 18 runs
    python bench/predict.py --ranks 2 --schedules 1f1b,zbv --sizes small --rounds 4

Profiling knows nothing of the schedules: one layer of each kind, the embedding, the head and messages are measured on
all ranks at once. Everything is set up first; then, round by round, every schedule trains a step, and the pieces are
measured before and after each of them, so that a slow moment of the machine hits all alike. Ranks have one thread each,
on cores of their own where there are enough, and keep the memory that they free, as on a GPU.

On a shared machine the cores change their speed within a second, each by itself, and a pipeline waits for the slowest.
`predicted` is the simulation with the mean costs, held against the median of the measured makespans. For `paced` each
step has a prediction of its own, in which each rank is as fast or slow as it was when the pieces were measured right
before and right after it; the median of these errors counts. For `fitted` the costs are corrected as `zeropipe profile
--fit` does, by the recorded steps of a schedule with whole backwards and of one with split ones; neither of them is the
one that is predicted.

More columns say where an error comes from: `busy` is the error of the time that ranks spend on actions and between
them, without waiting, under the mean costs; `by kind` is that of each kind of action; `between` is how much of the
measured step they spent between actions, for messages above all; `jitter` is how much of it they waited because
actions took longer or shorter than in the mean; `spread` is half of what lies between the first and the last quarter of
the measured steps.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import M_MMAP_THRESHOLD, pin

import zeropipe as zp
from zeropipe.core.action import Kind
from zeropipe.core.model.probe import Probe, Profile, full_schedule, split_schedule
from zeropipe.engine import CausalLMLoss, Engine, hf_stages
from zeropipe.engine.run.job import synthetic_microbatches
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.engine.run.spec import Job, built_in_config, layers_per_stage_of
from zeropipe.profiling.groups import describe_groups, open_groups
from zeropipe.profiling.measure import (
    create_profile,
    create_solo_group,
    gather_objects,
    random_microbatch,
    record_groups,
)
from zeropipe.profiling.spec import ProfileJob
from zeropipe.sim.attribution import attribute_idle_time, residuals
from zeropipe.sim.costs import TIME_FIELDS
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.sim.profile_costs import costs_from_profile, trimmed_mean
from zeropipe.sim.refit import refit

SIZES: dict[str, dict[str, Any]] = {
    "small": {"model": "tiny-qwen3", "num_layers": 16, "sequence": 128},
    "long": {"model": "tiny-llama", "num_layers": 16, "sequence": 256},
    "wide": {"model": "qwen3-0.6b", "num_layers": 8, "vocabulary": 2048, "sequence": 32},
}
M_TRIM_THRESHOLD = -1


@dataclass(frozen=True)
class Turns:
    """What the rounds gave: a profile of all of them, each rank's pace around each step, and the steps' timelines."""

    profile: Profile
    # by schedule, round and rank: its time for the pieces, 1.0 being the usual one
    paces: Sequence[Sequence[Sequence[float]]]
    timelines: Sequence[Sequence[zp.Timeline]]  # by schedule and round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved,zb-h1,zbv,dualpipev")
    parser.add_argument("--sizes", default="small,long", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="a folder for the results as JSON")
    args = parser.parse_args()
    print(f"{args.ranks} ranks on {os.cpu_count()} cores, {args.microbatches} microbatches, {args.rounds} rounds")
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    print(
        f"{'size':6} {'schedule':12} {'measured ms':>12} {'spread':>7} {'predicted ms':>13} {'error':>7} {'paced':>7} "
        f"{'fitted':>7} "
        f"{'memory':>7} {'busy':>7} {'between':>7} {'jitter':>7}  by kind",
        flush=True,
    )
    with LocalRanks(args.ranks) as ranks:
        ranks.run(keep_memory)
        for size in args.sizes.split(","):
            schedules = [
                zp.build(name, ranks=args.ranks, microbatches=args.microbatches) for name in args.schedules.split(",")
            ]
            turns = ranks.run(take_turns, size, schedules, args.rounds, timeout=1800)[0]
            layers = costs_from_profile(turns.profile)
            for schedule, timelines, paces in zip(schedules, turns.timelines, turns.paces):
                counts = layers_per_stage_of(Job(**SIZES[size]), schedule)
                found = compared(schedule, timelines, layers, counts, paces)
                fitted = corrected(layers, timelines, turns.timelines, Job(**SIZES[size]))
                guess = zp.simulate(schedule, fitted.costs(counts, placement=schedule.placement)).makespan
                found["fitted_error"] = guess / found["measured"] - 1
                rows.append(row := {"size": size, "schedule": schedule.name} | found)
                by_kind = ", ".join(f"{kind} {100 * error:+.1f}%" for kind, error in row["kind_errors"].items())
                print(
                    f"{size:6} {schedule.name:12} {1e3 * row['measured']:12.1f} {100 * row['spread']:6.1f}% "
                    f"{1e3 * row['predicted']:13.1f} {100 * row['error']:+6.1f}% {100 * row['paced_error']:+6.1f}% "
                    f"{100 * row['fitted_error']:+6.1f}% "
                    f"{100 * row['memory_error']:+6.1f}% {100 * row['busy_error']:+6.1f}% "
                    f"{100 * row['between']:6.1f}% {100 * row['jitter']:6.1f}%  {by_kind}",
                    flush=True,
                )
            ordered = sorted(pace for run in turns.paces for each in run for pace in each)
            low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
            print(
                f"{size:6} one rank took {100 * (high / low - 1):.0f}% longer for the pieces in a slow moment",
                flush=True,
            )
    for name in ("error", "paced_error", "fitted_error"):
        errors = [abs(row[name]) for row in rows]
        print(
            f"{len(rows)} runs: median {name.replace('_', ' ')} {100 * statistics.median(errors):.1f}%, "
            f"worst {100 * max(errors):.1f}%"
        )
    print(f"{time.perf_counter() - begun:.0f} s in all")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "predict.json").write_text(json.dumps(rows, indent=1))


def corrected(
    layers: LayerCosts, own: Sequence[zp.Timeline], runs: Sequence[Sequence[zp.Timeline]], job: Job
) -> LayerCosts:
    """The costs corrected by a run with whole and one with split backwards: other runs than `own`, one like it last."""
    for how in (not splits(own), splits(own)):
        for run in [run for run in runs if run is not own and splits(run) is how][:1]:
            layers = refit(layers, run, layers_per_stage_of(job, run[0].schedule))
    return layers


def splits(run: Sequence[zp.Timeline]) -> bool:
    """Whether it has backwards in two."""
    return any(span.action.kind is Kind.W for span in run[0].spans(0))


def keep_memory() -> None:
    """Freed memory stays here: the system would have to clear it again, and GPipe frees all that it has at once."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)


def take_turns(size: str, schedules: Sequence[zp.Schedule], rounds: int) -> Turns:
    """On every rank: the pieces of a model and all schedules, set up once and then run in turns."""
    from transformers import AutoConfig

    job, device, alone = Job(**SIZES[size]), torch.device("cpu"), create_solo_group()
    asked = ProfileJob(size, built_in_config(job), sequence=job.sequence, steps=rounds * len(schedules) + 2)
    setting, pieces = asked.settings[0], open_groups(asked.source, torch.float32, asked.seed)
    microbatch, stages = random_microbatch(asked, pieces, setting, device), pieces.build(device)
    known = describe_groups(pieces, stages, microbatch)
    probes = [
        record_groups(asked, stages, microbatch, setting, device, alone, split_schedule),
        record_groups(asked, pieces.build(device), microbatch, setting, device, alone, full_schedule),
    ]
    runs = [_training(schedule, job, AutoConfig.for_model(**built_in_config(job))) for schedule in schedules]
    for each in (*probes, *runs):
        next(each)  # warm up
    cores = pin()
    probed: list[zp.Timeline] = [next(probes[0])]  # with split and with whole backwards in turns
    timelines: list[list[zp.Timeline]] = [[] for _ in runs]
    for number in range(rounds):
        for found, run in zip(timelines, runs):
            found.append(next(run))
            probed.append(next(probes[len(probed) % 2]))
        if dist.get_rank() == 0:
            print(f"{size}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    for each in (*probes, *runs):
        each.close()
    os.sched_setaffinity(0, cores)
    by_rank = gather_objects(probed)
    split, whole = (tuple(timeline for own in by_rank for timeline in own[way::2]) for way in (0, 1))
    usual = usual_time(split), usual_time(whole)
    spent = [[sum(timeline.busy) / usual[at % 2] for at, timeline in enumerate(own)] for own in by_rank]
    around = [[(own[at] + own[at + 1]) / 2 for own in spent] for at in range(rounds * len(runs))]
    paces = [around[which :: len(runs)] for which in range(len(runs))]
    return Turns(create_profile(asked, pieces, [Probe(known, split, whole)], device), paces, timelines)


def usual_time(timelines: Sequence[zp.Timeline]) -> float:
    """What the actions of a step take together, each in the mean that costs are: without the extremes."""
    steps = [[span[0].end - span[0].start for span in timeline.steps(0)] for timeline in timelines]
    return sum(trimmed_mean(times) for times in zip(*steps))


def _training(schedule: zp.Schedule, job: Job, config: Any) -> Iterator[zp.Timeline]:
    """A recorded step each time it is asked."""
    microbatches = synthetic_microbatches(job, schedule.num_microbatches, 0, torch.device("cpu"))
    stages = hf_stages(config, schedule, dist.get_rank(), seed=job.seed)
    with Engine(schedule, stages, record=True) as engine:
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
        while True:
            dist.barrier()
            engine.train_step(microbatches, CausalLMLoss())
            optimizer.step()
            optimizer.zero_grad()
            yield engine.timeline()


def compared(
    schedule: zp.Schedule, timelines: Sequence[zp.Timeline], layers: LayerCosts, counts: Sequence[int],
    paces: Sequence[Sequence[float]],
) -> dict[str, Any]:  # fmt: skip
    """What was measured beside its prediction."""
    costs = layers.costs(counts, placement=schedule.placement)
    steady = zp.simulate(schedule, costs)
    paced = [zp.simulate(schedule, _at(costs, pace, schedule)).makespan for pace in paces]
    activations = zp.simulate(schedule, replace(layers.costs(counts), weights=0.0))
    makespans = sorted(timeline.makespan for timeline in timelines)
    measured, quarter = statistics.median(makespans), len(makespans) // 4
    gone = [attribute_idle_time(timeline) for timeline in timelines]
    between = [[one.overhead for one in each] for each in gone]
    busy = statistics.fmean(sum(timeline.busy) + sum(gaps) for timeline, gaps in zip(timelines, between))
    real, predicted = max(timelines[0].peak_memory), max(activations.peak_memory)
    return {
        "measured": measured,
        "spread": (makespans[-1 - quarter] - makespans[quarter]) / 2 / measured,
        "predicted": steady.makespan,
        "error": steady.makespan / measured - 1,
        "paced_error": statistics.median(a / b.makespan for a, b in zip(paced, timelines)) - 1,
        "memory_error": predicted / real - 1 if real else 0.0,
        "busy_error": sum(steady.busy) / busy - 1,
        "kind_errors": kind_errors(timelines, steady),
        "between": statistics.fmean(map(statistics.fmean, between)) / measured,
        "jitter": statistics.fmean(statistics.fmean(one.jitter for one in each) for each in gone) / measured,
    }


def kind_errors(measured: Sequence[zp.Timeline], predicted: zp.Timeline) -> dict[str, float]:
    """How far the time of all actions of a kind is off."""
    real: dict[str, float] = defaultdict(float)
    guess: dict[str, float] = defaultdict(float)
    for timeline in measured:
        for each in residuals(timeline, predicted, by_stage=True):
            real[each.kind] += each.number * each.measured
            guess[each.kind] += each.number * each.predicted
    return {kind: guess[kind] / real[kind] - 1 for kind in real}


def _at(costs: zp.Costs, paces: Sequence[float], schedule: zp.Schedule) -> zp.Costs:
    """The costs where each rank has its own pace."""
    by_stage = [paces[rank] for rank in schedule.placement.copies[0]]
    changes: dict[str, Any] = {
        name: [value * pace for value, pace in zip(getattr(costs, name), by_stage)] for name in TIME_FIELDS
    }
    return replace(costs, **changes)


if __name__ == "__main__":
    main()
