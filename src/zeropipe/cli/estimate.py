"""`estimate`: the costs of a model's layers on a GPU, computed from their shapes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.command import is_set
from zeropipe.cli.layer_table import print_costs, require_costs_file
from zeropipe.cli.options import option
from zeropipe.errors import ConfigError

NOTE = "an estimate from shapes, not a measurement: `zeropipe profile` measures"
DEFAULT_SEQUENCE, DEFAULT_DTYPE = 4096, "bfloat16"


@opt.command(short_help="Costs of a model's layers on a GPU, from their shapes.")
@click.argument("model", required=False)
@opt.gpu
@opt.sequence
@opt.sample
@opt.dtype
@opt.microbatch
@opt.ac
@opt.tp
@opt.ep
@opt.cp
@opt.imbalance
@opt.dispatch
@opt.sequence_parallel
@opt.compile
@opt.fused_head
@opt.efficiency
@opt.lora
@option("--known", is_flag=True, help="List the known models and GPUs.")
@opt.output()
@opt.json
def estimate(model: str | None, known: bool, out: str | None, as_json: bool, **values: Any) -> None:
    """Estimate the costs of the layers of MODEL: a known name, a directory with config.json, or a config file.

    \b
    zeropipe estimate qwen3-32b --gpu h200 --ac none,full -o costs.json
    zeropipe plan costs.json --gpus 16 --memory 80GB --batch 256

    -o writes a .json file for plan, simulate, compare and search. By default the microbatch is one sequence, ac is none
    and tp is 1.
    """
    from zeropipe.estimating.estimate import estimate as estimate_layers

    if known:
        _print_known(as_json)
        return
    if model is None:
        raise ConfigError("MODEL is missing: use a known name (--known), a directory with config.json, or a file")
    require_costs_file(out)
    found = estimate_layers(
        model, gpu=values["gpu"], compile=values["compile"] is True, efficiency=parse_efficiency(values["efficiency"]),
        sequence=values["sequence"] or DEFAULT_SEQUENCE, dtype=values["dtype"] or DEFAULT_DTYPE,
        microbatch_size=values["microbatch"] or (1,), tp=values["tp"] or (1,),
        ac=(values["ac"] or "none").split(","), lora=values["lora"], ep=values["ep"] or (1,), cp=values["cp"] or (1,),
        imbalance=values["imbalance"], dispatch=values["dispatch"], sample=values["sample"],
        fused_head=values["fused_head"],
        sequence_parallel=_parallel_values(values["sequence_parallel"], values["tp"] or (1,)),
    )  # fmt: skip
    print_compile_note()
    print_costs(found, NOTE, out, as_json)


def _parallel_values(sequence_parallel: bool | None, tp_sizes: Sequence[int]) -> bool | tuple[bool, ...]:
    """Settings with sequence parallelism come after those without it; with a `tp` of 1 only, estimate() refuses."""
    return (False, True) if sequence_parallel and max(tp_sizes) > 1 else bool(sequence_parallel)


def print_compile_note() -> None:
    """Print that blocks are not compiled, unless the command line says so."""
    if not is_set("compile"):
        line = "estimated without torch.compile, which `zeropipe train` uses on a GPU in 16 bits; see --compile"
        print(f"zeropipe: {line}", file=sys.stderr)


def parse_efficiency(text: str | None) -> dict[str, Any] | None:
    """Parse `matmul=0.6,memory=0.8`."""
    return None if text is None else opt.parse_pairs(tuple(text.split(",")), "--efficiency")


def _print_known(as_json: bool) -> None:
    from zeropipe.core.model.configs import BUILT_IN, COUNTED_PARAMETERS
    from zeropipe.estimating.estimate import num_parameters
    from zeropipe.estimating.gpus import GPUS

    counts = {name: COUNTED_PARAMETERS.get(name) or num_parameters(name) for name in BUILT_IN}
    if as_json:
        output.print_json({
            "models": {name: {"parameters": all, "active": active} for name, (all, active) in counts.items()},
            "gpus": {name: vars(gpu) | {"efficiency": vars(gpu.efficiency)} for name, gpu in GPUS.items()},
        })  # fmt: skip
        return
    table = output.create_table("name", "parameters", "active per token", left=("name",))
    for name, both in counts.items():
        table.add_row(name, *(f"{count / 1e9:.2f} B" for count in both))
    output.console().print(table)
    table = output.create_table("name", "TFLOP/s", "memory", "TB/s", "GB/s in a machine", "between", left=("name",))
    for gpu in GPUS.values():
        table.add_row(
            gpu.name, f"{gpu.peak / 1e12:.0f}", f"{gpu.memory / 1e9:.0f} GB", f"{gpu.bandwidth / 1e12:.2f}",
            f"{gpu.intra_node / 1e9:g}", f"{gpu.inter_node / 1e9:g}",
        )  # fmt: skip
    output.console().print(table)
