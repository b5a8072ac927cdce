"""What `trace compare` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from zeropipe.cli import output

if TYPE_CHECKING:
    from zeropipe.core.timeline import Timeline
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.megatron import Log
    from zeropipe.sim.reality import Lost, StageResidual

ROUNDING = 1e-9  # of the makespan: less is shown as 0
MOST = 32  # stages of a kind, or ranks, in a table


class Compared(NamedTuple):
    """A run and its prediction. Of a log there is no timeline: `measured` is then simulated from its means."""

    measured: Timeline
    predicted: Timeline
    residuals: list[StageResidual]
    lost: tuple[Lost, ...] | None
    corrected: Costs
    given: bool  # the costs were given, not the run's own
    log: Log | None

    @property
    def timelines(self) -> tuple[Timeline, Timeline]:
        return self.measured, self.predicted

    @property
    def makespan(self) -> float:
        return self.measured.makespan if self.log is None else self.log.step


def label(timeline: Timeline, word: str) -> Timeline:
    return timeline.with_label(f"{timeline.schedule.name}, {word}")


def data(found: Compared) -> dict[str, Any]:
    """All of it for machines."""
    from zeropipe.sim.costs import costs_data

    return {
        "measured": {**output.summary(found.measured), "makespan": found.makespan},
        "simulated": output.summary(found.predicted),
        "measured_over_simulated": _ratio(found.makespan, found.predicted.makespan),
        "costs": "given" if found.given else "of the run",
        "residuals": [{**r._asdict(), "ratio": r.ratio} for r in found.residuals],
        "lost": None if found.lost is None else [{**causes._asdict(), "total": causes.total} for causes in found.lost],
        "log": None if found.log is None else found.log._asdict(),
        "corrected": costs_data(found.corrected),
    }


def print_compared(found: Compared) -> None:
    console, real, guess = output.console(), found.measured, found.predicted
    console.print(output.problem_text(real), style="bold", markup=False)
    rows = output.table("", "measured", "simulated", "measured / simulated", left=("",))
    unit = real.unit
    _add(rows, "makespan", found.makespan, guess.makespan, unit)
    if found.log is None:
        rows.add_row("bubble", output.percent(real.bubble), output.percent(guess.bubble), "")
        if real.memory and guess.memory_unit == real.memory_unit:
            peaks = max(real.peak_memory), max(guess.peak_memory)
            name = "peak activations" if real.measured and real.sharding is None else "peak memory"
            rows.add_row(name, *(output.size_text(p, real.memory_unit) for p in peaks), _times(*peaks))
    else:
        _add(rows, "with the log's means", real.makespan, guess.makespan, unit)
    console.print(rows)
    output.note(f"simulated with {'the costs given' if found.given else 'the means of the run itself'}")
    rows = output.table("kind", "stage", "actions", "measured", "spread", "simulated", "ratio", left=("kind",))
    left_out = 0
    for r in found.residuals:
        if MOST <= r.stage < real.schedule.num_stages - MOST:
            left_out += 1
            continue
        times = (output.time_text(_seen(t, found), unit) for t in (r.measured, r.spread, r.predicted))
        rows.add_row(r.kind, str(r.stage), str(r.number), *times, _times(r.measured, r.predicted))
    console.print(rows)
    if left_out:
        output.note(f"{left_out} rows of stages in the middle are left out here: --json has them all")
    if found.lost is not None:
        _print_lost(found)
    output.print_warnings(real.schedule)


def _print_lost(found: Compared) -> None:
    assert found.lost is not None
    names = ("schedule", "imbalance", "communication", "overhead", "jitter")
    rows = output.table("idle", "in all", *names, left=("idle",))
    means = type(found.lost[0])(*(sum(column) / len(found.lost) for column in zip(*found.lost, strict=True)))
    listed = [(f"rank {rank}", causes) for rank, causes in enumerate(found.lost)]
    if len(listed) > 2 * MOST:
        listed = [*listed[:MOST], *listed[-MOST:]]
    for name, causes in [*listed, ("mean", means)]:
        times = (_seen(t, found) for t in (causes.total, *causes))
        rows.add_row(name, *(output.time_text(t, found.measured.unit) for t in times))
    shares = (_seen(t, found) / (found.makespan or 1.0) for t in (means.total, *means))
    rows.add_row("of the makespan", *map(output.percent, shares))
    output.console().print(rows)


def _seen(time: float, found: Compared) -> float:
    """A time without what is only rounding."""
    return time if abs(time) > ROUNDING * found.makespan else 0.0


def _add(rows: Any, name: str, real: float, guess: float, unit: str) -> None:
    rows.add_row(name, output.time_text(real, unit), output.time_text(guess, unit), _times(real, guess))


def _ratio(real: float, guess: float) -> float | None:
    return real / guess if guess else None


def _times(real: float, guess: float) -> str:
    return f"{real / guess:.3f}" if guess else "-"
