"""What a plan does not try although it may matter for the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zeropipe.core.model.cp_exchange import GATHER
from zeropipe.estimating.estimate import can_estimate_adapters
from zeropipe.planning.context import PlanContext
from zeropipe.planning.rows import Run
from zeropipe.planning.task import LONG_SEQUENCE, PlanTask
from zeropipe.sim.layer_costs import LayerCosts

READ_ON = "docs/plan.md#not-tried"


class Untried(NamedTuple):
    """Something that a plan does not try."""

    name: str
    how: str  # to have it, or why not


def list_untried(task: PlanTask, context: PlanContext, runs: Sequence[Run], searches: bool) -> tuple[Untried, ...]:
    """What was not tried with these runs; `searches`: whether schedules were searched."""
    costs = context.costs
    return tuple(
        Untried(*item)
        for items in (
            _list_parallelism(context, runs),
            _list_training(task),
            _list_schedules(task, costs, runs, searches),
        )
        for item in items
    )


def _list_parallelism(context: PlanContext, runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    costs = context.costs
    if any("experts" in kind for kind in costs.layers) and not any(run.layout.ep > 1 for run in runs):
        yield "expert parallelism", "mesh.ep in the training file: docs/experts.md"
    if costs.sequence >= LONG_SEQUENCE and not any(run.layout.cp > 1 for run in runs):
        yield "context parallelism", "mesh.cp in the training file: docs/long-sequences.md"
    exchanges = {context.setting(run).exchange for run in runs if run.layout.cp > 1}
    if GATHER in exchanges and costs.settings[0].compile:
        yield "a ring of keys", "without compile, for long sequences: docs/long-sequences.md"
    if any(run.layout.num_shards > 1 for run in runs):
        yield "replicas", "mesh.dp_replicate in the training file; plans shard weights over data-parallel GPUs"
        if "regather" not in context.shard_modes:
            yield "regather", 'engine.shards = "regather" in the training file: less memory, more gathers'
        yield "offload", "engine.offload = true in the training file: optimizer state in CPU memory"
    if costs.sequence >= LONG_SEQUENCE and not costs.can_slice:
        yield "slices", "costs of slices are estimated for dense text models without compile: docs/long-sequences.md"


def _list_training(task: PlanTask) -> Iterator[tuple[str, str]]:
    if task.lora is not None:
        yield "tensor parallelism", "costs of adapters are not known with tp"
    elif isinstance(task.model, LayerCosts):
        yield "LoRA", "these costs are for training all weights; `zeropipe estimate --lora RANK` gives others"
    elif can_estimate_adapters(task.model):
        yield "LoRA", "--lora RANK"
    else:
        yield "LoRA", "`zeropipe train` trains adapters of this model; their costs cannot be estimated"
    if task.dtype != "float32":
        yield "fp8", "zeropipe trains in bfloat16, float32 or float64"


def _list_schedules(
    task: PlanTask, costs: LayerCosts, runs: Sequence[Run], searches: bool
) -> Iterator[tuple[str, str]]:
    if task.ac is None and not isinstance(task.model, LayerCosts):
        yield "ac selective:N and memory_budget:X", "--ac MODE,.."
    if task.schedules is None:
        if not costs.has_overlaps and not any(run.layout.ep > 1 for run in runs):
            yield "schedules with Overlaps", "DualPipe and others need costs of `zeropipe profile`"
        if not searches:
            yield "searched schedules", "--search-seconds"
