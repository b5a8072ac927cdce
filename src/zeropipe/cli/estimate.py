"""`estimate`: what the layers of a model cost on a GPU, from their shapes."""

from __future__ import annotations

from typing import Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.layers import require_costs_file, tell
from zeropipe.errors import ConfigError

WORDS = "an estimate from shapes, not a measurement: `zeropipe profile` measures"


@click.command(short_help="What a model's layers cost on a GPU, from their shapes.")
@click.argument("model", required=False)
@click.option("--gpu", default="h100", show_default=True, help="h200, h100, a100, b200, ...: --known lists them.")
@click.option("--sequence", type=click.IntRange(1), default=4096, show_default=True, help="Tokens per sequence.")
@click.option("--dtype", default="bf16", show_default=True, help="bf16, float16 or float32.")
@click.option("--microbatch-size", type=opt.Counts(True), default="1", show_default=True, help="Sequences; or several.")
@click.option(
    "--ac", default="none", show_default=True, help="Activation checkpointing, as in `run`; or several: none,full."
)
@click.option("--tp", type=opt.Counts(True), default="1", show_default=True, help="Tensor parallelism; or several.")
@click.option("--compile/--no-compile", default=True, show_default=True, help="Whether blocks are compiled.")
@click.option(
    "--efficiency", metavar="NAME=X,..", help="What share of the data sheet is reached: matmul=0.6,memory=0.8."
)
@click.option("--known", is_flag=True, help="List the known models and GPUs.")
@click.option("-o", "--output", "out", help="costs.json, for plan, simulate, compare and search.")
@opt.json_option
def estimate(model: str | None, known: bool, out: str | None, as_json: bool, **given: Any) -> None:
    """Estimate what the layers of MODEL cost: a known name, a directory with config.json, or a config file.

    \b
    zeropipe estimate qwen3-32b --gpu h200 --ac none,full -o costs.json
    zeropipe plan costs.json --gpus 16 --memory 80GB --batch 256
    """
    from zeropipe.estimating.estimate import estimate as run

    if known:
        _print_known(as_json)
        return
    if model is None:
        raise ConfigError("MODEL is missing: give a known name (--known), a directory with config.json, or a file")
    require_costs_file(out)
    given["efficiency"] = efficiency_of(given["efficiency"])
    given["ac"] = given["ac"].split(",")
    tell(run(model, **given), WORDS, out, as_json)


def efficiency_of(text: str | None) -> dict[str, Any] | None:
    """`matmul=0.6,memory=0.8` as a table."""
    return None if text is None else opt.settings_of(tuple(text.split(",")), "--efficiency")


def _print_known(as_json: bool) -> None:
    from zeropipe.core.model.configs import CONFIGS_BY_SHAPE, COUNTED_PARAMETERS
    from zeropipe.estimating.estimate import num_parameters
    from zeropipe.estimating.gpus import GPUS

    counts = {name: num_parameters(name) for name in CONFIGS_BY_SHAPE} | COUNTED_PARAMETERS
    if as_json:
        models = {name: dict(zip(("parameters", "active"), both, strict=True)) for name, both in counts.items()}
        output.print_json(
            {
                "models": models,
                "gpus": {name: vars(gpu) | {"efficiency": vars(gpu.efficiency)} for name, gpu in GPUS.items()},
            }
        )
        return
    rows = output.table("name", "parameters", "a token meets", left=("name",))
    for name, both in counts.items():
        rows.add_row(name, *(f"{count / 1e9:.2f} B" for count in both))
    output.console().print(rows)
    rows = output.table("name", "TFLOP/s", "memory", "TB/s", "GB/s in a machine", "between", left=("name",))
    for gpu in GPUS.values():
        numbers = (gpu.peak / 1e12, gpu.memory / 1e9, gpu.bandwidth / 1e12, gpu.inside / 1e9, gpu.between / 1e9)
        rows.add_row(
            gpu.name, f"{numbers[0]:.0f}", f"{numbers[1]:.0f} GB", f"{numbers[2]:.2f}", *(f"{x:g}" for x in numbers[3:])
        )
    output.console().print(rows)
