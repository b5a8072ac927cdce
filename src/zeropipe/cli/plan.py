"""`plan`: what to run for a model, GPUs, memory and a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.command import is_set
from zeropipe.cli.estimate import DEFAULT_DTYPE, DEFAULT_SEQUENCE, parse_efficiency, print_compile_note
from zeropipe.cli.options import POSITIVE, option
from zeropipe.cli.param_types import Size
from zeropipe.cli.plan_output import print_closest, print_plan
from zeropipe.cli.progress import show_fraction
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.planning.result import Plan

DEFAULT_ROWS = 8
_ESTIMATE_ONLY = ("gpu", "sequence", "sample", "dtype", "compile", "efficiency")


@opt.command(short_help="What to run: layout, schedule, microbatches, checkpointing, layers.")
@click.argument("model")
@option("--gpus", type=POSITIVE, required=True, help="Number of GPUs.")
@option(
    "--gpus-per-node", type=POSITIVE, default=8, show_default=True, field="schedule.gpus_per_node",
    help="GPUs per machine.",
)  # fmt: skip
@option("--memory", type=Size(), help="Memory of a GPU, like 80GB; that of --gpu by default.")
@option(
    "--reserve", type=Size(), default="4GB", show_default=True,
    help="Memory of a GPU that CUDA, NCCL and fragmentation take.",
)  # fmt: skip
@option(
    "--batch", type=POSITIVE, field="data.batch",
    help="Sequences per step, over all pipelines; by default about 4 million tokens, and at least 16 sequences.",
)  # fmt: skip
@opt.sequence
@opt.sample
@opt.gpu
@opt.dtype
@opt.compile
@opt.efficiency
@opt.lora
@opt.ranks
@opt.tp
@opt.ep
@opt.cp
@opt.slices
@opt.imbalance
@opt.dispatch
@opt.sequence_parallel
@opt.microbatch
@opt.ac
@option("--schedules", metavar="NAME,..", help="Schedules to try; by default all, and searched ones.")
@opt.search_seconds
@opt.search_steps
@option(
    "--max-candidates", type=POSITIVE, default=4000, show_default=True, old_names={"--most": ""},
    help="Number of candidates to simulate.",
)  # fmt: skip
@opt.workers
@option("--rows", type=POSITIVE, default=DEFAULT_ROWS, show_default=True, help="Number of rows to print.")
@opt.output()
@opt.json
def plan(model: str, rows: int, out: str | None, as_json: bool, **values: Any) -> None:
    """Plan a training run of MODEL: what `zeropipe estimate` takes, or a costs.json of estimate or profile.

    \b
    zeropipe plan qwen3-32b --gpus 16 --memory 80GB --batch 256 -o run.toml
    zeropipe plan costs.json --gpus 8 --batch 64

    By default all pipeline and tensor-parallel sizes are tried that divide the GPUs and the model, with microbatches of
    1, 2 and 4 sequences and ac none, selective:op and full; of a costs.json all of its settings. -o writes a training
    file of the best plan, with a searched schedule beside it.
    """
    from zeropipe.core.files import has_suffix, require_writable
    from zeropipe.planning.data import plan_data
    from zeropipe.planning.plan import plan as make_plan
    from zeropipe.planning.write import list_missing, write_run

    if out:
        if not has_suffix(out, ".toml"):
            raise ConfigError(f"-o {out}: its name must end in .toml")
        require_writable(out)
    source = _read_layer_costs(model, values) if has_suffix(model, ".json") else None
    with show_fraction("planning") as progress:
        made = make_plan(source or model, progress=progress, **_plan_arguments(values))
    if not made.rows:
        _refuse(made, as_json)
    written = []
    if out:
        # the name of a GPU does not tell its efficiency
        costs = model if source else None if values["efficiency"] else values["gpu"]
        written = write_run(made, made.best, out, source.model if source else model, costs)
    if as_json:
        output.print_json({**plan_data(made), "files": written})
    else:
        print_plan(made, rows)
        for path in written:
            output.print_written(path)
        if values["batch"] is None:
            output.print_note(f"--batch not set: {count_text(made.batch, 'sequence')}")
        if written:
            output.print_note(f"to train it: {list_missing(source.model if source else model)}")
    if source is None:
        print_compile_note()


def _refuse(made: Plan, as_json: bool) -> None:
    """Raise ConfigError because nothing fits, with the memory of what comes closest and what would make it fit."""
    from zeropipe.planning.data import plan_data

    try:
        made.require_fit()
    except ConfigError as error:
        if as_json:
            error.json_fields = {**plan_data(made), "files": []}
        else:
            print_closest(made)
        raise


def _plan_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `zp.plan`."""
    names = (
        "gpus", "gpus_per_node", "memory", "reserve", "batch", "gpu", "lora", "tp", "ep", "cp",
        "slices", "search_seconds", "search_steps", "sequence_parallel", "workers", "imbalance", "dispatch", "sample",
    )  # fmt: skip
    return {
        **{name: values[name] for name in names},
        "compile": values["compile"] is True,
        "sequence": values["sequence"] or DEFAULT_SEQUENCE,
        "dtype": values["dtype"] or DEFAULT_DTYPE,
        "efficiency": parse_efficiency(values["efficiency"]),
        "pp": values["ranks"],
        "microbatch_sizes": values["microbatch"],
        "ac": values["ac"].split(",") if values["ac"] else None,
        "schedules": values["schedules"].split(",") if values["schedules"] else None,
        "max_candidates": values["max_candidates"],
    }


def _read_layer_costs(path: str, values: dict[str, Any]) -> Any:
    """Read layer costs; None for a model's config. ConfigError for an option that contradicts the costs."""
    from zeropipe.sim.costs_file import read_costs_file
    from zeropipe.sim.layer_costs import DTYPE_NAMES
    from zeropipe.sim.layer_file import from_layer_data, is_layer_data

    table = read_costs_file(path)
    if not is_layer_data(table):
        return None
    costs = from_layer_data(table, path)
    for name in _ESTIMATE_ONLY:
        value = values[name]
        if is_set(name) and DTYPE_NAMES.get(value, value) != getattr(costs, name, None):
            raise ConfigError(f"--{name} {value}: set by the costs in {path}; leave it out")
    return costs
