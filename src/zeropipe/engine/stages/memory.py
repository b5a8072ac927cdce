"""Weights that come from a model in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.adapters import is_adapters, plain
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.weights import compute_buffers, seed_modules
from zeropipe.engine.stages.whole import (
    SCORE,
    Whole,
    computed,
    listed,
    put,
    require_fit,
    tensors_of,
    unwrapped_name,
)
from zeropipe.engine.transformers_private import text_names
from zeropipe.errors import ConfigError


class ModelSource:
    """Copies from a whole model in memory; what is frozen there stays frozen."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, seed: int) -> None:
        self._model = model
        self._name = f"the {type(model).__name__} in memory"
        self._tensors = {_plain(name): t for name, t in tensors_of(model).items() if not is_adapters(name)}
        self._computed = {_plain(name) for name in computed(model)}
        self._keep_dtype, self._seed = dtype is None, seed

    def prepare(self, whole: Whole) -> bool:
        if type(self._model.config) is type(whole.model.config):
            self._add_prefix(f"{whole.model.base_model_prefix}.", whole.tensors)
        else:  # the text part of a model of several kinds of input
            names = text_names(self._model, whole.model)
            self._tensors = {names[name]: tensor for name, tensor in self._tensors.items() if name in names}
            self._computed = {names[name] for name in self._computed if name in names}
        head, embedding = (self._tensors.get(name) for name in whole.ends)
        # Whatever the config says, two tensors are trained apart, and one is one. A model without head has its config.
        tied = whole.head == "lm" and (whole.tie is not None if head is None else head is embedding)
        self._require_names(whole, spare=set(whole.ends[:1]) if tied else set())
        for name, other in whole.ties.items():
            if {name, other} != set(whole.ends) and self._tensors.get(name) is not self._tensors.get(other):
                raise ConfigError(f"{name} and {other} of {self._name} are two tensors: its config makes them one")
        for name, tensor in self._tensors.items():
            if tensor.is_meta:
                raise ConfigError(f"{name} of {self._name} has no values (it is on the meta device): load the model")
            if hasattr(tensor, "full_tensor"):
                raise ConfigError(f"{name} of {self._name} is sharded: give a model that is whole on this rank")
            if name in whole.tensors and name not in self._computed:
                require_fit(name, whole.tensors[name], tensor.shape, tensor.dtype, self._name)
        return tied

    def _require_names(self, whole: Whole, spare: set[str]) -> None:
        if missing := whole.stored - self._tensors.keys() - spare:
            way_out = whole.way_out(missing)
            raise ConfigError(f"{self._name} has no {listed(missing)}, which its config asks for: {way_out}")
        known = tensors_of(whole.model).keys() | whole.tensors.keys()
        if unused := self._tensors.keys() - self._computed - known:
            raise ConfigError(
                f"{self._name} has {listed(unused)}, which no stage would use: give a plain model of its config"
            )

    def _add_prefix(self, prefix: str, known: Mapping[str, Tensor]) -> None:
        """A model without its head has names without its first word."""
        if not any(name.startswith(prefix) or name in known for name in self._tensors):
            self._tensors = {prefix + name: tensor for name, tensor in self._tensors.items()}
            self._computed = {prefix + name for name in self._computed}

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return self._tensors[name].dtype if self._keep_dtype and name in self._tensors else dtype

    def fill(self, stage: HFStage) -> None:
        compute_buffers(stage, self._seed)
        for name, tensor in tensors_of(stage).items():
            full = stage.full_name(name)
            if full in self._tensors:
                put(full, tensor, self._tensors[full], self._name)
                tensor.requires_grad_(self._tensors[full].requires_grad)
            elif full == SCORE:
                seed_modules(stage, {name.rpartition(".")[0]}, self._seed)


def _plain(name: str) -> str:
    """A tensor's name in a model without wrappers and adapters."""
    return plain(unwrapped_name(name))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile, data parallelism and peft."""
    while (inner := _inner(model)) is not None:
        model = inner
    if not hasattr(getattr(model, "config", None), "model_type"):
        raise ConfigError(f"a {type(model).__name__} is no Hugging Face model: cut it with module_stages")
    return model


def _inner(model: nn.Module) -> Any:
    """What a wrapper wraps; None for a model."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return model.module
    if type(model).__module__.startswith("peft."):
        if not type(model.base_model).__module__.startswith("peft."):
            raise ConfigError(f"a {type(model).__name__} with {_kind(model)}: only LoRA adapters are kept")
        return model.base_model.model
    return getattr(model, "_orig_mod", None)


def _kind(model: Any) -> str:
    return ", ".join(str(getattr(c.peft_type, "value", c.peft_type)) for c in model.peft_config.values())
