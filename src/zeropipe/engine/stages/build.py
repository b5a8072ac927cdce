"""Builds this rank's stages of a model: hf_stages for Hugging Face models, module_stages for lists of modules."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropipe.core.model.layers import layer_counts, layer_ranges, num_stages_for, require_layer_counts
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.engine.stages.adapters import CONFIG as ADAPTER_CONFIG
from zeropipe.engine.stages.adapters import AdaptedSkeleton, find_adapter, find_base_model, open_adapter
from zeropipe.engine.stages.devices import parse_device
from zeropipe.engine.stages.directory import DirectorySource
from zeropipe.engine.stages.families import Family
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.memory import ModelSource, unwrap_model
from zeropipe.engine.stages.packed_attention import PackedAttention, resolve_attention
from zeropipe.engine.stages.plain import PlainStage
from zeropipe.engine.stages.skeleton import ModelSkeleton, build_on_meta, find_decoder_config, named_tensors
from zeropipe.engine.stages.verify import find_family, find_packed_attention
from zeropipe.engine.stages.weights import RandomSource, WeightSource
from zeropipe.engine.transformers_private import FLASH, classifier_name, quiet
from zeropipe.errors import ConfigError, MissingExtra, first_line, short


def hf_stages(
    model: Any,
    schedule: Schedule,
    rank: int,
    *,
    layers: Sequence[int] | None = None,
    first_less: int = 0,
    last_less: int = 0,
    layers_per_stage: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    head: str = "lm",
    seed: int = 0,
    adapter: Any = None,
    attention: str = "auto",
) -> dict[int, HFStage]:
    """This rank's stages of a Hugging Face decoder model, by stage.

    `model` is a directory with a config and safetensors, a config (random weights from `seed`, the same for every
    cut), or a model in memory. Only this rank's layers are ever given memory. `layers` is the number of layers of each
    stage; by default they are distributed evenly, with `first_less` and `last_less` fewer on the two ends.

    `adapter` is a `peft.LoraConfig` for a new adapter, or the directory of a saved one; its rules are those of the full
    model. The adapter of a model in memory is kept.

    `attention` is how packed rows (`cu_seqlens`) attend: "sdpa" with a dense mask, "flex" (blocks of torch's
    flex_attention), "varlen" (torch's variable-length attention), "flash" (the package flash-attn), or "auto": on a GPU
    in 16 bits flex, or else varlen, else sdpa.
    """
    _require_rank(rank, schedule)
    attention = resolve_attention(attention, parse_device(device))
    with _warnings_on_first_rank(rank):
        opened = open_model(model, dtype, head, seed, adapter, attention)
    counts = _layer_counts(opened.family.num_layers, schedule, layers, first_less, last_less, layers_per_stage)
    cut, last = layer_ranges(counts), schedule.num_stages - 1
    stages = {stage: opened.build_stage(cut, stage, device) for stage in schedule.placement.stages_of(rank)}
    if last and any(stage.has_tied_ends for stage in stages.values()):
        _tie_ends(stages, last)
    for stage in stages.values():
        opened.attach_adapter(stage, device)
    return stages


@contextmanager
def _warnings_on_first_rank(rank: int) -> Iterator[None]:
    """Silence warnings about the full model on all ranks but the first, since they are the same."""
    if (dist.get_rank() if dist.is_initialized() else rank) == 0:
        yield
        return
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def hf_model(
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    head: str = "lm",
    seed: int = 0,
    adapter: Any = None,
) -> nn.Module:
    """The full model, with the weights that the stages of `hf_stages` have."""
    opened = open_model(model, dtype, head, seed, adapter)
    stage = opened.build_stage((range(opened.family.num_layers),), 0, device)
    opened.attach_adapter(stage, device)
    return stage.lm if head == "lm" else stage


@dataclass(frozen=True)
class Model:
    """A model to be cut: its config, family and source of weights. It has no memory of its own."""

    config: Any
    family: Family
    dtype: torch.dtype
    head: str
    source: WeightSource
    adapter: AdaptedSkeleton | None
    seed: int
    attention: PackedAttention | None = None

    def build_stage(self, cut: tuple[range, ...], stage: int, device: torch.device | str) -> HFStage:
        """One stage, with memory and weights."""
        lm = build_on_meta(self.config, self.dtype)
        built = HFStage(lm, self.family, cut, stage, self.head, self.attention)
        for name, tensor in named_tensors(built).items():
            tensor.data = tensor.data.to(self.source.dtype_of(built.full_name(name), tensor.dtype))
        built.to_empty(device=device)
        self.source.fill(built)
        built.tie()
        return built.train()

    def attach_adapter(self, stage: HFStage, device: torch.device | str) -> None:
        """Add the adapter to a stage, after its parameters are tied."""
        if self.adapter is not None:
            self.adapter.attach(stage, device, self.seed)


def open_model(
    model: Any,
    dtype: torch.dtype | None,
    head: str,
    seed: int,
    adapter: Any = None,
    attention: str = "sdpa",
) -> Model:
    """Open a directory, a config or a model in memory; ConfigError unless it has all tensors of its config."""
    if head not in ("lm", "score"):
        raise ConfigError(
            f"head={head!r}: must be 'lm' (logits) or 'score' (a number per token, or the labels of a classifier)"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ConfigError(f"dtype={dtype!r}: must be torch.float32, torch.bfloat16, torch.float16 or torch.float64")
    if isinstance(model, str | os.PathLike) and (Path(model) / ADAPTER_CONFIG).exists():
        if adapter is not None:
            raise ConfigError(f"{model} is an adapter: must be passed as adapter=, with its base model as the model")
        model, adapter = find_base_model(Path(model)), model
    config, dtype, source = _open_source(model, dtype, seed)
    if attention == "flash":
        config._attn_implementation = FLASH
    own_adapter = find_adapter(unwrap_model(model)) if isinstance(model, nn.Module) else None
    if own_adapter is not None and adapter is not None:
        raise ConfigError("adapter=: must be left out, because the model in memory has an adapter")
    if head == "score" and not _is_classifier(model, config):
        config.num_labels = 1  # the default of a config is 2
    skeleton = ModelSkeleton(build_on_meta(config, dtype), head)
    # Ties are found in the weights; the config that is used, and saved, follows them.
    is_tied = source.prepare(skeleton)
    config.tie_word_embeddings = is_tied if head == "lm" else config.tie_word_embeddings
    found = open_adapter(adapter) if adapter is not None else own_adapter
    adapted = found and AdaptedSkeleton(skeleton, found)
    family = find_family(skeleton.model)
    kernels = find_packed_attention(skeleton.model, family, attention)
    return Model(config, family, dtype, head, source, adapted, seed, kernels)


def _is_classifier(model: Any, config: Any) -> bool:
    """Whether a model has a score head already, whose number of labels stays."""
    names = [type(unwrap_model(model)).__name__] if isinstance(model, nn.Module) else config.architectures or ()
    return classifier_name(config) in names


def _open_source(model: Any, dtype: torch.dtype | None, seed: int) -> tuple[Any, torch.dtype, WeightSource]:
    if isinstance(model, nn.Module):
        model = unwrap_model(model)
        if getattr(model.config, "quantization_config", None) is not None:
            raise ConfigError(f"the {type(model).__name__} in memory is quantized; dequantize it first")
        own = next(model.parameters()).dtype
        return find_decoder_config(model.config), dtype or own, ModelSource(model, dtype, seed)
    if isinstance(model, str | os.PathLike):
        full_config = read_config(Path(model))
        quantization = _remove_quantization(full_config)
        config = find_decoder_config(full_config)
        dtype = dtype or config.dtype or torch.float32
        return config, dtype, DirectorySource(Path(model), quantization, dtype, seed, full_config)
    if not hasattr(model, "model_type"):
        raise ConfigError(
            f"model={short(model)}: must be a directory with a config.json, a transformers config or a model in memory"
        )
    config = copy.deepcopy(model)
    _remove_quantization(config)  # random weights are not quantized
    config = find_decoder_config(config)
    return config, dtype or config.dtype or torch.float32, RandomSource(seed)


def read_config(directory: Path) -> Any:
    """The config of a model directory; ConfigError if it cannot be read."""
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtra("transformers", "engine") from None
    if not (directory / "config.json").exists():
        raise ConfigError(
            f"{directory} is not a model directory: it has no config.json; download a model of the Hub first "
            f"(hf download {directory})"
        )
    try:
        return AutoConfig.from_pretrained(directory)
    except Exception as error:  # any error of the config's own code
        raise ConfigError(f"cannot read {directory / 'config.json'}: {first_line(error)}") from None


def _remove_quantization(config: Any) -> dict[str, Any] | None:
    """Remove and return the quantization of a config: models are trained and saved without it."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    del config.quantization_config
    return found if isinstance(found, dict) else found.to_dict()


def module_stages(
    modules: Sequence[nn.Module | Callable[[], nn.Module]],
    schedule: Schedule,
    rank: int,
    *,
    layers: Sequence[int] | None = None,
) -> dict[int, PlainStage]:
    """This rank's stages of a list of modules, each called with the output(s) of the previous one.

    `layers` is the number of modules of each stage; by default they are distributed evenly. An entry may be a function
    that builds its module: only those of this rank are called. A parameter that two stages share stays one parameter:
    its gradients are summed.
    """
    _require_rank(rank, schedule)
    for module in modules if isinstance(modules, Iterable) else [None]:
        if not callable(module):
            raise ConfigError(f"modules={short(modules)}: must be a list of modules, or of functions that build them")
    counts = (
        layer_counts(len(modules), schedule.num_stages)
        if layers is None
        else require_layer_counts(layers, len(modules), schedule.num_stages)
    )
    stages = {
        stage: PlainStage(
            [_build_module(modules, index) for index in layer_ranges(counts)[stage]],
            layer_ranges(counts)[stage],
            is_first=stage == 0,
        )
        for stage in schedule.placement.stages_of(rank)
    }
    for stage, pairs in _find_ties(modules, layer_ranges(counts)).items():
        if stage in stages:
            stages[stage].tied_pairs = tuple(pairs)
    return stages


def _build_module(modules: Sequence[Any], index: int) -> nn.Module:
    """A module of the list; a function is called."""
    entry = modules[index]
    if isinstance(entry, nn.Module):
        return entry
    name, rule = f"modules[{index}]={short(entry)}", "must be a module, or a function without arguments that builds one"
    try:
        built = entry()
    except TypeError as error:
        raise ConfigError(f"{name}: {rule}; it raised TypeError: {error}") from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"{name}: {rule}; it returned {short(built)}")
    return built


