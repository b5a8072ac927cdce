"""Predicted costs of a run's stages: `schedule.costs` with the run's own layout and optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from zeropipe.core.files import has_suffix
from zeropipe.core.model.layers import layer_counts, require_layer_counts
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Origin
from zeropipe.errors import ConfigError
from zeropipe.planning.context import RESERVE, PlanContext
from zeropipe.planning.layouts import Layout
from zeropipe.planning.rows import Candidate
from zeropipe.sim.costs import Costs
from zeropipe.sim.layer_costs import LayerCosts, ParameterBytes
from zeropipe.sim.refit import find_run_setting
from zeropipe.train.compiling import is_compiled, predicted_device
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.inputs import COSTS_SUFFIXES, explain_adapter, load_layer_costs, open_shapes

_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
LOW_BITS_SIZE = 2  # bytes of a float32 weight beside a 16-bit one
_NUM_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "adafactor": 0}  # optimizer tensors of a parameter's size


@dataclass(frozen=True)
class RunCosts:
    """The costs of stages in the run of a training file with `schedule.costs`, for any schedule."""

    config: RunConfig
    path: str  # of the training file, for errors
    source: str = "training file"

    @property
    def model(self) -> str:
        return self.config.model.path

    def of(
        self, problem: Problem, placement: Placement, layers: Sequence[int] | None = None,
        schedule: Schedule | None = None, checkpointing: bool = False,
    ) -> Costs:  # fmt: skip
        """The costs of each stage, of `schedule` if it is known; with `checkpointing` those of checkpointed F too.

        `layers` defaults to `schedule.layers`, where that is for as many stages, else layers are spread evenly.
        """
        costs = load_layer_costs(self.config)
        assert costs is not None
        if reason := explain_mismatch(self.config, costs, schedule):
            raise ConfigError(f"{self.path}: {reason}; or pass --costs")
        table = self.config.schedule
        layers = table.layers if layers is None else layers
        counts = () if layers is None else require_layer_counts(layers, costs.num_layers)
        if len(counts) != problem.num_stages:
            counts = layer_counts(costs.num_layers, problem.num_stages, table.first_less, table.last_less)
        limit = memory_limit(costs)
        costs = replace(costs, state=state_bytes(self.config))
        checkpointing = checkpointing or table.checkpointing is not None
        if schedule is not None:
            costs, checkpointing = costs.for_schedule(schedule), checkpointing or bool(schedule.checkpointed)
        context = PlanContext.create(costs, table.gpus_per_node, inf if limit is None else limit)
        candidate = make_candidate(self.config, problem, checkpointing=checkpointing)
        return context.stage_costs(candidate, counts, placement)


def explain_exchanges(config: RunConfig) -> str:
    """Why a run with divided sequences or experts has no prediction; empty if it may have one."""
    ep, cp, tp, source = config.mesh.ep, config.mesh.cp, config.mesh.tp, config.schedule.costs
    is_estimated = source is None or not has_suffix(source, *COSTS_SUFFIXES)
    if cp > 1 and is_estimated and not open_shapes(config).allows_cp(cp):
        return f"no prediction with mesh.cp={cp}: it is estimated for text models of types in docs/plan.md"
    if ep == 1:
        return ""
    if tp > 1:
        return f"no prediction with mesh.ep={ep} and mesh.tp={tp}: costs are for one of them"
    if is_estimated and not open_shapes(config).allows_ep(ep):
        return f"no prediction with mesh.ep={ep}: it is estimated for mixtures of experts of types in docs/plan.md"
    return ""


def explain_mismatch(config: RunConfig, costs: LayerCosts, schedule: Schedule | None = None) -> str:
    """Why `costs` cannot predict this run, of `schedule` if it is known; empty if they can."""
    if reason := explain_exchanges(config):
        return reason
    data, engine = config.data, config.engine
    if engine.float8 != "none":
        return (
            f"no prediction: the run has engine.float8={engine.float8!r}, the costs are for products in 16 or more bits"
        )
    if config.mesh.ep > 1 and costs.dispatch != config.mesh.dispatch:
        return f"no prediction: the run has mesh.dispatch={config.mesh.dispatch!r}, the costs {costs.dispatch!r}"
    compiled = is_compiled(config, predicted_device(config, costs))
    if compiled and config.mesh.cp_exchange == "ring":
        return "no prediction: a ring is estimated in blocks that are not compiled; set engine.compile=false to get one"
    if all(one.compile != compiled for one in costs.settings):
        one, other, flag = ("", "not ", "--compile") if compiled else ("not ", "", "--no-compile")
        return (
            f"no prediction: the run's blocks are {one}compiled, those of the costs are {other}compiled; create costs "
            f"with {flag}, or set engine.compile={str(not compiled).lower()}"
        )
    if reason := _explain_head(config, costs):
        return f"no prediction: {reason}"
    origin = Origin(
        (), engine.ac, data.microbatch, data.sequence, config.model.dtype, config.mesh.tp,
        compiled, config.lora is not None, config.mesh.sequence_parallel,
    )  # fmt: skip
    try:
        costs.setting(ep=config.mesh.ep)
        costs.setting(cp=config.mesh.cp)
        setting = find_run_setting(_only_sizes(costs, config), origin)
        if schedule is not None and schedule.checkpointed:
            costs.checkpointed_setting(setting)
    except ConfigError as error:
        return f"no prediction: {error}"
    wanted = config.mesh.cp_exchange
    if setting.exchange and wanted not in ("auto", setting.exchange):
        return f"no prediction: the run has mesh.cp_exchange={wanted!r}, the costs {setting.exchange!r}"
    if config.schedule.slices > 1 and not costs.has_slices(setting):
        return (
            f"no prediction with schedule.slices={config.schedule.slices}: costs of slices are estimated for dense "
            "text models without windows, with engine.ac='full', without data.packing and without engine.compile"
        )
    table = config.lora
    reason = explain_adapter(table) if table is not None else ""
    if table is not None and not reason and table.rank != costs.lora_rank:
        reason = f"the run has lora.rank {table.rank}, the costs are for rank {costs.lora_rank}"
    return f"no prediction: {reason}" if reason else ""


def _explain_head(config: RunConfig, costs: LayerCosts) -> str:
    """Why the head of the costs is not that of the run. A profile without a fused head is of a model that has none."""
    if config.engine.fused_head == costs.fused_head or (config.engine.fused_head and costs.source == "profile"):
        return ""
    one, other = ("in chunks", "whole") if config.engine.fused_head else ("whole", "in chunks")
    return (
        f"the run has engine.fused_head={str(config.engine.fused_head).lower()}, which makes logits {one}, the costs "
        f"are for logits {other}; create them again, or change the run"
    )


def _only_sizes(costs: LayerCosts, config: RunConfig) -> LayerCosts:
    """The costs with the settings of the run's sizes of `ep` and `cp`."""
    sizes = (config.mesh.ep, config.mesh.cp)
    return replace(costs, settings=tuple(one for one in costs.settings if (one.ep, one.cp) == sizes))


