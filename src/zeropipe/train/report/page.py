"""The page of report.html."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeropipe.core.files import write_whole
from zeropipe.core.model.layers import format_counts
from zeropipe.core.units import count_text, number, percent, size_text, time_text
from zeropipe.errors import ConfigError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.report.drift import Drift, Prediction, compare_steps, predict_from_costs, predict_from_first
from zeropipe.train.report.hints import NOTHING, give_hint
from zeropipe.train.report.recorded_steps import RecordedStep
from zeropipe.train.stage_costs import RunCosts
from zeropipe.viz.article import Block, Chart, Figure, Figures, Heading, Line, Note, Row, Shares, Table
from zeropipe.viz.article.blocks import Tone
from zeropipe.viz.html import to_html
from zeropipe.viz.style import PageStyle

CAUSES: tuple[tuple[str, Tone], ...] = (
    ("schedule", "blue"), ("imbalance", "red"), ("communication", "yellow"), ("overhead", "violet"), ("jitter", "grey"),
)  # fmt: skip
Metrics = Sequence[dict[str, Any]]  # lines of metrics.jsonl


def write_report(
    config: RunConfig,
    steps: Sequence[RecordedStep],
    path: str | Path,
    *,
    layers: Sequence[int] | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Write the page, if a step has been recorded.

    `layers` are those of each stage. `metrics` defaults to metrics.jsonl beside the page.
    """
    if not steps:
        return
    if metrics is None:
        metrics = read_metrics(Path(path).parent / "metrics.jsonl")
    prediction = predict_steps(config, steps, layers)
    newest = steps[-1]
    timelines = [
        newest.timeline.with_label(f"step {newest.step}, measured"),
        prediction.timeline_of(newest).with_label(f"step {newest.step}, predicted"),
    ]
    title = f"{Path(config.model.path).name} trained with {config.schedule.name}"
    blocks = [Heading(title, _describe_run(config)), *_blocks(config, steps, prediction, metrics, layers)]
    write_whole(path, to_html(timelines, PageStyle(title=title), above=blocks))


def predict_steps(config: RunConfig, steps: Sequence[RecordedStep], layers: Sequence[int] | None) -> Prediction:
    """Predict from schedule.costs, if they are set and apply to the run; else from the first recorded step."""
    schedule = steps[-1].timeline.schedule
    if config.schedule.costs is None or layers is None:
        return predict_from_first(steps)
    try:
        costs = RunCosts(config, "").of(schedule.problem, schedule.placement, layers, schedule)
    except ConfigError:  # costs of another sequence length, for example: the dry run reports it
        return predict_from_first(steps)
    return predict_from_costs(costs, f"simulated with schedule.costs, {config.schedule.costs}", steps)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl."""
    found = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # a line that is being written
                continue
    return [line for line in found if isinstance(line, dict)]


def describe_setup(config: RunConfig) -> str:
    """The settings that the time of a step depends on."""
    data, engine = config.data, config.engine
    layers = f" layers {format_counts(config.schedule.layers)}" if config.schedule.layers else ""
    switches = ("compile", "dynamic_weights", "offload")
    options = "".join(f", {name}" for name in switches if getattr(engine, name) is True)
    return (
        f"{config.schedule.name}{layers} on {_describe_mesh(config)}: {config.num_microbatches} x {data.microbatch} x "
        f"{data.sequence}, ac {engine.ac}{options}"
    )


def _describe_run(config: RunConfig) -> str:
    data = config.data
    facts = [
        _describe_mesh(config),
        f"{count_text(data.batch, 'sequence')} of up to {count_text(data.sequence, 'token')} per step",
        f"{count_text(config.num_microbatches, 'microbatch')} per pipeline",
        config.model.dtype,
        *(["LoRA"] if config.lora else []),
        *(["compiled"] if config.engine.compile is True else []),
        *([f"checkpointing {config.engine.ac}"] if config.engine.ac != "none" else []),
    ]
    return " · ".join(facts)


def _describe_mesh(config: RunConfig) -> str:
    return " x ".join(f"{name} {size}" for name, size in config.mesh.sizes.items() if size > 1) or "one process"


def _blocks(
    config: RunConfig,
    steps: Sequence[RecordedStep],
    prediction: Prediction,
    metrics: Metrics,
    layers: Sequence[int] | None,
) -> list[Block]:
    rows = compare_steps(steps, prediction)
    hint = give_hint(config, steps[-1], layers)
    return [
        Figures(tuple(_figures(rows[-1], metrics))),
        Note("What to change" if hint.cause != NOTHING else "Nothing to change", hint.text),
        *_loss_chart(metrics),
        _time_chart(rows),
        _table(rows, prediction, config),
        *_experts(metrics),
    ]


def _figures(last: Drift, metrics: Metrics) -> list[Figure]:
    losses = _points(metrics, "loss")
    evaluations = _points(metrics, "evaluation_loss")
    speeds = {
        "tokens per second, processed": _points(metrics, "processed_tokens_per_second"),
        "tokens per second, with a loss": _points(metrics, "loss_tokens_per_second")
        or _points(metrics, "tokens_per_second"),  # of older runs
    }
    found = []
    if losses:
        found.append(Figure("loss", f"{losses[-1][1]:.3f}", f"{losses[0][1]:.3f} at step {losses[0][0]:.0f}"))
    if evaluations:
        best = min(y for _, y in evaluations)
        found.append(Figure("evaluation loss", f"{evaluations[-1][1]:.3f}", f"best {best:.3f}"))
    for title, points in speeds.items():
        if points:
            found.append(Figure(title, number(points[-1][1], 3), f"at step {points[-1][0]:.0f}"))
    found += _memory(metrics)
    outside = f"{time_text(last.outside, 's')} of it outside the pipeline"
    return [
        *found,
        Figure("step", time_text(last.seconds, "s"), outside),
        Figure("pipeline, measured", time_text(last.measured, "s"), f"predicted {time_text(last.predicted, 's')}"),
        Figure("measured / predicted", f"{last.ratio:.2f}", f"at step {last.step}"),
        Figure("idle", percent(last.idle_fraction), f"of the pipeline; bubble rate {percent(last.bubble)}"),
    ]


def _memory(metrics: Metrics) -> list[Figure]:
    """The peak of a rank, and what torch's allocator holds beyond it: fragments, which no tensor can use."""
    allocated, reserved = _points(metrics, "memory"), _points(metrics, "reserved_memory")
    if not allocated or not reserved:
        return []
    unused = size_text(max(0.0, reserved[-1][1] - allocated[-1][1]), "B")
    return [Figure("GPU memory", size_text(allocated[-1][1], "B"), f"at the peak; {unused} more are reserved")]


