"""`zeropipe train --dry-run`: what a training file comes to, before anything runs. Only counting a model needs torch.

Times and memory are those of the planner's own scoring (planning/score.py), for the one candidate that the file is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from zeropipe.core.built_in import BUILT_IN
from zeropipe.core.layers import check_counts, layer_counts, ranges
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.resize import resized
from zeropipe.core.schedule import Schedule
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError
from zeropipe.estimating.estimate import estimate
from zeropipe.planning.layouts import Layout
from zeropipe.planning.plan import RESERVE, optimizer_bandwidth
from zeropipe.planning.result import Plan
from zeropipe.planning.rows import Candidate
from zeropipe.planning.score import Scene, Simulated, memory_of, score, simulated
from zeropipe.planning.score import costs_of as stage_costs
from zeropipe.sim.costs import Costs
from zeropipe.sim.layer_costs import SHORT_DTYPES, LayerCosts, State
from zeropipe.train.config.files import has_weights
from zeropipe.train.config.models import RunConfig
from zeropipe.train.shape import costs_of, is_planned, layers_of, num_layers_of, schedule_of, setting_of, shapes_of

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "adafactor": 0}  # tensors of a parameter's size
HOW = "give the name of a GPU, like --schedule.costs h100, or a file of `zeropipe profile`"


@dataclass(frozen=True)
class Rank:
    """What a pipeline rank has."""

    rank: int
    stages: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]  # of each stage: first, and the one after the last
    parameters: int | None  # of one process; None where the model's shapes are not known
    memory: dict[str, float]  # bytes at its peak, as far as they are known

    @property
    def peak(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Prediction:
    """Of a step."""

    source: str
    step: float  # seconds
    bubble: float
    tokens_per_second: float
    mfu: float | None
    parts: dict[str, float]  # seconds; they add up to the step
    memory_limit: float | None  # bytes of a GPU


@dataclass(frozen=True)
class Preview:
    """What will run."""

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
    ranks: tuple[Rank, ...]
    prediction: Prediction | None
    notes: tuple[str, ...]


def preview(config: RunConfig) -> Preview:
    """What a checked file comes to."""
    asked = schedule_of(config)
    counts = layers_of(config, asked)
    schedule = resized(asked, config.num_microbatches)
    notes: list[str] = []
    if schedule is not asked:
        notes.append(
            f"{config.schedule.name} is of {count_text(asked.num_microbatches, 'microbatch')}, a step has "
            f"{schedule.num_microbatches}: it is made longer or shorter, so another batch may be faster"
        )
    costs, is_priced = _costs(config, notes)
    candidate = _candidate(config, schedule.problem, schedule.name)
    run: Simulated | None = None
    prediction = None
    if costs is not None:
        limit = _limit(costs) if is_priced else None
        room = inf if limit is None else limit
        scene = Scene(costs, config.schedule.gpus_per_node, room, optimizer_bandwidth(costs))
        run = simulated(scene, candidate, schedule, counts)
        if is_priced:
            prediction = _prediction(config, scene, candidate, schedule, counts, limit)
    spans = ranges(counts)
    ranks = []
    for rank in range(schedule.num_ranks):
        stages = schedule.placement.stages_of(rank)
        memory = {} if run is None else _memory(config, scene, candidate, run, rank, is_priced)
        layers = tuple((spans[stage].start, spans[stage].stop) for stage in stages)
        ranks.append(Rank(rank, stages, layers, None if run is None else run.parameters[rank], memory))
    if prediction and prediction.memory_limit is not None:
        fullest = max(ranks, key=lambda one: one.peak)
        if fullest.peak > prediction.memory_limit:
            notes.append(
                f"rank {fullest.rank} needs {fullest.peak / 1e9:.1f} GB, {prediction.memory_limit / 1e9:.1f} GB of a "
                "GPU can be used: more pp, dp_shard or tp, engine.ac, or a smaller data.microbatch take less"
            )
    path = config.model.path
    if is_planned(config) or (config.model.weights == "load" and (path in BUILT_IN or not has_weights(path))):
        random = "" if is_planned(config) else ", or set model.weights='random'"
        notes.append(f"{path} has no weights: to train, give their directory as --model.path{random}")
    if config.engine.offload:
        notes.append("optimizer state and the weights that it keeps are in CPU memory (engine.offload)")
    data, mesh = config.data, config.mesh
    return Preview(
        config.model.path, num_layers_of(config), _num_parameters(config), config.model.dtype, mesh.sizes,
        mesh.num_processes, mesh.num_pipelines, schedule.name, schedule.placement.name, schedule.num_stages, counts,
        schedule.num_microbatches, data.microbatch, data.sequence, data.batch * data.sequence, tuple(ranks), prediction,
        tuple(notes),
    )  # fmt: skip


def state_of(config: RunConfig) -> State:
    """Bytes of a parameter; float32 weights that the optimizer keeps beside 16-bit ones count as its own."""
    size = BYTES[config.model.dtype]
    if config.lora is not None:  # those of the adapter are few
        return State(size, 0, 0)
    masters = masters_of(config)
    moments = MOMENTS[config.optimizer.name] + (config.optimizer.name == "sgd" and config.optimizer.momentum > 0)
    kept = masters or size
    return State(size, kept, masters + moments * kept)


def masters_of(config: RunConfig) -> int:
    """Bytes of a parameter's float32 weight beside a 16-bit one."""
    wanted = config.model.dtype == "bfloat16" and config.optimizer.master_weights and config.lora is None
    return 4 if wanted else 0


