"""Where the weights of stages come from: a seed here, a model in memory or a directory in the files beside."""

from __future__ import annotations

import hashlib
import itertools
from typing import Protocol

import torch

from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.whole import Whole, computed


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
        for name, _ in stage.named_modules():
            seed_module(stage, name, self._seed)


def compute_buffers(stage: HFStage, seed: int) -> None:
    """Give those buffers of a stage their values that no checkpoint holds."""
    for owner in sorted({name.rpartition(".")[0] for name in computed(stage)}):
        seed_module(stage, owner, seed)


def seed_module(stage: HFStage, name: str, seed: int) -> None:
    """Initialise one module's own parameters and buffers the way its family does."""
    module = stage.get_submodule(name)
    device = next(itertools.chain(stage.parameters(), stage.buffers())).device  # a stage may have no layers
    digest = hashlib.sha256(f"{seed} {stage.full_name(name)}".encode()).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        stage.lm._init_weights(module)
