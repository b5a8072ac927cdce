"""`search`: a schedule for given costs under a memory limit, and its gap to the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.options import option
from zeropipe.cli.param_types import parse_size
from zeropipe.cli.progress import show_line
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.core.timeline import Timeline
    from zeropipe.searching.driver import Progress
    from zeropipe.searching.result import SearchResult

PREPARING = "loading kernels: after an installation they are compiled once, for about half a minute"


@opt.command(short_help="The best schedule for given costs and memory.")
@option(
    "--placement", type=click.Choice(["linear", "loop", "vee", "all"]), default="all", show_default=True,
    help="Which rank has which stage; the same for all with one stage per rank.",
)  # fmt: skip
@option(
    "--objective", type=click.Choice(["makespan", "span"]), default="makespan", show_default=True,
    help="Makespan, or the longest span of a rank, as in the Zero Bubble tables.",
)  # fmt: skip
@option("--rank-limits", metavar="X,X,..", help="Memory of each rank, if they differ, like 80GB,80GB,40GB,40GB.")
@opt.search_seconds
@opt.search_steps
@option("--seed", type=int, default=0, show_default=True, help="Seed of the random choices.")
@opt.workers
@opt.output()
@opt.json
@opt.ranks
@opt.microbatches
@opt.stages_per_rank
@opt.slices
@opt.costs
@opt.offload
@opt.checkpointing
def search(out: str | None, as_json: bool, **values: Any) -> None:
    """Search for the fastest schedule that fits, and print its gap to the proven lower bound.

    Ctrl-C ends the search with the best schedule so far.

    \b
    zeropipe search -p 8 -m 32 --costs c.json --memory-limit 40GB -o found.json
    zeropipe search -p 8 -m 32 -v 2 --w 0.7 --p2p 0.1 --memory-limit 8
    zeropipe search -p 4 -m 8 --slices 1,2,4
    zeropipe search -p 8 -m 32 --costs c.toml --checkpointing fit

    -o writes .json (schedule and times, for all commands), .csv, or a picture: .html, .svg, .png, .pdf.
    """
    from zeropipe.cli.cost_source import require_unit
    from zeropipe.cli.request import create_request
    from zeropipe.core.placement import PLACEMENTS, Problem
    from zeropipe.searching.search import search as search_schedule

    if out:
        _require_writable(out)
    slices = values.pop("slices")
    request = create_request([], values)
    for name in ("ranks", "microbatches"):
        if not getattr(request, name):
            raise ConfigError(f"{name} is missing: pass --{name} N")
    ranks, microbatches = request.ranks[0], request.microbatches[0]
    per_rank = request.stages_per_rank[0] if request.stages_per_rank else 1
    if request.offload not in (None, "fit"):
        raise ConfigError(f"offload={request.offload}: a search takes fit only, as few as keep the memory limit")
    problem = Problem(ranks, ranks * per_rank, microbatches)
    rule = PLACEMENTS.get(values["placement"])  # none for "all", where no stages are known to share a rank
    placement = rule(problem) if rule else None
    costs = request.source.stage_costs(problem, placement, None, request.checkpointing)
    layers = request.source.count_layers(problem, placement)
    limits = _parse_sizes(values["rank_limits"])
    for limit in limits or ():
        require_unit("--rank-limits", limit, costs)
    with _show_progress(costs.unit) as progress:
        found = search_schedule(
            ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank, costs=costs,
            weight_parts=request.weight_parts or 1, slices=slices or [1], progress=progress, rank_limits=limits,
            seconds=values["search_seconds"], steps=values["search_steps"], checkpointing=request.checkpointing,
            offload=request.offload is not None,
            **{name: values[name] for name in ("placement", "objective", "seed", "workers")},
        )  # fmt: skip
    if out:
        _write(found.timeline, out)
    if as_json:
        more = {"costs_per": request.source.name, "layers": layers, "file": out}
        output.print_json({**output.timeline_data(found.timeline), **_found_data(found), **more})
        return
    _print_found(found, request.source.describe(layers))
    if out:
        output.print_written(out)


def _parse_sizes(text: str | None) -> list[float] | None:
    return None if text is None else [parse_size("rank_limits", part) for part in text.split(",")]


def _require_writable(out: str) -> None:
    """ConfigError for a file that could not be written, before the search."""
    from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix, require_writable
    from zeropipe.viz import check_name

    if has_suffix(out, *SCHEDULE_SUFFIXES):
        require_writable(out)
    else:
        check_name(out)


def _write(timeline: Timeline, out: str) -> None:
    from zeropipe.core.files import has_suffix, write_whole
    from zeropipe.core.formats.csv import to_csv
    from zeropipe.core.formats.json import to_json
    from zeropipe.viz import draw

    if has_suffix(out, ".json"):
        write_whole(out, to_json(timeline))
    elif has_suffix(out, ".csv"):
        write_whole(out, to_csv(timeline.schedule))
    else:
        draw(timeline, out)


def _found_data(found: SearchResult) -> dict[str, Any]:
    return {
        "objective": found.objective,
        "value": found.value,
        "bound": found.bound,
        "gap": found.gap,
        "searched": found.searched,
        "seconds": found.seconds,
        "interrupted": found.interrupted,
        "slices": found.schedule.num_slices,
        "named": None if found.registered is None else found.registered.schedule.name,
        "named_value": None if found.registered is None else found.value_of(found.registered),
    }


def _print_found(found: SearchResult, costs: str) -> None:
    from zeropipe.searching.driver import relative_gap

    console, t = output.console(), found.timeline
    console.print(output.problem_text(t), style="bold", markup=False)
    limit = f" (limit {output.size_text(t.memory_limit, t.memory_unit)})" if t.memory_limit is not None else ""
    console.print(
        f"{found.objective} {output.time_text(found.value, t.unit)}   idle {output.percent(t.idle_fraction)} "
        f"(bubble rate {output.percent(t.bubble)})   "
        f"peak memory {output.size_text(max(t.peak_memory), t.memory_unit)}{limit}"
    )
    if found.gap == 0:
        console.print(f"proven: none of the {found.searched} is faster")
    else:
        bound = output.time_text(found.bound, t.unit)
        console.print(f"none of the {found.searched} is faster than {bound}: gap {found.gap:.2%}")
    if found.registered is None:
        console.print("no built-in one of these fits")
    else:
        name, value = found.registered.schedule.name, found.value_of(found.registered)
        console.print(
            f"the best built-in one of these that fits: {name}, {output.time_text(value, t.unit)} "
            f"({relative_gap(value, found.value):.1%} more)"
        )
    end = ", interrupted" if found.interrupted else ""
    output.print_note(f"searched for {found.seconds:.1f} s{end}; {costs}")


@contextmanager
def _show_progress(unit: str) -> Iterator[Callable[[Progress], None] | None]:
    """Show the best makespan so far in one line."""
    with show_line(PREPARING) as show:
        if show is None:
            yield None
            return
        yield lambda progress: show(
            f"{progress.seconds:.0f} s: {output.time_text(progress.value, unit)}, "
            f"at most {progress.gap:.2%} above the optimum (Ctrl-C takes it)"
        )
