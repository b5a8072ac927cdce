"""A plan as plain data, for `zeropipe plan --json` and for the page."""

from __future__ import annotations

from math import isfinite
from typing import Any

from zeropipe.planning.layouts import Layout
from zeropipe.planning.result import Plan
from zeropipe.planning.rows import Row


def plan_data(made: Plan, max_rows: int | None = None, max_misfits: int | None = None) -> dict[str, Any]:
    """The rows that fit, best first, and what does not fit. Rows on the front are never left out."""
    front, limit, costs = {id(row) for row in made.front}, made.scene.limit, made.scene.costs
    return {
        "source": costs.source, "model": costs.model, "gpu": costs.machine.get("gpu"),
        "gpus": made.gpus, "gpus_per_node": made.scene.gpus_per_node, "batch": made.batch,
        "sequence": costs.sequence, "memory_limit": limit if isfinite(limit) else None,
        "num_tried": made.num_tried, "num_left_out": made.num_left_out, "seconds": made.seconds,
        "rows": [
            {**_row_data(made, row), "front": id(row) in front, "why": made.why(row) if n else ""}
            for n, row in enumerate(made.rows)
            if max_rows is None or n < max_rows or id(row) in front
        ],
        "misfits": [_row_data(made, row) for row in made.misfits[:max_misfits]],
        "too_large": [
            {
                **_layout_data(misfit.run.layout), "microbatch_size": misfit.run.microbatch_size, "ac": misfit.run.ac,
                "needs": misfit.needs, "over": misfit.over,
            }
            for misfit in made.too_large[:max_misfits]
        ],
    }  # fmt: skip


def _row_data(made: Plan, row: Row) -> dict[str, Any]:
    candidate, memory = row.candidate, row.memory
    return {
        **_layout_data(candidate.layout), "schedule": candidate.schedule,
        "stages_per_rank": candidate.stages_per_rank, "microbatches": candidate.num_microbatches,
        "microbatch_size": candidate.microbatch_size, "ac": candidate.ac, "cut": candidate.cut,
        "layers": list(row.counts), "step_seconds": row.step, "tokens_per_second_per_gpu": made.speed(row),
        "mfu": made.mfu(row), "bubble": row.bubble, "makespan": row.makespan, "gap": row.gap,
        "peak_memory": memory.peak, "memory": vars(memory), "seconds": vars(row.parts), "over": row.over,
        "text": str(candidate),
    }  # fmt: skip


def _layout_data(layout: Layout) -> dict[str, int]:
    return {name: getattr(layout, name) for name in ("pp", "dp_shard", "tp")}
