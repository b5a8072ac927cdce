"""A plan as plain data: for the command line's JSON and for the page."""

from __future__ import annotations

from math import isfinite
from typing import Any

from zeropipe.planning.result import Plan
from zeropipe.planning.rows import Row


def row_data(made: Plan, row: Row) -> dict[str, Any]:
    """A row for machines."""
    one, memory = row.candidate, row.memory
    return {
        **{name: getattr(one.layout, name) for name in ("pp", "dp_shard", "tp")},
        "schedule": one.schedule, "stages_per_rank": one.stages_per_rank, "microbatches": one.num_microbatches,
        "microbatch_size": one.microbatch_size, "ac": one.ac, "cut": one.cut, "layers": list(row.counts),
        "step_seconds": row.step, "tokens_per_second_per_gpu": made.speed(row), "mfu": made.mfu(row),
        "bubble": row.bubble, "makespan": row.makespan, "gap": row.gap, "peak_memory": memory.peak,
        "memory": vars(memory), "seconds": vars(row.parts), "over": row.over, "text": str(one),
    }  # fmt: skip


def plan_data(made: Plan) -> dict[str, Any]:
    """A plan for machines: what fits, the front, and what does not fit."""
    front, limit = {id(row) for row in made.front}, made.scene.limit
    return {
        "source": made.scene.costs.source, "model": made.scene.costs.model, "gpu": made.scene.costs.machine.get("gpu"),
        "gpus": made.gpus, "gpus_per_node": made.scene.gpus_per_node, "batch": made.batch,
        "sequence": made.scene.costs.sequence, "memory_limit": limit if isfinite(limit) else None,
        "num_tried": made.num_tried, "num_left_out": made.num_left_out, "seconds": made.seconds,
        "rows": [
            {**row_data(made, row), "front": id(row) in front, "why": made.why(row) if at else ""}
            for at, row in enumerate(made.rows)
        ],
        "misfits": [row_data(made, row) for row in made.misfits],
        "too_large": [
            {
                **{name: getattr(one.run.layout, name) for name in ("pp", "dp_shard", "tp")},
                "microbatch_size": one.run.microbatch_size, "ac": one.run.ac, "needs": one.needs, "over": one.over,
            }
            for one in made.too_large
        ],
    }  # fmt: skip
