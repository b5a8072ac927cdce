"""What the Plan page and the search ask for: plans from estimates, a row's timeline, and rounds of a search."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from threading import Lock
from typing import Annotated, Any, Literal

from pydantic import Field

from zeropipe.app.calls import Reply, encoded
from zeropipe.app.errors import Refusal
from zeropipe.app.models import Size, Strict
from zeropipe.app.opened import known_models, opened, require_known
from zeropipe.app.work import costs_of
from zeropipe.core.formats.json import to_json
from zeropipe.core.limits import PAGE, PLAN_TEXT, num_actions
from zeropipe.core.model.configs import CONFIGS_BY_COUNT, CONFIGS_BY_SHAPE
from zeropipe.core.placement import Problem
from zeropipe.errors import ConfigError, short
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import estimate
from zeropipe.estimating.gpus import GPUS, find_gpu
from zeropipe.estimating.model import ShapedModel
from zeropipe.planning.layouts import Layout
from zeropipe.planning.plan import plan
from zeropipe.planning.result import Plan
from zeropipe.planning.rows import Candidate, Row
from zeropipe.planning.score import RESERVE, Scene, optimizer_bandwidth, row_of, schedule_of, simulated
from zeropipe.planning.write import named_schedule, run_text
from zeropipe.schedules.registry import find
from zeropipe.searching.hunt import Progress
from zeropipe.searching.search import search
from zeropipe.sim.compare import stage_costs
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.viz.payload import payload

MOST = 2400  # candidates that the page simulates
SHOWN = 40  # rows of its table
DOTS = 400  # of its chart
LONGEST = 10.0  # seconds of a round of a search
MOST_KEPT, MOST_COSTS = 16, 2000  # plans whose costs are kept, and costs of one of them
OF_ESTIMATES = ("gpu", "sequence", "compile")  # what costs of layers say already
Count = Annotated[int, Field(ge=1)]


class PlanAsk(Strict):
    """A model, GPUs, memory and a batch."""

    model: Annotated[str, Field(min_length=1, max_length=100, examples=["qwen3-8b"])]
    file: Annotated[str, Field(max_length=PLAN_TEXT)] | None = Field(
        None,
        description="The text of a model's config.json, or of a file of layer costs; `model` is then what it is "
        "called. Costs say what `gpu`, `sequence` and `compile` are: leave these out.",
    )
    gpu: Annotated[str, Field(max_length=40)] = "h100"
    gpus: Annotated[int, Field(ge=1, le=1024)] = 16
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = 8
    memory: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="Gigabytes of a GPU; its own by default, or that of the machine of the costs."
    )
    batch: Annotated[int, Field(ge=1, le=4096)] = 128
    sequence: Annotated[int, Field(ge=1, le=2**20)] = 4096
    compile: bool = True


class RowAsk(Strict):
    """One row of a plan, to see its timeline."""

    plan: PlanAsk
    pp: Count
    dp_shard: Count
    tp: Count
    schedule: Annotated[str, Field(max_length=100)]
    stages_per_rank: Count
    microbatches: Count
    microbatch_size: Count
    ac: Annotated[str, Field(max_length=40)]
    cut: Literal["even", "balanced"] = "balanced"
    layers: Annotated[list[int], Field(min_length=1, max_length=4096)]


class SearchAsk(Size):
    """One round of a search for the schedule of a size."""

    seconds: Annotated[float, Field(gt=0, le=LONGEST, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0


def known_call() -> Reply:
    models = known_models()
    counted = [name for name in models if name in CONFIGS_BY_COUNT]
    gpus = {name: gpu.memory / 1e9 for name, gpu in GPUS.items()}
    return Reply(encoded({"models": models, "counted": counted, "gpus": gpus, "max_file": PLAN_TEXT}))


class Kept:
    """Costs of the newest plans that took long to find, so that a row of them is shown at once."""

    def __init__(self) -> None:
        self._costs: OrderedDict[str, LayerCosts] = OrderedDict()
        self._lock = Lock()

    def get(self, ask: PlanAsk) -> LayerCosts | None:
        with self._lock:
            return self._costs.get(ask.model_dump_json())

    def keep(self, ask: PlanAsk, costs: LayerCosts) -> None:
        with self._lock:
            self._costs[ask.model_dump_json()] = costs
            while len(self._costs) > MOST_KEPT:
                self._costs.popitem(last=False)


def require_model(ask: PlanAsk) -> None:
    """A Refusal for a name that cannot be planned here."""
    if ask.file is None:
        require_known(_name(ask))


def is_quick(ask: PlanAsk) -> bool:
    """Whether the costs of its model are written down, and need not be kept."""
    return ask.file is None and _name(ask) in CONFIGS_BY_SHAPE


def plan_call(ask: PlanAsk, most: int, dots: int) -> tuple[Reply, LayerCosts | None]:
    """The ranking, and costs that are worth keeping."""
    try:
        source = _source(ask)
        made = plan(
            source, gpus=ask.gpus, gpus_per_node=ask.gpus_per_node, batch=ask.batch, sequence=ask.sequence,
            gpu=ask.gpu, memory=_memory(ask, source), compile=ask.compile, search_seconds=0, most=most, workers=2,
        )  # fmt: skip
        parameters = source.num_parameters if isinstance(source, LayerCosts) else source.num_parameters()[0]
    except ConfigError as error:
        raise _refusal(error, ask) from None
    costs = made.scene.costs
    is_small = sum(len(setting.kinds) for setting in costs.settings) <= MOST_COSTS
    reply = Reply(encoded({**_answer(made, dots), "parameters": parameters}))
    return reply, None if is_quick(ask) or not is_small else costs


def _name(ask: PlanAsk) -> str:
    return ask.model if ask.file is not None else ask.model.lower()


def _source(ask: PlanAsk) -> ShapedModel | CountedModel | LayerCosts:
    """What to plan. What costs say already must not be said otherwise."""
    source = opened(_name(ask), ask.file)
    for name in OF_ESTIMATES if isinstance(source, LayerCosts) else ():
        value = getattr(ask, name)
        if name in ask.model_fields_set and value != getattr(source, name, None):
            raise Refusal((name, f"{name}={short(value)}: the costs in {ask.model} say that already; leave it out"))
    return source


def _memory(ask: PlanAsk, source: object) -> float:
    """Bytes of a GPU."""
    if ask.memory is not None:
        return ask.memory * 1e9
    if not isinstance(source, LayerCosts):
        return find_gpu(ask.gpu).memory
    own = source.machine.get("memory")
    if own is None:
        say = f"memory is missing: {ask.model} does not say how much a GPU has; give gigabytes, like 80"
        raise Refusal(("memory", say))
    return float(own)


def _refusal(error: ConfigError, ask: PlanAsk) -> Refusal:
    """By the field that the error begins with; of an own file, most are about that."""
    match = re.match(r"(\w+)=", str(error))
    named = match is not None and match[1] in PlanAsk.model_fields
    return Refusal((match[1] if match and named else "" if ask.file is None else "file", str(error)))


def _answer(made: Plan, dots: int) -> dict[str, Any]:
    front = {id(row) for row in made.front}
    shown = [row for at, row in enumerate(made.rows) if at < SHOWN or id(row) in front]
    return {
        "rows": [_row(made, row, id(row) in front) for row in shown],
        "dots": [[row.memory.peak, row.step] for row in made.rows[:dots]],
        "misfits": [{"text": str(row.candidate), "over": row.over} for row in made.misfits[:3]],
        "closest": "" if made.rows else made.closest(),
        "source": made.scene.costs.source,
        "limit": made.scene.limit,
        "num_tried": made.num_tried,
        "num_left_out": made.num_left_out,
        "num_fitting": len(made.rows),
    }


def _row(made: Plan, row: Row, front: bool) -> dict[str, Any]:
    one = row.candidate
    return {
        "pp": one.layout.pp, "dp_shard": one.layout.dp_shard, "tp": one.layout.tp, "schedule": one.schedule,
        "stages_per_rank": one.stages_per_rank, "microbatches": one.num_microbatches,
        "microbatch_size": one.microbatch_size, "ac": one.ac, "cut": one.cut, "layers": list(row.counts),
        "step": row.step, "makespan": row.makespan, "speed": made.speed(row), "mfu": made.mfu(row),
        "bubble": row.bubble,
        "peak": row.memory.peak, "memory": vars(row.memory), "parts": vars(row.parts), "gap": row.gap, "front": front,
        "why": "" if row is made.rows[0] else made.why(row),
    }  # fmt: skip


def row_actions(ask: RowAsk) -> int:
    """How many actions the row's schedule has; a Refusal for more than the page takes."""
    try:
        entry = find(ask.schedule)
        count = num_actions(entry.splits_backward, ask.pp, ask.microbatches, ask.stages_per_rank)
        PAGE.require_ranks(ask.pp)
        PAGE.require_actions(count, entry.name)
    except ConfigError as error:
        raise Refusal(("schedule", str(error))) from None
    return count


