"""Activation checkpointing of transformer blocks: the tensors that are kept from F to I; I recomputes the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from zeropipe.engine.blocks.recompute import RecomputableForward
from zeropipe.engine.torch_private import attention as torch_attention
from zeropipe.engine.torch_private import autograd as torch_autograd


def add_checkpointing(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Wrap a block's forward: `mode` is "none", "full", or "op" to keep the results of expensive operators."""
    if mode == "none":
        return forward
    options = {"context_fn": _selective_contexts} if mode == "op" else {}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # what modifies buffers is not compiled, and inputs are saved as by autograd
            return checkpoint(lambda *a, **k: forward(self, *a, **k), *args, use_reentrant=False, **options, **kwargs)
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        return checkpoint(RecomputableForward(self, forward), *args, use_reentrant=False, **options, **kwargs)

    return run


_is_checkpointed = ContextVar("_is_checkpointed", default=False)


@contextmanager
def checkpointed_blocks() -> Iterator[None]:
    """Around an F that the schedule marks: blocks of `choose_forward` are checkpointed."""
    token = _is_checkpointed.set(True)
    try:
        yield
    finally:
        _is_checkpointed.reset(token)


def choose_forward(plain: Callable[..., Any], checkpointed: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward that is one of two: the second within `checkpointed_blocks`."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (checkpointed if _is_checkpointed.get() else plain)(self, *args, **kwargs)

    return run


def _selective_contexts() -> Any:
    return torch_autograd.selective_contexts(_policy)


# operators whose results are kept, by name: a module of the engine that nobody has imported has not defined its own
_EXPENSIVE = frozenset([
    *(f"aten::{name}" for name in (
        "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
    )),
    *(f"zeropipe::{name}" for name in (  # products, and what other processes sent in exchanges or turns
        "grouped_linear", "float8_linear", "exchange", "exchange_counts", "reduce", "gather", "sum_scatter",
        "exchange_even",
    )),
])  # fmt: skip


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_expensive(op) else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _is_expensive(op: Any) -> bool:
    return op.name() in _EXPENSIVE or op in torch_attention.OPERATORS
