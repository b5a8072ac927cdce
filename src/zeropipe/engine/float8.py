"""Which layers of a stage compute in float8, and how long their weights in float8 are kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine.backward.linear import Deferred, defer_layer
from zeropipe.engine.blocks.compiling import warn_once
from zeropipe.engine.stages.adapters import is_adapter_name
from zeropipe.engine.stages.contract import StageInfo
from zeropipe.engine.torch_private.autograd import has_grad_hooks
from zeropipe.engine.torch_private.float8 import MULTIPLE, explain_device, has_right_products
from zeropipe.errors import ConfigError

_OF_EXPERTS = re.compile(r"(^|\.)(experts|router|gate|\w+_gate)(\.|$)")  # names of layers that stay as they are
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_UNTESTED = ("tp", "cp", "ep")


def require_float8(
    mode: str, schedule: Schedule, sizes: Mapping[str, int], infos: Iterable[StageInfo], device: torch.device
) -> None:
    """ConfigError for what float8 does not run with; `sizes` are those of the mesh."""
    if mode == "none":
        return
    for name in _UNTESTED:
        if sizes.get(name, 1) > 1:
            raise ConfigError(f"float8={mode!r} does not run with {name}={sizes[name]}; leave out one of them")
    if schedule.num_slices > 1:
        raise ConfigError(f"float8={mode!r} does not run with {schedule.num_slices} slices; leave out one of them")
    reason = explain_device(device)
    if reason is not None:
        raise ConfigError(f"float8={mode!r}: {reason}; or leave out float8")
    if not has_right_products(device, mode == "row"):
        raise ConfigError(
            f"float8={mode!r}: products on {device} differ from those of the same numbers in float32; leave out float8"
        )
    if device.type == "cpu":
        warn_once("float8 on a CPU: numbers are rounded to float8, and their products are computed in float32")
    for info in infos:
        if info.build_weights is not None:
            raise ConfigError(f"float8={mode!r}: stage {info.number} has a dw_builder; leave out one of them")
        if info.blocks is None:
            raise ConfigError(f"float8={mode!r}: stage {info.number} names no blocks; use module_stages()")


def set_float8(info: StageInfo, mode: str) -> None:
    """Let the linear layers of a stage's blocks compute in float8 ("tensor" or "row"), or not ("none").

    Layers whose sizes are not multiples of 16, experts with their routers and gates, and adapters stay as they are.
    """
    for layer in info.module.modules():
        if isinstance(layer, Deferred):
            layer.float8 = "none"
    if mode == "none":
        return
    assert info.blocks is not None
    layers = [layer for block in info.blocks for name, layer in block.named_modules() if _can_convert(name, layer)]
    for layer in layers:
        layer.float8 = mode
    if info.blocks and not layers:
        raise ConfigError(
            f"float8={mode!r}: stage {info.number} has no linear layer in its blocks whose sizes are multiples of "
            f"{MULTIPLE}; leave out float8"
        )


def _can_convert(name: str, layer: Any) -> bool:
    """Whether a layer of a block computes in float8; it is one that can leave its weight gradient to W then."""
    weight = layer._parameters.get("weight")
    if _OF_EXPERTS.search(name) or is_adapter_name(f".{name}.weight") or weight is None or weight.dim() != 2:
        return False
    if any(size == 0 or size % MULTIPLE for size in weight.shape) or not weight.is_floating_point():
        return False
    if isinstance(layer, nn.Linear) and has_grad_hooks(weight):
        raise ConfigError(
            f"float8: {name}.weight has hooks on its gradient, which does not pass through autograd; remove them, or "
            "leave out float8"
        )
    if not defer_layer(layer):
        return False
    if weight.dtype not in _DTYPES:
        raise ConfigError(
            f"float8: {name}.weight is {str(weight.dtype).removeprefix('torch.')}, it must be bfloat16, float16 or "
            "float32; load the model in one of them, or leave out float8"
        )
    return True


@contextmanager
def keep_copies(layers: Iterable[Any]) -> Iterator[None]:
    """Context manager: convert each weight to float8 once, not in every F and I; weights must not change inside."""
    own = [layer for layer in layers if getattr(layer, "float8", "none") != "none"]
    for layer in own:
        layer.copies = {}
    try:
        yield
    finally:
        for layer in own:
            layer.copies = None
