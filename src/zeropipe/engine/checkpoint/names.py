"""The tensors of this rank's stages under their names in the whole model, and what all ranks know of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.comm.fabric import Fabric
from zeropipe.engine.stages import save
from zeropipe.engine.stages.adapters import adapter_in, wrapped, wrappers
from zeropipe.engine.stages.contract import StageInfo
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.whole import computed, unwrapped_name
from zeropipe.errors import ConfigError, short


class Team(NamedTuple):
    """What a rank of an Engine has, for work that all ranks do together beside steps."""

    schedule: Schedule
    stages: Mapping[int, StageInfo]
    fabric: Fabric


class HasTeam(Protocol):
    """An Engine, as this room sees it."""

    saving: Any

    def together(self, where: str, refusing: bool = True) -> AbstractContextManager[Team]:
        """Around such work: an error of one rank stops all. `refusing`: all of them raise a ConfigError anyway."""
        ...


def require_engine(engine: object) -> None:
    """ConfigError for what is no Engine."""
    if not hasattr(engine, "together"):
        raise ConfigError(f"engine={short(engine)}: give the folder first, then the Engine, then its optimizer")


class Described(NamedTuple):
    """A tensor that some rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_frozen: bool = False  # a parameter that is not trained


@dataclass(frozen=True, eq=False)
class Own:
    """A tensor of one of this rank's stages."""

    stage: int
    name: str  # in the whole model
    tensor: Tensor
    merged: Callable[[], Tensor] | None = None  # the tensor with an adapter added to it
    is_copy: bool = False  # of a buffer that another stage has: it is loaded, and not saved


class _Word(NamedTuple):
    """What a rank tells the others."""

    stages: dict[int, list[Described]]
    same: list[list[str]]  # names of one tensor of this rank
    ties: list[tuple[str, int, str]]  # a name, and the stage and the name there of what it is tied to
    here: dict[tuple[int, str], str]  # names of tied parameters, by stage and name there


class Catalog:
    """All tensors of the model, by name: those of this rank as tensors, those of the others described.

    Of the names of tied tensors one counts: that in the first stage. It is the only one that is saved.
    """

    def __init__(self, team: Team, merge: bool = False) -> None:
        tensors_of = merged_tensors if merge else own_tensors

        def look() -> list[Own]:
            return [own for stage in sorted(team.stages) for own in tensors_of(team.stages[stage])]

        self.own, words = on_all_ranks(team.fabric, look, share=lambda own: _word(own, team.stages))
        self.stages = _stages(words)
        self.ties = _ties(words, self.stages)

    def counted(self, name: str) -> str:
        """The name under which a tensor is saved."""
        return self.ties.get(name, name)

    @cached_property
    def described(self) -> dict[str, Described]:
        """All that is saved, in the order of the model."""
        every = (tensor for stage in sorted(self.stages) for tensor in self.stages[stage])
        return {tensor.name: tensor for tensor in every if tensor.name not in self.ties}

    def owner(self, name: str) -> Own:
        """What this rank holds under a counted name."""
        return next(own for own in self.own if own.name == name and not own.is_copy)

    @cached_property
    def saved(self) -> dict[str, Tensor]:
        """What this rank can save."""
        return {own.name: own.tensor for own in self.own if own.name not in self.ties and not own.is_copy}

    @cached_property
    def frozen(self) -> dict[str, Tensor]:
        """Of what this rank can save, the parameters that are not trained."""
        return {name: tensor for name, tensor in self.saved.items() if _is_frozen(tensor)}

    @cached_property
    def learning(self) -> str | None:
        """The name of a parameter of this rank that is trained."""
        return next((own.name for own in self.own if own.tensor.requires_grad), None)

    @cached_property
    def loaded(self) -> dict[str, list[Tensor]]:
        """What this rank loads; where both ends of a tie are here and are two tensors, both."""
        found: dict[str, dict[int, Tensor]] = {}
        for own in self.own:
            found.setdefault(self.counted(own.name), {})[id(own.tensor)] = own.tensor
        return {name: list(tensors.values()) for name, tensors in found.items()}

    @cached_property
    def names(self) -> dict[int, str]:
        """The counted name of each tensor, by its id."""
        return {id(own.tensor): self.counted(own.name) for own in self.own}

    @property
    def tied_sets(self) -> set[frozenset[str]]:
        """The names of each tied tensor."""
        return tied_sets(self.ties)


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def tied_sets(ties: Mapping[str, str]) -> set[frozenset[str]]:
    """Names that are one tensor, whichever of them counts."""
    groups: dict[str, set[str]] = {}
    for name, counted in ties.items():
        groups.setdefault(counted, {counted}).add(name)
    return {frozenset(group) for group in groups.values()}


def own_tensors(info: StageInfo) -> list[Own]:
    """Parameters and stored buffers of a stage; a tensor with several names under each of them."""
    module = info.module
    unstored = computed(module)
    buffers = {n: b for n, b in module.named_buffers(remove_duplicate=False) if n not in unstored}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    full = _full_names(info, parameters, buffers)
    copies = module.copied_buffers if isinstance(module, HFStage) else frozenset()
    return [
        Own(info.number, full[name], tensor, is_copy=name in copies) for name, tensor in (parameters | buffers).items()
    ]


