"""A plan's row as files for `zeropipe run`: run.toml, and the schedule beside it if it was searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zeropipe.core.files import require_writable, write_whole
from zeropipe.core.json import to_json
from zeropipe.search.plan.result import Plan
from zeropipe.search.plan.rows import Row

DTYPES = {"bf16": "bfloat16", "float16": "float16", "float32": "float32"}


def write_run(plan: Plan, row: Row, path: str, model: str) -> list[str]:
    """Write `path`, and for a searched schedule a .json beside it; returns the names of what was written."""
    one, costs = row.candidate, plan.scene.costs
    schedule: dict[str, Any] = {"schedule": one.schedule, "ranks": one.layout.pp}
    written = [path]
    if row.found is not None:
        file = Path(path).with_suffix(".schedule.json")
        require_writable(path)
        write_whole(file, to_json(row.found))
        schedule = {"schedule": file.name}
        written.append(str(file))
    else:
        schedule |= {"microbatches": one.num_microbatches, "stages_per_rank": one.stages_per_rank}
    setting = costs.setting(ac=one.ac, microbatch_size=one.microbatch_size, tp=one.layout.tp)
    run = {
        "model": model, "layers": list(row.counts), "batch": one.microbatch_size, "sequence": costs.sequence,
        "dtype": DTYPES.get(costs.dtype, costs.dtype), "ac": one.ac, "compile": setting.compile,
    }  # fmt: skip
    if one.layout.num_gpus > one.layout.pp:
        sizes = {name: size for name, size in vars(one.layout).items() if size > 1}
        run["mesh"] = ",".join(f"{name}={size}" for name, size in sizes.items())
    words = "an estimate" if costs.source == "estimate" else "from measured costs"
    head = [
        f"# {one}",
        f"# predicted ({words}): {row.step:.3f} s per step of {plan.batch} sequences on {plan.gpus} GPUs, "
        f"{plan.speed(row):,.0f} tokens/s per GPU, {row.memory.peak / 1e9:.1f} GB",
    ]
    lines = [*head, *_table(schedule), "", "[run]", *_table(run), ""]
    write_whole(path, "\n".join(lines))
    return written


def _table(values: dict[str, Any]) -> list[str]:
    """Texts, numbers and lists are written in TOML as in JSON."""
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]
