"""The tensors of all stages under their names in the full model: this rank's as tensors, the others' described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropipe.core.schedule import Schedule
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.stages import save
from zeropipe.engine.stages.adapters import find_adapter, find_adapter_layers, wrapped_layer
from zeropipe.engine.stages.contract import StageInfo
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.skeleton import strip_wrappers
from zeropipe.errors import ConfigError, short


class EngineView(NamedTuple):
    """The parts of an Engine that collective work outside of steps uses."""

    schedule: Schedule
    stages: Mapping[int, StageInfo]
    comm: Communicator


class EngineLike(Protocol):
    """The methods of an Engine that this package calls."""

    saving: Any

    def together(self, where: str, refusing: bool = True) -> AbstractContextManager[EngineView]:
        """Around collective work: an error of one rank stops all. `refusing`: a ConfigError is raised on all anyway."""
        ...


def require_engine(engine: object) -> None:
    """ConfigError for an object that is not an Engine."""
    if not hasattr(engine, "together"):
        raise ConfigError(
            f"engine={short(engine)}: must be an Engine; pass the folder, then the Engine, then its optimizer"
        )


class TensorInfo(NamedTuple):
    """Describes a tensor that some rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_frozen: bool = False  # a parameter that is not trained


@dataclass(frozen=True, eq=False)
class StageTensor:
    """A tensor of one of this rank's stages."""

    stage: int
    name: str  # in the full model
    tensor: Tensor
    merge: Callable[[], Tensor] | None = None  # computes the tensor with an adapter added to it
    is_copy: bool = False  # of a buffer that belongs to another stage: it is loaded, but not saved


class _RankTensors(NamedTuple):
    """Describes the tensors of one rank to all ranks."""

    stages: dict[int, list[TensorInfo]]
    aliases: list[list[str]]  # names of the same tensor of this rank
    ties: list[tuple[str, int, str]]  # a name, and the stage and local name of the parameter it is tied to
    tied_names: dict[tuple[int, str], str]  # names of tied parameters, by stage and local name


class Catalog:
    """All tensors of the model, by name; all ranks create one together.

    Tied tensors have several names. Only the one in the first stage is saved: the saved name.
    `merge`: weights with the adapter added to them, without the adapter's own.
    """

    def __init__(self, view: EngineView, merge: bool = False) -> None:
        list_tensors = _list_merged_tensors if merge else list_stage_tensors
        self.local, ranks = on_all_ranks(
            view.comm,
            lambda: [tensor for stage in sorted(view.stages) for tensor in list_tensors(view.stages[stage])],
            share=lambda local: _describe(local, view.stages),
        )
        self.stages = _merge_stages(ranks)
        self.ties = _resolve_ties(ranks, self.stages)  # name -> saved name

    def saved_name(self, name: str) -> str:
        return self.ties.get(name, name)

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """All saved tensors, in the order of the model."""
        every = (tensor for stage in sorted(self.stages) for tensor in self.stages[stage])
        return {tensor.name: tensor for tensor in every if tensor.name not in self.ties}

    def find(self, name: str) -> StageTensor:
        """This rank's tensor with a saved name."""
        return next(own for own in self.local if own.name == name and not own.is_copy)

    @cached_property
    def savable(self) -> dict[str, Tensor]:
        """The tensors that this rank can save."""
        return {own.name: own.tensor for own in self.local if own.name not in self.ties and not own.is_copy}

    @cached_property
    def frozen(self) -> dict[str, Tensor]:
        """The savable parameters that are not trained."""
        return {name: tensor for name, tensor in self.savable.items() if _is_frozen(tensor)}

    @cached_property
    def trained_name(self) -> str | None:
        """The name of a parameter of this rank that is trained, if there is one."""
        return next((own.name for own in self.local if own.tensor.requires_grad), None)

    @cached_property
    def loadable(self) -> dict[str, list[Tensor]]:
        """The tensors that this rank loads, by saved name; two where both ends of a tie are here as two tensors."""
        found: dict[str, dict[int, Tensor]] = {}
        for own in self.local:
            found.setdefault(self.saved_name(own.name), {})[id(own.tensor)] = own.tensor
        return {name: list(tensors.values()) for name, tensors in found.items()}

    @cached_property
    def names_by_id(self) -> dict[int, str]:
        """The saved name of each local tensor, by its id()."""
        return {id(own.tensor): self.saved_name(own.name) for own in self.local}

    @property
    def tied_sets(self) -> set[frozenset[str]]:
        return group_ties(self.ties)


def group_ties(ties: Mapping[str, str]) -> set[frozenset[str]]:
    """Sets of names of one tensor each, whichever of them is saved."""
    groups: dict[str, set[str]] = {}
    for name, saved_name in ties.items():
        groups.setdefault(saved_name, {saved_name}).add(name)
    return {frozenset(group) for group in groups.values()}


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


# tensors of a stage


def list_stage_tensors(stage: StageInfo) -> list[StageTensor]:
    """Parameters and persistent buffers of a stage; a tensor with several names under each of them."""
    module = stage.module
    stored = module.state_dict().keys()
    buffers = {name: b for name, b in module.named_buffers(remove_duplicate=False) if name in stored}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = _find_full_names(stage, parameters, buffers)
    copies = module.copied_buffers if isinstance(module, HFStage) else frozenset()
    return [
        StageTensor(stage.number, names[name], tensor, is_copy=name in copies)
        for name, tensor in (parameters | buffers).items()
    ]