def make_candidate(config: RunConfig, problem: Problem, name: str = "", checkpointing: bool = False) -> Candidate:
    """The run as a candidate of the planner. `checkpointing`: its schedule says which F are checkpointed."""
    mesh, slices = config.mesh, config.schedule.slices
    return Candidate(
        Layout(
            problem.num_ranks, mesh.dp_shard, mesh.tp, mesh.dp_replicate, mesh.sequence_parallel, mesh.ep, mesh.cp,
            mesh.shard_cp,
        ), name,
        problem.stages_per_rank, problem.num_microbatches, config.data.microbatch, config.engine.ac, "",
        config.engine.shards, config.engine.gradients, turns=config.engine.overlap == "turns",
        slices=slices, slice_sizes=config.schedule.slice_sizes or (1.0,) * slices,
        checkpointing=checkpointing,
    )  # fmt: skip


def memory_limit(costs: LayerCosts) -> float | None:
    """Bytes of a GPU that a run may use; None if the GPU's memory is not known."""
    memory = costs.machine.get("memory")
    return memory - RESERVE if isinstance(memory, (int, float)) and memory > RESERVE else None


def state_bytes(config: RunConfig) -> ParameterBytes:
    """Bytes per parameter of weights, gradients and optimizer. Float32 master weights count as optimizer state.

    An adapter has at least float32 weights, beside a frozen model.
    """
    size = _BYTES[config.model.dtype]
    masters = 4 if master_bytes(config) else 0
    optimizer = config.optimizer
    moments = _NUM_MOMENTS[optimizer.name] + (optimizer.name == "sgd" and optimizer.momentum > 0)
    if config.lora is not None:
        trained = max(4, size)
        return ParameterBytes(trained, trained, moments * trained, trained, frozen=size)
    trained = masters or size
    # sharded gradients of 16-bit weights add up in float32, also without master weights
    gradients = max(trained, 4) if config.mesh.num_shards > 1 else trained
    return ParameterBytes(
        size,
        gradients,
        masters + moments * trained,
        0 if masters else size,
        saved_unsharded=masters - LOW_BITS_SIZE if masters else 0,
    )


def master_bytes(config: RunConfig) -> int:
    """Bytes per parameter of float32 master weights; 0 without them.

    Sharded ones are the stored weights. Beside unsharded ones in 16 bits only the other 16 bits are kept, unless `tp`
    shards the weights.
    """
    has_masters = config.model.dtype == "bfloat16" and config.optimizer.master_weights and config.lora is None
    has_low_bits = config.mesh.num_shards == config.mesh.tp == 1
    return (LOW_BITS_SIZE if has_low_bits else 4) if has_masters else 0
