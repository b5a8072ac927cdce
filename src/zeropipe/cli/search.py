"""`search`: a schedule for given costs under a memory limit, and how far it is from the best possible."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.core.timeline import Timeline
    from zeropipe.searching.hunt import Progress
    from zeropipe.searching.search import Found

PREPARING = "making kernels ready: after an installation they are compiled, once, for about half a minute"


@click.command(short_help="The best schedule for given costs and memory.")
@click.option("--ranks", "-p", type=opt.Counts(False), help="Pipeline ranks.")
@click.option("--microbatches", "-m", type=opt.Counts(False), help="Microbatches.")
@click.option("--stages-per-rank", "-v", type=opt.Counts(False), help="Stages on each rank; 1 by default.")
@click.option(
    "--placement", type=click.Choice(["linear", "loop", "vee", "all"]), default="all", show_default=True,
    help="Where stages live; with one stage per rank all are the same.",
)  # fmt: skip
@click.option(
    "--objective", type=click.Choice(["makespan", "span"]), default="makespan", show_default=True,
    help="The whole time, or the longest rank's own, which the Zero Bubble tables use.",
)  # fmt: skip
@click.option(
    "--rank-limits", metavar="X,X,..", help="Memory of each rank where they differ, like 80GB,80GB,40GB,40GB."
)
@click.option("--seconds", type=float, default=10.0, show_default=True, help="How long to search.")
@click.option("--steps", type=int, help="Steps of local search instead of seconds: the same result every time.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another one searches elsewhere.")
@click.option("--workers", type=click.IntRange(1), help="Threads; all cores by default.")
@click.option(
    "-o", "--output", "out",
    help="x.json (schedule and times, for all commands), .csv, or a picture: .html .svg .png .pdf.",
)  # fmt: skip
@opt.json_option
@opt.cost_options
def search(out: str | None, as_json: bool, **given: Any) -> None:
    """Search for the fastest schedule that fits, and say how far it is from the best possible.

    Ctrl-C ends the search with the best so far.

    \b
    zeropipe search -p 8 -m 32 --costs c.json --memory-limit 40GB -o found.json
    zeropipe search -p 8 -m 32 -v 2 --w 0.7 --p2p 0.1 --memory-limit 8
    """
    from zeropipe.cli.request import request_of, require_unit
    from zeropipe.core.placement import PLACEMENTS, Problem
    from zeropipe.searching.search import search as run

    if out:
        _require_name(out)
    request = request_of([], {**given, "pairs": ()})
    for flag, value in (("ranks", request.ranks), ("microbatches", request.microbatches)):
        if not value:
            raise ConfigError(f"{flag} is missing: a schedule is searched for a number of {flag}, give --{flag} N")
    ranks, microbatches = request.ranks[0], request.microbatches[0]
    per_rank = request.stages_per_rank[0] if request.stages_per_rank else 1
    problem = Problem(ranks, ranks * per_rank, microbatches)
    rule = PLACEMENTS.get(given["placement"])  # none with "all": then no stages are taken to share a rank
    placement = rule(problem) if rule else None
    costs, layers = request.costs_of(problem, placement), request.layers_of(problem, placement)
    limits = _sizes(given["rank_limits"])
    for limit in limits or ():
        require_unit("--rank-limits", limit, costs)
    with _told(costs.unit) as tell:
        found = run(
            ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank, costs=costs,
            weight_parts=request.weight_parts or 1, progress=tell, rank_limits=limits,
            **{name: given[name] for name in ("placement", "objective", "seconds", "steps", "seed", "workers")},
        )  # fmt: skip
    if out:
        _write(found.timeline, out)
    if as_json:
        facts = {**_facts(found), "costs_per": request.per, "layers": layers, "file": out}
        output.print_json({**output.summary(found.timeline), **facts})
        return
    _print(found, given["placement"], output.costs_text(request.per, request.cut_text(layers)))
    if out:
        output.print_written(out)


def _sizes(text: str | None) -> list[float] | None:
    return None if text is None else [opt.Size("rank_limits").convert(part, None, None) for part in text.split(",")]


def _require_name(out: str) -> None:
    """Before the work: a mistake in the name is all that is told then."""
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


def _facts(found: Found) -> dict[str, Any]:
    return {
        "objective": found.objective,
        "value": found.value,
        "bound": found.bound,
        "gap": found.gap,
        "seconds": found.seconds,
        "interrupted": found.interrupted,
        "named": None if found.named is None else found.named.schedule.name,
        "named_value": None if found.named is None else found.value_of(found.named),
    }


def _print(found: Found, placement: str, costs: str) -> None:
    from zeropipe.searching.hunt import gap_of

    console, t = output.console(), found.timeline
    per_rank = found.schedule.problem.stages_per_rank
    others = f"with {count_text(per_rank, 'stage')} per rank" + (
        f" in a {placement}" if per_rank > 1 and placement != "all" else ""
    )
    console.print(output.problem_text(t), style="bold", markup=False)
    limit = f" (limit {output.size_text(t.memory_limit, t.memory_unit)})" if t.memory_limit is not None else ""
    console.print(
        f"{found.objective} {output.time_text(found.value, t.unit)}   bubble {output.percent(t.bubble)}   "
        f"peak memory {output.size_text(max(t.peak_memory), t.memory_unit)}{limit}"
    )
    if found.gap == 0:
        console.print(f"proven: nothing {others} is faster")
    else:
        console.print(f"nothing {others} is faster than {output.time_text(found.bound, t.unit)}: gap {found.gap:.2%}")
    if found.named is None:
        console.print("no schedule with a name fits")
    else:
        named = found.value_of(found.named)
        console.print(
            f"the best with a name that fits: {found.named.schedule.name}, {output.time_text(named, t.unit)} "
            f"({gap_of(named, found.value):.1%} more)"
        )
    ended = ", interrupted" if found.interrupted else ""
    output.note(f"searched for {found.seconds:.1f} s{ended}; {costs}")


@contextmanager
def _told(unit: str) -> Iterator[Callable[[Progress], None] | None]:
    """How far the search is, in one line on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(PREPARING) as status:

        def tell(progress: Progress) -> None:
            status.update(
                f"{progress.seconds:.0f} s: {output.time_text(progress.value, unit)}, "
                f"at most {progress.gap:.2%} above the best possible (Ctrl-C takes it)"
            )

        yield tell
