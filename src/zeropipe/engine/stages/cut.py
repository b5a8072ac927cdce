"""Cuts a full model down to one of its stages, in place.

A stage is the part of the model's own forward between the calls of two layers: from the call of its first layer to the
call of the first layer of the next stage. What the model does before its layers (masks, rotary embeddings) is done on
every stage; the hidden states that it computes there are replaced by those that the previous stage sent. Each layer
keeps its index, so that whatever a model looks up by the index of a layer stays right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.transformers_private import skip_initialization
from zeropipe.errors import EngineError

# The position of a tensor in a call: ("args", 0), ("kwargs", "residual"), and on into tuples, lists and dicts.
ArgPath = tuple[Any, ...]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def find_tensors(args: Any, kwargs: Any) -> dict[ArgPath, Tensor]:
    """All tensors among the arguments of a call."""
    call = {"args": tuple(args), "kwargs": dict(kwargs)}
    return {path: value for path, value in _flatten((), call) if isinstance(value, Tensor)}


def _replace_tensors(args: Any, kwargs: Any, values: Mapping[ArgPath, Tensor]) -> Call:
    """The same call with other values at some paths."""
    call = _replace((), {"args": tuple(args), "kwargs": dict(kwargs)}, values)
    return call["args"], call["kwargs"]


def _flatten(path: ArgPath, value: Any) -> Iterator[tuple[ArgPath, Any]]:
    yield path, value
    for key, item in _items(value):
        yield from _flatten((*path, key), item)


def _replace(path: ArgPath, value: Any, values: Mapping[ArgPath, Tensor]) -> Any:
    if path in values:
        return values[path]
    if not any(other[: len(path)] == path for other in values):
        return value
    if isinstance(value, dict):
        return {key: _replace((*path, key), item, values) for key, item in value.items()}
    return type(value)(_replace((*path, key), item, values) for key, item in _items(value))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if type(value) is dict:
        yield from value.items()
    elif type(value) in (tuple, list):
        yield from enumerate(value)


class StageEnd(Exception):
    """Raised where a stage ends, to leave the model's forward; `values` go to the next stage."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__("the end of a stage")
        self.values = tuple(values)


class StageStart:
    """Replaces the arguments of a stage's first layer by the tensors that the previous stage sent."""

    def __init__(self, paths: Sequence[ArgPath]) -> None:
        self._paths = paths
        self.received: Sequence[Tensor] | None = None
        self._shared: list[tuple[Tensor, Tensor]] = []  # (computed here, received) of arguments after the first

    def clear(self) -> None:
        self.received, self._shared = None, []

    def enter(self, layer: nn.Module, args: Any, kwargs: Any) -> Call:
        """Forward pre-hook of the stage's first layer."""
        if self.received is None:
            raise EngineError(
                f"{type(layer).__name__} runs outside the forward of its stage: use Engine(ac=...) instead of the "
                "model's own activation checkpointing"
            )
        computed = find_tensors(args, kwargs)
        pairs = list(zip(self._paths, self.received))
        self._shared = [(computed[path], value) for path, value in pairs[1:] if path in computed]
        return _replace_tensors(args, kwargs, dict(pairs))

    def follow(self, layer: nn.Module, args: Any, kwargs: Any) -> Call | None:
        """Forward pre-hook of the later layers, for tensors that the model passes to all its layers."""
        if not self._shared:
            return None
        values = {
            path: value
            for path, tensor in find_tensors(args, kwargs).items()
            for computed, value in self._shared
            if tensor is computed
        }
        return _replace_tensors(args, kwargs, values) if values else None


class Placeholder(nn.Module):
    """Stands for a layer of another stage: it has the attributes that a model reads from its layers, and no weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        classes = type(layer).__mro__[: type(layer).__mro__.index(nn.Module)]
        constants = {
            name: getattr(layer, name) for kind in classes for name, value in vars(kind).items() if _is_plain(value)
        }
        for name, value in (constants | vars(layer)).items():
            if not name.startswith("_") and not isinstance(value, Tensor | nn.Module):
                setattr(self, name, value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | tuple)


class SkippedLayer(Placeholder):
    """Returns its hidden states, in a tuple as long as the one that the layer returns.

    With `start` it returns the hidden states received: for a last stage without layers.
    """

    def __init__(
        self, layer: nn.Module, path: ArgPath, output_length: int | None, start: StageStart | None = None
    ) -> None:
        super().__init__(layer)
        self.path, self.output_length, self.start = path, output_length, start

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if self.path == ("args", 0) else find_tensors(args, kwargs)[self.path]
        if self.start is not None and self.start.received is not None:
            hidden = self.start.received[0]
        return hidden if self.output_length is None else (hidden, *[None] * (self.output_length - 1))


class NextStage(Placeholder):
    """Stands for the first layer of the next stage: its arguments are what this stage returns."""

    def __init__(self, layer: nn.Module, paths: Sequence[ArgPath]) -> None:
        super().__init__(layer)
        self.paths = paths

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = find_tensors(args, kwargs)
        raise StageEnd([tensors[path] for path in self.paths])


def _end_after(layer: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the model's last layer, where norm and head are a stage of their own."""
    raise StageEnd([output if isinstance(output, Tensor) else output[0]])


def cut_layers(
    layers: nn.ModuleList,
    kept: range,
    start: StageStart,
    *,
    carried: Sequence[ArgPath],
    output_length: int | None,
    is_first: bool,
    is_last: bool,
) -> None:
    """Replace all layers but `kept`; the model's forward then runs from the first of them to the end of the last."""
    total = len(layers)
    for index in range(total):
        if index in kept:
            continue
        if index == kept.stop:
            layers[index] = NextStage(layers[index], carried)
        else:
            returns_received = index == total - 1 and kept.start == total
            layers[index] = SkippedLayer(layers[index], carried[0], output_length, start if returns_received else None)
    if not is_first and kept.start < total:
        layers[kept.start].register_forward_pre_hook(start.enter, with_kwargs=True)
        for layer in layers[kept.start + 1 : kept.stop + 1]:
            layer.register_forward_pre_hook(start.follow, with_kwargs=True)
    if kept.stop == total and not is_last and kept:
        layers[total - 1].register_forward_hook(_end_after)


class ZeroWeights:
    """Weights of other stages that the model reads before it calls this stage's layers: zeros, expanded from one.

    What is computed with them is replaced at the first layer; only its shape and dtype matter.
    """

    def __init__(self) -> None:
        self._slots: list[tuple[nn.Module, str, torch.Size]] = []
        self._device_and_dtype: tuple[torch.device, torch.dtype] | None = None

    def replace(self, lm: nn.Module, name: str) -> None:
        """Replace a parameter of a model by zeros."""
        owner, _, leaf = name.rpartition(".")
        module = lm.get_submodule(owner)
        parameter = module._parameters.pop(leaf)
        self._slots.append((module, leaf, parameter.shape))
        self._fill(parameter.device, parameter.dtype, self._slots[-1:])
        self._device_and_dtype = None

    def match(self, tensor: Tensor) -> None:
        """Give the zeros the device and dtype of `tensor`."""
        if self._device_and_dtype != (tensor.device, tensor.dtype):
            self._fill(tensor.device, tensor.dtype, self._slots)
            self._device_and_dtype = (tensor.device, tensor.dtype)

    def _fill(self, device: torch.device, dtype: torch.dtype, slots: Sequence[tuple[nn.Module, str, Any]]) -> None:
        for module, leaf, shape in slots:
            zeros = torch.zeros((), device=device, dtype=dtype).expand(shape)
            setattr(module, leaf, skip_initialization(zeros))
