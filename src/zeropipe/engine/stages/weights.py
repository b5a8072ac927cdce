"""Where the weights of stages come from: a seed here, a model in memory or a directory in the files beside."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection
from typing import Protocol

import torch

from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.seeds import seeded
from zeropipe.engine.stages.unset import complete, unset
from zeropipe.engine.stages.whole import Whole, computed, tensors_of
from zeropipe.engine.transformers_private import initialise, is_model


class Source(Protocol):
    """Gives the parameters and buffers of a model's stages."""

    def prepare(self, whole: Whole) -> bool:
        """ConfigError unless this holds exactly the whole model; else whether its head is its embedding.

        Every rank asks about every tensor, so all ranks refuse a wrong source without a word between them.
        """

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of the whole model is kept; `dtype` is what its class says."""

    def fill(self, stage: HFStage) -> None:
        """Give values to a stage that was just given memory."""


class SeedSource:
    """Random weights that depend on the seed and the parameter's module in the whole model, not on the cut."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prepare(self, whole: Whole) -> bool:
        return whole.tie is not None

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def fill(self, stage: HFStage) -> None:
        unset(tensors_of(stage).values())
        seed_modules(stage, dict(stage.named_modules()), self._seed)
        complete(stage, tensors_of(stage), self._seed)


def compute_buffers(stage: HFStage, seed: int) -> None:
    """Give those buffers of a stage their values that no checkpoint holds."""
    names, tensors = computed(stage), tensors_of(stage)
    unset(tensors[name] for name in names)
    owners = {name.rpartition(".")[0] for name in names}
    # some families compute them from the model around the layers
    seed_modules(stage, owners | {name for name, module in stage.named_modules() if is_model(module)}, seed)
    complete(stage, names, seed)


def seed_modules(stage: HFStage, names: Collection[str], seed: int) -> None:
    """Initialise some modules' own parameters and buffers the way their family does, inner ones first.

    Some families change their weights once more from the module around them.
    """
    with stage.alone():
        for name, _ in reversed(list(stage.named_modules())):
            if name in names and name:
                _seed_module(stage, name, seed)


def _seed_module(stage: HFStage, name: str, seed: int) -> None:
    around, module = [stage.lm], stage.get_submodule(name)
    for part in name.removeprefix("lm").removeprefix(".").split(".")[:-1]:
        around.append(around[-1].get_submodule(part))
    tensor = next(itertools.chain(stage.parameters(), stage.buffers()), None)
    if tensor is None:  # a stage without layers
        return
    digest = hashlib.sha256(f"{seed} {stage.full_name(name)}".encode()).digest()
    with seeded(int.from_bytes(digest[:7], "little"), tensor.device), torch.no_grad():
        initialise(around, module)
