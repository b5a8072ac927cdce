"""`simulate`: the time, idle time and memory of one schedule, rank by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.progress import show_steps
from zeropipe.core.units import count_text

if TYPE_CHECKING:
    from zeropipe.core.timeline import Timeline

NUM_END_RANKS = 32  # shown at the beginning and at the end of the table


@opt.command(short_help="Time, idle time and memory, rank by rank.")
@click.argument("schedule")
@opt.json
@opt.size
@opt.costs
@opt.offload
@opt.checkpointing
@opt.overlaps
def simulate(schedule: str, as_json: bool, **values: Any) -> None:
    """Predict the time, idle time and memory of a schedule, rank by rank.

    \b
    zeropipe simulate zbv --ranks 4 --microbatches 8 --i 1.2 --p2p 0.1
    zeropipe simulate mine.csv --costs costs.toml --memory-limit 40
    zeropipe simulate job.toml        (schedule, sizes and costs in one file)
    """
    from zeropipe.cli.request import create_request

    request = create_request([schedule], values)
    with show_steps(1) as begin:
        begin(f"simulating {schedule}")
        priced = request.price()
        timeline = priced.simulate()
    if as_json:
        data = output.timeline_data(timeline)
        output.print_json({**data, "costs_per": priced.source.name, "layers": priced.layers})
    else:
        _print_timeline(timeline, priced.describe_costs())


def _print_timeline(timeline: Timeline, costs: str) -> None:
    from zeropipe.core.explain import idle_times

    console = output.console()
    console.print(output.problem_text(timeline), style="bold", markup=False)
    console.print(
        f"makespan {output.time_text(timeline.makespan, timeline.unit)}   "
        f"idle {output.percent(timeline.idle_fraction)} ({output.percent(timeline.bubble_to_ideal)} to ideal; "
        f"bubble rate {output.percent(timeline.bubble)})   "
        f"peak memory {output.size_text(max(timeline.peak_memory), timeline.memory_unit)}{_limit_text(timeline)}"
    )
    output.print_note(costs)
    is_sharded = timeline.sharding is not None
    shards = ["shards"] if is_sharded else []
    copies = ["reload"] if timeline.offloading is not None else []
    host = ["host\nmemory"] if timeline.offloading is not None else []
    table = output.create_table(
        "rank", "busy", "warm-up", "data", "comm", *shards, *copies, "cool-down", "idle", "peak\nmemory", *host
    )  # fmt: skip
    for rank, causes in enumerate(idle_times(timeline)):
        if NUM_END_RANKS <= rank < timeline.num_ranks - NUM_END_RANKS:
            continue
        sharding = [causes.sharding] if is_sharded else []
        reload = [causes.offload] if copies else []
        waits = (*causes[:2], causes.communication + causes.other, *sharding, *reload)
        times = (timeline.busy[rank], *waits, causes.cool_down)
        table.add_row(
            str(rank),
            *(output.time_text(time, timeline.unit) for time in times),
            output.percent(timeline.rank_idle_fraction[rank]),
            output.size_text(timeline.peak_memory[rank], timeline.memory_unit),
            *([output.size_text(timeline.peak_host_memory[rank], timeline.memory_unit)] if host else []),
        )
    console.print(table)
    if timeline.num_ranks > 2 * NUM_END_RANKS:
        last = timeline.num_ranks - NUM_END_RANKS - 1
        output.print_note(f"ranks {NUM_END_RANKS} to {last} are not shown: --json has all")
    _print_critical_path(timeline)
    _print_exchanges(timeline)
    output.print_warnings(timeline.schedule)


def _print_critical_path(timeline: Timeline) -> None:
    from zeropipe.core.action import COMPUTE
    from zeropipe.core.explain import critical_path

    console, path = output.console(), critical_path(timeline)
    work = sum(span.end - span.start for span in path if span.action.kind in COMPUTE)
    first, last = path[0], path[-1]
    console.print(
        f"critical path: {count_text(len(path), 'action')}, {output.time_text(work, timeline.unit)} of work, "
        f"{output.time_text(timeline.makespan - work, timeline.unit)} of waiting for messages"
        f"{', weights and gradients' if timeline.sharding is not None else ''}; "
        f"from {first.action} on rank {first.rank} to {last.action} on rank {last.rank}"
    )
    if last.action.kind not in COMPUTE:
        wait = timeline.first_start + timeline.makespan - max(memoryview(timeline.end).cast("d"))
        console.print(
            f"the end waits {output.time_text(wait, timeline.unit)} for {last.action} on rank {last.rank}: "
            "more --units, or an earlier last W of the stage, shorten the wait"
        )


def _print_exchanges(timeline: Timeline) -> None:
    """What of the exchanges of experts is hidden, if the timeline has phases."""
    from zeropipe.core.explain import sum_exchanges

    total, exposed = (sum(column) / timeline.num_ranks for column in zip(*sum_exchanges(timeline), strict=True))
    if total > 0:
        output.console().print(
            f"exchanges: {output.time_text(total, timeline.unit)} of a rank, {output.percent(1 - exposed / total)} "
            f"hidden, {output.time_text(exposed, timeline.unit)} exposed"
        )


def _limit_text(timeline: Timeline) -> str:
    limit = timeline.memory_limit
    if limit is None:
        return ""
    text = output.size_text(limit, timeline.memory_unit)
    if not timeline.over_limit:
        return f" (limit {text})"
    return f" [red]over the limit {text} on rank {', '.join(map(str, timeline.over_limit))}[/]"