def _costs(config: RunConfig, notes: list[str]) -> tuple[LayerCosts | None, bool]:
    """Costs to go by, and whether their times may be told; else they are there for the shapes, and a note says why."""
    given = costs_of(config)
    why = _unfit(config, given) if given else f"step time, bubble and activations are predicted from costs: {HOW}"
    if given and not why:
        return replace(given, state=state_of(config)), True
    notes.append(why)
    try:
        shapes = estimate(
            shapes_of(config), sequence=config.data.sequence, ac=config.engine.ac, tp=config.mesh.tp,
            microbatch_size=config.data.microbatch, compile=config.engine.compile,
        )  # fmt: skip
    except ConfigError as error:
        notes.append(f"no parameters: {error}")
        return None, False
    return replace(shapes, state=state_of(config)), False


def _unfit(config: RunConfig, costs: LayerCosts) -> str:
    """Why these costs say nothing about this run; empty where they do."""
    if config.lora is not None:
        return "no prediction with lora: costs are of training all weights"
    if config.model.dtype == "float64" or SHORT_DTYPES.get(config.model.dtype, config.model.dtype) != costs.dtype:
        return f"no prediction: the costs are of {costs.dtype}, model.dtype={config.model.dtype}"
    if costs.sequence and costs.sequence != config.data.sequence:
        return f"no prediction: the costs are of {costs.sequence} tokens, data.sequence={config.data.sequence}"
    try:
        setting_of(config, costs)
    except ConfigError as error:
        return f"no prediction: {error}"
    return ""


def _candidate(config: RunConfig, problem: Problem, name: str = "") -> Candidate:
    mesh = config.mesh
    return Candidate(
        Layout(problem.num_ranks, mesh.dp_shard, mesh.tp, mesh.dp_replicate), name, problem.stages_per_rank,
        problem.num_microbatches, config.data.microbatch, config.engine.ac, "", config.engine.shards,
    )  # fmt: skip


@dataclass(frozen=True)
class RunCosts:
    """What stages cost in the run of a training file that gives costs, for any schedule."""

    config: RunConfig
    path: str
    source: str = "training file"

    @property
    def model(self) -> str:
        return self.config.model.path

    def of(self, problem: Problem, placement: Placement, layers: Sequence[int] | None = None) -> Costs:
        """With these layers, or with the file's if they are of so many stages, else as even as can be."""
        given = costs_of(self.config)
        assert given is not None
        if why := _unfit(self.config, given):
            raise ConfigError(f"{self.path}: {why}: give other ones with --costs")
        table = self.config.schedule
        wish = table.layers if layers is None else layers
        counts = () if wish is None else check_counts(wish, given.num_layers)
        if len(counts) != problem.num_stages:
            counts = layer_counts(given.num_layers, problem.num_stages, table.first_less, table.last_less)
        limit = _limit(given)
        scene = Scene(
            replace(given, state=state_of(self.config)), table.gpus_per_node, inf if limit is None else limit, None
        )
        return stage_costs(scene, _candidate(self.config, problem), counts, placement)


def _limit(costs: LayerCosts) -> float | None:
    memory = costs.machine.get("memory")
    return memory - RESERVE if isinstance(memory, (int, float)) and memory > RESERVE else None


def _prediction(
    config: RunConfig, scene: Scene, candidate: Candidate, schedule: Schedule, counts: tuple[int, ...],
    limit: float | None,
) -> Prediction:  # fmt: skip
    row = score(scene, candidate, schedule, counts)
    gpus, costs = config.mesh.num_processes, scene.costs
    plan = Plan((row,), (), (), scene, gpus, config.data.batch, 1, 0, 0.0)
    where = costs.machine.get("gpu", "this machine")
    words = f"an estimate for {where}" if costs.source == "estimate" else f"from {config.schedule.costs}"
    return Prediction(words, row.step, row.bubble, plan.speed(row) * gpus, plan.mfu(row), vars(row.parts), limit)


def _memory(
    config: RunConfig, scene: Scene, candidate: Candidate, run: Simulated, rank: int, is_priced: bool
) -> dict[str, float]:
    """Bytes by what they are for. Without costs: what does not depend on when things run."""
    state, shards, own = scene.costs.state, config.mesh.dp_shard, run.parameters[rank]
    masters = own * masters_of(config) / shards
    weights = "gathered weights" if shards > 1 else "weights"
    if is_priced:
        held = memory_of(scene, candidate, run, rank)
        found = {
            weights: held.weights, "gradients": held.gradients, "masters": masters,
            "optimizer": held.optimizer - masters, "activations": held.activations, "workspace": held.workspace,
        }  # fmt: skip
    else:
        found = {
            weights: own * state.weights, "gradients": own * state.gradients, "masters": masters,
            "optimizer": own * state.optimizer / shards - masters,
        }  # fmt: skip
    if config.engine.offload:
        found |= {"masters": 0.0, "optimizer": 0.0}
    return found


def _num_parameters(config: RunConfig) -> int | None:
    try:
        return shapes_of(config).num_parameters()[0]
    except ConfigError:
        return None
