"""LoRA adapters of peft in stages.

Which layers get one, and how large it is, peft decides on the whole model, without memory. Each stage then takes the
layers that are its own. So every rule of a LoraConfig means the same as without a pipeline, and random weights depend
on the seed and a layer's name, not on the cut.
"""

from __future__ import annotations

import copy
import hashlib
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
from zeropipe.engine.stages.seeds import seeded
from zeropipe.engine.stages.stored import Stored
from zeropipe.engine.stages.whole import Whole, listed, put, unwrapped_name
from zeropipe.errors import ConfigError, MissingExtra

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # before every name in an adapter's file
# of a LoraConfig: what only the whole model can do, such as to look for invocation tokens before the first layer
_UNSUPPORTED = (
    "trainable_token_indices", "layer_replication", "loftq_config", "eva_config", "corda_config",
    "alora_invocation_tokens",
)  # fmt: skip
_PARTS = re.compile(r"\.(lora_(embedding_)?[AB]|lora_magnitude_vector|modules_to_save)\.")
_WRAPPED = re.compile(r"\.(base_layer|original_module)(?=\.)")


def is_adapters(name: str) -> bool:
    """Whether a tensor is part of an adapter, by its name."""
    return _PARTS.search(name) is not None


def plain(name: str) -> str:
    """What a tensor was called before its layer got an adapter."""
    return _WRAPPED.sub("", name)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its config, and its values by their names in the model, if it is not new."""

    config: Any
    name: str = "default"
    values: Callable[[Injected], Mapping[str, Tensor]] | None = None
    is_in_memory: bool = False  # of a model whose weights are each frozen or not


def open_adapter(given: Any) -> Adapter:
    """What a user calls an adapter: a LoraConfig, or a directory that peft has written."""
    peft = _peft()
    if isinstance(given, str | Path):
        config, values = _read_config(Path(given)), lambda injected: _Saved(Path(given), injected)
        config.inference_mode = False  # it will be trained
        if config.bias != "none":
            raise ConfigError(
                f"{given}: an adapter with bias={config.bias!r} changes biases of the model, too: load it with "
                "PeftModel.from_pretrained(..., is_trainable=True) and give that model"
            )
        return Adapter(_checked(config), values=values)
    if not isinstance(given, peft.PeftConfig):
        raise ConfigError(f"adapter={given!r}: give a peft.LoraConfig, or a directory with an {CONFIG}")
    config = _checked(copy.deepcopy(given))
    if config.init_lora_weights not in (True, False, "gaussian") or config.use_dora:
        raise ConfigError(
            f"an adapter with init_lora_weights={config.init_lora_weights!r}, use_dora={config.use_dora} starts from "
            "the weights of the whole model: make it with peft.get_peft_model and give that model"
        )
    return Adapter(config)


def adapter_in(model: nn.Module) -> Adapter | None:
    """The adapter of a model (or stage) in memory."""
    named = {unwrapped_name(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    tensors = {name: p for name, p in named.items() if is_adapters(name)}
    if not tensors:
        return None
    configs: dict[str, Any] = next((m.peft_config for m in model.modules() if getattr(m, "peft_config", None)), {})
    if len(configs) != 1:
        raise ConfigError(f"the model has {len(configs)} adapters ({', '.join(configs)}): keep one of them")
    for layer in model.modules():
        if getattr(layer, "merged_adapters", None):
            raise ConfigError("the model's adapter is merged into its weights: unmerge it, or merge_and_unload()")
        if getattr(layer, "_disable_adapters", False):
            raise ConfigError("the model's adapter is switched off: enable it, or unload it")
    ((name, config),) = configs.items()
    return Adapter(_checked(copy.deepcopy(config)), name, lambda injected: tensors, is_in_memory=True)


class Injected:
    """The whole model with an adapter, without memory."""

    def __init__(self, whole: Whole, adapter: Adapter) -> None:
        peft = _peft()
        self.adapter = adapter
        self.model = copy.deepcopy(whole.model)
        self.config = copy.deepcopy(adapter.config)
        try:
            peft.inject_adapter_in_model(self.config, self.model, adapter.name, low_cpu_mem_usage=True)
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise ConfigError(f"peft cannot add this adapter: {str(error).splitlines()[0]}") from None
        self.tensors = {name: p for name, p in self.model.named_parameters() if is_adapters(name)}
        self.modules = wrappers(self.model)
        if whole.tie and any(end.startswith(f"{name}.") for name in self.modules for end in whole.tie):
            raise ConfigError(f"an adapter on {' or '.join(whole.tie)}: they are one weight; leave both out of it")

    def saved_config(self, origin: str | None) -> Any:
        """The config as peft writes it beside an adapter's tensors; `origin` is where the model came from."""
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        if origin:
            config.base_model_name_or_path = origin
        return config

    @cached_property
    def keys(self) -> dict[str, str]:
        """The names of its tensors in an adapter's file."""
        named = dict(self.model.named_parameters())
        found = _peft().get_peft_model_state_dict(
            self.model, state_dict=named, adapter_name=self.adapter.name, save_embedding_layers=False
        )
        names = {id(tensor): name for name, tensor in named.items()}
        return {names[id(tensor)]: PREFIX + key for key, tensor in found.items()}

    @cached_property
    def values(self) -> Mapping[str, Tensor] | None:
        """What its tensors hold, if it is not new."""
        if self.adapter.values is None:
            return None
        values = self.adapter.values(self)
        if differ := values.keys() ^ self.tensors.keys():
            raise ConfigError(f"the adapter and its config do not agree about {listed(differ)}")
        return values

    def attach(self, stage: HFStage, device: torch.device | str, seed: int) -> None:
        """Put the adapter's layers into a stage around those that it has."""
        local = {stage.full_name(name): name for name, _ in stage.named_modules()}
        owned = set(stage.full_names().values())
        for name, module in self.modules.items():
            if not any(own.startswith(f"{name}.") for own in owned):
                continue
            if any(stage.get_submodule(local[name]) is block for block in stage.blocks):
                raise ConfigError(f"an adapter on {name}, which is a whole layer: name modules inside it")
            mine = copy.deepcopy(module)
            _wrap(mine, stage.get_submodule(local[name]))
            self._give_memory(name, mine, device)
            self._fill(name, mine, seed)
            stage.set_submodule(local[name], mine.train(stage.training))
        self._set_trainable(stage)
        stage.lm.peft_config = {self.adapter.name: self.config}

    def _set_trainable(self, stage: HFStage) -> None:
        """As peft does: the adapter, not the model. Of a model in memory each weight stays as it is there."""
        known = dict(self.model.named_parameters(remove_duplicate=False))
        if self.adapter.is_in_memory:
            known = dict(self.values or {})
        for name, parameter in stage.named_parameters():
            if stage.full_name(name) in known:
                parameter.requires_grad_(known[stage.full_name(name)].requires_grad)

    def _give_memory(self, name: str, module: nn.Module, device: torch.device | str) -> None:
        """In the dtype that it has in memory, or else in peft's: the layer's, but at least float32."""
        own = next(wrapped(module).parameters()).dtype
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
            _start(name, module, self.adapter, seed)
            return
        for inner, tensor in module.named_parameters():
            if f"{name}.{inner}" in self.tensors:
                put(f"{name}.{inner}", tensor, self.values[f"{name}.{inner}"], "the adapter")


