"""`run`: a schedule for real, and what was measured beside what was predicted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Timeline
    from zeropipe.engine.run.job import Outcome
    from zeropipe.engine.run.spec import Job


@click.command()
@click.argument("schedules", nargs=-1, required=True)
@opt.size_options
@click.option(
    "--model",
    default="tiny-qwen3",
    show_default=True,
    help="A model directory, or built in with random weights: tiny-qwen3, tiny-llama, qwen3-0.6b, qwen3-8b, llama-8b.",
)
@click.option("--num-layers", type=click.IntRange(1), help="Layers of a built-in model, if not its own number.")
@click.option("--vocabulary", type=click.IntRange(2), help="Vocabulary of a built-in model, if not its own.")
@click.option(
    "--layers",
    help="Layers of each stage, like 2,3,3,2; spread evenly by default. A tiny model has as many as they add up to.",
)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Recorded steps, after a warm-up.")
@click.option("--sequence", type=click.IntRange(2), default=128, show_default=True, help="Tokens per sequence.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences per microbatch.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float64"]), default="float32", show_default=True)
@click.option("--compile", is_flag=True, help="Compile each transformer block (torch.compile).")
@click.option(
    "--ac",
    default="none",
    show_default=True,
    help="Activation checkpointing: none, full, selective:N, selective:op, memory_budget:X.",
)
@click.option(
    "--split",
    type=click.Choice(["store", "autograd", "whole"]),
    default="store",
    show_default=True,
    help="How I and W share the backward; autograd is torch's way.",
)
@click.option("--report", help="Write a page with the measured and the simulated timeline: report.html.")
@click.option("--timeline", "timeline_file", help="Write the measured timeline: x.json.")
@click.option("--dry-run", is_flag=True, help="Print layers, placement and messages; start nothing.")
@click.option(
    "--timeout",
    type=opt.Finite(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds until a silent run is stopped.",
)
@opt.json_option
def run(
    schedules: tuple[str, ...],
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    knobs: tuple[str, ...],
    report: str | None,
    timeline_file: str | None,
    dry_run: bool,
    timeout: float,
    as_json: bool,
    **job: Any,
) -> None:
    """Run schedules for real on a model with synthetic tokens, and hold the run against the simulation.

    Starts local processes, or uses torchrun's: `torchrun --nproc-per-node 4 -m zeropipe run zbv --microbatches 8`.
    """
    from zeropipe.core.check import check
    from zeropipe.viz import check_name

    world = os.environ.get("WORLD_SIZE")
    if world is not None and world.isdecimal() and ranks is None:
        ranks = int(world)
    if world is None and ranks is not None and not dry_run:
        _require_cores(ranks)
    built = [opt.schedule_of(spec, ranks, microbatches, stages_per_rank, knobs) for spec in schedules]
    if world is None and not dry_run:  # a file has ranks of its own
        _require_cores(built[0].num_ranks)
    if len({schedule.num_ranks for schedule in built}) > 1:
        raise ConfigError("these schedules have different numbers of ranks: run them one by one")
    if timeline_file and len(built) > 1:
        raise ConfigError("--timeline holds one run: give one schedule")
    for schedule in built:
        check(schedule)
    for path in (report, timeline_file):
        if path:
            check_name(path)
    if timeline_file and not timeline_file.endswith(".json"):
        raise ConfigError(f"--timeline {timeline_file}: its name must end in .json")
    todo = _job(built, **job)
    if dry_run:
        _print_plan(built, todo, as_json)
        return
    results = _run_ranks(built, todo, timeout)
    if results is None:  # a rank of torchrun's that is not the first
        return
    pairs = [(result, _predicted(result.measured.timeline)) for result in results]
    if report:
        from zeropipe.viz import draw

        draw([t for result, guess in pairs for t in (_label(result.measured.timeline, "measured"), guess)], report)
    if timeline_file:
        from zeropipe.core.json import to_json

        Path(timeline_file).write_text(to_json(results[0].measured.timeline))
    if as_json:
        output.print_json([_data(result, guess) for result, guess in pairs])
        return
    for result, guess in pairs:
        _print_run(result, guess, todo)
    if len(pairs) > 1:
        _print_ranking(results)
    for path in (report, timeline_file):
        if path:
            print(f"wrote {path}")


def _job(built: list[Schedule], **given: Any) -> Job:
    from zeropipe.engine.run.spec import BUILT_IN, Job, check_job, counts_of

    layers = given.pop("layers")
    try:
        counts = tuple(int(part) for part in layers.split(",")) if layers else None
    except ValueError:
        raise ConfigError(f"--layers {layers!r}: write one number per stage, like 2,3,3,2") from None
    job = Job(layers=counts, **given)
    most = max(schedule.num_stages for schedule in built)
    if job.model in BUILT_IN and job.model.startswith("tiny") and job.num_layers is None:
        # a tiny model has a layer for every stage, and the same number for all schedules compared
        job = replace(job, num_layers=sum(counts) if counts else max(BUILT_IN[job.model][0], most))
    check_job(job)
    for schedule in built:
        counts_of(job, schedule)
    return job


def _require_cores(num_ranks: int) -> None:
    """Local ranks are processes: a wrong number must not take the machine down."""
    cores = os.cpu_count() or 1
    if num_ranks > max(64, 4 * cores):
        raise ConfigError(
            f"{num_ranks} ranks are too many processes for the {cores} cores here: give at most {max(64, 4 * cores)}, "
            "or use torchrun on several machines"
        )


def _run_ranks(built: list[Schedule], job: Job, timeout: float) -> list[Outcome] | None:
    from zeropipe.engine import require_torch

    require_torch()
    from zeropipe.engine.run.job import backend_of, check_device, run_all, run_under_torchrun
    from zeropipe.engine.run.launch import LocalRanks, is_local

    check_device(job)
    if not is_local():
        return run_under_torchrun(built, job)
    num_ranks = built[0].num_ranks
    with LocalRanks(num_ranks, backend=backend_of(job, num_ranks)) as ranks:
        first: list[Outcome] = ranks.run(run_all, built, job, timeout=timeout)[0]
        return first


def _predicted(measured: Timeline) -> Timeline:
    from zeropipe.sim.fit import fit
    from zeropipe.sim.simulate import simulate

    return _label(simulate(measured.schedule, fit(measured)), "simulated")


def _label(timeline: Timeline, word: str) -> Timeline:
    return timeline.labelled(f"{timeline.schedule.name}, {word}")


def _data(result: Outcome, guess: Timeline) -> dict[str, Any]:
    from zeropipe.cli.plan import summary
    from zeropipe.sim.fit import residuals

    return {
        "measured": summary(result.measured.timeline),
        "simulated": summary(guess),
        "residuals": [r._asdict() for r in residuals(result.measured.timeline, guess)],
        "losses": result.measured.losses,
        "makespans": result.measured.makespans,
        "num_parameters": result.num_parameters,
    }


def _print_run(result: Outcome, guess: Timeline, job: Job) -> None:
    from zeropipe.sim.fit import residuals

    console, real = output.console(), result.measured.timeline
    schedule = real.schedule
    console.print(
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages ({schedule.placement.name}), "
        f"{schedule.num_microbatches} microbatches of {job.batch} x {job.sequence} tokens; "
        f"{job.model}, {result.num_parameters / 1e6:.1f}M parameters, {job.dtype} on {job.device}",
        style="bold",
    )
    cores = os.cpu_count() or 1
    if job.device == "cpu" and schedule.num_ranks > cores:
        console.print(f"{schedule.num_ranks} ranks share {cores} cores: times are longer than on cores of their own")
    rows = output.table("", "measured", "simulated", "difference", left=("",))
    peaks = max(real.peak_memory), max(guess.peak_memory)
    rows.add_row(
        "makespan", output.time_text(real.makespan, "s"), output.time_text(guess.makespan, "s"),
        _difference(real.makespan, guess.makespan),
    )  # fmt: skip
    rows.add_row(
        "bubble", output.percent(real.bubble), output.percent(guess.bubble),
        f"{100 * (guess.bubble - real.bubble):+.1f} points",
    )  # fmt: skip
    rows.add_row("peak activations", *(output.size_text(peak, "B") for peak in peaks), _difference(*peaks))
    console.print(rows)
    rows = output.table("kind", "actions", "measured", "simulated", "starts later by", left=("kind",))
    for r in residuals(real, guess):
        rows.add_row(r.kind, str(r.number), *(output.time_text(t, "s") for t in (r.measured, r.predicted, r.late)))
    console.print(rows)


def _difference(real: float, guess: float) -> str:
    return f"{100 * (guess / real - 1):+.1f}%" if real else "-"


def _print_ranking(results: list[Outcome]) -> None:
    rows = output.table("schedule", "measured makespan", "of best", "bubble", left=("schedule",))
    best = min(result.measured.timeline.makespan for result in results)
    for result in sorted(results, key=lambda r: r.measured.timeline.makespan):
        t = result.measured.timeline
        rows.add_row(
            t.schedule.name, output.time_text(t.makespan, "s"), f"{t.makespan / best:.3f}", output.percent(t.bubble)
        )
    output.console().print(rows)


def _print_plan(built: list[Schedule], job: Job, as_json: bool) -> None:
    from zeropipe.core.action import Kind
    from zeropipe.core.layers import ranges
    from zeropipe.core.lower import lower
    from zeropipe.engine.run.spec import counts_of

    plans: list[dict[str, Any]] = []
    for schedule in built:
        counts = counts_of(job, schedule)
        program = lower(schedule)
        sent = [sum(getattr(s, "kind", None) in (Kind.SEND_F, Kind.SEND_B) for s in row) for row in program.rows]
        plans.append({
            "schedule": schedule.name, "num_ranks": schedule.num_ranks, "num_microbatches": schedule.num_microbatches,
            "placement": schedule.placement.name, "layers_per_stage": counts,
            "ranks": [
                {"rank": rank, "stages": schedule.placement.stages_of(rank),
                 "layers": [[r.start, r.stop] for s in schedule.placement.stages_of(rank) for r in [ranges(counts)[s]]],
                 "messages_sent": sent[rank]}
                for rank in range(schedule.num_ranks)
            ],
        })  # fmt: skip
    if as_json:
        output.print_json(plans)
        return
    for plan in plans:
        output.console().print(
            f"{plan['schedule']}: {plan['num_ranks']} ranks, {plan['num_microbatches']} microbatches, "
            f"{plan['placement']} placement, layers per stage {' '.join(map(str, plan['layers_per_stage']))}",
            style="bold",
        )
        rows = output.table("rank", "stages", "layers", "messages sent", left=("stages", "layers"))
        for row in plan["ranks"]:
            spans = [f"{a}-{b - 1}" if b > a else "none" for a, b in row["layers"]]
            rows.add_row(
                str(row["rank"]), " ".join(map(str, row["stages"])), " ".join(spans), str(row["messages_sent"])
            )
        output.console().print(rows)