def _require_rank(rank: int, schedule: Schedule) -> None:
    require_schedule(schedule)
    if not hasattr(rank, "__index__") or not 0 <= rank < schedule.num_ranks:
        raise ConfigError(f"rank={short(rank)}: must be from 0 to {schedule.num_ranks - 1}, the ranks of the schedule")


def _find_ties(modules: Sequence[Any], cut: Sequence[range]) -> dict[int, list[tuple[str, int, str]]]:
    """The `tied_pairs` of each stage: parameters that modules of another stage have too."""
    holders: dict[nn.Parameter, dict[int, str]] = {}
    for stage, indices in enumerate(cut):
        for block, index in enumerate(indices):
            if isinstance(modules[index], nn.Module):
                for name, parameter in modules[index].named_parameters():
                    holders.setdefault(parameter, {}).setdefault(stage, f"blocks.{block}.{name}")
    pairs: dict[int, list[tuple[str, int, str]]] = {}
    for names in holders.values():
        if len(names) > 2:
            raise ConfigError(
                f"stages {sorted(names)} share a parameter: must be at most two stages; cut the model elsewhere"
            )
        if len(names) == 2:
            (one, name), (other, other_name) = names.items()
            pairs.setdefault(one, []).append((name, other, other_name))
            pairs.setdefault(other, []).append((other_name, one, name))
    return pairs


