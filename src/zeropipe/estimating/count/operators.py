"""What was seen of a layer, as operators: its products one by one, and all else as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from zeropipe.core.model.operators import ADDED, ENDS, Op
from zeropipe.engine.backward.linear import defer, find_deferred
from zeropipe.engine.stages.hf import HFStage
from zeropipe.estimating.count.graph import kernels, least_kept, moved
from zeropipe.estimating.count.watch import ATTENTION, EXPERTS, Call, Watched, memory_of

GRADIENT = 8  # bytes: a table's gradient is read and added to a float32 number


@dataclass(frozen=True)
class Seen:
    """A run of a layer, or of what is outside of all layers."""

    stage: HFStage
    kind: str
    watched: Watched
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    divided: Sequence[Tensor]  # parameters that the GPUs of `tp` share out
    tp: int
    tokens: int

    def module_parameters(self) -> list[nn.Parameter]:
        """Those of the layer, or those outside of all layers."""
        inside = [parameter for layer in self.stage.blocks for parameter in layer.parameters()]
        if self.kind not in ENDS:
            return inside
        apart = set(map(id, inside))
        return [parameter for parameter in self.stage.parameters() if id(parameter) not in apart]


def operators(seen: Seen) -> tuple[Op, ...]:
    """The operators of a layer, or of an end of the model."""
    parameters = {memory_of(parameter): parameter for parameter in seen.module_parameters()}
    there = parameters.keys() | {memory_of(buffer) for buffer in seen.stage.buffers()}
    calls = [_without(call, there) for call in seen.watched.calls]
    inputs, outputs = (set(map(memory_of, some)) for some in (seen.inputs, seen.outputs))
    made = inputs | {place for call in calls for place in call.writes}
    kept = {place: size for place, size in seen.watched.kept.items() if place in made}
    if seen.kind == "head":  # the loss keeps a copy of its own
        kept = {place: size for place, size in kept.items() if place not in outputs}
    products = _products(seen, calls, {place: parameter.numel() for place, parameter in parameters.items()})
    compiled = least_kept(calls, kept, inputs)
    copied = sum(call.copied for call in calls)
    number = sum(parameter.numel() for parameter in parameters.values())
    one_by_one, together = moved(calls, outputs | compiled.keys())
    rest = Op(
        "rest", parameters=number - sum(op.parameters for op in products),
        kept=(sum(kept.values()), sum(compiled.values()) + copied), moved=(one_by_one, together + 2 * copied),
        kernels=(len(calls), kernels(calls)),
    )  # fmt: skip
    looked_up = {place for call in seen.watched.calls if call.name == "embedding" for place in call.reads}
    tables = looked_up & parameters.keys()
    if tables:
        bytes_of = sum(parameters[place].nbytes for place in tables)
        added = GRADIENT * sum(parameters[place].numel() for place in tables)
        rest = replace(rest, moved_back=2 * rest.moved[1] + 2 * bytes_of + added, gradient=float(bytes_of))
    return (*products, *(Op("sum", summed=call.summed) for call in calls if call.summed), rest)


def _products(seen: Seen, calls: Sequence[Call], parameters: dict[int, int]) -> list[Op]:
    """The matrix products."""
    defer(seen.stage)
    waiting = {memory_of(layer._parameters[name]) for layer in find_deferred(seen.stage) for name in layer.defers}
    divided = set(map(memory_of, seen.divided))
    parts = _parts(seen.watched.calls, divided)
    stacks = _stacks(seen.stage)
    found, read, met = list[Op](), set[int](), set[int]()
    for call, whole in zip(calls, seen.watched.calls):
        if not call.flops:
            continue
        weights = parameters.keys() & whole.reads.keys()
        waits = bool(weights & waiting)
        # of experts that are shared out, each GPU has its share of the rows; what is not divided, every GPU computes
        flops = call.flops / seen.tp if call.name in EXPERTS and weights & divided else call.flops
        chosen = _chosen(seen, whole, stacks)
        useful = flops * chosen * _pairs(seen, call) / (1 if whole.reads.keys() & parts else seen.tp)
        result = sum(call.writes.values())
        stash = result + sum(size for place, size in call.reads.items() if place not in read) if waits else 0.0
        size = sum(whole.reads.values()) + sum(whole.writes.values())
        is_attention = call.name == ATTENTION
        number = sum(parameters[place] for place in weights - met)
        is_experts = call.name in EXPERTS or chosen < 1
        by_one = min(number, round(chosen * call.flops / (2 * seen.tokens))) if is_experts else None
        op = Op(
            call.name, flops, useful, number, by_one, is_attention, waits,
            back=1.0 if waits else 2.0, kept_op=result, moved=(size, size), stash=stash,
            added=ADDED * sum(whole.reads[place] for place in weights) if call.name in EXPERTS else 0.0,
            gradient=(1.0 + is_attention) * result,
        )  # fmt: skip
        found.append(op)
        read |= call.reads.keys() if waits else set()  # what stays until W is counted once
        met |= weights
    return found


def _stacks(stage: HFStage) -> set[int]:
    """Parameters that hold one matrix for each expert."""
    named = [module for name, module in stage.named_modules() if name.rpartition(".")[2] == "experts"]
    return {memory_of(weight) for module in named for weight in module.parameters(recurse=False) if weight.dim() == 3}


def _chosen(seen: Seen, call: Call, stacks: set[int]) -> float:
    """The share of experts that a token needs where it goes through all of them, as in Llama 4."""
    if call.name in EXPERTS or not call.reads.keys() & stacks:
        return 1.0
    config = seen.stage.full_config.get_text_config()
    chosen, number = (getattr(config, name, None) for name in ("num_experts_per_tok", "num_local_experts"))
    return chosen / number if chosen and number else 1.0


def _parts(calls: Sequence[Call], divided: set[int]) -> set[int]:
    """What each GPU of `tp` has a part of: what comes of divided parameters, until it is summed."""
    parts = set(divided)
    for call in calls:
        if not call.summed and call.reads.keys() & parts:
            parts |= call.writes.keys()
    return parts


def _pairs(seen: Seen, call: Call) -> float:
    """The share of what attention computes under a mask that the model needs: a token meets those before it."""
    if not call.masked:
        return 1.0
    windows = [getattr(module, "sliding_window", None) for module in seen.stage.blocks[0].modules()]
    width = min([call.masked, *(window for window in windows if type(window) is int and window > 0)])
    return (width - width * (width - 1) / (2 * call.masked)) / call.masked


def _without(call: Call, places: set[int]) -> Call:
    """A call without the weights that it reads: these are there all the time."""
    return replace(call, reads={place: size for place, size in call.reads.items() if place not in places})
