"""The output of `run`: the plan of a dry run, and measured beside simulated figures."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zeropipe.cli import output
from zeropipe.core.mesh import format_mesh
from zeropipe.core.units import count_text, parameters_text

if TYPE_CHECKING:
    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Timeline
    from zeropipe.engine.run.job import Outcome
    from zeropipe.engine.run.spec import Job


def predict(measured: Timeline, job: Job) -> Timeline:
    """Simulate a measured run with its own mean times."""
    from zeropipe.sim.fit import fit
    from zeropipe.sim.simulate import simulate

    return label(simulate(measured.schedule, fit(measured)), "simulated", job)


def label(timeline: Timeline, kind: str, job: Job) -> Timeline:
    where = f" on {format_mesh(job.mesh)}" if job.mesh else ""
    return timeline.with_label(f"{timeline.schedule.name}{where}, {kind}")


def run_data(result: Outcome, predicted: Timeline, job: Job) -> dict[str, Any]:
    from zeropipe.sim.attribution import residuals

    return {
        "measured": output.timeline_data(result.measured.timeline),
        "simulated": output.timeline_data(predicted),
        "residuals": [
            {"kind": r.kind, "number": r.number, "measured": r.measured, "predicted": r.predicted, "late": r.delay}
            for r in residuals(result.measured.timeline, predicted)
        ],
        "losses": result.measured.losses,
        "makespans": result.measured.makespans,
        "num_parameters": result.num_parameters,
        "mesh": dict(job.mesh) or {"pp": result.measured.timeline.schedule.num_ranks},
        "gradient_error": result.gradient_error,
    }


def print_run(result: Outcome, predicted: Timeline, job: Job) -> None:
    from zeropipe.engine.run.spec import num_pipelines_of, num_ranks_of
    from zeropipe.sim.attribution import residuals

    console, real = output.console(), result.measured.timeline
    schedule = real.schedule
    console.print(
        f"{schedule.name}: {schedule.sizes} of {job.batch} x {count_text(job.sequence, 'token')}; "
        f"{job.model}, {parameters_text(result.num_parameters)}, {job.dtype} on {job.device}",
        style="bold",
        markup=False,
    )
    if job.mesh:
        number = num_pipelines_of(job)
        pipelines = f"{number} pipelines, each with its own microbatches" if number > 1 else "1 pipeline"
        console.print(f"on {format_mesh(job.mesh)}: {pipelines}", markup=False)
    if result.gradient_error is not None:
        console.print(f"gradients equal the full model's, to {result.gradient_error:.0e}")
    cores, processes = os.cpu_count() or 1, num_ranks_of(job, schedule)
    if job.device == "cpu" and processes > cores:
        console.print(
            f"{processes} ranks share {count_text(cores, 'core')}: times are longer than with a core for each"
        )
    table = output.create_table("", "measured", "simulated", "difference", left=("",))
    peaks = max(real.peak_memory), max(predicted.peak_memory)
    table.add_row(
        "makespan", output.time_text(real.makespan, "s"), output.time_text(predicted.makespan, "s"),
        _difference(real.makespan, predicted.makespan),
    )  # fmt: skip
    for name, shares in (
        ("idle", (real.idle_fraction, predicted.idle_fraction)), ("bubble rate", (real.bubble, predicted.bubble)),
    ):  # fmt: skip
        table.add_row(name, *map(output.percent, shares), f"{100 * (shares[1] - shares[0]):+.1f} points")
    table.add_row("peak activations", *(output.size_text(peak, "B") for peak in peaks), _difference(*peaks))
    console.print(table)
    table = output.create_table("kind", "actions", "measured", "simulated", "starts later by", left=("kind",))
    for r in residuals(real, predicted):
        table.add_row(r.kind, str(r.number), *(output.time_text(t, "s") for t in (r.measured, r.predicted, r.delay)))
    console.print(table)


def _difference(real: float, predicted: float) -> str:
    return f"{100 * (predicted / real - 1):+.1f}%" if real else "-"


def print_ranking(results: list[Outcome]) -> None:
    from rich.markup import escape

    from zeropipe.core.ranking import rank_timelines

    timelines = [result.measured.timeline for result in results]
    found = rank_timelines(timelines)
    table = output.create_table("schedule", "measured makespan", "of best", "idle", "bubble rate", left=("schedule",))
    for index in found.order:
        t, standing = timelines[index], found.standings[index]
        name = escape(t.schedule.name) + (" ★" if standing.best_time else "")
        shares = (output.percent(t.idle_fraction), output.percent(t.bubble))
        table.add_row(name, output.time_text(t.makespan, "s"), f"{standing.of_best:.3f}", *shares)
    output.console().print(table)


def print_plan(built: list[Schedule], job: Job, as_json: bool) -> None:
    from zeropipe.core.action import Kind
    from zeropipe.core.lower import lower
    from zeropipe.core.model.layers import layer_ranges
    from zeropipe.engine.run.spec import layers_per_stage_of

    plans: list[dict[str, Any]] = []
    for schedule in built:
        counts = layers_per_stage_of(job, schedule)
        ranges = layer_ranges(counts)
        program = lower(schedule)
        sent = [sum(getattr(s, "kind", None) in (Kind.SEND_F, Kind.SEND_B) for s in row) for row in program.rows]
        plans.append({
            "schedule": schedule.name, "num_ranks": schedule.num_ranks, "num_microbatches": schedule.num_microbatches,
            "placement": schedule.placement.name, "layers_per_stage": counts,
            "mesh": dict(job.mesh) or {"pp": schedule.num_ranks},
            "ranks": [
                {"rank": rank, "stages": schedule.placement.stages_of(rank),
                 "layers": [[ranges[s].start, ranges[s].stop] for s in schedule.placement.stages_of(rank)],
                 "messages_sent": sent[rank]}
                for rank in range(schedule.num_ranks)
            ],
        })  # fmt: skip
    if as_json:
        output.print_json(plans)
        return
    where = f"mesh {format_mesh(job.mesh)}, " if job.mesh else ""
    for plan in plans:
        output.console().print(
            f"{plan['schedule']}: {count_text(plan['num_ranks'], 'rank')}, "
            f"{count_text(plan['num_microbatches'], 'microbatch')}, {where}{plan['placement']} placement, layers per "
            f"stage {' '.join(map(str, plan['layers_per_stage']))}",
            style="bold",
            markup=False,
        )
        table = output.create_table("rank", "stages", "layers", "messages sent", left=("stages", "layers"))
        for row in plan["ranks"]:
            spans = [f"{a}-{b - 1}" if b > a else "none" for a, b in row["layers"]]
            table.add_row(
                str(row["rank"]), " ".join(map(str, row["stages"])), " ".join(spans), str(row["messages_sent"])
            )
        output.console().print(table)
