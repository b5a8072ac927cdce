"""`simulate`: one schedule's time, bubble and memory, and where its time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.progress import progress
from zeropipe.core.units import count_text

if TYPE_CHECKING:
    from zeropipe.core.timeline import Timeline

MOST = 32  # ranks in the table at its beginning, and at its end


@click.command(short_help="Time, bubble and memory, rank by rank.")
@click.argument("schedule")
@opt.size_options
@opt.json_option
@opt.cost_options
def simulate(schedule: str, as_json: bool, **given: Any) -> None:
    """Predict a schedule's time, bubble and memory, rank by rank.

    \b
    zeropipe simulate zbv --ranks 4 --microbatches 8 --i 1.2 --p2p 0.1
    zeropipe simulate mine.csv --costs costs.toml --memory-limit 40
    zeropipe simulate job.toml        (schedule, sizes and costs in one file)
    """
    from zeropipe.cli.request import request_of

    request = request_of([schedule], given)
    with progress(1) as begin:
        begin(f"simulating {schedule}")
        priced = request.priced()
        timeline = priced.simulated()
    if as_json:
        output.print_json({**output.summary(timeline), "costs_per": priced.per, "layers": priced.layers})
    else:
        _print_timeline(timeline, output.costs_text(priced.per, request.cut_text(priced.layers)))


def _print_timeline(timeline: Timeline, costs: str) -> None:
    from zeropipe.core.action import COMPUTE
    from zeropipe.core.explain import critical_path, idle_times

    console = output.console()
    console.print(output.problem_text(timeline), style="bold", markup=False)
    console.print(
        f"makespan {output.time_text(timeline.makespan, timeline.unit)}   bubble {output.percent(timeline.bubble)} "
        f"({output.percent(timeline.bubble_to_ideal)} to ideal)   "
        f"peak memory {output.size_text(max(timeline.peak_memory), timeline.memory_unit)}{_limit(timeline)}"
    )
    output.note(costs)
    sharded = timeline.sharding is not None
    shards = ["shards"] if sharded else []
    rows = output.table("rank", "busy", "warm-up", "data", "comm", *shards, "cool-down", "bubble", "peak\nmemory")
    for rank, causes in enumerate(idle_times(timeline)):
        if MOST <= rank < timeline.num_ranks - MOST:
            continue
        held = [causes.sharding] if sharded else []
        times = (timeline.busy[rank], *causes[:2], causes.communication + causes.other, *held, causes.cool_down)
        rows.add_row(
            str(rank),
            *(output.time_text(time, timeline.unit) for time in times),
            output.percent(timeline.rank_bubble[rank]),
            output.size_text(timeline.peak_memory[rank], timeline.memory_unit),
        )
    console.print(rows)
    if timeline.num_ranks > 2 * MOST:
        output.note(f"ranks {MOST} to {timeline.num_ranks - MOST - 1} are left out here: --json has them all")
    path = critical_path(timeline)
    inside = sum(span.end - span.start for span in path if span.action.kind in COMPUTE)
    console.print(
        f"critical path: {count_text(len(path), 'action')}, {output.time_text(inside, timeline.unit)} of work, "
        f"{output.time_text(timeline.makespan - inside, timeline.unit)} of waiting for messages"
        f"{', weights and gradients' if sharded else ''}; "
        f"from {path[0].action} on rank {path[0].rank} to {path[-1].action} on rank {path[-1].rank}"
    )
    if path[-1].action.kind not in COMPUTE:
        late = timeline.first_start + timeline.makespan - max(memoryview(timeline.end).cast("d"))
        console.print(
            f"the end waits {output.time_text(late, timeline.unit)} for {path[-1].action} on rank {path[-1].rank}: "
            "less is left to wait for with more --units, or where the stage's last W comes earlier"
        )
    output.print_warnings(timeline.schedule)


def _limit(timeline: Timeline) -> str:
    limit = timeline.memory_limit
    if limit is None:
        return ""
    text = output.size_text(limit, timeline.memory_unit)
    if not timeline.over_limit:
        return f" (limit {text})"
    return f" [red]over the limit {text} on rank {', '.join(map(str, timeline.over_limit))}[/]"
