"""Operators to seconds and bytes: a roofline for each, and what activation checkpointing changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.model.operators import Op
from zeropipe.estimating.gpus import Gpu
from zeropipe.sim.layer_costs import LayerCost

ATTENTION_BACK = 2.5  # FLOPs of the flash kernel's backward over its forward's: it computes the scores again
EAGER_LAUNCH = 2.0  # over a compiled layer's
SLOW_LAUNCH = 7.5  # of `selective:op` without compilation: every operator passes through Python
I_LAUNCH = 1.3  # of I over F
EAGER_FREES = 0.6  # of the gradients' memory: one by one, what F kept is freed on the way
KERNEL = (26e-6, 5e-6)  # seconds that a kernel takes at least, on the CPU or on the GPU: one by one, and compiled
COMPILED_FREES = 0.9  # of what is computed again: compiled, not all of it is there at once
POINTWISE_BACK = 2.0  # bytes of a backward over those of its forward


@dataclass(frozen=True)
class Pricing:
    """On what and how the layers run."""

    gpu: Gpu
    dtype: str
    compile: bool
    tp: int

    def product(self, op: Op, times: float = 1.0) -> float:
        """Seconds of a matrix product, or of attention, forward."""
        reached = self.gpu.efficiency
        share = reached.attention if op.attention else reached.matmul
        return times * max(op.flops / (self.gpu.peak_of(self.dtype) * share), self.move(op.moved[1]))

    def move(self, size: float) -> float:
        """Seconds to read and write so many bytes."""
        return size / (self.gpu.bandwidth * self.gpu.efficiency.memory)

    def sums(self, size: float) -> float:
        """Seconds to sum so many bytes over the GPUs of tensor parallelism."""
        if self.tp == 1 or size == 0:
            return 0.0
        link = self.gpu.link(between=False)
        assert link.bandwidth is not None
        return 2 * (self.tp - 1) / self.tp * size / link.bandwidth + 2 * (link.p2p or 0.0)

    def forward(self, op: Op) -> float:
        own = self.product(op) if op.is_product else self.move(op.moved[self.compile])
        return own + self.sums(op.summed)

    def inputs(self, op: Op) -> float:
        """Seconds of I, without what is computed again; the sum over `tp` meets its mirror image there."""
        if op.attention:
            back = ATTENTION_BACK * self.gpu.efficiency.attention / self.gpu.efficiency.attention_backward
            return self.product(op, back)
        moved = POINTWISE_BACK * op.moved[self.compile] if op.moved_back is None else op.moved_back
        return (self.product(op, op.back) if op.is_product else self.move(moved)) + self.sums(op.summed)

    def weights(self, op: Op) -> float:
        return self.product(op) + self.move(op.added) if op.deferred else 0.0

    def launch(self, wish: Checkpointing) -> float:
        """Seconds that the CPU needs for one action of a layer."""
        times = 1.0 if self.compile else SLOW_LAUNCH if wish.mode in ("op", "budget") else EAGER_LAUNCH
        return times * self.gpu.efficiency.launch


def layer_cost(
    ops: Sequence[Op], pricing: Pricing, message: float, wish: Checkpointing, *, block: bool = True
) -> LayerCost:
    """What a layer of these operators costs. Only blocks are checkpointed: the ends keep what they need."""
    forward = sum(map(pricing.forward, ops))
    kept = sum(op.kept[pricing.compile] for op in ops)
    grown = max((op.gradient for op in ops), default=0.0)
    if block:
        grown = sum(op.gradient for op in ops) * (1.0 if pricing.compile else EAGER_FREES)
    held, again, workspace = _checkpointed(ops, pricing, message, wish, kept, forward) if block else (kept, 0.0, 0.0)
    kernels = KERNEL[pricing.compile] * sum(op.kernels[pricing.compile] for op in ops)
    least = max(pricing.launch(wish), kernels) if block else 0.0
    backward = sum(map(pricing.inputs, ops))
    weights = sum(map(pricing.weights, ops))
    return LayerCost(
        f=max(forward, least), i=max(backward + again, I_LAUNCH * least),
        w=max(weights, pricing.gpu.efficiency.launch if block and weights else 0.0),
        activation=held, stash=sum(op.stash for op in ops), workspace=workspace + grown,
        message=message if block else 0.0, parameters=sum(op.parameters for op in ops),
        flops=sum(op.flops if op.useful is None else op.useful for op in ops),
    )  # fmt: skip


def _checkpointed(
    ops: Sequence[Op], pricing: Pricing, message: float, wish: Checkpointing, kept: float, forward: float
) -> tuple[float, float, float]:
    """Bytes held by F, seconds of computing again in I, and bytes that are there while that runs."""
    kept_op = message + sum(op.kept_op for op in ops)
    if pricing.compile:  # what nobody needs again is not kept
        kept_op -= _last(ops).kept_op
    cheap = sum(pricing.forward(op) for op in ops if not op.is_product)
    all_again = forward - pricing.product(_last(ops))
    there = COMPILED_FREES if pricing.compile else 1.0
    mode = wish.mode
    if mode == "budget" and not pricing.compile:
        mode = "op"
    if mode == "none":
        return kept, 0.0, 0.0
    if mode == "op":
        return kept_op, cheap, there * max(0.0, kept - kept_op)
    if mode == "full":
        return message, all_again, there * kept
    # between the two ends the compiler gives up what is cheapest to compute again first
    assert wish.budget is not None
    held = message + wish.budget * max(0.0, kept - message)
    if held >= kept_op:
        share = (kept - held) / (kept - kept_op) if kept > kept_op else 0.0
        return held, share * cheap, there * (kept - held)
    share = (kept_op - held) / (kept_op - message)
    return held, cheap + share * (all_again - cheap), there * (kept - held)


def _last(ops: Sequence[Op]) -> Op:
    """The last product, whose result the layer's backward does not need."""
    return next(op for op in reversed(ops) if op.is_product)
