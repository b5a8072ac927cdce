"""`plan`: what to run for a model, GPUs, memory and a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.estimate import efficiency_of
from zeropipe.core.model.layers import format_counts
from zeropipe.core.units import count_text, gigabytes
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zeropipe.planning.result import Plan
    from zeropipe.planning.rows import Row

SHOWN = 8  # rows
CLOSE = 3  # of what does not fit
_ESTIMATE_ONLY = ("gpu", "sequence", "dtype", "compile", "efficiency")


@click.command(short_help="What to run: layout, schedule, microbatches, checkpointing, layers.")
@click.argument("model")
@click.option("--gpus", type=click.IntRange(1), required=True, help="All GPUs.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True, help="GPUs of a machine.")
@click.option("--memory", type=opt.Size("memory"), help="Of a GPU, like 80GB; the GPU's own by default.")
@click.option(
    "--reserve", type=opt.Size("reserve"), default="4GB", show_default=True,
    help="Of it, what CUDA, NCCL and fragmentation take.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(1), required=True, help="Sequences of a step, over all GPUs.")
@click.option("--sequence", type=click.IntRange(1), default=4096, show_default=True, help="Tokens per sequence.")
@click.option("--gpu", default="h100", show_default=True, help="For estimates: see `zeropipe estimate --known`.")
@click.option("--dtype", default="bf16", show_default=True, help="For estimates.")
@click.option("--compile/--no-compile", default=True, show_default=True, help="For estimates.")
@click.option("--efficiency", metavar="NAME=X,..", help="For estimates, as in `zeropipe estimate`.")
@click.option("--pp", type=opt.Counts(True), help="Numbers of pipeline ranks to try; all that divide the GPUs.")
@click.option("--tp", type=opt.Counts(True), help="Sizes of tensor parallelism to try; all that divide the model.")
@click.option("--microbatch-sizes", type=opt.Counts(True), help="To try; 1,2,4 or those of the costs by default.")
@click.option("--ac", help="Checkpointing modes to try; none,selective:op,full or those of the costs by default.")
@click.option("--schedules", metavar="NAME,..", help="Schedules to try; all, and searched ones, by default.")
@click.option("--search-seconds", type=float, default=10.0, show_default=True, help="For searched ones; 0: none.")
@click.option("--search-steps", type=click.IntRange(0), help="Steps of each search instead: the same every time.")
@click.option("--most", type=click.IntRange(1), default=4000, show_default=True, help="Candidates to simulate.")
@click.option("--workers", type=click.IntRange(1), help="Processes; as many as cores by default.")
@click.option("--rows", type=click.IntRange(1), default=SHOWN, show_default=True, help="Rows to print.")
@click.option("-o", "--output", "out", help="Training file of the best: run.toml; a searched schedule beside it.")
@opt.json_option
def plan(model: str, rows: int, out: str | None, as_json: bool, **given: Any) -> None:
    """Plan a training run of MODEL: what `zeropipe estimate` takes, or a costs.json of estimate or profile.

    \b
    zeropipe plan qwen3-32b --gpus 16 --memory 80GB --batch 256 -o run.toml
    zeropipe plan costs.json --gpus 8 --batch 64
    """
    from zeropipe.core.files import has_suffix, require_writable
    from zeropipe.planning.data import plan_data
    from zeropipe.planning.plan import plan as run
    from zeropipe.planning.write import write_run

    if out:
        if not has_suffix(out, ".toml"):
            raise ConfigError(f"-o {out}: its name must end in .toml")
        require_writable(out)
    for name in ("ac", "schedules"):
        given[name] = given[name].split(",") if given[name] else None
    given["efficiency"] = efficiency_of(given["efficiency"])
    source: Any = _costs(model, given) if has_suffix(model, ".json") else None
    with _told() as tell:
        made = run(source or model, progress=tell, **given)
    name = source.model if source else model
    written = []
    if out:
        written = write_run(made, made.best, out, name, _costs_name(model, source, given))
    if as_json:
        output.print_json({**plan_data(made), "files": written})
        made.require_a_fit()
        return
    _print(made, rows)
    for path in written:
        output.print_written(path)


def _costs_name(model: str, source: Any, given: dict[str, Any]) -> str | None:
    """Where a training file finds the same costs; None for an estimate that a name does not say all of."""
    return model if source else None if given["efficiency"] else given["gpu"]


def _costs(path: str, given: dict[str, Any]) -> Any:
    """Layer costs of a file; None for a model's config. What the file says already must not be said otherwise."""
    from zeropipe.sim.costs import read_costs
    from zeropipe.sim.layer_file import from_layer_data, is_layer_data

    table = read_costs(path)
    if not is_layer_data(table):
        return None
    costs = from_layer_data(table, path)
    for name in _ESTIMATE_ONLY:
        if opt.is_told(name) and given[name] != getattr(costs, name, None):
            raise ConfigError(f"--{name} {given[name]}: the costs in {path} say that already; leave it out")
    return costs


