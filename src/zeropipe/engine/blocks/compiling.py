"""Compiles transformer blocks, each as one graph, or around attention; blocks of one class share it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.engine.backward.experts import find_divided
from zeropipe.engine.backward.turns import taken_in_graphs
from zeropipe.engine.blocks.checkpointing import add_checkpointing, choose_forward
from zeropipe.engine.torch_private import compile as torch_compile
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.engine.torch_private.compile import checked_backend, inductor_backend, is_compile_error
from zeropipe.errors import ConfigError, first_line

BY_SCHEDULE = "by schedule"  # the mode of a block with two forwards
MAX_REASON_LENGTH = 200  # characters of a compiler error


def prepare_blocks(stage: nn.Module, *, compile: bool = False, ac: str = "none", backend: Any = None) -> nn.Module:
    """Switch activation checkpointing and compilation of a stage's blocks on or off, in place.

    `ac` is documented at `Checkpointing`. `backend` is for tests (default: inductor).
    """
    set_blocks(stage.blocks, stage.layers.start, compile=compile, ac=ac, backend=backend)
    return stage


def set_blocks(
    blocks: Iterable[nn.Module], first: int, *, compile: bool = False, ac: str = "none", backend: Any = None,
    by_schedule: bool = False, turns: bool = False, graph_breaks: bool = False,
) -> None:  # fmt: skip
    """`prepare_blocks` for some blocks; `first` is the index of the first one in the full model.

    `by_schedule`: a block is checkpointed, in full, in the F that the schedule marks: within `checkpointed_blocks`.
    `turns`: forward and backward take turns at the collectives of compiled blocks, too. `graph_breaks`:
    blocks call attention that cannot be compiled, so each is several graphs.
    """
    checkpointing = Checkpointing.parse(ac)
    if checkpointing.mode == "budget" and not compile:
        warn_once(
            f"ac={ac!r} has no effect without compile=True, whose partitioner keeps the budget; using selective:op"
        )
        checkpointing = Checkpointing.parse("selective:op")
    if compile and graph_breaks and checkpointing.mode == "op":
        raise ConfigError(
            f"ac={ac!r} with compile=True: blocks that attend in slices, or round a ring, are several graphs, whose "
            "operators cannot be selected; use 'full', 'selective:2' or 'none', or leave out compile"
        )
    for index, block in enumerate(blocks):
        if compile and getattr(block, "gathers", False) and not torch_compile.COMPILES_GATHERED:
            raise ConfigError(
                f"compile=True with sequence_parallel: torch {torch.__version__} computes invalid gradients of a "
                f"compiled {type(block).__name__}; leave out one of them, or use torch 2.13"
            )
        exchanges = bool(find_divided(block))
        if compile and exchanges and checkpointing.mode == "budget":
            raise ConfigError(
                f"ac={ac!r} with experts divided over ep: the compiler may recompute exchanges, in another order on "
                "each process; use selective:op"
            )
        mode = BY_SCHEDULE if by_schedule else checkpointing.of_layer(first + index)
        block_class = getattr(type(block), "plain_class", type(block))
        block.__class__ = (
            _variant(block_class, mode, checkpointing.budget, compile, exchanges, turns, graph_breaks, backend)
            if compile or mode != "none"
            else block_class
        )


@functools.cache
def _variant(
    block_class: type[nn.Module], mode: str, budget: float | None, compile: bool, exchanges: bool, turns: bool,
    graph_breaks: bool, backend: Any = None,
) -> type:  # fmt: skip
    """A subclass with another forward: one per class of blocks, because a compiled graph belongs to its code.

    A block that exchanges rows or takes turns is recomputed by its forward graph: in a backward graph the compiler
    could put the recomputed exchanges before or after those of gradients, and all processes must have one order. So
    is a block with graph breaks, as a checkpoint inside of a graph cannot contain one.
    """

    def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
        name = block_class.__name__
        return compile_function(forward, name, backend, budget, turns, graph_breaks) if compile else forward

    plain = compiled(block_class.forward) if mode in ("none", BY_SCHEDULE) else None
    forward = plain
    if mode != "none":
        wrapped = "full" if mode == BY_SCHEDULE else mode
        is_checkpoint_outside = exchanges or turns or graph_breaks
        if compile and wrapped == "full" and (is_checkpoint_outside or not torch_compile.MARKS_REACH_FUNCTIONS):
            torch_tensors.init_gpu()  # inside a checkpoint the compiler must not initialize it
            forward = add_checkpointing(plain or compiled(block_class.forward), wrapped)
        else:
            forward = compiled(add_checkpointing(block_class.forward, wrapped))
        if plain is not None:
            forward = choose_forward(plain, forward)
    return type(
        block_class.__name__,
        (block_class,),
        {"forward": forward, "__module__": block_class.__module__, "plain_class": block_class},
    )


def compile_function(
    function: Callable[..., Any], name: str, backend: Any = None, budget: float | None = None, turns: bool = False,
    graph_breaks: bool = False,
) -> Any:  # fmt: skip
    """Compile a function as one graph; one that cannot be compiled runs as it is, with a warning.

    `graph_breaks`: as several graphs, between calls that are not compiled.
    """
    compiled = torch.compile(
        function, fullgraph=not graph_breaks, backend=checked_backend(backend or inductor_backend(budget))
    )
    has_failed = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_failed
        if not has_failed:
            try:
                with taken_in_graphs(turns):
                    return compiled(*args, **kwargs)
            except Exception as error:
                if not is_compile_error(error):
                    raise
                reason = first_line(error)
                warn_once(f"{name} cannot be compiled as one graph and runs uncompiled: {reason[:MAX_REASON_LENGTH]}")
                has_failed = True
        return function(*args, **kwargs)

    return run


@functools.cache
def warn_once(text: str) -> None:
    """Warn about an option that cannot be used, once per text."""
    warnings.warn(text, stacklevel=3)