def row_call(ask: RowAsk, costs: LayerCosts | None) -> Reply:
    """The viewer's data of a row's pipeline, and its training file. `costs` are those of its plan, if kept."""
    given = ask.plan
    try:
        source = _source(given)
        if isinstance(source, LayerCosts):
            costs, names = source, (source.model, given.model)
        else:
            costs = costs or estimate(
                source, gpu=given.gpu, sequence=given.sequence, compile=given.compile, tp=ask.tp,
                microbatch_size=ask.microbatch_size, ac=ask.ac,
            )  # fmt: skip
            names = (_name(given), find_gpu(given.gpu).name)
        room = max(0.0, _memory(given, source) - RESERVE)
        scene = Scene(costs, given.gpus_per_node, room, optimizer_bandwidth(costs))
        candidate = Candidate(
            Layout(ask.pp, ask.dp_shard, ask.tp), ask.schedule, ask.stages_per_rank, ask.microbatches,
            ask.microbatch_size, ask.ac, ask.cut,
        )  # fmt: skip
        schedule = schedule_of(candidate)
        run = simulated(scene, candidate, schedule, ask.layers)
        row = row_of(scene, candidate, schedule, ask.layers, run)
    except ConfigError as error:
        raise _refusal(error, given) from None
    alone = Plan((row,), (), (), scene, given.gpus, given.batch, 1, 0, 0.0)
    return Reply(encoded({
        "viewer": payload([run.timeline.labelled(schedule.name)]),
        "run": run_text(alone, row, named_schedule(row), *names),
    }))  # fmt: skip


