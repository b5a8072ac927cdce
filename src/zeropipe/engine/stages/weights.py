"""First values of a stage's tensors, random from a seed, and the interface of all sources of weights.

Random values depend on the seed and on the name of a module in the full model, not on the cut. The other sources are
`memory.ModelSource` and `directory.DirectorySource`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.skeleton import ModelSkeleton, computed_buffers, named_tensors
from zeropipe.engine.stages.small_model import small_config
from zeropipe.engine.transformers_private import build, initialize, is_model
from zeropipe.errors import ConfigError

CPU = torch.device("cpu")


class WeightSource(Protocol):
    """Where the parameters and buffers of a model's stages come from."""

    def prepare(self, skeleton: ModelSkeleton) -> bool:
        """Check that the source has exactly this model; return whether its head is tied to its embedding.

        Every rank checks every tensor, so all ranks refuse a source that does not match without any communication.
        """

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of the full model is kept; `dtype` is that of the model's class."""

    def fill(self, stage: HFStage) -> None:
        """Give values to a stage whose tensors have memory."""


class RandomSource:
    """Random weights, the same for every cut."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prepare(self, skeleton: ModelSkeleton) -> bool:
        return skeleton.tied_ends is not None

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def fill(self, stage: HFStage) -> None:
        _mark_unset(named_tensors(stage).values())
        initialize_modules(stage, dict(stage.named_modules()), self._seed)
        _fill_unset(stage, named_tensors(stage), self._seed)


@contextmanager
def seeded_rng(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed the random generators of the CPU and of a device; their state is restored afterwards.

    For the CPU only its own generator is seeded: `torch.manual_seed` would seed the GPUs too, whose state is not
    restored, or record the call with a stack trace, which takes longer than filling a small layer.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type in ("cpu", "meta"):
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield


def derive_seed(seed: int, name: str) -> int:
    """A seed for one module or tensor of the full model."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")


def compute_buffers(stage: HFStage, seed: int) -> None:
    """Give values to the buffers of a stage that no checkpoint has."""
    names, tensors = computed_buffers(stage), named_tensors(stage)
    _mark_unset(tensors[name] for name in names)
    owners = {name.rpartition(".")[0] for name in names}
    # some families compute them in the model around the layers
    initialize_modules(stage, owners | {name for name, module in stage.named_modules() if is_model(module)}, seed)
    _fill_unset(stage, names, seed)


def initialize_modules(stage: HFStage, names: Collection[str], seed: int) -> None:
    """Initialize the own parameters and buffers of some modules as their family does.

    Inner modules come first: some families change their weights again in the module around them.
    """
    with stage.own_layers_only():
        for name, _ in reversed(list(stage.named_modules())):
            if name in names and name:
                _initialize_module(stage, name, seed)


def _initialize_module(stage: HFStage, name: str, seed: int) -> None:
    outer, module = [stage.lm], stage.get_submodule(name)
    for part in name.removeprefix("lm").removeprefix(".").split(".")[:-1]:
        outer.append(outer[-1].get_submodule(part))
    tensor = next(itertools.chain(stage.parameters(), stage.buffers()), None)
    if tensor is None:  # a stage without layers
        return
    with seeded_rng(derive_seed(seed, stage.full_name(name)), tensor.device), torch.no_grad():
        initialize(outer, module)


def _mark_unset(tensors: Iterable[Tensor]) -> None:
    """Fill tensors with NaN, to find later those that no initialization has set."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))


def _fill_unset(stage: HFStage, names: Iterable[str], seed: int) -> None:
    """Give values to the tensors of a stage that its family's initialization has not set.

    Their values come from the constructors of their modules, which have set nothing, because stages are built on the
    meta device. These run in a small copy of the model.
    """
    tensors = named_tensors(stage)
    unset = [name for name in names if tensors[name].is_floating_point() and tensors[name].isnan().any()]
    if not unset:
        return
    constructed = named_tensors(_build_narrow(stage))
    for name in unset:
        full = stage.full_name(name)
        if full not in constructed:
            raise ConfigError(f"{full} has no first value in transformers; load the model from a checkpoint")
        _fill_like(tensors[name], constructed[full], full, seed)


def _build_narrow(stage: HFStage) -> nn.Module:
    """A narrow copy of the full model with all its layers."""
    total = stage.family.num_layers
    with seeded_rng(0), torch.device("cpu"):
        return build(small_config(stage.full_config, range(total), total), torch.float32, kernels=False)


def _fill_like(tensor: Tensor, value: Tensor, name: str, seed: int) -> None:
    """Copy a buffer's value, or draw random numbers with the mean and deviation of a narrower parameter."""
    with torch.no_grad():
        if tensor.shape == value.shape and not value.requires_grad:
            tensor.copy_(value)
        elif value.requires_grad:
            generator = torch.Generator().manual_seed(derive_seed(seed, name))
            deviation = float(value.std()) if value.numel() > 1 else 0.0
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation + float(value.mean()))
        else:
            raise ConfigError(
                f"{name} is not computed by transformers when a model is loaded; pass the model in memory"
            )
