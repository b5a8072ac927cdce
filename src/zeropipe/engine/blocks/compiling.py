"""Compiles transformer blocks whole, one graph for all blocks of a kind."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.engine.blocks.checkpointing import checkpointed
from zeropipe.engine.torch_private import compile as torch_compile
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.engine.torch_private.compile import careful, inductor_backend, is_compile_error
from zeropipe.errors import ConfigError, first_line

_LONGEST = 200  # characters of what the compiler says


def prepare_blocks(stage: nn.Module, *, compile: bool = False, ac: str = "none", backend: Any = None) -> nn.Module:
    """Switch activation checkpointing and compilation of the blocks of a stage on, or off again, in place.

    `ac` is explained at `Checkpointing`. `backend` is for tests; inductor if not given.
    """
    set_blocks(stage.blocks, stage.layers.start, compile=compile, ac=ac, backend=backend)
    return stage


def set_blocks(
    blocks: Iterable[nn.Module], first: int, *, compile: bool = False, ac: str = "none", backend: Any = None
) -> None:
    """`prepare_blocks` for some blocks, of which the first has the number `first` in the whole model."""
    wish = Checkpointing.parse(ac)
    if wish.mode == "budget" and not compile:
        report(f"{ac} needs compile=True, whose partitioner keeps the budget: selective:op is used instead")
        wish = Checkpointing.parse("selective:op")
    for place, block in enumerate(blocks):
        if compile and getattr(block, "gathers", False) and not torch_compile.COMPILES_GATHERED:
            raise ConfigError(
                f"torch {torch.__version__} gets gradients of a compiled {type(block).__name__} wrong with "
                "sequence_parallel: leave compile or sequence_parallel out, or use torch 2.13"
            )
        mode, kind = wish.of_layer(first + place), getattr(type(block), "plain_kind", type(block))
        block.__class__ = _variant(kind, mode, wish.budget, compile, backend) if compile or mode != "none" else kind


@functools.cache
def _variant(kind: type[nn.Module], mode: str, budget: float | None, compile: bool, backend: Any = None) -> type:
    """A subclass with another forward. One per kind of block, not per block: a compiled graph belongs to its code."""
    outside = compile and mode == "full" and not torch_compile.MARKS_REACH_FUNCTIONS
    forward = kind.forward if outside else checkpointed(kind.forward, mode)
    if compile:
        forward = _compiled(forward, kind.__name__, budget, backend)
    if outside:
        torch_tensors.wake_gpu()  # a checkpoint refuses that the compiler does it inside
        forward = checkpointed(forward, mode)
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "plain_kind": kind})


def _compiled(forward: Callable[..., Any], name: str, budget: float | None, backend: Any = None) -> Callable[..., Any]:
    fast = torch.compile(forward, fullgraph=True, backend=careful(backend or inductor_backend(budget)))
    failed = False

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        if not failed:
            try:
                return fast(self, *args, **kwargs)
            except Exception as error:
                if not is_compile_error(error):
                    raise
                reason = first_line(error)
                report(f"{name} cannot be compiled whole and runs uncompiled: {reason[:_LONGEST]}")
                failed = True
        return forward(self, *args, **kwargs)

    return run


@functools.cache
def report(text: str) -> None:
    """Say once what could not be had, why, and what is done instead."""
    warnings.warn(text, stacklevel=3)
