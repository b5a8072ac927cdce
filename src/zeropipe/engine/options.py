"""The options of an Engine."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

from zeropipe.core.gradient_policy import GradientPolicy
from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.slices import parse_shares
from zeropipe.errors import ConfigError, short

SPLITS = ("store", "whole")
SHAPES = ("auto", "dynamic")
FLOAT8 = ("none", "tensor", "row")
OVERLAPS = ("streams", "turns")
MAX_TIMEOUT_S = 10**7  # four months


def require_switch(name: str, value: object) -> None:
    """ConfigError unless a value is True or False: a text like "no" would count as True."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ConfigError(f"{name}={short(value)}: must be True or False")


@dataclass(frozen=True)
class Options:
    """The options of an Engine. They must be the same on every rank, which is checked at set-up.

    `compile`: compile each block as one graph. `ac`: activation checkpointing of blocks, "none", "full", "selective:N",
    "selective:op" or "memory_budget:X"; "none" for a schedule that says which F are checkpointed.
    `split`: how I and W share the backward: "store", or "whole" (all of it in I).
    `direct_gradients`: full backwards, too, add the weight gradients of linear layers straight to `.grad`. That saves
    a tensor of the weight's size each time; autograd hooks on these weights do not fire.
    `fused_head`: the last stage of a Hugging Face model computes the losses of CausalLMLoss and LogProbabilities in
    chunks of tokens, so that logits are never whole in memory. That is verified on a small copy of the model; one whose
    losses would differ keeps its logits whole, with a warning.
    `float8`: linear layers of blocks compute F, I and W in float8, with a scale for each "tensor" or each "row".
    `dynamic_weights`: a rank that would wait for a message runs pending weight gradients, one product at a time, until
    it has arrived. The schedule's order stays the plan, and gradients stay the same.
    `overlap`: how F and B of an Overlap run together: on two "streams" of a GPU (on a CPU in order), or in "turns":
    at every exchange of one of them, of experts or of tensor parallelism, the other one computes, in one order on all
    processes. Weight gradients fill the rest.
    `recv_ahead`: how many receives an edge posts before their data is needed. With 0, and always on NCCL, a receive is
    posted at its own action in the Program.
    `shapes`: "auto" sends shapes when a microbatch has new ones, "dynamic" with every message, for stages whose output
    shapes depend on values.
    `regather`: gather the weights of sharded stages again for every microbatch instead of once per step: less memory,
    more messages.
    `gradients`: those of sharded stages are "whole" until the last microbatch, or "rolling": reduced after every one
    and kept as shards, a unit at a time: less memory, more messages. With "rolling:N" those of N stages are whole.
    `check_finite`: stop at the first action that computes a NaN or an infinity.
    `check_equal`: at every step, compare microbatches and the weights of mirrored and tied stages between ranks. It
    reads all of them, so it is for debugging.
    `slice_sizes`: in a schedule with slices, the tokens of each, or numbers in their ratio; equal by default.
    `timeout`: seconds that a rank waits for another one that makes no progress, before all of them stop.
    """

    compile: bool = False
    ac: str = "none"
    split: str = "store"
    direct_gradients: bool = False
    fused_head: bool = True
    float8: str = "none"
    dynamic_weights: bool = False
    overlap: str = "streams"
    recv_ahead: int = 2
    shapes: str = "auto"
    regather: bool = False
    gradients: str = "whole"
    check_finite: bool = False
    check_equal: bool = False
    slice_sizes: tuple[float, ...] | None = None
    timeout: float = 600.0

    @staticmethod
    def of(arguments: dict[str, Any]) -> Options:
        """From keyword arguments; the error for an unknown name suggests the nearest known one."""
        names = [field.name for field in fields(Options)]
        for name in arguments:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
                raise ConfigError(f"Engine has no option {name}={arguments[name]!r}: {hint}")
        options = Options(**arguments)
        options.check_each()
        return options

    def check_each(self) -> None:
        """ConfigError for a value that is invalid by itself: checked before ranks communicate."""
        for field in fields(Options):
            if field.type == "bool":
                require_switch(field.name, getattr(self, field.name))
        if type(self.recv_ahead) is not int or self.recv_ahead < 0:
            raise ConfigError(f"recv_ahead={short(self.recv_ahead)}: must be a non-negative integer")
        if not isinstance(self.timeout, int | float) or not 0 < self.timeout <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout={short(self.timeout)}: must be a number of seconds above 0, at most {MAX_TIMEOUT_S:,}"
            )

    def check(self) -> None:
        """ConfigError for an invalid value or combination."""
        self.check_each()
        Checkpointing.parse(self.ac)
        if self.split not in SPLITS:
            raise ConfigError(f"split={self.split!r}: must be {' or '.join(map(repr, SPLITS))}")
        if self.float8 not in FLOAT8:
            raise ConfigError(f"float8={short(self.float8)}: must be 'none', 'tensor' or 'row'")
        if self.dynamic_weights and self.split != "store":
            raise ConfigError(
                f"dynamic_weights=True cannot run split={self.split!r}, whose W cannot run in parts; use split='store'"
            )
        if self.dynamic_weights and self.shapes == "dynamic":
            raise ConfigError(
                "dynamic_weights=True cannot run shapes='dynamic': whether a message has arrived is not known before "
                "its shapes are; use shapes='auto'"
            )
        if GradientPolicy.parse(self.gradients).is_rolling and self.dynamic_weights:
            raise ConfigError(
                f"dynamic_weights=True cannot run gradients={self.gradients!r}: a W that runs early has whole "
                "gradients until its own position; leave out one of them"
            )
        if self.shapes not in SHAPES:
            raise ConfigError(f"shapes={self.shapes!r}: must be {' or '.join(map(repr, SHAPES))}")
        if self.overlap not in OVERLAPS:
            raise ConfigError(f"overlap={self.overlap!r}: must be {' or '.join(map(repr, OVERLAPS))}")
        if self.overlap == "turns" and self.regather:
            raise ConfigError(
                "overlap='turns' cannot run regather=True: F and B would gather weights in between each other; leave "
                "out one of them"
            )

    def shares(self, num_slices: int) -> tuple[float, ...]:
        """The share of each slice of a sequence; ConfigError unless `slice_sizes` has one for each."""
        return parse_shares(self.slice_sizes, num_slices)

    @property
    def changes_blocks(self) -> bool:
        """Whether the blocks of a stage are compiled or checkpointed."""
        return self.compile or self.ac != "none"
