"""What `train` prints: the plan of a dry run, and how a run ended."""

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

SHOWN = 32  # ranks
UNITS = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3))
SHORT = {"gathered weights": "gathered", "gradients": "grads", "optimizer": "optim", "activations": "acts",
         "workspace": "space"}  # fmt: skip


def print_preview(made: Preview, as_json: bool) -> None:
    """The plan."""
    if as_json:
        output.print_json(dataclasses.asdict(made))
        return
    console = output.console()
    size = "" if made.num_parameters is None else f", {parameters_text(made.num_parameters)}"
    console.print(
        f"{made.model}: {count_text(made.num_layers, 'layer')}{size}, {made.dtype}", style="bold", markup=False
    )
    sizes = format_mesh({name: number for name, number in made.mesh.items() if number > 1 or name == "pp"})
    console.print(
        f"{count_text(made.num_processes, 'process')} ({sizes}), {count_text(made.num_pipelines, 'pipeline')}",
        markup=False,
    )
    console.print(
        f"{made.schedule}: {count_text(made.num_stages, 'stage')} ({made.placement}), "
        f"{count_text(made.num_microbatches, 'microbatch')} of {made.microbatch} x "
        f"{count_text(made.sequence, 'token')} each; a step has {count_text(made.tokens, 'token')}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(_table(made.ranks))
    if len(made.ranks) > SHOWN:
        output.note(f"{len(made.ranks) - SHOWN} more ranks are left out here: --json has them all")
    if made.prediction is not None:
        _print_prediction(made.prediction)
    for line in made.notes:
        console.print(line, markup=False, soft_wrap=True)


def _table(ranks: tuple[RankPreview, ...]) -> Table:
    """Sizes in one unit, so that the columns are narrow."""
    names = [name for name in ranks[0].memory if any(one.memory[name] for one in ranks)]
    largest = max(one.peak for one in ranks)
    unit, scale = next((pair for pair in UNITS if largest >= pair[1]), UNITS[-1])
    total = [] if not names else ["peak"] if "activations" in names else ["known"]
    heads = [f"{SHORT.get(name, name)}\n{unit}" for name in (*names, *total)]
    table = output.table("rank", "stages", "layers", *heads, left=("stages", "layers"))
    for one in ranks[:SHOWN]:
        spans = [f"{start}-{stop - 1}" if stop > start else "none" for start, stop in one.layers]
        sizes = [*(one.memory[name] for name in names), *([one.peak] if names else [])]
        table.add_row(
            str(one.rank), " ".join(map(str, one.stages)), " ".join(spans), *(f"{size / scale:.2f}" for size in sizes)
        )
    return table


def _print_prediction(made: Prediction) -> None:
    mfu = "" if made.mfu is None else f", MFU {100 * made.mfu:.1f}%"
    output.console().print(
        f"predicted ({made.source}): {output.time_text(made.step, 's')} per step, bubble "
        f"{output.percent(made.bubble)}, {made.tokens_per_second:,.0f} tokens/s{mfu}",
        style="bold", markup=False, soft_wrap=True,
    )  # fmt: skip
    parts = [(share / made.step, name) for name, share in made.parts.items() if share > 0.001 * made.step]
    text = ", ".join(f"{name} {output.percent(share)}" for share, name in parts)
    output.console().print(f"of the step: {text}", markup=False, soft_wrap=True)


def print_outcome(outcome: Outcome, folder: str) -> None:
    """Where to find what."""
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