def _tie_ends(stages: dict[int, HFStage], last: int) -> None:
    """Tie head and embedding: one tensor if both stages are on this rank, and `tied_pairs` in any case."""
    if 0 in stages and last in stages:
        stages[last].tie(stages[0].embedding)
    for stage in stages.values():
        embedding, head = stage.tied_names
        if stage.is_first:
            stage.tied_pairs = ((embedding, last, head),)
        elif stage.is_last:
            stage.tied_pairs = ((head, 0, embedding),)


def _layer_counts(
    num_layers: int,
    schedule: Schedule,
    layers: Sequence[int] | None,
    first_less: int,
    last_less: int,
    layers_per_stage: int | None,
) -> tuple[int, ...]:
    if layers is not None:
        return require_layer_counts(layers, num_layers, schedule.num_stages)
    if layers_per_stage is not None:
        num_stages = num_stages_for(num_layers, layers_per_stage, schedule.num_ranks, first_less, last_less)
        if num_stages != schedule.num_stages:
            raise ConfigError(
                f"layers_per_stage={layers_per_stage} makes {num_stages} stages of {num_layers} layers: must be "
                f"{schedule.num_stages}, the stages of the schedule; pass layers=[...], or build another schedule"
            )
    return layer_counts(num_layers, schedule.num_stages, first_less, last_less)
