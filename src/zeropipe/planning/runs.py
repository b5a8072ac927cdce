"""The runs of a task: every layout, number and size of microbatches and mode that divide its GPUs and batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zeropipe.errors import ConfigError
from zeropipe.planning.candidates import drop_dominated, list_runs
from zeropipe.planning.context import PlanContext
from zeropipe.planning.layouts import Layout, list_layouts, with_experts
from zeropipe.planning.rows import Run
from zeropipe.planning.task import PlanTask, SearchSpace


def list_task_runs(task: PlanTask, context: PlanContext, space: SearchSpace) -> list[Run]:
    """Every run in the search space; ConfigError if there is none."""
    num_layers = context.costs.num_layers
    every = list_layouts(task.gpus, context.gpus_per_node, space.tp, num_layers, space.cp)
    layouts = [layout for layout in every if task.pp is None or layout.pp in task.pp]
    if not layouts:
        possible = _join(sorted({layout.pp for layout in every}))
        raise ConfigError(
            f"pp={_join(task.pp or ())}: no layout of {task.gpus} GPUs and {num_layers} layers has that many pipeline "
            f"ranks; use one of {possible}"
        )
    divided = with_experts(layouts, space.ep, context.gpus_per_node)
    layouts += [replace(layout, sequence_parallel=True) for layout in layouts if layout.tp > 1]
    layouts = [*(layouts if 1 in space.ep else []), *divided]
    if not layouts:
        raise ConfigError(
            f"ep={_join(space.ep)}: no layout divides experts over that many GPUs: ep is tried inside a machine of "
            f"{context.gpus_per_node} and over all of dp_shard, with tp=1"
        )
    runs = list_runs(context, task.batch, layouts, space.microbatch_sizes, space.ac)
    runs = drop_dominated(runs, context)
    if not runs:
        raise _explain_no_runs(task.batch, task.gpus, layouts, space.microbatch_sizes)
    return runs


def _explain_no_runs(batch: int, gpus: int, layouts: Sequence[Layout], sizes: Sequence[int]) -> ConfigError:
    if any(batch % (layout.dp_shard * size) == 0 for layout in layouts for size in sizes):
        return ConfigError(
            f"batch={batch}: too many microbatches of {_join(sizes)} to simulate; use a smaller batch or larger "
            "microbatches"
        )
    return ConfigError(
        f"batch={batch}: cannot be divided over {gpus} GPUs in microbatches of {_join(sizes)}; use a multiple of them, "
        "or other microbatch_sizes"
    )


def _join(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
