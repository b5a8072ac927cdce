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
from zeropipe.cli.progress import show_fraction
from zeropipe.core.model.layers import format_counts
from zeropipe.core.units import count_text, gigabytes
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zeropipe.planning.result import Plan
    from zeropipe.planning.rows import PlanRow

DEFAULT_ROWS = 8
NUM_MISFITS = 3
_ESTIMATE_ONLY = ("gpu", "sequence", "dtype", "compile", "efficiency")


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
@option("--batch", type=POSITIVE, required=True, field="data.batch", help="Sequences per step, over all pipelines.")
@opt.sequence
@opt.gpu
@opt.dtype
@opt.compile
@opt.efficiency
@opt.ranks
@opt.tp
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
    from zeropipe.planning.write import write_run

    if out:
        if not has_suffix(out, ".toml"):
            raise ConfigError(f"-o {out}: its name must end in .toml")
        require_writable(out)
    source = _read_layer_costs(model, values) if has_suffix(model, ".json") else None
    with show_fraction("planning") as progress:
        made = make_plan(source or model, progress=progress, **_plan_arguments(values))
    written = []
    if out:
        # the name of a GPU does not tell its efficiency
        costs = model if source else None if values["efficiency"] else values["gpu"]
        written = write_run(made, made.best, out, source.model if source else model, costs)
    if as_json:
        data = {**plan_data(made), "files": written}
        try:
            made.require_fit()
        except ConfigError as error:
            error.json_fields = data
            raise
        output.print_json(data)
    else:
        _print_plan(made, rows)
        for path in written:
            output.print_written(path)
    if source is None:
        print_compile_note()


def _plan_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `zp.plan`."""
    names = ("gpus", "gpus_per_node", "memory", "reserve", "batch", "gpu", "compile", "tp", "search_seconds", "workers")
    return {
        **{name: values[name] for name in (*names, "search_steps")},
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


def _print_plan(made: Plan, num_rows: int) -> None:
    console, costs = output.console(), made.context.costs
    kind = "estimated" if costs.source == "estimate" else "measured"
    console.print(
        f"{costs.model}: {count_text(made.gpus, 'GPU')} ({costs.machine.get('gpu', 'profiled')}), "
        f"{count_text(made.batch, 'sequence')} of {count_text(costs.sequence, 'token')}, "
        f"{gigabytes(made.context.memory_limit)} of each GPU; {kind} costs",
        style="bold", markup=False, soft_wrap=True,
    )  # fmt: skip
    best = made.best
    front = {id(row) for row in made.front}
    cells = {
        f"{n + 1}{'*' if id(row) in front else ''}": _cells(made, row) for n, row in enumerate(made.rows[:num_rows])
    }
    console.print(_create_table(cells, console))
    console.print(
        "mesh: pp x dp_shard x tp; *: no other is both faster and smaller; gap: to the lower bound of the pipeline",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    console.print(f"1: layers {format_counts(best.counts)} ({best.candidate.cut})", soft_wrap=True)
    console.print(f"   memory of the fullest rank: {_memory_text(best)}", soft_wrap=True)
    if len(made.rows) > 1:
        console.print(f"2: {made.why(made.rows[1])}", soft_wrap=True)
    smallest = made.front[-1]
    if smallest is not best:
        size = gigabytes(smallest.memory.peak)
        console.print(f"the smallest: {smallest.candidate}: {size}, {made.why(smallest)}", soft_wrap=True)
    for row in made.misfits[:NUM_MISFITS]:
        console.print(f"does not fit: {row.candidate}: {gigabytes(row.excess)} over", soft_wrap=True)
    left_out = f", {made.num_left_out:,} with more work left out" if made.num_left_out else ""
    output.print_note(f"{count_text(made.num_tried, 'candidate')} in {made.seconds:.0f} s{left_out}")


def _create_table(cells: dict[str, list[str]], console: Console) -> Table:
    """One line per row; two on a terminal that is too narrow for that."""
    wide = output.create_table(
        "", "mesh", "schedule", "micro-\nbatches", "ac", "step", "tok/s\n/GPU", "MFU", "idle", "peak\nmemory", "gap",
        left=("mesh", "schedule", "ac"),
    )  # fmt: skip
    for name, row in cells.items():
        wide.add_row(name, *row)
    if output.fits_width(wide, console):
        return wide
    left = ("mesh\nmicrobatches", "schedule\nac")
    narrow = output.create_table("", *left, "step\ntok/s/GPU", "MFU\nidle", "peak memory\ngap", left=left)
    for name, (mesh, schedule, microbatches, ac, *figures) in cells.items():
        pairs = [(mesh, microbatches), (schedule, ac), *zip(figures[::2], figures[1::2], strict=True)]
        narrow.add_row(name, *("\n".join(pair) for pair in pairs))
    return narrow


def _cells(made: Plan, row: PlanRow) -> list[str]:
    candidate, mfu = row.candidate, made.mfu(row)
    layout = candidate.layout
    return [
        f"{layout.pp}x{layout.dp_shard}x{layout.tp}", candidate.title,
        f"{candidate.num_microbatches}x{candidate.microbatch_size}", candidate.ac, output.time_text(row.step, "s"),
        f"{made.speed(row):,.0f}", "" if mfu is None else f"{100 * mfu:.1f}%", output.percent(row.idle_fraction),
        gigabytes(row.memory.peak), "" if row.gap is None else f"{row.gap:.1%}",
    ]  # fmt: skip


def _memory_text(row: PlanRow) -> str:
    return ", ".join(f"{name} {gigabytes(value)}" for name, value in vars(row.memory).items())
