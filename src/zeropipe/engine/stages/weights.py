"""Where a stage's weights come from: a model in memory, a directory of safetensors, or a seed."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.hf import HFStage
from zeropipe.errors import ConfigError


class Source(Protocol):
    """Fills the parameters and buffers of a stage that was just given memory."""

    def fill(self, stage: HFStage) -> None: ...


class ModelSource:
    """Copies from a whole model in memory."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())

    def fill(self, stage: HFStage) -> None:
        for name, tensor in _tensors(stage):
            full = stage.full_name(name)
            if full in self._tensors:
                tensor.data.copy_(self._tensors[full])
            else:
                _seed_module(stage, name.rpartition(".")[0], seed=0)  # a new score head


class SeedSource:
    """Random weights that depend on the seed and the parameter's module in the whole model, not on the cut."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fill(self, stage: HFStage) -> None:
        for name, _ in stage.named_modules():
            _seed_module(stage, name, self._seed)


class DirectorySource:
    """Reads the tensors a stage needs, and no others, from a directory of safetensors."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = directory / "model.safetensors.index.json"
        if index.exists():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (directory / "model.safetensors").exists():
            with self._open("model.safetensors") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise ConfigError(f"{directory} holds no model.safetensors and no model.safetensors.index.json")

    def fill(self, stage: HFStage) -> None:
        for name, module in stage.named_modules():
            if next(module.buffers(recurse=False), None) is not None:
                _seed_module(stage, name, seed=0)  # rotary frequencies are computed, not stored
        for name, parameter in stage.named_parameters():
            full = stage.full_name(name)
            if full.startswith("score.") and full not in self._files:
                _seed_module(stage, "score", seed=0)
            elif full != "lm_head.weight" or not stage.is_tied:
                parameter.data.copy_(self._read(self._stored(full, stage)))

    def _stored(self, name: str, stage: HFStage) -> str:
        head = name.replace("lm_head.", f"{stage.family.stored_head}.")
        return head if head in self._files else name

    def _read(self, name: str) -> Tensor:
        if name in self._files:
            with self._open(self._files[name]) as file:
                return file.get_tensor(name)
        head, _, last = name.rpartition(".")
        if head.endswith(".experts") and last in _EXPERTS:
            return self._read_experts(head, _EXPERTS[last])
        raise ConfigError(f"{self._directory} has no tensor {name!r}: is it a checkpoint of this model?")

    def _read_experts(self, experts: str, parts: tuple[str, ...]) -> Tensor:
        """Published checkpoints keep one matrix per expert; the model keeps one stack of all."""
        count = sum(name.startswith(f"{experts}.") and name.endswith(f".{parts[0]}.weight") for name in self._files)
        return torch.stack(
            [torch.cat([self._read(f"{experts}.{expert}.{part}.weight") for part in parts]) for expert in range(count)]
        )

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self._directory / file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {self._directory / file}: {error}") from None


_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _tensors(stage: HFStage) -> list[tuple[str, Tensor]]:
    return [*stage.named_parameters(), *stage.named_buffers()]


def _seed_module(stage: HFStage, name: str, seed: int) -> None:
    """Initialise one module's own parameters and buffers the way its family does."""
    module = stage.get_submodule(name)
    device = next(itertools.chain(stage.parameters(), stage.buffers())).device  # a stage may have no layers
    digest = hashlib.sha256(f"{seed} {stage.full_name(name)}".encode()).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        stage.lm._init_weights(module)
