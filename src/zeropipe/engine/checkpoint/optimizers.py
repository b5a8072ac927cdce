"""The state of torch's optimizers under names of the whole model, and back into optimizers of any layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropipe.engine.backward.gradients import local
from zeropipe.engine.checkpoint.manifest import Saved
from zeropipe.engine.checkpoint.names import Catalog
from zeropipe.engine.checkpoint.pieces import dtype_of
from zeropipe.engine.checkpoint.values import decode, encode
from zeropipe.engine.masters import MasterWeights
from zeropipe.engine.stages.whole import listed
from zeropipe.engine.torch_private.tensors import like
from zeropipe.errors import ConfigError

MASTER = "master"  # the float32 copy of a parameter that MasterWeights keeps
SEVERAL = "several"  # the kind of a list of optimizers ...
_OF = "optimizer"  # ... in which each group says of which kind it is
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # of a group: how it computes, not what


class Kept(NamedTuple):
    """An optimizer's state on this rank."""

    kind: str
    tensors: dict[str, Tensor]  # by parameter and key: `model.norm.weight.exp_avg`
    numbers: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    group_of: dict[str, int]


class Gives(NamedTuple):
    """What a rank gives for its optimizer."""

    kind: str | None  # None: it has none
    learning: str | None  # a parameter of its stages that is trained


def require_optimizers(given: Sequence[Gives], does: str) -> None:
    """ConfigError for a rank without an optimizer where others have one; a rank that trains nothing needs none."""
    having = next((rank for rank, gives in enumerate(given) if gives.kind is not None), None)
    for rank, (kind, learning) in enumerate(given):
        if having is not None and kind is None and learning is not None:
            raise ConfigError(
                f"rank {rank} {does} no optimizer, rank {having} {does} one: give rank {rank} that of {learning}, or "
                "freeze what it does not train"
            )


def kind_of_all(given: Sequence[Gives]) -> str | None:
    """The kind of all ranks' optimizers."""
    require_optimizers(given, "saves")
    kinds: dict[str, int] = {}  # of each the first rank that has it
    for rank, gives in enumerate(given):
        if gives.kind is not None:
            kinds.setdefault(gives.kind, rank)
    if len(kinds) > 1:
        one, other = (f"rank {rank} saves {'several' if k == SEVERAL else k}" for k, rank in list(kinds.items())[:2])
        raise ConfigError(f"the optimizers are not alike: {one}, {other}; give all the same kind, or all a list")
    return next(iter(kinds), None)


