"""Stages: a model cut along its depth, of which a rank builds only its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropipe.core.model.layers import layer_counts, layer_ranges, num_stages_for, require_layer_counts
from zeropipe.core.schedule import Schedule, require_schedule
from zeropipe.engine.stages.devices import known_device
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.open import open_model
from zeropipe.engine.stages.plain import PlainStage
from zeropipe.engine.transformers_private import quiet
from zeropipe.errors import ConfigError, short


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
) -> dict[int, HFStage]:
    """This rank's stages of a Hugging Face decoder model, by stage.

    `model` is a directory with a config and safetensors, a config (random weights from `seed`, the same however the
    model is cut), or a model in memory. Only this rank's layers are ever given memory. `layers` says how many layers
    each stage has; without it they are spread evenly, `first_less` and `last_less` fewer on the two ends.

    `adapter` is a `peft.LoraConfig` for a new adapter, or the directory of a saved one: its rules are those of the
    whole model. The adapter of a model in memory is kept.
    """
    _require_rank(rank, schedule)
    known_device(device)
    with _said_once(rank):
        whole = open_model(model, dtype, head, seed, adapter)
    counts = _counts(whole.family.num_layers, schedule, layers, first_less, last_less, layers_per_stage)
    last = schedule.num_stages - 1
    stages = {stage: whole.stage(layer_ranges(counts), stage, device) for stage in schedule.placement.stages_of(rank)}
    if last and any(stage.has_tied_ends for stage in stages.values()):
        _tie_ends(stages, last)
    for stage in stages.values():
        whole.adapt(stage, device)
    return stages


@contextmanager
def _said_once(rank: int) -> Iterator[None]:
    """Warnings about the whole model are the same on all ranks: the first one says them."""
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
    """The same model in one piece with the same weights: what the stages of `hf_stages` are cut from."""
    whole = open_model(model, dtype, head, seed, adapter)
    stage = whole.stage((range(whole.family.num_layers),), 0, device)
    whole.adapt(stage, device)
    return stage.lm if head == "lm" else stage


def module_stages(
    modules: Sequence[nn.Module | Callable[[], nn.Module]],
    schedule: Schedule,
    rank: int,
    *,
    layers: Sequence[int] | None = None,
) -> dict[int, PlainStage]:
    """This rank's stages of a model given as a list of modules, each fed with the output(s) of the one before.

    With more modules than stages they are grouped: `layers` says how many go to each stage, evenly if not given.
    An entry may be a function that builds its module: only this rank's are called. A weight that two stages share
    stays one weight: its gradients are summed.
    """
    _require_rank(rank, schedule)
    for module in modules if isinstance(modules, Iterable) else [None]:
        if not callable(module):
            raise ConfigError(f"modules={short(modules)}: give a list of modules, or of functions that build them")
    counts = (
        layer_counts(len(modules), schedule.num_stages)
        if layers is None
        else require_layer_counts(layers, len(modules), schedule.num_stages)
    )
    stages = {
        stage: PlainStage(
            [_module(modules, number) for number in layer_ranges(counts)[stage]],
            layer_ranges(counts)[stage],
            is_first=stage == 0,
        )
        for stage in schedule.placement.stages_of(rank)
    }
    for stage, pairs in _shared(modules, layer_ranges(counts)).items():
        if stage in stages:
            stages[stage].tied_pairs = tuple(pairs)
    return stages


def _module(modules: Sequence[Any], number: int) -> nn.Module:
    """An entry of the list, built if it is a function."""
    entry = modules[number]
    if isinstance(entry, nn.Module):
        return entry
    name = f"modules[{number}]={short(entry)}"
    way_out = "give a module, or a function without arguments that builds one"
    try:
        built = entry()
    except TypeError as error:
        raise ConfigError(f"{name} fails when it is called without arguments, {error}: {way_out}") from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"{name} gives {short(built)}, which is no module: {way_out}")
    return built


def _require_rank(rank: int, schedule: Schedule) -> None:
    require_schedule(schedule)
    if not hasattr(rank, "__index__") or not 0 <= rank < schedule.num_ranks:
        raise ConfigError(f"rank={short(rank)}: the schedule has ranks 0 to {schedule.num_ranks - 1}")


def _shared(modules: Sequence[Any], cut: Sequence[range]) -> dict[int, list[tuple[str, int, str]]]:
    """The ties of each stage: weights that stand in the modules of another one too."""
    holders: dict[nn.Parameter, dict[int, str]] = {}
    for stage, part in enumerate(cut):
        for place, index in enumerate(part):
            if isinstance(modules[index], nn.Module):
                for name, parameter in modules[index].named_parameters():
                    holders.setdefault(parameter, {}).setdefault(stage, f"blocks.{place}.{name}")
    pairs: dict[int, list[tuple[str, int, str]]] = {}
    for names in holders.values():
        if len(names) > 2:
            raise ConfigError(f"stages {sorted(names)} share a weight: two at most may, so cut the model elsewhere")
        if len(names) == 2:
            (one, here), (other, there) = names.items()
            pairs.setdefault(one, []).append((here, other, there))
            pairs.setdefault(other, []).append((there, one, here))
    return pairs


def _tie_ends(stages: dict[int, HFStage], last: int) -> None:
    """One tensor where first and last stage share this rank; elsewhere each names its partner."""
    if 0 in stages and last in stages:
        stages[last].tie(stages[0].embedding)
    for stage in stages.values():
        embedding, head = stage.tied_names
        if stage.is_first:
            stage.tied_pairs = ((embedding, last, head),)
        elif stage.is_last:
            stage.tied_pairs = ((head, 0, embedding),)


def _counts(
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
        wanted = num_stages_for(num_layers, layers_per_stage, schedule.num_ranks, first_less, last_less)
        if wanted != schedule.num_stages:
            raise ConfigError(
                f"layers_per_stage={layers_per_stage} makes {wanted} stages of {num_layers} layers, the schedule has "
                f"{schedule.num_stages}: build it with that many, or give layers=[...]"
            )
    return layer_counts(num_layers, schedule.num_stages, first_less, last_less)