def _loss_chart(metrics: Metrics) -> list[Chart]:
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
            Line("full step", tuple((r.step, r.seconds) for r in rows), "grey"),
            Line("pipeline, measured", tuple((r.step, r.measured) for r in rows), "blue"),
            Line("pipeline, predicted", tuple((r.step, r.predicted) for r in rows), "red", "dashed"),
        ),
        unit="s", from_zero=True,
    )  # fmt: skip


def _table(rows: Sequence[Drift], prediction: Prediction, config: RunConfig) -> Table:
    head = ("step", "full step", "measured", "predicted", "ratio", "idle", "idle time by cause")
    remark = f"Predicted: {prediction.source}. Idle time is the mean over ranks. Bars are relative to the longest step."
    cores = os.cpu_count() or 1
    if config.engine.device == "cpu" and config.mesh.num_processes > cores:
        remark += f" {config.mesh.num_processes} processes share {cores} cores, so they also wait for cores."
    return Table("Measured and predicted", head, _table_rows(rows), remark)


def _experts(metrics: Metrics) -> list[Block]:
    """The load of experts over time, and that of each layer in the last step."""
    lines = [line for line in metrics if isinstance(line.get("experts"), dict)]
    if not lines:
        return []
    chart = Chart(
        "Load of experts", "step",
        (Line("busiest expert / mean, worst layer", _points(metrics, "expert_max_over_mean"), "red"),), from_zero=True,
    )  # fmt: skip
    rows = tuple(
        Row((name, f"{load['max_over_mean']:.2f}", percent(load["busiest"]), f"{load['entropy']:.3f}"))
        for name, load in lines[-1]["experts"].items()
    )
    head = ("layer", "busiest / mean", "share of the busiest", "entropy")
    remark = "Tokens by expert, over all pipelines. Entropy: 1 if all experts get equally many. No token is dropped."
    return [chart, Table(f"Experts in step {lines[-1]['step']}", head, rows, remark)]


def _table_rows(rows: Sequence[Drift]) -> tuple[Row, ...]:
    """A row for each step, and one that names the setup where it changes."""
    longest, setup = max(row.seconds for row in rows), rows[0].setup
    found = []
    for row in rows:
        if row.setup != setup:
            setup = row.setup
            found.append(Row((f"setup from here on: {setup}",)))
        times = [time_text(value, "s") for value in (row.seconds, row.measured, row.predicted)]
        causes = [(name, getattr(row.lost, name), tone) for name, tone in CAUSES]
        bar = Shares((*causes, ("outside the pipeline", row.outside, "green")), longest)
        is_newest = row is rows[-1]
        found.append(Row((str(row.step), *times, f"{row.ratio:.3f}", percent(row.idle_fraction), bar), is_newest))
    return tuple(found)


def _points(metrics: Metrics, name: str) -> tuple[tuple[float, float], ...]:
    """(step, value) of the lines in which the value is a number."""
    return tuple(
        (float(line["step"]), float(line[name]))
        for line in metrics
        if isinstance(line.get("step"), int) and isinstance(line.get(name), int | float)
    )
