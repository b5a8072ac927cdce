"""What a user calls a model: its config, dtype and weights."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeropipe.engine.stages.adapters import CONFIG as ADAPTER
from zeropipe.engine.stages.adapters import Injected, adapter_in, base_of, open_adapter
from zeropipe.engine.stages.directory import DirectorySource
from zeropipe.engine.stages.families import Family
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.memory import ModelSource, unwrapped
from zeropipe.engine.stages.models import decoder_config, meta_model
from zeropipe.engine.stages.proof import family_of
from zeropipe.engine.stages.weights import SeedSource, Source
from zeropipe.engine.stages.whole import Whole, tensors_of
from zeropipe.engine.transformers_private import classifier_name
from zeropipe.errors import ConfigError, MissingExtra, first_line


@dataclass(frozen=True)
class Model:
    """A model that can be cut: nothing of it has memory but what its source holds."""

    config: Any
    family: Family
    dtype: torch.dtype
    head: str
    source: Source
    adapter: Injected | None
    seed: int

    def stage(self, cut: tuple[range, ...], stage: int, device: torch.device | str) -> HFStage:
        """One stage, with memory and weights."""
        built = HFStage(meta_model(self.config, self.dtype), self.family, cut, stage, self.head)
        for name, tensor in tensors_of(built).items():
            tensor.data = tensor.data.to(self.source.dtype_of(built.full_name(name), tensor.dtype))
        built.to_empty(device=device)
        self.source.fill(built)
        built.tie()
        return built.train()

    def adapt(self, stage: HFStage, device: torch.device | str) -> None:
        """Give a stage its part of the adapter, after its ties are made."""
        if self.adapter is not None:
            self.adapter.attach(stage, device, self.seed)


def open_model(model: Any, dtype: torch.dtype | None, head: str, seed: int, adapter: Any = None) -> Model:
    """A directory, a config or a model in memory, checked: ConfigError unless it holds a whole model."""
    if head not in ("lm", "score"):
        raise ConfigError(
            f"head={head!r}: give 'lm' (logits) or 'score' (a number per token, or a classifier's labels)"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ConfigError(f"dtype={dtype!r}: give torch.float32, torch.bfloat16, torch.float16 or torch.float64")
    if isinstance(model, str | os.PathLike) and (Path(model) / ADAPTER).exists():
        if adapter is not None:
            raise ConfigError(f"{model} is an adapter: give it as adapter=, and the model that it belongs to")
        model, adapter = base_of(Path(model)), model
    config, dtype, source = _parts(model, dtype, seed)
    kept = adapter_in(unwrapped(model)) if isinstance(model, nn.Module) else None
    if kept is not None and adapter is not None:
        raise ConfigError("the model in memory has an adapter: give it without adapter=")
    if head == "score" and not _is_classifier(model, config):
        config.num_labels = 1  # a config has two by itself
    whole = Whole(meta_model(config, dtype), head)
    # Ties are found in the weights; the config then says the same, also where it is saved.
    tied = source.prepare(whole)
    config.tie_word_embeddings = tied if head == "lm" else config.tie_word_embeddings
    found = open_adapter(adapter) if adapter is not None else kept
    return Model(config, family_of(whole.model), dtype, head, source, found and Injected(whole, found), seed)


def _is_classifier(model: Any, config: Any) -> bool:
    """Whether a model has a score head already: its labels stay."""
    names = [type(unwrapped(model)).__name__] if isinstance(model, nn.Module) else config.architectures or ()
    return classifier_name(config) in names


def _parts(model: Any, dtype: torch.dtype | None, seed: int) -> tuple[Any, torch.dtype, Source]:
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        if getattr(model.config, "quantization_config", None) is not None:
            raise ConfigError(f"the {type(model).__name__} in memory is quantised: give it dequantised")
        own = next(model.parameters()).dtype
        return decoder_config(model.config), dtype or own, ModelSource(model, dtype, seed)
    if isinstance(model, str | os.PathLike):
        given = read_config(Path(model))
        quantization = _without_quantization(given)
        config = decoder_config(given)
        dtype = dtype or config.dtype or torch.float32
        return config, dtype, DirectorySource(Path(model), quantization, dtype, seed, given)
    if not hasattr(model, "model_type"):
        raise ConfigError(
            f"{model!r} is no model: give a directory with a config.json, a transformers config or a model in memory"
        )
    config = copy.deepcopy(model)
    _without_quantization(config)  # random weights are not quantised
    config = decoder_config(config)
    return config, dtype or config.dtype or torch.float32, SeedSource(seed)


def read_config(directory: Path) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtra("transformers", "engine") from None
    if not (directory / "config.json").exists():
        raise ConfigError(
            f"{directory} is no model directory: it has no config.json; a model of the Hub must be downloaded first "
            f"(hf download {directory})"
        )
    try:
        return AutoConfig.from_pretrained(directory)
    except Exception as error:  # whatever transformers finds wrong with it
        raise ConfigError(f"cannot read {directory / 'config.json'}: {first_line(error)}") from None


def _without_quantization(config: Any) -> dict[str, Any] | None:
    """Take the quantisation out of a config: what is trained, and saved, is not quantised."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    del config.quantization_config
    return found if isinstance(found, dict) else found.to_dict()
