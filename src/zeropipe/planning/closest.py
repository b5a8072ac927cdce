"""Where nothing fits: the candidate that comes closest, and changes of the task with which a candidate fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeropipe.errors import ConfigError
from zeropipe.estimating.estimate import can_estimate_adapters
from zeropipe.estimating.gpus import GPUS
from zeropipe.planning.candidates import OversizedRun, least_memory, list_candidates, list_variants
from zeropipe.planning.context import PlanContext
from zeropipe.planning.pool import score_group
from zeropipe.planning.rows import PlanRow, Run
from zeropipe.planning.runs import list_task_runs
from zeropipe.planning.task import PlanTask
from zeropipe.sim.layer_costs import LayerCosts

FACTORS = (2, 4, 8, 16, 32)  # of GPUs, and of shorter sequences
MIN_SEQUENCE = 128
LORA_RANK = 16
SCHEDULES = ("1f1b", "v-min")  # those with the least memory, for one and two stages per rank


@dataclass(frozen=True)
class WayOut:
    """Other arguments of `zp.plan`, and a candidate that fits with them."""

    change: Mapping[str, Any]
    row: PlanRow


@dataclass(frozen=True)
class Closest:
    """The candidate that comes closest to fitting, and the changes with which one fits."""

    row: PlanRow
    ways_out: tuple[WayOut, ...]


def find_closest(
    task: PlanTask, context: PlanContext, misfits: Sequence[PlanRow], oversized: Sequence[OversizedRun]
) -> Closest | None:
    """Find what comes closest to fitting; None if no schedule takes any of the sizes."""
    rows = list(misfits[:1]) or _score(task, context, [misfit.run for misfit in oversized])
    if not rows:
        return None
    ways_out = tuple(_find_ways_out(task, _list_changes(task))) or tuple(_find_ways_out(task, [_list_combined(task)]))
    return Closest(min(rows, key=lambda row: row.excess), ways_out)


def _find_ways_out(task: PlanTask, kinds: Iterable[Sequence[Mapping[str, Any]]]) -> Iterator[WayOut]:
    """Of each kind of change the smallest with which a candidate fits."""
    for changes in kinds:
        for change in changes:
            row = _find_fit(replace(task, **change))
            if row is not None:
                yield WayOut(_describe(change, row), row)
                break


def _list_changes(task: PlanTask) -> Iterator[list[dict[str, Any]]]:
    """Changes by kind, the smallest first."""
    for name, value in _restrictions(task).items():
        yield [{name: value}]
    yield [{"gpus": factor * task.gpus} for factor in FACTORS]
    if isinstance(task.model, LayerCosts):
        return
    yield [{"sequence": task.sequence // factor} for factor in FACTORS if task.sequence // factor >= MIN_SEQUENCE]
    if task.dtype == "float32":
        yield [{"dtype": "bf16"}]
    if task.lora is None and can_estimate_adapters(task.model) and task.tp in (None, [1]):
        yield [{"lora": LORA_RANK, "tp": [1]}]
    if task.memory is None:
        memory = GPUS[task.gpu.lower()].memory
        larger = sorted((gpu for gpu in GPUS.values() if gpu.memory > memory), key=lambda gpu: gpu.memory)
        yield [{"gpu": gpu.name} for gpu in larger]


def _restrictions(task: PlanTask) -> dict[str, Any]:
    """The arguments that keep the task from what takes the least memory, with values that do not."""
    found: dict[str, Any] = {}
    if task.ac is not None and "full" not in task.ac:
        found["ac"] = ["full"]
    if task.microbatch_sizes is not None and 1 not in task.microbatch_sizes:
        found["microbatch_sizes"] = [1]
    given = ("pp", "cp", "schedules") if task.lora is not None else ("pp", "tp", "ep", "cp", "schedules")
    return found | {name: None for name in given if getattr(task, name) is not None}


def _list_combined(task: PlanTask) -> list[dict[str, Any]]:
    """More GPUs and shorter sequences at once, without the task's restrictions."""
    found = []
    for factor in FACTORS:
        sequence = task.sequence if isinstance(task.model, LayerCosts) else max(MIN_SEQUENCE, task.sequence // factor)
        change = {"gpus": factor * task.gpus, **({"sequence": sequence} if sequence < task.sequence else {})}
        found.append({**_restrictions(task), **change})
    return found


def _describe(change: Mapping[str, Any], row: PlanRow) -> dict[str, Any]:
    """The change as arguments: an argument that was left out has the value of the row."""
    candidate = row.candidate
    layout = candidate.layout
    values = {"pp": layout.pp, "tp": layout.tp, "ep": layout.ep, "cp": layout.cp, "schedules": candidate.title}
    given = {name: values[name] if value is None else value for name, value in change.items()}
    if "lora" in given:
        del given["tp"]  # the default with lora
    return {name: value[0] if isinstance(value, list) else value for name, value in given.items()}


def _find_fit(task: PlanTask) -> PlanRow | None:
    """A candidate that fits; None if those with the least memory do not, or if the change is impossible."""
    try:
        context, space = task.open()
        runs = list_task_runs(task, context, space)
    except ConfigError:
        return None
    possible = [run for run in runs if least_memory(context, run) <= context.memory_limit]
    return next((row for row in _score(task, context, possible) if row.fits), None)


def _score(task: PlanTask, context: PlanContext, runs: Sequence[Run]) -> list[PlanRow]:
    """The rows of the run with the least memory of each tensor-parallel size, up to the first that fits."""
    rows: list[PlanRow] = []
    variants = list_variants(task.schedules or SCHEDULES, has_overlap_costs=True)
    smallest: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: (least_memory(context, run), run)):
        smallest.setdefault(run.layout.tp, run)
    for candidate in list_candidates(smallest.values(), variants, context.costs.num_layers):
        rows += score_group(context, [candidate])
        if rows and rows[-1].fits:
            break
    return rows
