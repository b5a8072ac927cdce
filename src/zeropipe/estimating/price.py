"""Operators -> seconds and bytes: a roofline for each operator, and activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.model.operators import Op
from zeropipe.core.phases import LayerPhases, PhaseTimes
from zeropipe.estimating.gpus import Gpu
from zeropipe.sim.layer_costs import LayerCost

ATTENTION_BACKWARD = 2.5  # FLOPs of the flash kernel's backward over its forward: it recomputes the scores
EAGER_LAUNCH = 2.0  # launch time over that of a compiled layer
SELECTIVE_LAUNCH = 7.5  # the same with `selective:op`: every operator passes through Python
I_LAUNCH = 1.3  # launch time of I over F
EAGER_GRADIENTS = 0.6  # peak of the gradients over their sum: eager layers free activations meanwhile
MIN_KERNEL_S = (26e-6, 5e-6)  # per kernel, on the CPU or the GPU: eager, compiled
COMPILED_RECOMPUTED = 0.9  # peak of recomputed activations over their sum, compiled
POINTWISE_BACKWARD = 2.0  # bytes moved by a backward over its forward


@dataclass(frozen=True)
class Pricing:
    """A GPU, and how the layers run on it."""

    gpu: Gpu
    dtype: str
    compile: bool
    tp: int

    def product_seconds(self, op: Op) -> float:
        """Of a matrix product or attention, forward."""
        efficiency = self.gpu.efficiency
        fraction = efficiency.attention if op.attention else efficiency.matmul
        peak = self.gpu.peak_of("float32" if op.float32 else self.dtype)
        return max(op.flops / (peak * fraction), self.move_seconds(op.moved[1]))

    def move_seconds(self, size: float) -> float:
        """Of reading and writing `size` bytes."""
        return size / (self.gpu.bandwidth * self.gpu.efficiency.memory)

    def all_reduce_seconds(self, size: float) -> float:
        """Of an all-reduce of `size` bytes over `tp`."""
        if self.tp == 1 or size == 0:
            return 0.0
        link = self.gpu.intra_node_link
        assert link.bandwidth is not None
        return 2 * (self.tp - 1) / self.tp * size / link.bandwidth + 2 * (link.p2p or 0.0)

    def f_seconds(self, op: Op) -> float:
        seconds = self.product_seconds(op) if op.is_product else self.move_seconds(op.moved[self.compile])
        return seconds + self.all_reduce_seconds(op.summed)

    def i_seconds(self, op: Op) -> float:
        """Without recomputation. An all-reduce of F has a counterpart in I."""
        if op.attention:
            efficiency = self.gpu.efficiency
            return ATTENTION_BACKWARD * efficiency.attention / efficiency.attention_backward * self.product_seconds(op)
        moved = POINTWISE_BACKWARD * op.moved[self.compile] if op.moved_back is None else op.moved_back
        seconds = op.back * self.product_seconds(op) if op.is_product else self.move_seconds(moved)
        return seconds + self.all_reduce_seconds(op.summed)

    def w_seconds(self, op: Op) -> float:
        return self.product_seconds(op) + self.move_seconds(op.added) if op.deferred else 0.0

    def launch_seconds(self, checkpointing: Checkpointing) -> float:
        """CPU time of one action of a layer."""
        is_slow = checkpointing.mode in ("op", "budget")
        factor = 1.0 if self.compile else SELECTIVE_LAUNCH if is_slow else EAGER_LAUNCH
        return factor * self.gpu.efficiency.launch


def price_layer(
    ops: Sequence[Op], pricing: Pricing, message: float, checkpointing: Checkpointing, *, is_block: bool = True,
    exchanged: float = 0.0,
) -> LayerCost:  # fmt: skip
    """The costs of a layer with these operators. Only decoder blocks are checkpointed, not the ends of the model.

    `exchanged` are the bytes of rows that a dispatch or combine moves, if experts are divided.
    """
    forward = sum(map(pricing.f_seconds, ops))
    kept = sum(op.kept[pricing.compile] for op in ops)
    gradients = max((op.gradient for op in ops), default=0.0)
    held, recompute, recomputed = kept, 0.0, 0.0
    if is_block:
        gradients = sum(op.gradient for op in ops) * (1.0 if pricing.compile else EAGER_GRADIENTS)
        held, recompute, recomputed = _checkpoint(ops, pricing, message, checkpointing, kept, forward)
    kernels = MIN_KERNEL_S[pricing.compile] * sum(op.kernels[pricing.compile] for op in ops)
    launch = max(pricing.launch_seconds(checkpointing), kernels) if is_block else 0.0
    backward = sum(map(pricing.i_seconds, ops))
    weights = sum(map(pricing.w_seconds, ops))
    times = PhaseTimes(
        max(forward, launch), max(backward + recompute, I_LAUNCH * launch),
        max(weights, pricing.gpu.efficiency.launch if is_block and weights else 0.0),
    )  # fmt: skip
    parts = sum(op.exchanged for op in ops)
    parts_back = sum(op.exchanged if op.exchanged_back is None else op.exchanged_back for op in ops)
    hidden = _hidden_seconds(ops, pricing, checkpointing)
    attention = _price_attention(ops, pricing, checkpointing)
    return LayerCost(
        f=times.f, i=times.i, w=times.w, f_exchange=parts,
        i_exchange=parts_back + (0.0 if checkpointing.mode == "none" else parts),  # checkpointing exchanges once more
        f_hidden=hidden.f, i_hidden=hidden.i,
        activation=held, stash=sum(op.stash for op in ops), workspace=recomputed + gradients,
        f_workspace=sum(op.workspace[pricing.compile] for op in ops)
        + (_forward_workspace(ops, pricing, checkpointing) if is_block else 0.0),
        message=message if is_block else 0.0, parameters=sum(op.parameters for op in ops), trained=_count_trained(ops),
        flops=sum(map(_useful, ops)), frozen_flops=sum(_useful(op) for op in ops if op.trained == 0),
        phases=_divide_phases(ops, pricing, checkpointing, times, exchanged) if exchanged else None,
        experts=sum(op.divided for op in ops) if exchanged else 0, **attention,
    )  # fmt: skip


def _hidden_seconds(ops: Sequence[Op], pricing: Pricing, checkpointing: Checkpointing) -> PhaseTimes:
    """The seconds of exchanges over `cp` that attention can hide."""
    part = max((op.hides for op in ops), default=0.0)
    attending = [op for op in ops if op.attention and part]
    forward, backward = (sum(map(seconds, attending)) for seconds in (pricing.f_seconds, pricing.i_seconds))
    return PhaseTimes(part * forward, part * (backward + (forward if checkpointing.mode == "full" else 0.0)))


def _price_attention(ops: Sequence[Op], pricing: Pricing, checkpointing: Checkpointing) -> dict[str, Any]:
    """The fields of slices of sequences, which are estimated with full checkpointing and without compilation."""
    if pricing.compile or checkpointing.mode != "full":
        return {}
    attending = [op for op in ops if op.keys]
    forward = sum(map(pricing.product_seconds, attending))
    workspaces = [sum(op.kept[0] for op in ops[: at + 1]) + ops[at].gradient for at, op in enumerate(ops) if op.keys]
    return {
        "attention_workspace": max(workspaces, default=0.0), "chunk_workspace": sum(op.chunk for op in ops),
        "chunks": max((op.chunks for op in ops), default=0.0),
        "f_attention": forward, "i_attention": sum(map(pricing.i_seconds, attending)) + forward,
        "keys": sum(op.keys for op in attending), "repeated_keys": max((op.repeated for op in attending), default=0.0),
    }  # fmt: skip


def _divide_phases(
    ops: Sequence[Op], pricing: Pricing, checkpointing: Checkpointing, times: PhaseTimes, exchanged: float
) -> LayerPhases:
    """The phases of a layer whose experts are divided: seconds, of dispatch and combine bytes.

    What is neither routed nor exchanged is attention. With `full` I exchanges rows once more.
    """
    routed = [op for op in ops if op.routed]
    forward = sum(map(pricing.f_seconds, routed))
    recompute = {"none": 0.0, "full": forward - pricing.product_seconds(_last(routed))}.get(
        checkpointing.mode, sum(pricing.f_seconds(op) for op in routed if not op.is_product)
    )
    own = PhaseTimes(
        min(times.f, forward), min(times.i, sum(map(pricing.i_seconds, routed)) + recompute),
        min(times.w, sum(map(pricing.w_seconds, routed))),
    )  # fmt: skip
    rest = PhaseTimes(*(total - part for total, part in zip(times, own)))
    exchange = PhaseTimes(exchanged, exchanged * (2 if checkpointing.mode == "full" else 1))
    return LayerPhases(attention=rest, dispatch=exchange, experts=own, combine=exchange)


def _useful(op: Op) -> float:
    return op.flops if op.useful is None else op.useful


def _count_trained(ops: Sequence[Op]) -> int | None:
    """The trained parameters; None for all."""
    if all(op.trained is None for op in ops):
        return None
    return sum(op.parameters if op.trained is None else op.trained for op in ops)


def _checkpoint(
    ops: Sequence[Op], pricing: Pricing, message: float, checkpointing: Checkpointing, kept: float, forward: float
) -> tuple[float, float, float]:
    """Bytes kept from F to I, seconds of recomputation in I, and bytes of recomputed activations."""
    kept_op = message + sum(op.kept_op for op in ops)
    if pricing.compile:  # a result that no backward needs is not kept
        kept_op -= _last(ops).kept_op
    cheap = sum(pricing.f_seconds(op) for op in ops if not op.is_product)
    everything = forward - pricing.product_seconds(_last(ops))
    peak = COMPILED_RECOMPUTED if pricing.compile else 1.0
    mode = _mode(pricing, checkpointing)
    if mode == "none":
        return kept, 0.0, 0.0
    if mode == "op":
        return kept_op, cheap, peak * max(0.0, kept - kept_op)
    if mode == "full":
        return message, everything, peak * kept
    # the compiler drops what is cheapest to recompute first
    assert checkpointing.budget is not None
    held = message + checkpointing.budget * max(0.0, kept - message)
    if held >= kept_op:
        fraction = (kept - held) / (kept - kept_op) if kept > kept_op else 0.0
        return held, fraction * cheap, peak * (kept - held)
    fraction = (kept_op - held) / (kept_op - message)
    return held, cheap + fraction * (everything - cheap), peak * (kept - held)


def _forward_workspace(ops: Sequence[Op], pricing: Pricing, checkpointing: Checkpointing) -> float:
    """Bytes that F of a checkpointed layer makes and does not keep: for attention or the MLP, whichever makes more.

    Each ends with a residual, and has all that it makes until then; a norm's copies are freed before. Counted operators
    are not divided so.
    """
    mode = _mode(pricing, checkpointing)
    if mode == "none" or not any(op.name == "residual" for op in ops):
        return 0.0
    budget = checkpointing.budget or 0.0 if mode == "budget" else 0.0
    made = held = largest = 0.0
    for op in ops:
        if op.name == "residual":
            made = held = 0.0
        elif op.name != "norm":
            made += op.kept[pricing.compile]
            held += op.kept_op
            largest = max(largest, made - held if mode == "op" else (1 - budget) * made)
    return largest


def _mode(pricing: Pricing, checkpointing: Checkpointing) -> str:
    """The mode that runs: a budget needs the compiler."""
    return "op" if checkpointing.mode == "budget" and not pricing.compile else checkpointing.mode


def _last(ops: Sequence[Op]) -> Op:
    """The last product, whose result the layer's backward does not need."""
    return next(op for op in reversed(ops) if op.is_product)
