"""`zeropipe train --dry-run`: describe the run of a training file without starting it.

Times and memory are those that the planner (planning/score.py) gives the one layout and schedule of the file. Only
counting a model whose shapes are not tabulated needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import inf

from zeropipe.core.model.configs import find_built_in
from zeropipe.core.model.layers import layer_ranges
from zeropipe.core.resize import resize
from zeropipe.core.schedule import Schedule
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, MissingExtra
from zeropipe.estimating.adapters import count_adapters
from zeropipe.estimating.estimate import can_estimate_adapters, estimate
from zeropipe.estimating.operators import Sizes
from zeropipe.planning.context import PlanContext
from zeropipe.planning.score import Simulation, attribute_memory, compute_mfu, create_row, simulate_candidate
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.train.compiling import explain_uncompiled, is_estimated_compiled, predicted_device
from zeropipe.train.config.file_rules import has_weights
from zeropipe.train.config.tables import LoraTable, RunConfig
from zeropipe.train.inputs import (
    choose_layers,
    count_layers,
    estimated_rank,
    has_dense_mask,
    load_layer_costs,
    open_shapes,
)  # fmt: skip
from zeropipe.train.schedule import build_run_schedule
from zeropipe.train.stage_costs import (
    explain_exchanges,
    explain_mismatch,
    make_candidate,
    master_bytes,
    memory_limit,
    state_bytes,
)

NO_COSTS = (
    "no prediction of step time, idle time and activations without costs; use --schedule.costs h100, or another "
    "GPU, or a file of `zeropipe profile`"
)


@dataclass(frozen=True)
class RankPreview:
    """The stages of a pipeline rank, and the memory that each of its processes needs."""

    rank: int
    stages: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]  # of each stage: the first layer, and one past the last
    parameters: int | None  # None if the model's shapes are not known
    memory: dict[str, float]  # purpose -> bytes at the peak, as far as they are known

    @property
    def peak(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step."""

    source: str
    step: float  # seconds
    idle_fraction: float
    tokens_per_second: float
    mfu: float | None
    parts: dict[str, float]  # seconds, which add up to the step
    memory_limit: float | None  # bytes of a GPU


@dataclass(frozen=True)
class Preview:
    """The run of a training file."""

    model: str
    num_layers: int
    num_parameters: int | None
    dtype: str
    mesh: dict[str, int]
    num_processes: int
    num_pipelines: int
    schedule: str
    placement: str
    num_stages: int
    layers_per_stage: tuple[int, ...]
    num_microbatches: int  # of each pipeline
    microbatch: int  # sequences
    sequence: int
    tokens: int  # of a step, at most
    ranks: tuple[RankPreview, ...]
    prediction: Prediction | None
    notes: tuple[str, ...]


def preview(config: RunConfig) -> Preview:
    """Describe the run of a checked training file."""
    loaded = build_run_schedule(config)
    counts = choose_layers(config, loaded)
    schedule = resize(loaded, config.num_microbatches)
    notes: list[str] = []
    if schedule is not loaded:
        notes.append(
            f"{config.schedule.name} has {count_text(loaded.num_microbatches, 'microbatch')}, a step has "
            f"{schedule.num_microbatches}: the schedule is resized, so another batch may be faster"
        )
    costs, has_times = _choose_costs(config, schedule, notes)
    ranks, prediction = _predict(config, schedule, counts, costs, has_times)
    if prediction and prediction.memory_limit is not None:
        fullest = max(ranks, key=lambda rank: rank.peak)
        if fullest.peak > prediction.memory_limit:
            notes.append(
                f"rank {fullest.rank} needs {fullest.peak / 1e9:.1f} GB, but only {prediction.memory_limit / 1e9:.1f} "
                "GB of a GPU are usable; use more pp, dp_shard or tp, engine.ac, or a smaller data.microbatch"
            )
    path = config.model.path
    if config.model.weights == "load" and (find_built_in(path) is not None or not has_weights(path)):
        notes.append(f"{path} has no weights; to train, set --model.path to their directory, or model.weights='random'")
    if config.engine.offload:
        notes.append("optimizer state and master weights are in CPU memory (engine.offload)")
    if reason := explain_uncompiled(config, predicted_device(config, costs)):
        notes.append(reason)
    notes += _preview_data(config)
    data, mesh = config.data, config.mesh
    return Preview(
        path, count_layers(config), _count_parameters(config), config.model.dtype, mesh.sizes,
        mesh.num_processes, mesh.num_pipelines, schedule.name, schedule.placement.name, schedule.num_stages, counts,
        schedule.num_microbatches, data.microbatch, data.sequence, data.batch * data.sequence, ranks, prediction,
        tuple(notes),
    )  # fmt: skip


def _preview_data(config: RunConfig) -> list[str]:
    """The first chat of the data with the tokens that have a loss; without transformers, how to have it."""
    if config.data.kind not in ("chat", "datasets"):
        return []
    if find_spec("transformers") is None or find_spec("torch") is None:
        return [f"data: the first chat is not shown: {MissingExtra('transformers', 'train')}"]
    from zeropipe.train.data.chat_preview import preview_chats

    return list(preview_chats(config))


