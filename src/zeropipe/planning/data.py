"""A plan as JSON data, for `zeropipe plan --json` and for the page."""

from __future__ import annotations

from math import isfinite
from typing import Any

from zeropipe.planning.closest import Closest
from zeropipe.planning.layouts import Layout
from zeropipe.planning.result import Plan
from zeropipe.planning.rows import PlanRow
from zeropipe.planning.untried import READ_ON


def plan_data(plan: Plan, max_rows: int | None = None, max_misfits: int | None = None) -> dict[str, Any]:
    """The rows that fit, best first, and what does not fit. Rows on the front are never left out."""
    front, limit, costs = {id(row) for row in plan.front}, plan.context.memory_limit, plan.context.costs
    return {
        "source": costs.source, "model": costs.model, "gpu": costs.machine.get("gpu"),
        "gpus": plan.gpus, "gpus_per_node": plan.context.gpus_per_node, "batch": plan.batch,
        "sequence": costs.sequence, "memory_limit": limit if isfinite(limit) else None,
        "reserve": plan.reserve, "lora_rank": costs.lora_rank,
        "num_tried": plan.num_tried, "num_left_out": plan.num_left_out, "seconds": plan.seconds,
        "rows": [
            {**_row_data(plan, row), "front": id(row) in front, "why": plan.why(row) if index else ""}
            for index, row in enumerate(plan.rows)
            if max_rows is None or index < max_rows or id(row) in front
        ],
        "levers": [
            {"name": lever.name, "slower": lever.slower, "over": lever.over,
             "without": None if lever.row is None else str(lever.row.candidate)}
            for lever in plan.levers
        ],
        "misfits": [_row_data(plan, row) for row in plan.misfits[:max_misfits]],
        "too_large": [
            {
                **_layout_data(misfit.run.layout), "microbatch_size": misfit.run.microbatch_size, "ac": misfit.run.ac,
                "needs": misfit.needs, "over": misfit.excess,
            }
            for misfit in plan.too_large[:max_misfits]
        ],
        "closest": None if plan.closest is None else _closest_data(plan, plan.closest),
        "not_tried": [item._asdict() for item in plan.untried], "read_on": READ_ON,
    }  # fmt: skip


def _closest_data(plan: Plan, closest: Closest) -> dict[str, Any]:
    """What comes closest to fitting, and what would make it fit."""
    return {
        "row": _row_data(plan, closest.row),
        "ways_out": [
            {"change": dict(way.change), "peak_memory": way.row.memory.peak, "text": str(way.row.candidate)}
            for way in closest.ways_out
        ],
    }  # fmt: skip


def _row_data(plan: Plan, row: PlanRow) -> dict[str, Any]:
    candidate, memory = row.candidate, row.memory
    return {
        **_layout_data(candidate.layout), "cp_exchange": plan.context.setting(candidate).exchange or None,
        "schedule": candidate.schedule,
        "stages_per_rank": candidate.stages_per_rank, "microbatches": candidate.num_microbatches,
        "microbatch_size": candidate.microbatch_size, "ac": candidate.ac, "cut": candidate.cut,
        "shards": candidate.shards, "gradients": candidate.gradients, "slices": candidate.slices,
        "offload": candidate.offload, "host_memory": row.host_memory, "checkpointing": candidate.checkpointing,
        "checkpointed": row.checkpointed, "layers": list(row.counts),
        "step_seconds": row.step, "tokens_per_second_per_gpu": plan.speed(row),
        "mfu": plan.mfu(row), "idle_fraction": row.idle_fraction, "bubble": row.bubble, "makespan": row.makespan,
        "gap": row.gap,
        "peak_memory": memory.peak, "memory": vars(memory), "seconds": vars(row.seconds), "over": row.excess,
        "text": str(candidate),
    }  # fmt: skip


def _layout_data(layout: Layout) -> dict[str, int]:
    return {
        name: getattr(layout, name) for name in ("pp", "dp_shard", "tp", "sequence_parallel", "ep", "cp", "shard_cp")
    }
