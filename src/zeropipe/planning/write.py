"""A plan's row as a training file, which all commands take: run.toml, and the schedule beside it if it was searched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zeropipe.core.files import require_writable, write_whole
from zeropipe.core.formats.json import to_json
from zeropipe.core.formats.toml import format_table
from zeropipe.core.model.configs import BUILT_IN
from zeropipe.core.units import count_text, gigabytes
from zeropipe.planning.result import Plan
from zeropipe.planning.rows import Row

DTYPES = {"bf16": "bfloat16", "float16": "bfloat16", "float32": "float32"}  # float16 is not trained in
GPUS_PER_NODE = 8  # a training file's default
STEPS = 100


def write_run(plan: Plan, row: Row, path: str, model: str, costs: str | None = None) -> list[str]:
    """Write `path`, and for a searched schedule a .json beside it; returns the names of what was written.

    `costs` is where the plan's costs come from: a file, or the name of a GPU.
    """
    schedule, written = named_schedule(row), [path]
    if row.found is not None:
        file = Path(path).with_suffix(".schedule.json")
        require_writable(path)
        write_whole(file, to_json(row.found))
        schedule = {"name": file.name}
        written.append(str(file))
    text = run_text(plan, row, schedule, _from(path, model), None if costs is None else _from(path, costs))
    write_whole(path, text)
    return written


def named_schedule(row: Row) -> dict[str, Any]:
    """A schedule as a training file names it: also with one stage per rank, as `interleaved` alone has two."""
    return {"name": row.candidate.schedule, "stages_per_rank": row.candidate.stages_per_rank}


def run_text(plan: Plan, row: Row, schedule: dict[str, Any], model: str, costs: str | None) -> str:
    """The training file of a row. `schedule` names it, and the other arguments are as in `write_run`."""
    one, known = row.candidate, plan.scene.costs
    schedule = {**schedule, "layers": list(row.counts)}
    if costs is not None:
        schedule["costs"] = costs
    if plan.scene.gpus_per_node != GPUS_PER_NODE:
        schedule["gpus_per_node"] = plan.scene.gpus_per_node
    setting = known.setting(ac=one.ac, microbatch_size=one.microbatch_size, tp=one.layout.tp)
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": model, "dtype": DTYPES.get(known.dtype, known.dtype)},
        "mesh": {"pp": one.layout.pp, "dp_shard": one.layout.dp_shard, "tp": one.layout.tp},
        "schedule": schedule,
        "engine": {"compile": setting.compile, "ac": one.ac},
        "data": {"sequence": known.sequence, "batch": plan.batch, "microbatch": one.microbatch_size},
        "train": {"steps": STEPS},
    }
    if (
        model in BUILT_IN and BUILT_IN[model]["num_hidden_layers"] != known.num_layers
    ):  # profiled with another number of them
        tables["model"]["num_layers"] = known.num_layers
    words = "an estimate" if known.source == "estimate" else "from measured costs"
    head = [
        f"# {one}",
        f"# predicted ({words}): {row.step:.3f} s per step of {count_text(plan.batch, 'sequence')} on "
        f"{count_text(plan.gpus, 'GPU')}, {plan.speed(row):,.0f} tokens/s per GPU, {gigabytes(row.memory.peak)}",
    ]
    blocks = [format_table(name, values) for name, values in tables.items()]
    return "\n".join([*head, "", "\n\n".join(blocks), ""])


def _from(path: str, name: str) -> str:
    """The name of a file as the file at `path` has it: from its own folder. Other names stay."""
    return os.path.relpath(name, Path(path).parent) if os.path.exists(name) else name
