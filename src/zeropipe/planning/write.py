"""A row of a plan as a training file; a schedule that has no name is a file beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zeropipe.core.files import require_writable, write_whole
from zeropipe.core.formats.json import to_json
from zeropipe.core.formats.toml import format_table
from zeropipe.core.model.configs import find_built_in
from zeropipe.core.model.cp_exchange import HEADS
from zeropipe.core.packed import is_joined
from zeropipe.core.units import count_text, gigabytes
from zeropipe.planning.result import Plan
from zeropipe.planning.rows import PlanRow

DTYPES = {"bf16": "bfloat16", "float16": "bfloat16", "float32": "float32"}  # training in float16 is not supported
GPUS_PER_NODE = 8  # a training file's default
STEPS = 100
SCHEDULE_FILE = "run.schedule.json"  # beside run.toml, of a schedule without a name
WEIGHTS = "--model.path DIRECTORY, or --model.weights random,"
DATA = "--data.path FILES, or random tokens are used"


def write_run(plan: Plan, row: PlanRow, path: str, model: str, costs: str | None = None) -> list[str]:
    """Write `path`, and beside it a .json of a schedule that has no name; returns the paths of the files.

    `costs` is the source of the plan's costs: a file, or the name of a GPU.
    """
    file, written = Path(path).with_suffix(".schedule.json"), [path]
    if row.own_schedule is not None:
        require_writable(path)
        write_whole(file, to_json(row.own_schedule))
        written.append(str(file))
    text = format_run(
        plan, row, schedule_table(row, file.name), _relative_to(path, model),
        None if costs is None else _relative_to(path, costs), missing=list_missing(model),
    )  # fmt: skip
    write_whole(path, text)
    return written


def schedule_table(row: PlanRow, file: str = SCHEDULE_FILE) -> dict[str, Any]:
    """A schedule in a training file; `file` is that of one without a name.

    One stage per rank of a registered schedule is written too: it is not every default.
    """
    if row.own_schedule is not None:
        return {"name": file}
    return {"name": row.candidate.schedule, "stages_per_rank": row.candidate.stages_per_rank}


def format_run(
    plan: Plan, row: PlanRow, schedule: dict[str, Any], model: str, costs: str | None,
    missing: str = f"{WEIGHTS} and {DATA}",
) -> str:  # fmt: skip
    """The text of a row's training file. `schedule` has its name; `missing` is what a run needs besides the file.

    The other arguments are those of `write_run`.
    """
    candidate, layer_costs = row.candidate, plan.context.costs
    schedule = {**schedule, "layers": list(row.counts)}
    if candidate.slices > 1:
        schedule |= {"slices": candidate.slices, "slice_sizes": plan.context.slice_sizes(candidate, candidate.slices)}
    if costs is not None:
        schedule["costs"] = costs
    if plan.context.gpus_per_node != GPUS_PER_NODE:
        schedule["gpus_per_node"] = plan.context.gpus_per_node
    setting = plan.context.setting(candidate)
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": model, "dtype": DTYPES.get(layer_costs.dtype, layer_costs.dtype)},
        **({} if layer_costs.lora_rank is None else {"lora": {"rank": layer_costs.lora_rank}}),
        "mesh": {name: getattr(candidate.layout, name) for name in ("pp", "dp_shard", "tp")},
        "schedule": schedule,
        "engine": {"compile": setting.compile, "ac": candidate.ac},
        "data": {"sequence": layer_costs.sequence, "batch": plan.batch, "microbatch": candidate.microbatch_size},
        "train": {"steps": STEPS},
    }
    if candidate.layout.cp > 1:
        tables["mesh"] |= {"cp": candidate.layout.cp, "shard_cp": candidate.layout.shard_cp}
        if setting.exchange not in ("", HEADS):
            tables["mesh"]["cp_exchange"] = setting.exchange
    if layer_costs.source == "estimate" and not layer_costs.fused_head:
        tables["engine"]["fused_head"] = False
    if candidate.layout.ep > 1:
        tables["mesh"]["ep"] = candidate.layout.ep
        if layer_costs.dispatch != "expert":
            tables["mesh"]["dispatch"] = layer_costs.dispatch
        if any(map(is_joined, row.schedule.packed.view)):
            tables["engine"]["overlap"] = "turns"
    if candidate.shards != "keep":
        tables["engine"]["shards"] = candidate.shards
    if candidate.gradients != "whole":
        tables["engine"]["gradients"] = candidate.gradients
    if candidate.layout.sequence_parallel:
        tables["mesh"]["sequence_parallel"] = True
    known = find_built_in(model)
    if known is not None and known["num_hidden_layers"] != layer_costs.num_layers:
        tables["model"]["num_layers"] = layer_costs.num_layers  # profiled with another number of layers
    source = "an estimate" if layer_costs.source == "estimate" else "from measured costs"
    head = [
        f"# {candidate}",
        f"# predicted ({source}): {row.step:.3f} s per step of {count_text(plan.batch, 'sequence')} on "
        f"{count_text(plan.gpus, 'GPU')}, {plan.speed(row):,.0f} tokens/s per GPU, {gigabytes(row.memory.peak)}",
        f"# to train: {missing}",
    ]
    blocks = [format_table(name, values) for name, values in tables.items()]
    return "\n".join([*head, "", "\n\n".join(blocks), ""])


def list_missing(model: str) -> str:
    """The options of `train` that a plan's file does not have."""
    has_weights = any(Path(model).glob("*.safetensors")) if Path(model).is_dir() else False
    return DATA if has_weights else f"{WEIGHTS} and {DATA}"


def _relative_to(path: str, name: str) -> str:
    """The path of a file relative to the folder of `path`; other names are unchanged."""
    return os.path.relpath(name, Path(path).parent) if os.path.exists(name) else name
