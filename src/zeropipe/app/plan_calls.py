"""The functions of the Plan page, and of the search on the Compare page."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from threading import Lock
from typing import Annotated, Literal

from pydantic import Field

from zeropipe.app.calls import Reply, encode_json
from zeropipe.app.comparison import create_costs
from zeropipe.app.errors import Refusal
from zeropipe.app.models import SizeRequest, StrictModel
from zeropipe.app.plan_source import PlanSource, known_models, open_source, require_known
from zeropipe.core.formats.json import to_json
from zeropipe.core.limits import MAX_PLAN_CHARACTERS, PAGE, num_actions
from zeropipe.core.model.configs import CONFIGS_BY_COUNT
from zeropipe.core.placement import Problem
from zeropipe.errors import ConfigError, short
from zeropipe.estimating.estimate import estimate
from zeropipe.estimating.gpus import GPUS, find_gpu
from zeropipe.planning.context import RESERVE, PlanContext
from zeropipe.planning.data import plan_data
from zeropipe.planning.layouts import Layout
from zeropipe.planning.plan import plan
from zeropipe.planning.result import Plan
from zeropipe.planning.rows import Candidate
from zeropipe.planning.score import create_row, simulate_candidate
from zeropipe.planning.write import format_run, schedule_table
from zeropipe.schedules.registry import find
from zeropipe.searching.driver import Progress
from zeropipe.searching.search import search
from zeropipe.sim.layer_costs import DTYPE_NAMES, LayerCosts
from zeropipe.viz.payload import payload

MAX_CANDIDATES = 2400  # that a plan simulates
MAX_ROWS = 40  # of the table, beside the rows on the front
MAX_DOTS = 400  # of the chart
MAX_MISFITS = 3
MAX_ROUND_S = 10.0  # of a search
MAX_CACHED_PLANS, MAX_CACHED_COSTS = 16, 2000  # plans whose costs are cached, and costs of one of them
# fields that a file of layer costs has itself, under these names
ESTIMATE_FIELDS = {"gpu": "gpu", "sequence": "sequence", "compile": "compile", "dtype": "dtype", "lora": "lora_rank"}
PositiveInt = Annotated[int, Field(ge=1)]


class PlanRequest(StrictModel):
    """A model, GPUs, memory and a batch."""

    model: Annotated[str, Field(min_length=1, max_length=100, examples=["qwen3-8b"])]
    file: Annotated[str, Field(max_length=MAX_PLAN_CHARACTERS)] | None = Field(
        None,
        description="The text of a model's config.json or of a file of layer costs; `model` is then its name. Layer "
        "costs have their own `gpu`, `sequence` and `compile`: leave these out.",
    )
    gpu: Annotated[str, Field(max_length=40)] = "h100"
    gpus: Annotated[int, Field(ge=1, le=1024)] = 16
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = 8
    memory: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = Field(
        None, description="Gigabytes of a GPU; by default those of `gpu`, or of the machine of the layer costs."
    )
    batch: Annotated[int, Field(ge=1, le=4096)] = 128
    sequence: Annotated[int, Field(ge=1, le=2**20)] = 4096
    compile: bool = True
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    reserve: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = Field(
        RESERVE / 1e9, description="Gigabytes of a GPU that CUDA, NCCL and fragmentation take."
    )
    lora: PositiveInt | None = Field(None, description="Rank of LoRA adapters; by default all weights are trained.")
    pp: PositiveInt | None = Field(None, description="Pipeline ranks; by default all sizes are tried.")
    tp: PositiveInt | None = Field(None, description="Tensor-parallel size; by default all sizes are tried.")
    ac: Annotated[str, Field(max_length=40)] | None = Field(
        None, description="Mode of activation checkpointing; by default several are tried."
    )

    @property
    def model_name(self) -> str:
        return self.model if self.file is not None else self.model.lower()


class RowRequest(StrictModel):
    """One row of a plan, to show its timeline."""

    plan: PlanRequest
    pp: PositiveInt
    dp_shard: PositiveInt
    tp: PositiveInt
    ep: PositiveInt = 1
    cp: PositiveInt = 1
    shard_cp: bool = False
    sequence_parallel: bool = False
    schedule: Annotated[str, Field(max_length=100)]
    stages_per_rank: PositiveInt
    microbatches: PositiveInt
    microbatch_size: PositiveInt
    ac: Annotated[str, Field(max_length=40)]
    cut: Literal["even", "balanced"] = "balanced"
    shards: Literal["keep", "regather"] = "keep"
    gradients: str = "whole"
    slices: PositiveInt = 1
    offload: bool = False
    checkpointing: bool = False
    layers: Annotated[list[int], Field(min_length=1, max_length=4096)]


class SearchRequest(SizeRequest):
    """One round of a search for the best schedule of a size."""

    seconds: Annotated[float, Field(gt=0, le=MAX_ROUND_S, allow_inf_nan=False)] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0


class CostsCache:
    """Costs of the newest plans that took long to compute, so that their rows are shown at once."""

    def __init__(self) -> None:
        self._costs: OrderedDict[str, LayerCosts] = OrderedDict()
        self._lock = Lock()

    def get(self, request: PlanRequest) -> LayerCosts | None:
        with self._lock:
            return self._costs.get(request.model_dump_json())

    def add(self, request: PlanRequest, costs: LayerCosts) -> None:
        with self._lock:
            self._costs[request.model_dump_json()] = costs
            while len(self._costs) > MAX_CACHED_PLANS:
                self._costs.popitem(last=False)


def known_call() -> Reply:
    models = known_models()
    counted = [name for name in models if name in CONFIGS_BY_COUNT]
    gpus = {name: gpu.memory / 1e9 for name, gpu in GPUS.items()}
    return Reply(encode_json({"models": models, "counted": counted, "gpus": gpus, "max_file": MAX_PLAN_CHARACTERS}))


def require_model(request: PlanRequest) -> None:
    """Raise Refusal for a name that cannot be planned here."""
    if request.file is None:
        require_known(request.model_name)


def has_quick_costs(request: PlanRequest) -> bool:
    """Whether the model's shapes are built in, so that its costs need no cache."""
    return request.file is None and request.model_name not in CONFIGS_BY_COUNT


