"""What the engine asks of a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from zeropipe.errors import ConfigError

Microbatch = Mapping[str, Any]
Pick = Callable[[Microbatch], tuple[tuple[Any, ...], dict[str, Any]]]


def picker(stage: nn.Module, index: int) -> Pick:
    """How a stage takes its own part of a microbatch."""
    pick = getattr(stage, "pick", None)
    if pick is not None:
        return lambda microbatch: ((), dict(pick(microbatch)))
    if index > 0:
        return lambda microbatch: ((), {})
    return _first_inputs


def inputs_of(microbatch: Microbatch) -> Any:
    """What a model without a pick() starts from."""
    if "inputs" not in microbatch:
        raise ConfigError(f"a microbatch has {sorted(microbatch)}: it needs 'inputs', or the first stage a pick()")
    return microbatch["inputs"]


def _first_inputs(microbatch: Microbatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = inputs_of(microbatch)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}