def _print(made: Plan, number: int) -> None:
    console, costs = output.console(), made.scene.costs
    words = "estimated" if costs.source == "estimate" else "measured"
    console.print(
        f"{costs.model}: {count_text(made.gpus, 'GPU')} ({costs.machine.get('gpu', 'profiled')}), "
        f"{count_text(made.batch, 'sequence')} of {count_text(costs.sequence, 'token')}, "
        f"{gigabytes(made.scene.limit)} of each GPU; {words} costs",
        style="bold", markup=False, soft_wrap=True,
    )  # fmt: skip
    best = made.best
    front = {id(row) for row in made.front}
    cells = {
        f"{at + 1}{'*' if id(row) in front else ''}": _cells(made, row) for at, row in enumerate(made.rows[:number])
    }
    console.print(_table(cells, console))
    console.print(
        "mesh: pp x dp_shard x tp; * no other is both faster and smaller; gap: of the pipeline to the least possible",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    console.print(f"1: layers {format_counts(best.counts)} ({best.candidate.cut})", soft_wrap=True)
    console.print(f"   memory of the fullest rank: {_memory_text(best)}", soft_wrap=True)
    if len(made.rows) > 1:
        console.print(f"2: {made.why(made.rows[1])}", soft_wrap=True)
    small = made.front[-1]
    if small is not best:
        size = gigabytes(small.memory.peak)
        console.print(f"the smallest: {small.candidate}: {size}, {made.why(small)}", soft_wrap=True)
    for row in made.misfits[:CLOSE]:
        console.print(f"does not fit: {row.candidate}: {gigabytes(row.over)} over", soft_wrap=True)
    left = f", {made.num_left_out:,} with more work left out" if made.num_left_out else ""
    output.note(f"{count_text(made.num_tried, 'candidate')} in {made.seconds:.0f} s{left}")


def _table(cells: dict[str, list[str]], console: Console) -> Table:
    """A line for each row; on a terminal that is too narrow for that, two, with half of the columns."""
    wide = output.table(
        "", "mesh", "schedule", "micro-\nbatches", "ac", "step", "tok/s\n/GPU", "MFU", "bubble", "peak\nmemory", "gap",
        left=("mesh", "schedule", "ac"),
    )  # fmt: skip
    for name, row in cells.items():
        wide.add_row(name, *row)
    if output.fits(wide, console):
        return wide
    left = ("mesh\nmicrobatches", "schedule\nac")
    narrow = output.table("", *left, "step\ntok/s/GPU", "MFU\nbubble", "peak memory\ngap", left=left)
    for name, (mesh, schedule, microbatches, ac, *figures) in cells.items():
        pairs = [(mesh, microbatches), (schedule, ac), *zip(figures[::2], figures[1::2], strict=True)]
        narrow.add_row(name, *("\n".join(pair) for pair in pairs))
    return narrow


def _cells(made: Plan, row: Row) -> list[str]:
    one, mfu = row.candidate, made.mfu(row)
    return [
        f"{one.layout.pp}x{one.layout.dp_shard}x{one.layout.tp}", one.title,
        f"{one.num_microbatches}x{one.microbatch_size}", one.ac, output.time_text(row.step, "s"),
        f"{made.speed(row):,.0f}", "" if mfu is None else f"{100 * mfu:.1f}%", output.percent(row.bubble),
        gigabytes(row.memory.peak), "" if row.gap is None else f"{row.gap:.1%}",
    ]  # fmt: skip


def _memory_text(row: Row) -> str:
    return ", ".join(f"{name} {gigabytes(value)}" for name, value in vars(row.memory).items())


@contextmanager
def _told() -> Iterator[Callable[[str, float], None] | None]:
    """A bar on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)
