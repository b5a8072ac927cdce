"""The output of `trace compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from zeropipe.cli import output

if TYPE_CHECKING:
    from zeropipe.core.timeline import Timeline
    from zeropipe.sim.attribution import LostTime, Residual
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.megatron import TimerLog

ROUNDING = 1e-9  # of the makespan: shorter times are shown as 0
NUM_END_ROWS = 32  # stages or ranks shown at the beginning and at the end of a table
_RESIDUAL_FIELDS = ("kind", "stage", "number", "measured", "spread", "predicted", "ratio")


class TraceComparison(NamedTuple):
    """A run and its prediction. A log has no timeline: `measured` is then simulated with the log's means."""

    measured: Timeline
    predicted: Timeline
    residuals: list[Residual]
    lost: tuple[LostTime, ...] | None
    corrected: Costs
    has_costs_file: bool  # else the costs are the run's own
    log: TimerLog | None

    @property
    def timelines(self) -> tuple[Timeline, Timeline]:
        return self.measured, self.predicted

    @property
    def makespan(self) -> float:
        return self.measured.makespan if self.log is None else self.log.step


def label(timeline: Timeline, kind: str) -> Timeline:
    return timeline.with_label(f"{timeline.schedule.name}, {kind}")


def comparison_data(found: TraceComparison) -> dict[str, Any]:
    from zeropipe.sim.costs_file import costs_to_data

    return {
        "measured": {**output.timeline_data(found.measured), "makespan": found.makespan},
        "simulated": output.timeline_data(found.predicted),
        "measured_over_simulated": _ratio(found.makespan, found.predicted.makespan),
        "costs": "given" if found.has_costs_file else "of the run",
        "residuals": [{name: getattr(r, name) for name in _RESIDUAL_FIELDS} for r in found.residuals],
        "lost": None if found.lost is None else [{**causes._asdict(), "total": causes.total} for causes in found.lost],
        "log": None if found.log is None else found.log._asdict(),
        "corrected": costs_to_data(found.corrected),
    }


def print_comparison(found: TraceComparison) -> None:
    console, real, predicted = output.console(), found.measured, found.predicted
    console.print(output.problem_text(real), style="bold", markup=False)
    table = output.create_table("", "measured", "simulated", "measured / simulated", left=("",))
    unit = real.unit
    _add_times(table, "makespan", found.makespan, predicted.makespan, unit)
    if found.log is None:
        for name, of in (("idle", "idle_fraction"), ("bubble rate", "bubble")):
            table.add_row(name, *(output.percent(getattr(timeline, of)) for timeline in found.timelines), "")
        if real.memory and predicted.memory_unit == real.memory_unit:
            peaks = max(real.peak_memory), max(predicted.peak_memory)
            name = "peak activations" if real.measured and real.sharding is None else "peak memory"
            table.add_row(name, *(output.size_text(p, real.memory_unit) for p in peaks), _ratio_text(*peaks))
    else:
        _add_times(table, "with the log's means", real.makespan, predicted.makespan, unit)
    console.print(table)
    output.print_note(
        f"simulated with {'the costs of --costs' if found.has_costs_file else 'the mean times of the run'}"
    )
    table = output.create_table("kind", "stage", "actions", "measured", "spread", "simulated", "ratio", left=("kind",))
    num_left_out = 0
    for r in found.residuals:
        if NUM_END_ROWS <= r.stage < real.schedule.num_stages - NUM_END_ROWS:
            num_left_out += 1
            continue
        times = (output.time_text(_round_off(t, found), unit) for t in (r.measured, r.spread, r.predicted))
        table.add_row(r.kind, str(r.stage), str(r.number), *times, _ratio_text(r.measured, r.predicted))
    console.print(table)
    if num_left_out:
        output.print_note(f"{num_left_out} rows of stages in the middle are not shown: --json has all")
    if found.lost is not None:
        _print_lost(found)
    output.print_warnings(real.schedule)


def _print_lost(found: TraceComparison) -> None:
    assert found.lost is not None
    names = ("schedule", "imbalance", "communication", "overhead", "jitter")
    table = output.create_table("idle", "total", *names, left=("idle",))
    means = type(found.lost[0])(*(sum(column) / len(found.lost) for column in zip(*found.lost, strict=True)))
    listed = [(f"rank {rank}", causes) for rank, causes in enumerate(found.lost)]
    if len(listed) > 2 * NUM_END_ROWS:
        listed = [*listed[:NUM_END_ROWS], *listed[-NUM_END_ROWS:]]
    for name, causes in [*listed, ("mean", means)]:
        times = (_round_off(t, found) for t in (causes.total, *causes))
        table.add_row(name, *(output.time_text(t, found.measured.unit) for t in times))
    shares = (_round_off(t, found) / (found.makespan or 1.0) for t in (means.total, *means))
    table.add_row("of the makespan", *map(output.percent, shares))
    output.console().print(table)


def _round_off(time: float, found: TraceComparison) -> float:
    """A time, or 0 if it is only rounding."""
    return time if abs(time) > ROUNDING * found.makespan else 0.0


def _add_times(table: Any, name: str, real: float, predicted: float, unit: str) -> None:
    table.add_row(name, output.time_text(real, unit), output.time_text(predicted, unit), _ratio_text(real, predicted))


def _ratio(real: float, predicted: float) -> float | None:
    return real / predicted if predicted else None


def _ratio_text(real: float, predicted: float) -> str:
    return f"{real / predicted:.3f}" if predicted else "-"