class Optimized:
    """An optimizer as a checkpoint sees it."""

    def __init__(self, optimizer: Any, catalog: Catalog) -> None:
        given = listed_optimizers(optimizer)
        self._inners: list[torch.optim.Optimizer] = [
            one.optimizer if isinstance(one, MasterWeights) else one for one in given
        ]
        for one in self._inners:
            if not hasattr(one, "param_groups") or not hasattr(one, "state"):
                raise ConfigError(
                    f"the optimizer is a {type(one).__name__}: give a torch optimizer, MasterWeights, or a list of them"
                )
        pairs = [pair for one in given if isinstance(one, MasterWeights) for pair in one.pairs]
        self._masters = {id(master): parameter for parameter, master in pairs if parameter is not master}
        self._catalog = catalog
        self._has_several = isinstance(optimizer, list | tuple)
        self.kind = SEVERAL if self._has_several else _kind(self._inners[0])
        self._require_once()

    def _require_once(self) -> None:
        """Two optimizers of one parameter would have two states of one name."""
        owner: dict[int, int] = {}
        for number, inner in enumerate(self._inners):
            for seen in (seen for group in inner.param_groups for seen in group["params"]):
                parameter = self._masters.get(id(seen), seen)
                if owner.setdefault(id(parameter), number) != number:
                    name = self._catalog.names.get(id(parameter), f"one of shape {tuple(seen.shape)}")
                    raise ConfigError(f"two of the optimizers have the parameter {name}: give it to one of them")

    def _seen(self) -> Iterable[tuple[torch.optim.Optimizer, dict[str, Any], Tensor, str]]:
        """Every optimizer and group, what it sees as a parameter, and its name."""
        for inner in self._inners:
            for group in inner.param_groups:
                for seen in group["params"]:
                    name = self._catalog.names.get(id(self._masters.get(id(seen), seen)))
                    if name is None:
                        raise ConfigError(
                            f"the optimizer has a parameter of shape {tuple(seen.shape)} that is in no stage: save and "
                            "load it yourself"
                        )
                    yield inner, group, seen, name

    # to a checkpoint

    def keep(self) -> Kept:
        """The state of those parameters that this rank saves."""
        kept = Kept(self.kind, {}, {}, [], {})
        for inner, group, seen, name in self._seen():
            if self._masters.get(id(seen), seen) is not self._catalog.saved.get(name):
                continue  # the other end of a tie
            options = {
                key: encode(_number(value), f"{key} of the optimizer", {})
                for key, value in group.items()
                if key not in _HOW and key != "param_names"
            }
            if self._has_several:
                options[_OF] = _kind(inner)
            if options not in kept.groups:
                kept.groups.append(options)
            kept.group_of[name] = kept.groups.index(options)
            if id(seen) in self._masters:
                kept.tensors[f"{name}.{MASTER}"] = seen.detach()
            for key, value in inner.state.get(seen, {}).items():
                _keep(kept, name, seen, key, value, _kind(inner))
        return kept

    # from a checkpoint

    def check(self, saved: Mapping[str, Saved], facts: Mapping[str, Any] | None) -> None:
        """ConfigError unless this optimizer can go on from the state that was saved."""
        if facts is None:
            raise ConfigError("the checkpoint holds no optimizer state: load it without an optimizer")
        here = {name: _kind(inner) for inner, _, _, name in self._seen()}
        for name in sorted(here.keys() & facts["group_of"].keys()):
            there = facts["groups"][facts["group_of"][name]].get(_OF, facts["kind"])
            if there != here[name]:
                of = f" of {name}" if self._has_several or facts["kind"] == SEVERAL else ""
                raise ConfigError(f"the checkpoint is of {there}, the optimizer{of} is {here[name]}: use the same kind")
        own = self._catalog.loaded.keys()
        if missing := (facts["group_of"].keys() & own) - here.keys():
            raise ConfigError(f"the checkpoint has optimizer state of {listed(missing)}: the optimizer here has none")
        if unknown := here.keys() - facts["group_of"].keys():
            raise ConfigError(
                f"the checkpoint has no optimizer state of {listed(unknown)}: the optimizer there had none"
            )
        masters = {name for _, _, seen, name in self._seen() if id(seen) in self._masters}
        if missing := {name for name in masters if f"{name}.{MASTER}" not in saved}:
            raise ConfigError(f"the checkpoint has no float32 copy of {listed(missing)}: load it without MasterWeights")
        if unknown := {name for name in here.keys() - masters if f"{name}.{MASTER}" in saved}:
            raise ConfigError(f"the checkpoint has a float32 copy of {listed(unknown)}: use MasterWeights, as there")
        self._wanted(saved)
        self._options(facts)

    def _wanted(self, saved: Mapping[str, Saved]) -> dict[str, dict[str, Saved]]:
        """The saved tensors of each parameter, by key."""
        names = {name for _, _, _, name in self._seen()}
        found: dict[str, dict[str, Saved]] = {name: {} for name in names}
        for full, tensor in saved.items():
            name, _, key = full.rpartition(".")
            if name in names:
                found[name][key] = tensor
        for _, _, seen, name in self._seen():
            for key, tensor in found[name].items():
                if tensor.shape and tensor.shape != tuple(seen.shape) and hasattr(seen, "full_tensor"):
                    raise ConfigError(f"{key} of {name} is no tensor like its parameter: it cannot be sharded")
                if key == MASTER and (tensor.shape != tuple(seen.shape) or dtype_of(tensor) != seen.dtype):
                    raise ConfigError(f"the float32 copy of {name} has another shape or dtype in the checkpoint")
        return found

    def _options(self, facts: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """What each group's options were; all its parameters must have had the same."""
        found = []
        for group in (group for inner in self._inners for group in inner.param_groups):
            numbers = {facts["group_of"][name] for _, g, _, name in self._seen() if g is group}
            if len(numbers) > 1:
                one, other = (facts["groups"][number] for number in sorted(numbers)[:2])
                key = next(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
                raise ConfigError(
                    f"parameters of one group had {key}={one.get(key)} and {key}={other.get(key)} in the checkpoint: "
                    "make the same groups as there"
                )
            if numbers:
                options = facts["groups"][numbers.pop()]
                found.append((group, {key: value for key, value in options.items() if key != _OF}))
        return found

    def like(self, saved: Mapping[str, Saved]) -> dict[str, Tensor]:
        """Tensors that lie as the state will: to find out what has to be read."""
        wanted = self._wanted(saved)
        return {
            f"{name}.{key}": seen.detach() if tensor.shape == tuple(seen.shape) else torch.empty(tensor.shape)
            for _, _, seen, name in self._seen()
            for key, tensor in wanted[name].items()
        }

    def prepare(self, saved: Mapping[str, Saved], facts: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """Give the optimizer new state, without values: the tensors to read, by name."""
        into: dict[str, list[Tensor]] = {}
        wanted = self._wanted(saved)
        for inner, group, seen, name in self._seen():
            inner.state.pop(seen, None)
            state = {}
            for key, tensor in wanted[name].items():
                if key == MASTER:
                    made = seen
                else:
                    made = state[key] = _empty(seen, key, tensor, group)
                into.setdefault(f"{name}.{key}", []).append(made)
            state |= {key: decode(value, {}) for key, value in facts["numbers"].get(name, {}).items()}
            if state:
                inner.state[seen] = state
        for group, options in self._options(facts):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(decode(value, {}))
                else:
                    group[key] = decode(value, {})
        return into


def _keep(kept: Kept, name: str, seen: Tensor, key: str, value: Any, kind: str) -> None:
    if "." in key:
        raise ConfigError(f"the optimizer has a state called {key!r}: a name without dots is needed")
    if isinstance(value, Tensor):
        spread = hasattr(value, "full_tensor") == hasattr(seen, "full_tensor") and value.shape == seen.shape
        if value.ndim and not spread and hasattr(seen, "full_tensor"):
            raise ConfigError(
                f"{key} of {name} is not spread over processes as its parameter is: such an optimizer "
                f"({kind}) can be saved for parameters that are not sharded only"
            )
        kept.tensors[f"{name}.{key}"] = value.detach()
    elif value is None or isinstance(value, bool | int | float | str):
        kept.numbers.setdefault(name, {})[key] = encode(value, key, {})
    else:
        raise ConfigError(
            f"{key} of {name} in the optimizer is a {type(value).__name__}: a checkpoint keeps tensors and numbers"
        )


def _empty(parameter: Tensor, key: str, saved: Saved, group: Mapping[str, Any]) -> Tensor:
    """Memory for a state that lies as its parameter does; the number of steps where torch wants it."""
    dtype = dtype_of(saved)
    if hasattr(parameter, "full_tensor") and saved.shape == tuple(parameter.shape):
        return like(parameter, torch.empty_like(local(parameter.detach()), dtype=dtype))
    on_cpu = key == "step" and not group.get("fused") and not group.get("capturable")
    return torch.empty(saved.shape, dtype=dtype, device="cpu" if on_cpu else local(parameter).device)


def listed_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a list, or the one."""
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def has_masters(optimizer: Any) -> bool:
    """Whether float32 copies are kept beside some weights."""
    return any(isinstance(one, MasterWeights) for one in listed_optimizers(optimizer))


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
