"""What balanced layers and a searched schedule bring: seconds of a step by estimate, on 8 ranks with 32 microbatches.

python bench/balance.py            # about a minute on 2 cores
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import zeropipe as zp
from zeropipe.schedules.registry import entries
from zeropipe.sim.layer_costs import LayerCosts

MODELS = ("llama-3-8b", "qwen3-8b", "qwen3-14b")
RANKS, MICROBATCHES = 8, 32


def best_built_in(costs: LayerCosts, cut: Callable[[zp.Schedule], tuple[int, ...]], limit: float) -> zp.Timeline:
    """The fastest built-in schedule that keeps the memory limit, with the layers that `cut` gives each stage."""
    found = []
    for entry in entries():
        if entry.overlaps:  # an estimate has no times of Overlaps
            continue
        try:
            schedule = zp.build(entry.name, ranks=RANKS, microbatches=MICROBATCHES)
            counts = cut(schedule)
        except zp.ConfigError:  # it cannot be built at this size, or does not fit
            continue
        timeline = zp.simulate(schedule, costs.costs(counts, placement=schedule.placement, memory_limit=limit))
        if max(timeline.peak_memory) <= limit:
            found.append(timeline)
    return min(found, key=lambda timeline: timeline.makespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--memory-limit", type=float, default=76e9, help="bytes of a GPU")
    parser.add_argument("--search-seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    limit = arguments.memory_limit
    for model in MODELS:
        costs = zp.estimate(model, gpu=arguments.gpu)
        even = best_built_in(costs, lambda s, c=costs: zp.balance(c, s).even, limit)
        balanced = best_built_in(costs, lambda s, c=costs: zp.balance(c, s).counts, limit)
        searched = None
        for name, placement in (("1f1b", zp.linear), ("zbv", zp.vee)):
            schedule = zp.build(name, ranks=RANKS, microbatches=MICROBATCHES)
            counts = zp.balance(costs, schedule).counts
            result = zp.search(
                ranks=RANKS,
                microbatches=MICROBATCHES,
                costs=costs.costs(counts, placement=schedule.placement, memory_limit=limit),
                stages_per_rank=schedule.problem.stages_per_rank,
                placement=placement,
                seconds=arguments.search_seconds,
            )
            if searched is None or result.timeline.makespan < searched.timeline.makespan:
                searched = result
        assert searched is not None
        print(
            f"{model:12} even {even.makespan:.3f} ({even.schedule.name})  balanced {balanced.makespan:.3f} "
            f"({balanced.schedule.name})  searched {searched.timeline.makespan:.3f}  "
            f"faster than even {even.makespan / searched.timeline.makespan - 1:.0%}  gap {searched.gap:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
