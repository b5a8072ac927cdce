"""Activation checkpointing of transformer blocks: what is kept from F to I, and what I computes again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from zeropipe.engine.blocks.again import Again
from zeropipe.engine.torch_private import autograd as torch_autograd


def checkpointed(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """A block's forward, run again in I as far as `mode` says."""
    if mode == "none":
        return forward
    options = {"context_fn": _selective_contexts} if mode == "op" else {}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what modifies buffers is not compiled, and inputs are saved as by autograd
            return checkpoint(lambda *a, **k: forward(self, *a, **k), *args, use_reentrant=False, **options, **kwargs)
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        return checkpoint(Again(self, forward), *args, use_reentrant=False, **options, **kwargs)

    return run


def _selective_contexts() -> Any:
    return torch_autograd.selective_contexts(_policy)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _expensive() else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _expensive() -> frozenset[Any]:
    """Operators whose results are worth their memory."""
    names = (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_attention_math",
    )
    found = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    return frozenset([*found, torch.ops.zeropipe.grouped_linear.default])