def plan_call(request: PlanRequest, max_candidates: int, max_dots: int) -> tuple[Reply, LayerCosts | None]:
    """Return the ranking, and costs that are worth caching."""
    try:
        source = _open(request)
        result = plan(
            source, gpus=request.gpus, gpus_per_node=request.gpus_per_node, batch=request.batch,
            sequence=request.sequence, gpu=request.gpu, memory=_given_memory(request, source), compile=request.compile,
            dtype=request.dtype, reserve=request.reserve * 1e9, lora=request.lora, pp=request.pp, tp=request.tp,
            ac=request.ac, search_seconds=0, max_candidates=max_candidates, workers=2,
        )  # fmt: skip
        num_parameters = source.num_parameters if isinstance(source, LayerCosts) else source.num_parameters()[0]
    except ConfigError as error:
        raise _refusal(error, request) from None
    costs = result.context.costs
    is_small = sum(len(setting.kinds) for setting in costs.settings) <= MAX_CACHED_COSTS
    reply = Reply(encode_json({
        **plan_data(result, MAX_ROWS, MAX_MISFITS),
        "dots": [[row.memory.peak, row.step] for row in result.rows[:max_dots]],
        "problem": "" if result.rows else result.describe_closest(),
        "num_fitting": len(result.rows),
        "parameters": num_parameters,
    }))  # fmt: skip
    return reply, None if has_quick_costs(request) or not is_small else costs


def _open(request: PlanRequest) -> PlanSource:
    """Open what to plan; Refusal for a field that contradicts layer costs."""
    source = open_source(request.model_name, request.file)
    for name, own in ESTIMATE_FIELDS.items() if isinstance(source, LayerCosts) else ():
        value = getattr(request, name)
        if name in request.model_fields_set and DTYPE_NAMES.get(value, value) != getattr(source, own, None):
            raise Refusal((name, f"{name}={short(value)}: set by the costs in {request.model}; leave it out"))
    return source


def _given_memory(request: PlanRequest, source: PlanSource) -> float | None:
    """Bytes of a GPU; None if they are those of the GPU to estimate for."""
    is_default = request.memory is None and not isinstance(source, LayerCosts)
    return None if is_default else _memory(request, source)


def _memory(request: PlanRequest, source: PlanSource) -> float:
    """Bytes of a GPU."""
    if request.memory is not None:
        return request.memory * 1e9
    if not isinstance(source, LayerCosts):
        return find_gpu(request.gpu).memory
    memory = source.machine.get("memory")
    if memory is None:
        message = f"memory is missing: {request.model} does not have the memory of a GPU; use gigabytes, like 80"
        raise Refusal(("memory", message))
    return float(memory)


def _refusal(error: ConfigError, request: PlanRequest) -> Refusal:
    """By the field that the message begins with; most others are about the user's file, if there is one."""
    match = re.match(r"(\w+)=", str(error))
    default = "" if request.file is None else "file"
    return Refusal((match[1] if match and match[1] in PlanRequest.model_fields else default, str(error)))