class _Saved(Mapping[str, Tensor]):
    """The values in an adapter's file, by their names in the model."""

    def __init__(self, directory: Path, injected: Injected) -> None:
        self._stored, self._keys = Stored(directory, single=WEIGHTS), injected.keys
        if unknown := set(self._stored.names) - set(self._keys.values()):
            raise ConfigError(f"{directory / WEIGHTS} has {listed(unknown)}, which its config does not know")

    def __getitem__(self, name: str) -> Tensor:
        return self._stored.read(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        there = set(self._stored.names)
        return (name for name, key in self._keys.items() if key in there)

    def __len__(self) -> int:
        return len(list(iter(self)))


def merged(module: Any, name: str) -> nn.Module:
    """What an adapter's layer wraps, in a copy with the adapter added to its weights."""
    if hasattr(module, "modules_to_save"):
        return module.modules_to_save[name]
    twin = copy.deepcopy(module)
    try:
        twin.merge(safe_merge=True, adapter_names=[name])
    except ValueError as error:
        raise ConfigError(f"the adapter cannot be merged: {str(error).splitlines()[0]}") from None
    return twin.get_base_layer()


def wrapped(module: Any) -> nn.Module:
    """What an adapter's layer wraps, as it is."""
    return module.original_module if hasattr(module, "original_module") else module.get_base_layer()


def wrappers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that peft put around others, by the names of those; of nested ones the outermost."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_wrapper(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def _is_wrapper(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") or (hasattr(module, "modules_to_save") and hasattr(module, "original_module"))


def _wrap(wrapper: nn.Module, real: nn.Module) -> None:
    """Put a real layer in the place of the one without memory that peft wrapped."""
    if hasattr(wrapper, "original_module"):
        wrapper.original_module = real.requires_grad_(False)
        for name in wrapper.modules_to_save:
            wrapper.modules_to_save[name] = copy.deepcopy(real).requires_grad_(True)
        return
    while hasattr(wrapper.base_layer, "lora_A"):
        wrapper = wrapper.base_layer
    wrapper.base_layer = real


def _start(name: str, module: nn.Module, adapter: Adapter, seed: int) -> None:
    """Random values as peft gives them; a fully trained module starts as the model's own."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    device = next(module.parameters()).device
    with seeded(int.from_bytes(digest[:7], "little"), device), torch.no_grad():
        for layer in [child for child in module.modules() if hasattr(child, "lora_A")]:
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                part.reset_parameters()
            layer.reset_lora_parameters(adapter.name, adapter.config.init_lora_weights or not layer.lora_A)


def _checked(config: Any) -> Any:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ConfigError(f"an adapter of peft_type={kind}: only LORA is kept; merge_and_unload() it first")
    for field in _UNSUPPORTED:
        if getattr(config, field, None):
            raise ConfigError(f"a LoraConfig with {field} is not supported in stages: leave it out")
    return config


def _read_config(directory: Path) -> Any:
    if not (directory / CONFIG).exists():
        raise ConfigError(f"{directory} is no adapter directory: it has no {CONFIG}")
    try:
        return _peft().PeftConfig.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {directory / CONFIG}: {str(error).splitlines()[0]}") from None


def described_adapter(stage: HFStage) -> dict[str, Any] | None:
    """The adapter of a stage's model as plain data, also of a stage that has no part of it."""
    for name, config in getattr(stage.lm, "peft_config", {}).items():
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            return {"name": name, "config": json.loads((Path(folder) / CONFIG).read_text())}
    return None


def adapter_from(described: Mapping[str, Any]) -> Adapter:
    """The other way; it has no values."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(described["config"]))
        return Adapter(_checked(_read_config(Path(folder))), described["name"])


def base_of(directory: Path) -> str:
    """The directory of the model that an adapter belongs to: its own if it has a config, as in transformers."""
    if (directory / "config.json").exists():
        return str(directory)
    return _read_config(directory).base_model_name_or_path


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise MissingExtra("peft", "peft") from None
    return peft
