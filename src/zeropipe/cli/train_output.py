"""The output of `train`: the plan of a dry run, and the result of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from zeropipe.cli import output
from zeropipe.core.mesh import format_mesh
from zeropipe.core.units import count_text, parameters_text

if TYPE_CHECKING:
    from rich.table import Table

    from zeropipe.train.loop.trainer import Outcome
    from zeropipe.train.preview import Prediction, Preview, RankPreview

MAX_RANKS = 32  # in the table
UNITS = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3))
COLUMN_NAMES = {"gradients": "grads", "optimizer": "optim", "activations": "acts",
         "workspace": "space"}  # fmt: skip


def print_preview(preview: Preview, as_json: bool) -> None:
    """Print the plan of a dry run."""
    if as_json:
        output.print_json(dataclasses.asdict(preview))
        return
    console = output.console()
    size = "" if preview.num_parameters is None else f", {parameters_text(preview.num_parameters)}"
    console.print(
        f"{preview.model}: {count_text(preview.num_layers, 'layer')}{size}, {preview.dtype}", style="bold", markup=False
    )
    sizes = format_mesh({name: number for name, number in preview.mesh.items() if number > 1 or name == "pp"})
    console.print(
        f"{count_text(preview.num_processes, 'process')} ({sizes}), {count_text(preview.num_pipelines, 'pipeline')}",
        markup=False,
    )
    console.print(
        f"{preview.schedule}: {count_text(preview.num_stages, 'stage')} ({preview.placement}), "
        f"{count_text(preview.num_microbatches, 'microbatch')} of {preview.microbatch} x "
        f"{count_text(preview.sequence, 'token')} each; a step has {count_text(preview.tokens, 'token')}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(_create_table(preview.ranks))
    if len(preview.ranks) > MAX_RANKS:
        output.print_note(f"{len(preview.ranks) - MAX_RANKS} more ranks are not shown: --json has all")
    if preview.prediction is not None:
        _print_prediction(preview.prediction)
    for line in preview.notes:
        console.print(line, markup=False, soft_wrap=True)


def _create_table(ranks: tuple[RankPreview, ...]) -> Table:
    """A row per rank; sizes have one unit, which keeps the columns narrow."""
    names = [name for name in ranks[0].memory if any(rank.memory[name] for rank in ranks)]
    largest = max(rank.peak for rank in ranks)
    unit, scale = next((pair for pair in UNITS if largest >= pair[1]), UNITS[-1])
    total = [] if not names else ["peak"] if "activations" in names else ["known"]
    heads = [f"{COLUMN_NAMES.get(name, name)}\n{unit}" for name in (*names, *total)]
    table = output.create_table("rank", "stages", "layers", *heads, left=("stages", "layers"))
    for rank in ranks[:MAX_RANKS]:
        spans = [f"{start}-{stop - 1}" if stop > start else "none" for start, stop in rank.layers]
        sizes = [*(rank.memory[name] for name in names), *([rank.peak] if names else [])]
        table.add_row(
            str(rank.rank), " ".join(map(str, rank.stages)), " ".join(spans), *(f"{size / scale:.2f}" for size in sizes)
        )
    return table


def _print_prediction(prediction: Prediction) -> None:
    mfu = "" if prediction.mfu is None else f", MFU {100 * prediction.mfu:.1f}%"
    output.console().print(
        f"predicted ({prediction.source}): {output.time_text(prediction.step, 's')} per step, idle "
        f"{output.percent(prediction.idle_fraction)}, {prediction.tokens_per_second:,.0f} tokens/s processed{mfu}",
        style="bold", markup=False, soft_wrap=True,
    )  # fmt: skip
    parts = [
        (share / prediction.step, name) for name, share in prediction.parts.items() if share > 0.001 * prediction.step
    ]
    text = ", ".join(f"{name} {output.percent(share)}" for share, name in parts)
    output.console().print(f"of the step: {text}", markup=False, soft_wrap=True)


def print_outcome(outcome: Outcome, folder: str) -> None:
    """Print the steps and losses of a run, and the files it wrote."""
    if not outcome.losses and not outcome.stopped_by:
        print(
            f"nothing to do: {outcome.steps} of {count_text(outcome.steps, 'step')} are done, the model is in "
            f"{outcome.export or outcome.checkpoint}; for more steps raise train.steps or train.epochs, for a new run "
            f"use another train.output than {folder}"
        )
        return
    loss = f", loss {outcome.losses[-1]:.4f}" if outcome.losses else ""
    print(
        f"{count_text(outcome.steps, 'step')}, {count_text(outcome.tokens, 'token')}{loss}; checkpoint "
        f"{outcome.checkpoint}"
    )
    if outcome.export:
        reader = "peft" if (Path(outcome.export) / "adapter_config.json").is_file() else "transformers"
        print(f"wrote {outcome.export} for {reader}")
    report = Path(folder) / "report.html"
    if report.is_file():
        print(f"wrote {report}")
