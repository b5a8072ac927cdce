"""Weights of a model in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropipe.engine.stages.adapters import is_adapter_name, strip_adapter
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.skeleton import (
    SCORE_WEIGHT,
    ModelSkeleton,
    computed_buffers,
    copy_into,
    format_names,
    named_tensors,
    require_match,
    strip_wrappers,
)
from zeropipe.engine.stages.weights import compute_buffers, initialize_modules
from zeropipe.engine.transformers_private import text_model_names
from zeropipe.errors import ConfigError


class ModelSource:
    """Copies weights from a full model in memory; parameters that are frozen there stay frozen."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, seed: int) -> None:
        self._model = model
        self._name = f"the {type(model).__name__} in memory"
        self._tensors = {_plain_name(n): t for n, t in named_tensors(model).items() if not is_adapter_name(n)}
        self._computed = {_plain_name(name) for name in computed_buffers(model)}
        self._keep_dtype, self._seed = dtype is None, seed

    def prepare(self, skeleton: ModelSkeleton) -> bool:
        if type(self._model.config) is type(skeleton.model.config):
            self._add_prefix(f"{skeleton.model.base_model_prefix}.", skeleton.tensors)
        else:  # the text part of a multimodal model
            names = text_model_names(self._model, skeleton.model)
            self._tensors = {names[name]: tensor for name, tensor in self._tensors.items() if name in names}
            self._computed = {names[name] for name in self._computed if name in names}
        head, embedding = (self._tensors.get(name) for name in skeleton.ends)
        # Tensors decide, whatever the config says; without a head the config does.
        tied = skeleton.head == "lm" and (skeleton.tied_ends is not None if head is None else head is embedding)
        self._require_names(skeleton, spare=set(skeleton.ends[:1]) if tied else set())
        for name, other in skeleton.ties.items():
            if {name, other} != set(skeleton.ends) and self._tensors.get(name) is not self._tensors.get(other):
                raise ConfigError(f"{name} and {other} of {self._name} are two tensors: must be one by its config")
        for name, tensor in self._tensors.items():
            if tensor.is_meta:
                raise ConfigError(
                    f"{name} of {self._name} is on the meta device: must have values; load the model first"
                )
            if isinstance(tensor, DTensor):
                raise ConfigError(f"{name} of {self._name} is sharded: must be a full tensor; pass an unsharded model")
            if name in skeleton.tensors and name not in self._computed:
                require_match(name, skeleton.tensors[name], tensor.shape, tensor.dtype, self._name)
        return tied

    def _require_names(self, skeleton: ModelSkeleton, spare: set[str]) -> None:
        if missing := skeleton.stored - self._tensors.keys() - spare:
            raise ConfigError(f"{self._name} has no {format_names(missing)}: {skeleton.hint(missing)}")
        known = named_tensors(skeleton.model).keys() | skeleton.tensors.keys()
        if unused := self._tensors.keys() - self._computed - known:
            raise ConfigError(
                f"{self._name} has {format_names(unused)}, which no stage would use; pass a model of its config"
            )

    def _add_prefix(self, prefix: str, known: Mapping[str, Tensor]) -> None:
        """Add the base model's prefix to the names of a model without a head."""
        if not any(name.startswith(prefix) or name in known for name in self._tensors):
            self._tensors = {prefix + name: tensor for name, tensor in self._tensors.items()}
            self._computed = {prefix + name for name in self._computed}

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return self._tensors[name].dtype if self._keep_dtype and name in self._tensors else dtype

    def fill(self, stage: HFStage) -> None:
        compute_buffers(stage, self._seed)
        for name, tensor in named_tensors(stage).items():
            full = stage.full_name(name)
            if full in self._tensors:
                copy_into(full, tensor, self._tensors[full], self._name)
                tensor.requires_grad_(self._tensors[full].requires_grad)
            elif full == SCORE_WEIGHT:
                initialize_modules(stage, {name.rpartition(".")[0]}, self._seed)


def _plain_name(name: str) -> str:
    """A tensor's name in a model without wrappers and adapters."""
    return strip_adapter(strip_wrappers(name))


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile, data parallelism and peft."""
    while (inner := _wrapped_model(model)) is not None:
        model = inner
    if not hasattr(getattr(model, "config", None), "model_type"):
        raise ConfigError(f"a {type(model).__name__} is not a Hugging Face model; cut it with module_stages")
    return model


def _wrapped_model(model: nn.Module) -> Any:
    """The model inside one wrapper; None if it has none."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return model.module
    if type(model).__module__.startswith("peft."):
        if not type(model.base_model).__module__.startswith("peft."):
            raise ConfigError(f"a {type(model).__name__} with {_adapter_types(model)}: must be a LoRA adapter")
        return model.base_model.model
    return getattr(model, "_orig_mod", None)


def _adapter_types(model: Any) -> str:
    return ", ".join(str(getattr(c.peft_type, "value", c.peft_type)) for c in model.peft_config.values())
