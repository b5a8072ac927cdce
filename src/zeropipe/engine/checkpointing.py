"""Activation checkpointing of transformer blocks: what is kept from F to I, and what I computes again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zeropipe.errors import ConfigError

_RULE = "give none, full, selective:N, selective:op or memory_budget:X with X from 0 to 1"


@dataclass(frozen=True)
class Checkpointing:
    """Which blocks are checkpointed and how.

    | text | kept from F to I |
    |---|---|
    | `none` | everything |
    | `full` | each block's input |
    | `selective:N` | everything, but only the input of every Nth block of the model |
    | `selective:op` | the results of matrix products and attention; the cheap rest is computed again |
    | `memory_budget:X` | what the compiler chooses within the share X of everything |
    """

    mode: str = "none"
    every: int = 1
    budget: float | None = None

    @staticmethod
    def parse(text: str) -> Checkpointing:
        """From its text form."""
        mode, _, option = text.partition(":")
        if text in ("none", "full"):
            return Checkpointing(mode)
        if text == "selective:op":
            return Checkpointing("op")
        if mode == "selective" and option.isdecimal() and int(option) > 0:
            return Checkpointing("full", every=int(option))
        if mode == "memory_budget" and option.replace(".", "", 1).isdecimal() and 0 <= float(option) <= 1:
            return Checkpointing("budget", budget=float(option))
        raise ConfigError(f"activation checkpointing {text!r}: {_RULE}")

    def of_layer(self, layer: int) -> str:
        """How layer number `layer` of the whole model is wrapped: `none`, `full` or `op`."""
        if self.mode == "full":
            return "full" if layer % self.every == 0 else "none"
        return "op" if self.mode == "op" else "none"


def checkpointed(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """A block's forward, run again in I as far as `mode` says."""
    if mode == "none":
        return forward
    options = {"context_fn": _selective_contexts} if mode == "op" else {}

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *a, **k: forward(self, *a, **k), *args, use_reentrant=False, **options, **kwargs)

    return run


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


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
    return frozenset([*found, torch.ops.zeropipe.grouped.default])
