"""The output of `plan`: the ranking, or what comes closest if nothing fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropipe.cli import output
from zeropipe.core.model.cp_exchange import HEADS
from zeropipe.core.model.layers import format_counts
from zeropipe.core.units import count_text, gigabytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zeropipe.planning.levers import Lever
    from zeropipe.planning.result import Plan
    from zeropipe.planning.rows import Candidate, PlanRow

NUM_MISFITS = 3
EXPOSED = ", cp: parts of sequences, ep: experts divided; exposed: exchanges that no computation hides"
REGATHER = ", rg: weights gathered for every microbatch"
OFFLOAD = ", off: activations copied to the host"
CHECKPOINTED = ", x% of F: only these are checkpointed"
_FLAGS = {"pp": "--ranks", "microbatch_sizes": "--microbatch"}  # of arguments of zp.plan; others have their own names


def print_plan(made: Plan, num_rows: int) -> None:
    """Print the ranking, and what the best row takes."""
    console = output.console()
    _print_head(made, console)
    best = made.best
    front = {id(row) for row in made.front}
    cells = {
        f"{n + 1}{'*' if id(row) in front else ''}": _cells(made, row) for n, row in enumerate(made.rows[:num_rows])
    }
    exposed = [_exposed_text(row) for row in made.rows[:num_rows]]
    console.print(_create_table(cells, console, exposed if any(exposed) else None))
    shown = [row.candidate for row in made.rows[:num_rows]]
    marks = REGATHER * any(one.shards == "regather" for one in shown) + OFFLOAD * any(one.offload for one in shown)
    marks += CHECKPOINTED * any(one.checkpointing for one in shown)
    console.print(
        f"mesh: pp x dp_shard x tp, sp: sequence parallelism{marks}"
        f"{EXPOSED if any(exposed) else ''}; *: no other is both "
        "faster and smaller; gap: to the lower bound of the pipeline",
        style="dim", soft_wrap=True,
    )  # fmt: skip
    console.print(
        f"1: layers {format_counts(best.counts)} ({best.candidate.cut}){_more_text(made, best)}", soft_wrap=True
    )
    console.print(f"   memory of the fullest rank: {_memory_text(best)}", soft_wrap=True)
    if len(made.rows) > 1:
        console.print(f"2: {made.why(made.rows[1])}", soft_wrap=True)
    smallest = made.front[-1]
    if smallest is not best:
        size = gigabytes(smallest.memory.peak)
        console.print(f"the smallest: {smallest.candidate}: {size}, {made.why(smallest)}", soft_wrap=True)
    for row in made.misfits[:NUM_MISFITS]:
        console.print(f"does not fit: {row.candidate}: {gigabytes(row.excess)} over", soft_wrap=True)
    if made.levers:
        console.print(
            f"what each lever buys: without {'; without '.join(map(_lever_text, made.levers))}", soft_wrap=True
        )
    _print_untried(made, console)
    left_out = f", {made.num_left_out:,} with more work left out" if made.num_left_out else ""
    output.print_note(f"{count_text(made.num_tried, 'candidate')} in {made.seconds:.0f} s{left_out}")


def _more_text(made: Plan, row: PlanRow) -> str:
    """What else a row does for its memory."""
    candidate = row.candidate
    gradients = "" if candidate.gradients == "whole" else f", gradients {candidate.gradients}"
    slices = ""
    if candidate.slices > 1:
        sizes = made.context.slice_sizes(candidate, candidate.slices)
        slices = f", slices of {', '.join(f'{size:,}' for size in sizes)} tokens"
    copied = f", {gigabytes(row.host_memory)} of activations on the host" if candidate.offload else ""
    return f"{gradients}{slices}{copied}"


def _print_head(made: Plan, console: Console) -> None:
    """What was planned, and how much of a GPU's memory may be used."""
    costs, limit = made.context.costs, made.context.memory_limit
    trains = "" if costs.lora_rank is None else f", LoRA of rank {costs.lora_rank}"
    kind = "estimated" if costs.source == "estimate" else "measured"
    console.print(
        f"{costs.model}{trains}: {count_text(made.gpus, 'GPU')} ({costs.machine.get('gpu', 'profiled')}), "
        f"{count_text(made.batch, 'sequence')} of {count_text(costs.sequence, 'token')}, {gigabytes(limit)} of each "
        f"GPU ({gigabytes(limit + made.reserve)} - {gigabytes(made.reserve)} reserve); {kind} costs",
        style="bold", markup=False, soft_wrap=True,
    )  # fmt: skip


