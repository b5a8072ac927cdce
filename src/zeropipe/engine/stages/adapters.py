"""LoRA adapters of peft in stages.

peft adds the adapter to the full model on the meta device. Each stage then takes the adapter layers of its own modules.
So every rule of a LoraConfig means the same as without a pipeline, and random weights depend on the seed and the name
of a layer, not on the cut.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.reader import SafetensorsReader
from zeropipe.engine.stages.skeleton import ModelSkeleton, copy_into, format_names, strip_wrappers
from zeropipe.engine.stages.weights import derive_seed, seeded_rng
from zeropipe.errors import ConfigError, MissingExtra, first_line, short

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of every name in an adapter's file
# fields of a LoraConfig that work on the full model only, such as a search for invocation tokens
_UNSUPPORTED_FIELDS = (
    "trainable_token_indices", "layer_replication", "loftq_config", "eva_config", "corda_config",
    "alora_invocation_tokens",
)  # fmt: skip
_ADAPTER_TENSORS = re.compile(r"\.(lora_(embedding_)?[AB]|lora_magnitude_vector|modules_to_save)\.")
_BASE_LAYER = re.compile(r"\.(base_layer|original_module)(?=\.)")
_ADAPTER_PARTS = re.compile(r"\.(base_layer|original_module|(lora_[AB]|modules_to_save)\.[^.]+)(?=\.)")


def is_adapter_name(name: str) -> bool:
    """Whether a tensor of this name is part of an adapter."""
    return _ADAPTER_TENSORS.search(name) is not None


def strip_adapter(name: str) -> str:
    """The name of a tensor before its layer got an adapter."""
    return _BASE_LAYER.sub("", name)


def layer_of(name: str) -> str:
    """The name of a layer, of the name of a parameter in it or in its adapter."""
    return _ADAPTER_PARTS.sub("", name).rpartition(".")[0]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its config and, unless it is new, a function that returns its tensors by name."""

    config: Any
    name: str = "default"
    values: Callable[[AdaptedSkeleton], Mapping[str, Tensor]] | None = None
    is_in_memory: bool = False  # of a model in memory: each parameter stays frozen or trainable


def open_adapter(adapter: Any) -> Adapter:
    """Open a LoraConfig (a new adapter) or a directory written by peft."""
    peft = _peft()
    if isinstance(adapter, str | Path):
        config, values = _read_config(Path(adapter)), lambda adapted: _AdapterFile(Path(adapter), adapted)
        config.inference_mode = False  # it will be trained
        if config.bias != "none":
            raise ConfigError(
                f"{adapter}: an adapter with bias={config.bias!r} also changes biases of the model; load it with "
                "PeftModel.from_pretrained(..., is_trainable=True) and pass that model"
            )
        return Adapter(_require_supported(config), values=values)
    if not isinstance(adapter, peft.PeftConfig):
        raise ConfigError(f"adapter={short(adapter)}: must be a peft.LoraConfig, or a directory with an {CONFIG}")
    config = _require_supported(copy.deepcopy(adapter))
    if config.init_lora_weights not in (True, False, "gaussian") or config.use_dora:
        raise ConfigError(
            f"an adapter with init_lora_weights={config.init_lora_weights!r}, use_dora={config.use_dora} depends on "
            "the weights of the full model; create it with peft.get_peft_model and pass that model"
        )
    return Adapter(config)


