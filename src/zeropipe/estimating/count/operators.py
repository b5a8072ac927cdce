"""Recorded calls of a layer -> its operators: each product, and the rest as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from zeropipe.core.model.operators import ADDED, ENDS, Op
from zeropipe.engine.backward.linear import defer, find_deferred
from zeropipe.engine.stages.hf import HFStage
from zeropipe.estimating.count.fusion import count_kernels, minimize_saved, moved_bytes
from zeropipe.estimating.count.meta_private import storage_id
from zeropipe.estimating.count.record import ATTENTION, EXPERTS, Call, OperatorLog

GRADIENT_TRAFFIC = 8  # bytes per parameter of an embedding: its gradient is read, and added to a float32


@dataclass(frozen=True)
class LayerRun:
    """A recorded run of a layer, or of an end of the model."""

    stage: HFStage
    kind: str
    log: OperatorLog
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    sharded: Sequence[Tensor]  # parameters that are sharded over `tp`
    tp: int
    tokens: int

    def module_parameters(self) -> list[nn.Parameter]:
        """The parameters of the layer, or those outside of all layers."""
        inside = [parameter for layer in self.stage.blocks for parameter in layer.parameters()]
        if self.kind not in ENDS:
            return inside
        ids = set(map(id, inside))
        return [parameter for parameter in self.stage.parameters() if id(parameter) not in ids]


def list_operators(run: LayerRun) -> tuple[Op, ...]:
    """The operators of a layer, or of an end of the model."""
    parameters = {storage_id(parameter): parameter for parameter in run.module_parameters()}
    constant = parameters.keys() | {storage_id(buffer) for buffer in run.stage.buffers()}
    calls = [_without(call, constant) for call in run.log.calls]
    inputs, outputs = (set(map(storage_id, tensors)) for tensors in (run.inputs, run.outputs))
    created = inputs | {storage for call in calls for storage in call.writes}
    kept = {storage: size for storage, size in run.log.saved.items() if storage in created}
    if run.kind == "head":  # the loss keeps a copy of its own
        kept = {storage: size for storage, size in kept.items() if storage not in outputs}
    products = _list_products(run, calls, {storage: parameter.numel() for storage, parameter in parameters.items()})
    compiled = minimize_saved(calls, kept, inputs)
    copied = sum(call.copied for call in calls)
    num_parameters = sum(parameter.numel() for parameter in parameters.values())
    eager, fused = moved_bytes(calls, outputs | compiled.keys())
    rest = Op(
        "rest", parameters=num_parameters - sum(op.parameters for op in products),
        kept=(sum(kept.values()), sum(compiled.values()) + copied), moved=(eager, fused + 2 * copied),
        kernels=(len(calls), count_kernels(calls)),
    )  # fmt: skip
    looked_up = {storage for call in run.log.calls if call.name == "embedding" for storage in call.reads}
    tables = looked_up & parameters.keys()
    if tables:
        table_bytes = sum(parameters[storage].nbytes for storage in tables)
        added = GRADIENT_TRAFFIC * sum(parameters[storage].numel() for storage in tables)
        rest = replace(rest, moved_back=2 * rest.moved[1] + 2 * table_bytes + added, gradient=float(table_bytes))
    return (*products, *(Op("sum", summed=call.summed) for call in calls if call.summed), rest)


def _list_products(run: LayerRun, calls: Sequence[Call], parameters: dict[int, int]) -> list[Op]:
    """The matrix products."""
    defer(run.stage)
    deferred = {storage_id(layer._parameters[name]) for layer in find_deferred(run.stage) for name in layer.defers}
    sharded = set(map(storage_id, run.sharded))
    shards = _find_shards(run.log.calls, sharded)
    stacks = _expert_stacks(run.stage)
    found, read, counted = list[Op](), set[int](), set[int]()
    for call, full_call in zip(calls, run.log.calls):
        if not call.flops:
            continue
        weights = parameters.keys() & full_call.reads.keys()
        is_deferred = bool(weights & deferred)
        # with sharded experts each GPU has its share of the rows; a product that is not sharded runs on every GPU
        flops = call.flops / run.tp if call.name in EXPERTS and weights & sharded else call.flops
        active = _active_fraction(run, full_call, stacks)
        useful = flops * active * _unmasked_fraction(run, call) / (1 if full_call.reads.keys() & shards else run.tp)
        result = sum(call.writes.values())
        stash = (
            result + sum(size for storage, size in call.reads.items() if storage not in read) if is_deferred else 0.0
        )
        size = sum(full_call.reads.values()) + sum(full_call.writes.values())
        is_attention = call.name == ATTENTION
        number = sum(parameters[storage] for storage in weights - counted)
        is_experts = call.name in EXPERTS or active < 1
        per_token = min(number, round(active * call.flops / (2 * run.tokens))) if is_experts else None
        op = Op(
            call.name, flops, useful, number, per_token, attention=is_attention, deferred=is_deferred,
            back=1.0 if is_deferred else 2.0, kept_op=result, moved=(size, size), stash=stash,
            added=ADDED * sum(full_call.reads[storage] for storage in weights) if call.name in EXPERTS else 0.0,
            gradient=(1.0 + is_attention) * result,
        )  # fmt: skip
        found.append(op)
        read |= call.reads.keys() if is_deferred else set()  # an input kept until W is counted once
        counted |= weights
    return found


def _expert_stacks(stage: HFStage) -> set[int]:
    """Parameters that hold one matrix for each expert."""
    named = [module for name, module in stage.named_modules() if name.rpartition(".")[2] == "experts"]
    return {storage_id(weight) for module in named for weight in module.parameters(recurse=False) if weight.dim() == 3}


def _active_fraction(run: LayerRun, call: Call, stacks: set[int]) -> float:
    """The fraction of experts that a token needs, if it passes through all of them, as in Llama 4."""
    if call.name in EXPERTS or not call.reads.keys() & stacks:
        return 1.0
    config = run.stage.full_config.get_text_config()
    active, number = (getattr(config, name, None) for name in ("num_experts_per_tok", "num_local_experts"))
    return active / number if active and number else 1.0


def _find_shards(calls: Sequence[Call], sharded: set[int]) -> set[int]:
    """Storages of which each GPU of `tp` has a shard: results of sharded parameters, until an all-reduce."""
    shards = set(sharded)
    for call in calls:
        if not call.summed and call.reads.keys() & shards:
            shards |= call.writes.keys()
    return shards


def _unmasked_fraction(run: LayerRun, call: Call) -> float:
    """The fraction of the pairs that masked attention computes which the mask keeps."""
    if not call.masked:
        return 1.0
    windows = [getattr(module, "sliding_window", None) for module in run.stage.blocks[0].modules()]
    width = min([call.masked, *(window for window in windows if type(window) is int and window > 0)])
    return (width - width * (width - 1) / (2 * call.masked)) / call.masked


def _without(call: Call, storages: set[int]) -> Call:
    """A call without its reads of parameters and buffers, which are resident all the time."""
    return replace(call, reads={storage: size for storage, size in call.reads.items() if storage not in storages})
