"""The page itself."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeropipe.core.files import write_whole
from zeropipe.core.units import number, percent, time_text
from zeropipe.errors import ConfigError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.report.drift import Drift, Prediction, Recorded, drifts, from_costs, from_first
from zeropipe.train.report.hints import NOTHING, hint
from zeropipe.train.report.words import facts_text, title_text
from zeropipe.train.stage_costs import RunCosts
from zeropipe.viz.article import Block, Chart, Figure, Figures, Heading, Line, Note, Row, Shares, Table
from zeropipe.viz.article.blocks import Tone
from zeropipe.viz.html import to_html
from zeropipe.viz.style import PageStyle

CAUSES: tuple[tuple[str, Tone], ...] = (
    ("schedule", "blue"), ("imbalance", "red"), ("communication", "yellow"), ("overhead", "violet"), ("jitter", "grey"),
)  # fmt: skip


def write_report(
    config: RunConfig,
    recorded: Sequence[Recorded],
    path: str | Path,
    *,
    layers: Sequence[int] | None = None,
    metrics: Sequence[dict[str, Any]] | None = None,
) -> None:
    """Write the page; nothing happens before a step is recorded.

    `layers` are those of each stage. `metrics` are by default those of metrics.jsonl beside the page.
    """
    if not recorded:
        return
    told = metrics if metrics is not None else read_metrics(Path(path).parent / "metrics.jsonl")
    guess = prediction_of(config, recorded, layers)
    newest = recorded[-1]
    shown = [
        newest.timeline.labelled(f"step {newest.step}, measured"),
        guess.of(newest).labelled(f"step {newest.step}, predicted"),
    ]
    page = to_html(shown, PageStyle(title=title_text(config)), above=_blocks(config, recorded, guess, told, layers))
    write_whole(path, page)


def prediction_of(config: RunConfig, recorded: Sequence[Recorded], layers: Sequence[int] | None) -> Prediction:
    """By schedule.costs, if they are given and of such a run; else by the first recorded step."""
    schedule = recorded[-1].timeline.schedule
    if config.schedule.costs is None or layers is None:
        return from_first(recorded)
    try:
        costs = RunCosts(config, "").of(schedule.problem, schedule.placement, layers)
    except ConfigError:  # of other sequences, say: a dry run tells
        return from_first(recorded)
    return from_costs(costs, f"simulated with schedule.costs, {config.schedule.costs}", recorded)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole."""
    found = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # the line that is being written
                continue
    return [line for line in found if isinstance(line, dict)]


def _blocks(
    config: RunConfig,
    recorded: Sequence[Recorded],
    guess: Prediction,
    metrics: Sequence[dict[str, Any]],
    layers: Sequence[int] | None,
) -> list[Block]:
    rows = drifts(recorded, guess)
    found = hint(config, recorded[-1], layers)
    title = "What to change" if found.cause != NOTHING else "Nothing to change"
    return [
        Heading(title_text(config), facts_text(config)),
        Figures(tuple(_figures(rows[-1], metrics))),
        Note(title, found.text),
        *_loss_chart(metrics),
        _time_chart(rows),
        _table(rows, guess, config),
    ]


def _figures(last: Drift, metrics: Sequence[dict[str, Any]]) -> list[Figure]:
    losses = _points(metrics, "loss")
    evaluations = _points(metrics, "evaluation_loss")
    speeds = _points(metrics, "tokens_per_second")
    found = []
    if losses:
        found.append(Figure("loss", f"{losses[-1][1]:.3f}", f"{losses[0][1]:.3f} at step {losses[0][0]:.0f}"))
    if evaluations:
        best = min(y for _, y in evaluations)
        found.append(Figure("evaluation loss", f"{evaluations[-1][1]:.3f}", f"best {best:.3f}"))
    if speeds:
        found.append(Figure("tokens per second", number(speeds[-1][1], 3), f"at step {speeds[-1][0]:.0f}"))
    outside = f"{time_text(last.outside, 's')} of it outside the pipeline"
    return [
        *found,
        Figure("step", time_text(last.seconds, "s"), outside),
        Figure("pipeline, measured", time_text(last.measured, "s"), f"predicted {time_text(last.predicted, 's')}"),
        Figure("measured / predicted", f"{last.ratio:.2f}", f"at step {last.step}"),
        Figure("bubble", percent(last.bubble), "of the longest rank's time"),
    ]


def _loss_chart(metrics: Sequence[dict[str, Any]]) -> list[Chart]:
    losses = _points(metrics, "loss")
    evaluations = _points(metrics, "evaluation_loss")
    if not losses:
        return []
    lines = [Line("training", losses, "violet")]
    if evaluations:
        lines.append(Line("evaluation", evaluations, "red", "points"))
    return [Chart("Loss", "step", tuple(lines))]


def _time_chart(rows: Sequence[Drift]) -> Chart:
    return Chart(
        "Time of recorded steps", "step",
        (
            Line("whole step", tuple((r.step, r.seconds) for r in rows), "grey"),
            Line("pipeline, measured", tuple((r.step, r.measured) for r in rows), "blue"),
            Line("pipeline, predicted", tuple((r.step, r.predicted) for r in rows), "red", "dashed"),
        ),
        unit="s", from_zero=True,
    )  # fmt: skip


def _table(rows: Sequence[Drift], guess: Prediction, config: RunConfig) -> Table:
    head = ("step", "whole step", "measured", "predicted", "ratio", "bubble", "idle time was lost to")
    remark = f"Predicted: {guess.source}. Idle time is the mean of all ranks; bars are shares of the longest step."
    cores = os.cpu_count() or 1
    if config.engine.device == "cpu" and config.mesh.num_processes > cores:
        remark += f" {config.mesh.num_processes} processes on a machine with {cores} cores wait for cores, too."
    return Table("Measured beside predicted", head, _rows(rows), remark)


def _rows(rows: Sequence[Drift]) -> tuple[Row, ...]:
    """A row of its own says where another setup begins."""
    whole, setup = max(r.seconds for r in rows), rows[0].setup
    found = []
    for row in rows:
        if row.setup != setup:
            setup = row.setup
            found.append(Row((f"from here on: {setup}",)))
        found.append(_row(row, whole, row is rows[-1]))
    return tuple(found)


def _row(row: Drift, whole: float, newest: bool) -> Row:
    times = [time_text(value, "s") for value in (row.seconds, row.measured, row.predicted)]
    parts = [(name, getattr(row.lost, name), tone) for name, tone in CAUSES]
    bar = Shares((*parts, ("outside the pipeline", row.outside, "green")), whole)
    return Row((str(row.step), *times, f"{row.ratio:.3f}", percent(row.bubble), bar), newest)


def _points(metrics: Sequence[dict[str, Any]], name: str) -> tuple[tuple[float, float], ...]:
    """(step, value) of the lines that have it as a number."""
    return tuple(
        (float(line["step"]), float(line[name]))
        for line in metrics
        if isinstance(line.get("step"), int) and isinstance(line.get(name), int | float)
    )