def search_call(ask: SearchAsk) -> Reply:
    """One round: what was found, and how the gap shrank on the way."""
    per_rank = ask.stages_per_rank or 1
    problem = Problem(ask.ranks, ask.ranks * per_rank, ask.microbatches)
    seen: list[tuple[float, float]] = []

    def note(progress: Progress) -> None:
        if progress.bound > 0 and (not seen or progress.gap < seen[-1][1]):
            seen.append((progress.seconds, progress.gap))

    try:
        PAGE.require_actions(num_actions(True, ask.ranks, ask.microbatches, per_rank, ask.weight_parts or 1), "it")
        costs = stage_costs(costs_of(ask.costs), problem, ask.per)
        found = search(
            ranks=ask.ranks, microbatches=ask.microbatches, stages_per_rank=per_rank, costs=costs,
            weight_parts=ask.weight_parts or 1, seconds=ask.seconds, seed=ask.seed, progress=note, workers=2,
        )  # fmt: skip
    except ConfigError as error:
        raise Refusal(("", str(error))) from None
    timeline = found.timeline
    return Reply(encoded({
        "value": found.value, "bound": found.bound, "seconds": found.seconds, "seen": seen,
        "named": found.named and found.named.schedule.name, "named_value": found.named and found.named.makespan,
        "unit": timeline.unit, "memory_unit": timeline.memory_unit, "peak_memory": max(timeline.peak_memory),
        "bubble": timeline.bubble, "schedule": to_json(replace(timeline.schedule, name="searched")),
    }))  # fmt: skip