def merged_tensors(info: StageInfo) -> list[Own]:
    """A stage's tensors as they are without the adapter's layers, which are added to them."""
    stage = info.module
    adapter = adapter_in(stage) if isinstance(stage, HFStage) else None
    if not isinstance(stage, HFStage) or adapter is None:
        return own_tensors(info)
    around = {stage.full_name(name): module for name, module in wrappers(stage).items()}
    bare = {own.name: own.tensor for own in own_tensors(info)}
    found = []
    for name, get in save.merged_tensors(stage, adapter.name).items():
        wrapper = next((wrapper for wrapper in around if name.startswith(f"{wrapper}.")), None)
        if wrapper is None:
            found.append(Own(info.number, name, bare[name]))
            continue
        outer = around[wrapper]
        if any(hasattr(tensor, "full_tensor") for tensor in outer.parameters()):
            raise ConfigError(f"the adapter on {name} is sharded and cannot be merged: ask for merge=False")
        inside = wrapped(outer).state_dict(keep_vars=True)
        found.append(Own(info.number, name, inside[name.removeprefix(f"{wrapper}.")], get))
    return found


def _full_names(info: StageInfo, parameters: Iterable[str], buffers: Iterable[str]) -> dict[str, str]:
    module: Any = info.module
    if not hasattr(module, "full_names"):  # it tells nothing: such a checkpoint is for the same stages
        return {name: f"stages.{info.number}.{unwrapped_name(name)}" for name in (*parameters, *buffers)}
    full = dict(module.full_names())
    for name in buffers:
        if not hasattr(module, "full_name"):
            raise ConfigError(
                f"stage {info.number} has a buffer {name} and no full_name(name): its name in the whole model is needed"
            )
        full[name] = module.full_name(name)
    if missing := [name for name in parameters if name not in full]:
        raise ConfigError(f"full_names() of stage {info.number} does not tell {missing[0]}: it tells every parameter")
    return {name: unwrapped_name(name_there) for name, name_there in full.items()}


def _word(own: Iterable[Own], stages: Mapping[int, StageInfo]) -> _Word:
    described: dict[int, list[Described]] = {stage: [] for stage in stages}
    same: dict[int, list[str]] = {}
    for each in (each for each in own if not each.is_copy):
        dtype = str(each.tensor.dtype).removeprefix("torch.")
        what = Described(each.name, tuple(each.tensor.shape), dtype, _is_frozen(each.tensor))
        described[each.stage].append(what)
        same.setdefault(id(each.tensor), []).append(each.name)
    names = {id(each.tensor): each.name for each in own}
    ties, here = [], {}
    for number, info in stages.items():
        for tie in info.ties:
            name = names[id(info.module.get_parameter(tie.name))]
            here[number, tie.name] = name
            ties.append((name, tie.partner_stage, tie.partner_name))
    return _Word(described, [group for group in same.values() if len(group) > 1], ties, here)


def _stages(words: Iterable[_Word]) -> dict[int, list[Described]]:
    """Every stage's tensors; ranks that hold the same stage must say the same."""
    found: dict[int, list[Described]] = {}
    for word in words:
        for stage, tensors in word.stages.items():
            if found.setdefault(stage, tensors) != tensors:
                one, other = next((a, b) for a, b in zip([*found[stage], None], [*tensors, None]) if a != b)
                raise ConfigError(
                    f"two ranks hold another stage {stage}: {one and one.name} and {other and other.name}"
                )
    return found


def _ties(words: list[_Word], stages: Mapping[int, list[Described]]) -> dict[str, str]:
    """Name -> the name that counts."""
    leader: dict[str, str] = {}
    place = {d.name: (stage, i) for stage in sorted(stages, reverse=True) for i, d in enumerate(stages[stage])}

    def find(name: str) -> str:
        while leader.get(name, name) != name:
            name = leader[name]
        return name

    def join(one: str, other: str) -> None:
        first, second = sorted((find(one), find(other)), key=place.__getitem__)
        leader[second] = first

    here = {key: name for word in words for key, name in word.here.items()}
    for word in words:
        for first, *others in word.same:
            for name in others:
                join(first, name)
        for name, stage, other in word.ties:
            join(name, here[stage, other])
    shared = {name for word in words for name, stage, other in word.ties if here[stage, other] == name}
    _require_one_owner(stages, shared)
    return {name: find(name) for name in place if find(name) != name}


def _require_one_owner(stages: Mapping[int, list[Described]], shared: set[str]) -> None:
    """One name, one tensor: but for tied tensors that have one name in both stages."""
    owner: dict[str, int] = {}
    for stage, tensors in stages.items():
        for name in {tensor.name for tensor in tensors} - shared:
            if owner.setdefault(name, stage) != stage:
                raise ConfigError(f"stages {owner[name]} and {stage} both have a {name}: names must differ, or be tied")