def find_adapter(model: nn.Module) -> Adapter | None:
    """The adapter of a model (or stage) in memory; None if it has none."""
    named = {strip_wrappers(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    tensors = {name: p for name, p in named.items() if is_adapter_name(name)}
    if not tensors:
        return None
    configs: dict[str, Any] = next((m.peft_config for m in model.modules() if getattr(m, "peft_config", None)), {})
    if len(configs) != 1:
        raise ConfigError(
            f"the model has {len(configs)} adapters ({', '.join(configs)}): must be one; delete the others"
        )
    for layer in model.modules():
        if getattr(layer, "merged_adapters", None):
            raise ConfigError("the model's adapter is merged into its weights; unmerge it, or merge_and_unload() it")
        if getattr(layer, "_disable_adapters", False):
            raise ConfigError("the model's adapter is disabled; enable it, or unload it")
    ((name, config),) = configs.items()
    return Adapter(_require_supported(copy.deepcopy(config)), name, lambda adapted: tensors, is_in_memory=True)


class AdaptedSkeleton:
    """A full model with an adapter, on the meta device."""

    def __init__(self, skeleton: ModelSkeleton, adapter: Adapter) -> None:
        peft = _peft()
        self.adapter = adapter
        self.model = copy.deepcopy(skeleton.model)
        self.config = copy.deepcopy(adapter.config)
        try:
            peft.inject_adapter_in_model(self.config, self.model, adapter.name, low_cpu_mem_usage=True)
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise ConfigError(f"peft cannot add this adapter: {first_line(error)}") from None
        self.tensors = {name: p for name, p in self.model.named_parameters() if is_adapter_name(name)}
        self.modules = find_adapter_layers(self.model)
        ends = skeleton.tied_ends
        if ends and any(end.startswith(f"{name}.") for name in self.modules for end in ends):
            raise ConfigError(f"an adapter on {' or '.join(ends)}: they are tied; leave both out of the adapter")

    def saved_config(self, origin: str | None) -> Any:
        """The config as peft saves it with an adapter; `origin` is the name or path of the base model."""
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        if origin:
            config.base_model_name_or_path = origin
        return config

    @cached_property
    def keys(self) -> dict[str, str]:
        """Parameter name in the model -> name in an adapter's file."""
        named = dict(self.model.named_parameters())
        found = _peft().get_peft_model_state_dict(
            self.model, state_dict=named, adapter_name=self.adapter.name, save_embedding_layers=False
        )
        names = {id(tensor): name for name, tensor in named.items()}
        return {names[id(tensor)]: PREFIX + key for key, tensor in found.items()}

    @cached_property
    def values(self) -> Mapping[str, Tensor] | None:
        """The values of its tensors; None for a new adapter."""
        if self.adapter.values is None:
            return None
        values = self.adapter.values(self)
        if differ := values.keys() ^ self.tensors.keys():
            raise ConfigError(f"the adapter and its config differ in {format_names(differ)}: must be of one adapter")
        return values

    def attach(self, stage: HFStage, device: torch.device | str, seed: int) -> None:
        """Wrap the modules of a stage in the adapter's layers."""
        local = {stage.full_name(name): name for name, _ in stage.named_modules()}
        owned = set(stage.full_names().values())
        for name, module in self.modules.items():
            if not any(own.startswith(f"{name}.") for own in owned):
                continue
            if any(stage.get_submodule(local[name]) is block for block in stage.blocks):
                raise ConfigError(f"an adapter on {name}, which is a transformer layer: must be on modules inside it")
            layer = copy.deepcopy(module)
            _set_base_layer(layer, stage.get_submodule(local[name]))
            self._allocate(name, layer, device)
            self._fill(name, layer, seed)
            if isinstance(self.values, _AdapterFile):
                self.values.check_base(name, wrapped_layer(layer))
            stage.set_submodule(local[name], layer.train(stage.training))
        self._set_trainable(stage)
        stage.lm.peft_config = {self.adapter.name: self.config}

    def _set_trainable(self, stage: HFStage) -> None:
        """Train the adapter and not the model, as peft does; parameters of a model in memory stay as they are there."""
        reference = dict(self.model.named_parameters(remove_duplicate=False))
        if self.adapter.is_in_memory:
            reference = dict(self.values or {})
        for name, parameter in stage.named_parameters():
            if stage.full_name(name) in reference:
                parameter.requires_grad_(reference[stage.full_name(name)].requires_grad)

    def _allocate(self, name: str, module: nn.Module, device: torch.device | str) -> None:
        """Give memory to an adapter layer, in the dtype of the model in memory or, as in peft, in at least float32."""
        own = next(wrapped_layer(module).parameters()).dtype
        for inner, parameter in list(module.named_parameters()):
            if parameter.is_meta:
                dtype = torch.promote_types(own, torch.float32)
                if self.adapter.is_in_memory and self.values is not None:
                    dtype = self.values[f"{name}.{inner}"].dtype
                owner, _, leaf = inner.rpartition(".")
                empty = torch.empty_like(parameter, device=device, dtype=dtype)
                module.get_submodule(owner)._parameters[leaf] = nn.Parameter(empty, parameter.requires_grad)

    def _fill(self, name: str, module: nn.Module, seed: int) -> None:
        if self.values is None:
            _initialize(name, module, self.adapter, seed)
            return
        for inner, tensor in module.named_parameters():
            if f"{name}.{inner}" in self.tensors:
                copy_into(f"{name}.{inner}", tensor, self.values[f"{name}.{inner}"], "the adapter")


class _AdapterFile(Mapping[str, Tensor]):
    """The tensors of an adapter's file, by their names in the model."""

    def __init__(self, directory: Path, adapted: AdaptedSkeleton) -> None:
        self._stored, self._keys = SafetensorsReader(directory, single=WEIGHTS), adapted.keys
        self._path = directory / WEIGHTS
        # of embeddings, which peft saves with their adapter
        base = {PREFIX + name for name, _ in adapted.model.named_parameters() if ".base_layer." in name}
        if unknown := set(self._stored.names) - set(self._keys.values()) - base:
            raise ConfigError(f"{self._path} has {format_names(unknown)}, which its config does not have")

    def __getitem__(self, name: str) -> Tensor:
        return self._stored.read(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        there = set(self._stored.names)
        return (name for name, key in self._keys.items() if key in there)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def check_base(self, name: str, module: nn.Module) -> None:
        """Raise ConfigError if the file has other weights of the module inside an adapter layer than the model."""
        for inner, tensor in module.named_parameters():
            key = f"{PREFIX}{name}.base_layer.{inner}"
            if key not in self._stored.names or tensor.is_meta:
                continue
            if not torch.equal(self._stored.read(key).to(tensor), tensor):
                raise ConfigError(
                    f"{self._path} has other weights of {name} than the model: pass the model of "
                    "PeftModel.from_pretrained(..., is_trainable=True), which takes them from the adapter"
                )


def merge_layer(module: Any, name: str) -> nn.Module:
    """A copy of the module inside an adapter layer, with the adapter added to its weights."""
    if hasattr(module, "modules_to_save"):
        return module.modules_to_save[name]
    merged = copy.deepcopy(module)
    try:
        merged.merge(safe_merge=True, adapter_names=[name])
    except ValueError as error:
        raise ConfigError(f"the adapter cannot be merged: {first_line(error)}") from None
    return merged.get_base_layer()


def compute_adapters_in(stage: HFStage, dtype: torch.dtype) -> None:
    """Let the adapters of a stage compute in `dtype`, under autocast, whatever their weights are.

    peft would cast their inputs to the dtype of the weights first, of which W would keep another copy.
    """
    stage.autocast = dtype
    for module in stage.modules():
        if hasattr(module, "lora_A"):
            module.cast_input_dtype_enabled = False


def wrapped_layer(module: Any) -> nn.Module:
    """The module inside an adapter layer."""
    return module.original_module if hasattr(module, "original_module") else module.get_base_layer()


def find_adapter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The adapter layers of a model, by the names of the modules inside; of nested ones the outermost."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if is_adapter_layer(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether a module wraps another one, to which it adds an adapter, or of which it trains a copy."""
    return hasattr(module, "lora_A") or (hasattr(module, "modules_to_save") and hasattr(module, "original_module"))


def _set_base_layer(wrapper: nn.Module, real: nn.Module) -> None:
    """Replace the module on the meta device inside an adapter layer."""
    if hasattr(wrapper, "original_module"):
        wrapper.original_module = real.requires_grad_(False)
        for name in wrapper.modules_to_save:
            wrapper.modules_to_save[name] = copy.deepcopy(real).requires_grad_(True)
        return
    while hasattr(wrapper.base_layer, "lora_A"):
        wrapper = wrapper.base_layer
    wrapper.base_layer = real


def _initialize(name: str, module: nn.Module, adapter: Adapter, seed: int) -> None:
    """Initialize a new adapter layer as peft does; a module of modules_to_save is a copy of the model's."""
    device = next(module.parameters()).device
    with seeded_rng(derive_seed(seed, name), device), torch.no_grad():
        for layer in [child for child in module.modules() if hasattr(child, "lora_A")]:
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                part.reset_parameters()
            layer.reset_lora_parameters(adapter.name, adapter.config.init_lora_weights or not layer.lora_A)


def _require_supported(config: Any) -> Any:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ConfigError(f"an adapter of peft_type={kind}: must be LORA; merge_and_unload() it first")
    for field in _UNSUPPORTED_FIELDS:
        if getattr(config, field, None):
            raise ConfigError(f"a LoraConfig with {field} is not supported in stages; leave it out")
    return config


def _read_config(directory: Path) -> Any:
    if not (directory / CONFIG).exists():
        raise ConfigError(f"{directory} is not an adapter directory: it has no {CONFIG}")
    try:
        return _peft().PeftConfig.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {directory / CONFIG}: {first_line(error)}") from None


def describe_adapter(stage: HFStage) -> dict[str, Any] | None:
    """The adapter of a stage's model as JSON data, also for a stage without adapter layers."""
    for name, config in getattr(stage.lm, "peft_config", {}).items():
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            return {"name": name, "config": json.loads((Path(folder) / CONFIG).read_text())}
    return None


def restore_adapter(described: Mapping[str, Any]) -> Adapter:
    """The adapter of `describe_adapter`, without values."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(described["config"]))
        return Adapter(_require_supported(_read_config(Path(folder))), described["name"])


def find_base_model(directory: Path) -> str:
    """The directory of an adapter's base model: its own if that has a config, as in transformers."""
    if (directory / "config.json").exists():
        return str(directory)
    return _read_config(directory).base_model_name_or_path


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise MissingExtra("peft", "peft") from None
    return peft