def _list_merged_tensors(stage: StageInfo) -> list[StageTensor]:
    """A stage's tensors with its adapter added to them, and without the adapter's own."""
    module, tensors = stage.module, list_stage_tensors(stage)
    adapter = find_adapter(module) if isinstance(module, HFStage) else None
    if not isinstance(module, HFStage) or adapter is None:
        return tensors
    adapted = {module.full_name(name): layer for name, layer in find_adapter_layers(module).items()}
    unadapted = {own.name: own.tensor for own in tensors}
    found = []
    for name, merge in save.merged_tensors(module, adapter.name).items():
        layer_name = next((layer for layer in adapted if name.startswith(f"{layer}.")), None)
        if layer_name is None:
            found.append(StageTensor(stage.number, name, unadapted[name]))
            continue
        layer = adapted[layer_name]
        if any(isinstance(tensor, DTensor) for tensor in layer.parameters()):
            raise ConfigError(f"the adapter on {name} is sharded and cannot be merged; use merge=False")
        base = wrapped_layer(layer).state_dict(keep_vars=True)
        found.append(StageTensor(stage.number, name, base[name.removeprefix(f"{layer_name}.")], merge))
    return found


def _find_full_names(stage: StageInfo, parameters: Iterable[str], buffers: Iterable[str]) -> dict[str, str]:
    """The names in the full model of a stage's tensors, by their local names."""
    module: Any = stage.module
    if not hasattr(module, "full_names"):  # unknown: the checkpoint can be loaded into the same stages only
        return {name: f"stages.{stage.number}.{strip_wrappers(name)}" for name in (*parameters, *buffers)}
    full = dict(module.full_names())
    for name in buffers:
        if not hasattr(module, "full_name"):
            raise ConfigError(
                f"stage {stage.number} has a buffer {name} and no method full_name(name), which must return its name "
                "in the full model"
            )
        full[name] = module.full_name(name)
    if missing := [name for name in parameters if name not in full]:
        raise ConfigError(f"full_names() of stage {stage.number} has no {missing[0]}: it must have all parameters")
    return {name: strip_wrappers(full_name) for name, full_name in full.items()}


# tensors of all ranks


def _describe(local: Iterable[StageTensor], stages: Mapping[int, StageInfo]) -> _RankTensors:
    infos: dict[int, list[TensorInfo]] = {stage: [] for stage in stages}
    names_by_id: dict[int, list[str]] = {}
    for own in (own for own in local if not own.is_copy):
        dtype = str(own.tensor.dtype).removeprefix("torch.")
        infos[own.stage].append(TensorInfo(own.name, tuple(own.tensor.shape), dtype, _is_frozen(own.tensor)))
        names_by_id.setdefault(id(own.tensor), []).append(own.name)
    last_names = {id(own.tensor): own.name for own in local}
    ties, tied_names = [], {}
    for number, stage in stages.items():
        for tie in stage.ties:
            name = last_names[id(stage.module.get_parameter(tie.name))]
            tied_names[number, tie.name] = name
            ties.append((name, tie.partner_stage, tie.partner_name))
    return _RankTensors(infos, [names for names in names_by_id.values() if len(names) > 1], ties, tied_names)


def _merge_stages(ranks: Iterable[_RankTensors]) -> dict[int, list[TensorInfo]]:
    """The tensors of every stage; ConfigError if ranks that hold the same stage have different ones."""
    merged: dict[int, list[TensorInfo]] = {}
    for rank in ranks:
        for stage, tensors in rank.stages.items():
            if merged.setdefault(stage, tensors) != tensors:
                one, other = next((a, b) for a, b in zip([*merged[stage], None], [*tensors, None]) if a != b)
                raise ConfigError(
                    f"two ranks have different tensors in stage {stage}: {one and one.name} and {other and other.name}"
                )
    return merged


def _resolve_ties(ranks: list[_RankTensors], stages: Mapping[int, list[TensorInfo]]) -> dict[str, str]:
    """The saved name of each name of a tied tensor that is not saved itself (union-find)."""
    parent: dict[str, str] = {}
    order = {t.name: (stage, i) for stage in sorted(stages, reverse=True) for i, t in enumerate(stages[stage])}

    def find(name: str) -> str:
        while parent.get(name, name) != name:
            name = parent[name]
        return name

    def union(one: str, other: str) -> None:
        first, second = sorted((find(one), find(other)), key=order.__getitem__)
        parent[second] = first

    tied_names = {key: name for rank in ranks for key, name in rank.tied_names.items()}
    for rank in ranks:
        for first, *others in rank.aliases:
            for name in others:
                union(first, name)
        for name, stage, other in rank.ties:
            union(name, tied_names[stage, other])
    same_name = {name for rank in ranks for name, stage, other in rank.ties if tied_names[stage, other] == name}
    _require_unique_names(stages, same_name)
    return {name: find(name) for name in order if find(name) != name}


def _require_unique_names(stages: Mapping[int, list[TensorInfo]], tied: set[str]) -> None:
    """ConfigError for a name in two stages, except of tensors that are tied."""
    owner: dict[str, int] = {}
    for stage, tensors in stages.items():
        for name in {tensor.name for tensor in tensors} - tied:
            if owner.setdefault(name, stage) != stage:
                raise ConfigError(f"stages {owner[name]} and {stage} both have a {name}: names must differ, or be tied")