def count_row_actions(request: RowRequest) -> int:
    """Count the actions of the row's schedule; Refusal for more than the page takes."""
    try:
        entry = find(request.schedule)
        slices = request.microbatches * request.slices
        count = num_actions(entry.splits_backward, request.pp, slices, request.stages_per_rank)
        if request.offload:  # an OFFLOAD and a RELOAD of each F
            count += num_actions(False, request.pp, slices, request.stages_per_rank)
        PAGE.require_ranks(request.pp)
        PAGE.require_actions(count, entry.name)
    except ConfigError as error:
        raise Refusal(("schedule", str(error))) from None
    return count


def row_call(request: RowRequest, costs: LayerCosts | None) -> Reply:
    """Return the viewer's data of a row's pipeline, and its training file. `costs` are the plan's, if cached.

    A schedule that has no name, with copies to the host, is a file beside it.
    """
    planned = request.plan
    try:
        source = _open(planned)
        if isinstance(source, LayerCosts):
            costs, names = source, (source.model, planned.model)
        else:
            costs = costs or estimate(
                source, gpu=planned.gpu, sequence=planned.sequence, compile=planned.compile, tp=request.tp,
                sequence_parallel=request.sequence_parallel, microbatch_size=request.microbatch_size,
                ac=[request.ac, "full"] if request.checkpointing else request.ac,
                dtype=planned.dtype, lora=planned.lora, ep=request.ep, cp=request.cp,
                gpus_per_node=planned.gpus_per_node,
            )  # fmt: skip
            names = (planned.model_name, find_gpu(planned.gpu).name)
        limit = max(0.0, _memory(planned, source) - planned.reserve * 1e9)
        context = PlanContext.create(costs, planned.gpus_per_node, limit)
        candidate = Candidate(
            Layout(
                request.pp, request.dp_shard, request.tp, sequence_parallel=request.sequence_parallel, ep=request.ep,
                cp=request.cp, shard_cp=request.shard_cp,
            ),
            request.schedule, request.stages_per_rank, request.microbatches, request.microbatch_size, request.ac,
            request.cut, request.shards, request.gradients, slices=request.slices,
            offload=request.offload, checkpointing=request.checkpointing,
        )  # fmt: skip
        schedule = candidate.build_schedule()
        run = simulate_candidate(context, candidate, schedule, request.layers)
        row = create_row(context, run)
    except ConfigError as error:
        raise _refusal(error, planned) from None
    single = Plan((row,), (), (), context, planned.gpus, planned.batch, 1, 0, 0.0)
    return Reply(encode_json({
        "viewer": payload([run.timeline.with_label(schedule.name)]),
        "run": format_run(single, row, schedule_table(row), *names),
        "schedule": None if row.own_schedule is None else to_json(row.own_schedule),
    }))  # fmt: skip


def search_call(request: SearchRequest) -> Reply:
    """Run one round of the search; returns the schedule found, and how the gap shrank."""
    per_rank, weight_parts = request.stages_per_rank or 1, request.weight_parts or 1
    problem = Problem(request.ranks, request.ranks * per_rank, request.microbatches)
    gaps: list[tuple[float, float]] = []  # seconds, gap

    def record(progress: Progress) -> None:
        if progress.bound > 0 and (not gaps or progress.gap < gaps[-1][1]):
            gaps.append((progress.seconds, progress.gap))

    try:
        PAGE.require_actions(num_actions(True, request.ranks, request.microbatches, per_rank, weight_parts), "it")
        costs = create_costs(request.costs).stage_costs(problem, per=request.per)
        found = search(
            ranks=request.ranks, microbatches=request.microbatches, stages_per_rank=per_rank, costs=costs,
            weight_parts=weight_parts, seconds=request.seconds, seed=request.seed, progress=record, workers=2,
        )  # fmt: skip
    except ConfigError as error:
        raise Refusal(("", str(error))) from None
    timeline, registered = found.timeline, found.registered
    return Reply(encode_json({
        "value": found.value, "bound": found.bound, "seconds": found.seconds, "seen": gaps,
        "named": registered and registered.schedule.name, "named_value": registered and registered.makespan,
        "unit": timeline.unit, "memory_unit": timeline.memory_unit, "peak_memory": max(timeline.peak_memory),
        "idle_fraction": timeline.idle_fraction, "searched": found.searched,
        "schedule": to_json(replace(timeline.schedule, name="searched")),
    }))  # fmt: skip