def _choose_costs(config: RunConfig, schedule: Schedule, notes: list[str]) -> tuple[LayerCosts | None, bool]:
    """Costs of layers, and whether their times apply to this run. If not, they only give the model's shapes."""
    if reason := explain_exchanges(config):  # nor is the memory known: that of experts is divided by ep too
        notes.append(reason)
        return None, False
    costs = load_layer_costs(config)
    reason = NO_COSTS if costs is None else explain_mismatch(config, costs, schedule)
    if costs is not None and not reason:
        return replace(costs, state=state_bytes(config)), True
    notes.append(reason)
    try:
        shapes = estimate(
            open_shapes(config), sequence=config.data.sequence, ac=config.engine.ac, tp=config.mesh.tp,
            microbatch_size=config.data.microbatch, compile=is_estimated_compiled(config),
            sequence_parallel=config.mesh.sequence_parallel, lora=estimated_rank(config), ep=config.mesh.ep,
            dispatch=config.mesh.dispatch, dense_mask=has_dense_mask(config), cp=config.mesh.cp,
            fused_head=config.engine.fused_head, cp_exchange=config.mesh.cp_exchange,
            gpus_per_node=config.schedule.gpus_per_node,
        )  # fmt: skip
    except ConfigError as error:
        notes.append(f"parameters are not known: {error}")
        return None, False
    if config.lora is not None and shapes.lora_rank is None:
        shapes = _add_adapters(config, shapes, config.lora)
    return replace(shapes, state=state_bytes(config)), False


def _add_adapters(config: RunConfig, costs: LayerCosts, table: LoraTable) -> LayerCosts:
    """The costs of a frozen model with the parameters of its adapters, without any where these are not known: few."""
    model, names = open_shapes(config), table.target_modules
    numbers: dict[str, int] = {}
    if table.adapter is None and can_estimate_adapters(model) and (names == "all-linear" or not isinstance(names, str)):
        kinds = model.layer_operators(Sizes(1, 1, 1, config.mesh.tp))
        targets = None if isinstance(names, str) else names
        numbers = {kind: count_adapters(kinds[kind], table.rank, targets) for kind in model.layers}
    settings = [
        replace(setting, kinds={
            name: replace(kind, parameters=kind.parameters + numbers.get(name, 0), trained=numbers.get(name, 0))
            for name, kind in setting.kinds.items()
        }) for setting in costs.settings
    ]  # fmt: skip
    return replace(costs, settings=tuple(settings))


def _predict(
    config: RunConfig, schedule: Schedule, counts: tuple[int, ...], costs: LayerCosts | None, has_times: bool
) -> tuple[tuple[RankPreview, ...], Prediction | None]:
    """Every rank's stages and memory, and the time of a step if the costs have times."""
    layers = [(span.start, span.stop) for span in layer_ranges(counts)]
    stages = [schedule.placement.stages_of(rank) for rank in range(schedule.num_ranks)]
    spans = [tuple(layers[stage] for stage in own) for own in stages]
    if costs is None:
        return tuple(RankPreview(rank, *own, None, {}) for rank, own in enumerate(zip(stages, spans))), None
    limit = memory_limit(costs) if has_times else None
    context = PlanContext.create(costs, config.schedule.gpus_per_node, inf if limit is None else limit)
    checkpointing = has_times and bool(schedule.checkpointed)
    candidate = make_candidate(config, schedule.problem, schedule.name, checkpointing)
    run = simulate_candidate(context, candidate, schedule, counts)
    ranks = tuple(
        RankPreview(rank, *own, run.parameters[rank], _memory(config, context, run, rank, has_times))
        for rank, own in enumerate(zip(stages, spans))
    )
    if not has_times:
        return ranks, None
    row = create_row(context, run)
    gpu = costs.machine.get("gpu", "this machine")
    source = f"an estimate for {gpu}" if costs.source == "estimate" else f"from {config.schedule.costs}"
    speed = config.data.batch * config.data.sequence / row.step
    return ranks, Prediction(
        source, row.step, row.idle_fraction, speed, compute_mfu(context, row), vars(row.seconds), limit
    )


def _memory(config: RunConfig, context: PlanContext, run: Simulation, rank: int, has_times: bool) -> dict[str, float]:
    """Bytes of a rank by purpose; without costs that are for this run, not those of activations."""
    state, shards, held = context.costs.state_of(config.mesh.tp), run.shards, run.held(rank)
    masters = held.count_stepped(shards) * master_bytes(config)
    if shards.rest > shards.experts == 1:  # of divided experts, only the bits that their weights do not have
        masters -= held.experts * state.saved_unsharded
    memory = attribute_memory(context, run, rank, has_activations=has_times)
    found = {
        "weights": memory.weights, "gradients": memory.gradients, "masters": masters,
        "optimizer": memory.optimizer - masters, "activations": memory.activations, "workspace": memory.workspace,
    }  # fmt: skip
    if not has_times:
        del found["activations"], found["workspace"]
    if config.engine.offload:  # shards are in CPU memory
        found["weights"] -= held.count_stepped(shards) * state.shard
        found["weights"] -= held.frozen * state.frozen / shards.rest
        found["gradients"] -= state.sum_bytes(held, shards)
        found |= {"masters": 0.0, "optimizer": 0.0}
    return found


def _count_parameters(config: RunConfig) -> int | None:
    try:
        return open_shapes(config).num_parameters()[0]
    except ConfigError:
        return None