def print_closest(made: Plan) -> None:
    """Why nothing fits, and what would."""
    console, closest = output.console(), made.closest
    _print_head(made, console)
    if closest is not None:
        row = closest.row
        console.print(f"closest: {row.candidate}: {gigabytes(row.memory.peak)}", soft_wrap=True)
        console.print(f"   memory of the fullest rank: {_memory_text(row)}", soft_wrap=True)
        for way in closest.ways_out:
            text = " ".join(f"{_FLAGS.get(name, '--' + name)} {value}" for name, value in way.change.items())
            size = gigabytes(way.row.memory.peak)
            console.print(f"fits with {text}: {way.row.candidate}: {size}", markup=False, soft_wrap=True)
        if not closest.ways_out:
            console.print("no change that was tried fits: more GPUs, shorter sequences, other settings", soft_wrap=True)
    _print_untried(made, console)


def _print_untried(made: Plan, console: Console) -> None:
    from zeropipe.planning.untried import READ_ON

    names = ", ".join(item.name for item in made.untried)
    if names:
        console.print(f"not tried: {names}: {READ_ON}", style="dim", markup=False, soft_wrap=True)


def _create_table(cells: dict[str, list[str]], console: Console, exposed: list[str] | None = None) -> Table:
    """One line per row; two on a terminal that is too narrow for that, without the column `exposed`."""
    wide = output.create_table(
        "", "mesh", "schedule", "micro-\nbatches", "ac", "step", "tok/s\n/GPU", "MFU", "idle", "peak\nmemory", "gap",
        *(["ex-\nposed"] if exposed else []), left=("mesh", "schedule", "ac"),
    )  # fmt: skip
    for n, (name, row) in enumerate(cells.items()):
        wide.add_row(name, *row, *([exposed[n]] if exposed else []))
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
    return [
        _mesh_text(candidate, made.context.setting(candidate).exchange),
        candidate.title,
        f"{candidate.num_microbatches}x{candidate.microbatch_size}",
        f"{row.checkpointed:.0%} of F" if candidate.checkpointing else candidate.ac, output.time_text(row.step, "s"),
        f"{made.speed(row):,.0f}", "" if mfu is None else f"{100 * mfu:.1f}%", output.percent(row.idle_fraction),
        gigabytes(row.memory.peak), "" if row.gap is None else f"{row.gap:.1%}",
    ]  # fmt: skip


def _mesh_text(candidate: Candidate, exchange: str) -> str:
    """A mesh, what attention exchanges over cp, if that is not heads, and how memory is saved."""
    layout = candidate.layout
    cp, ep = (f" {name}{size}" if size > 1 else "" for name, size in (("cp", layout.cp), ("ep", layout.ep)))
    keys = f" {exchange}" if exchange not in ("", HEADS) else ""
    more = " rg" * (candidate.shards == "regather") + " off" * candidate.offload
    return f"{layout.pp}x{layout.dp_shard}x{layout.tp}{' sp' * layout.sequence_parallel}{cp}{keys}{ep}{more}"


def _exposed_text(row: PlanRow) -> str:
    """The part of a step in which ranks exchange rows of experts, or tensors of attention, and do not compute."""
    exchanges = row.candidate.layout.ep > 1 or row.candidate.layout.cp > 1
    return output.percent((row.seconds.exchange + row.seconds.parts) / row.step) if exchanges else ""


def _lever_text(lever: Lever) -> str:
    if lever.slower is not None:
        return f"{lever.name} {lever.slower:.1%} slower"
    if lever.over is not None:
        return f"{lever.name} at least {gigabytes(lever.over)} over"
    return f"{lever.name} nothing was tried"


def _memory_text(row: PlanRow) -> str:
    return ", ".join(f"{name} {gigabytes(value)}" for name, value in vars(row.memory).items())
