"""The state of torch optimizers under the names of their parameters in the full model, for any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.checkpoint.catalog import Catalog
from zeropipe.engine.checkpoint.manifest import TensorEntry, decode, encode
from zeropipe.engine.checkpoint.reader import to_dtype
from zeropipe.engine.masters import MasterWeights
from zeropipe.engine.stages.skeleton import format_names
from zeropipe.engine.torch_private.tensors import sharded_like
from zeropipe.errors import ConfigError

MASTER = "master"  # state key of the float32 copy of a parameter that MasterWeights keeps
LIST_KIND = "several"  # the kind of a list of optimizers ...
_GROUP_KIND = "optimizer"  # ... of which each group has its own kind under this key
# options of a group that do not change its results, and options that are not saved
_UNSAVED_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class OptimizerState(NamedTuple):
    """The state of an optimizer on one rank."""

    kind: str
    tensors: dict[str, Tensor]  # by parameter and key: `model.norm.weight.exp_avg`
    numbers: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    group_of: dict[str, int]


class OptimizerUse(NamedTuple):
    """Whether a rank has an optimizer, and whether it needs one."""

    kind: str | None  # None: it has none
    trained_name: str | None  # a parameter of its stages that is trained


def require_optimizers(ranks: Sequence[OptimizerUse], verb: str) -> None:
    """ConfigError for a rank without an optimizer where others have one; a rank that trains nothing needs none."""
    first = next((rank for rank, use in enumerate(ranks) if use.kind is not None), None)
    for rank, (kind, trained_name) in enumerate(ranks):
        if first is not None and kind is None and trained_name is not None:
            raise ConfigError(
                f"rank {rank} {verb} no optimizer, rank {first} {verb} one; pass the optimizer of {trained_name} on "
                f"rank {rank}, or freeze its parameters"
            )


def merge_states(uses: Sequence[OptimizerUse], states: Sequence[OptimizerState | None]) -> dict[str, Any] | None:
    """The manifest's entry for the optimizers of all ranks; ConfigError unless they are of one kind."""
    require_optimizers(uses, "saves")
    kinds: dict[str, int] = {}  # the first rank with each
    for rank, use in enumerate(uses):
        if use.kind is not None:
            kinds.setdefault(use.kind, rank)
    if not kinds:
        return None
    if len(kinds) > 1:
        one, other = (f"rank {rank} saves {kind}" for kind, rank in list(kinds.items())[:2])
        raise ConfigError(f"the optimizers differ: {one}, {other}; use the same kind on all ranks, or a list on all")
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    numbers: dict[str, Mapping[str, Any]] = {}
    for state in (state for state in states if state is not None):
        numbers |= state.numbers
        for name, number in state.group_of.items():
            index = _add_group(groups, state.groups[number])
            if group_of.setdefault(name, index) != index:
                raise ConfigError(f"the optimizers of two ranks have different options for {name}; use the same ones")
    return {"kind": next(iter(kinds)), "numbers": numbers, "groups": groups, "group_of": group_of}


def _add_group(groups: list[dict[str, Any]], options: dict[str, Any]) -> int:
    """The index of a group with these options; it is added if there is none."""
    if options not in groups:
        groups.append(options)
    return groups.index(options)


class _Entry(NamedTuple):
    """A parameter of an optimizer."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    tensor: Tensor  # the parameter, or its float32 copy
    parameter: Tensor
    name: str

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    @property
    def is_master(self) -> bool:
        return self.tensor is not self.parameter


class NamedOptimizer:
    """One optimizer, MasterWeights, or a list of them, with the names of their parameters."""

    def __init__(self, optimizer: Any, catalog: Catalog) -> None:
        given = _to_list(optimizer)
        self._optimizers = [one.optimizer if isinstance(one, MasterWeights) else one for one in given]
        for one in self._optimizers:
            if not hasattr(one, "param_groups") or not hasattr(one, "state"):
                raise ConfigError(
                    f"the optimizer is a {type(one).__name__}: must be a torch optimizer, MasterWeights, or a list of "
                    "them"
                )
        pairs = [pair for one in given if isinstance(one, MasterWeights) for pair in one.pairs]
        self._parameters = {id(master): parameter for parameter, master in pairs if parameter is not master}
        self._catalog = catalog
        self._is_list = isinstance(optimizer, list | tuple)
        self.kind = LIST_KIND if self._is_list else type(self._optimizers[0]).__name__
        self._entries = [
            self._create_entry(one, group, tensor)
            for one in self._optimizers
            for group in one.param_groups
            for tensor in group["params"]
        ]
        self._require_one_owner()

    def _create_entry(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], tensor: Tensor) -> _Entry:
        parameter = self._parameters.get(id(tensor), tensor)
        name = self._catalog.names_by_id.get(id(parameter))
        if name is None:
            raise ConfigError(
                f"the optimizer has a parameter of shape {tuple(tensor.shape)} that is in no stage; use an optimizer "
                "of its own for it, and save that separately"
            )
        return _Entry(optimizer, group, tensor, parameter, name)

    def _require_one_owner(self) -> None:
        """ConfigError for a parameter of two optimizers: their states would have the same names."""
        owner: dict[int, torch.optim.Optimizer] = {}
        for entry in self._entries:
            if owner.setdefault(id(entry.parameter), entry.optimizer) is not entry.optimizer:
                raise ConfigError(f"two optimizers have the parameter {entry.name}; pass it to one of them")

    # save

    def collect_state(self) -> OptimizerState:
        """The state of those parameters that this rank saves."""
        state = OptimizerState(self.kind, {}, {}, [], {})
        for entry in self._entries:
            if entry.parameter is not self._catalog.savable.get(entry.name):
                continue  # the other end of a tie
            options = {
                key: encode(_to_number(value), f"{key} of the optimizer", {})
                for key, value in entry.group.items()
                if key not in _UNSAVED_OPTIONS
            }
            if self._is_list:
                options[_GROUP_KIND] = entry.kind
            state.group_of[entry.name] = _add_group(state.groups, options)
            if entry.is_master:
                state.tensors[f"{entry.name}.{MASTER}"] = entry.tensor.detach()
            for key, value in entry.optimizer.state.get(entry.tensor, {}).items():
                _add_value(state, entry, key, value)
        return state

    # load

    def check(self, saved: Mapping[str, TensorEntry], facts: Mapping[str, Any] | None) -> None:
        """ConfigError unless the saved state fits this optimizer. `facts`: its entry in the manifest."""
        if facts is None:
            raise ConfigError("the checkpoint has no optimizer state; load it without an optimizer")
        kinds = {entry.name: entry.kind for entry in self._entries}
        for name in sorted(kinds.keys() & facts["group_of"].keys()):
            saved_kind = facts["groups"][facts["group_of"][name]].get(_GROUP_KIND, facts["kind"])
            if saved_kind != kinds[name]:
                of = f" of {name}" if self._is_list or facts["kind"] == LIST_KIND else ""
                raise ConfigError(
                    f"the checkpoint is of {saved_kind}, the optimizer{of} is {kinds[name]}; use the same kind"
                )
        local_names = self._catalog.loadable.keys()
        if missing := (facts["group_of"].keys() & local_names) - kinds.keys():
            raise ConfigError(
                f"the checkpoint has optimizer state of {format_names(missing)}, which is not in the optimizer; add it"
            )
        if unknown := kinds.keys() - facts["group_of"].keys():
            raise ConfigError(
                f"the checkpoint has no optimizer state of {format_names(unknown)}, which was not in the optimizer; "
                "remove it"
            )
        masters = {entry.name for entry in self._entries if entry.is_master}
        if missing := {name for name in masters if f"{name}.{MASTER}" not in saved}:
            raise ConfigError(
                f"the checkpoint has no float32 copy of {format_names(missing)}; load it without MasterWeights"
            )
        if unknown := {name for name in kinds.keys() - masters if f"{name}.{MASTER}" in saved}:
            raise ConfigError(
                f"the checkpoint has a float32 copy of {format_names(unknown)}; load it with MasterWeights"
            )
        self._find_tensors(saved)
        self._find_options(facts)

    def _find_tensors(self, saved: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
        """The saved tensors of each parameter, by state key; ConfigError if one does not fit."""
        found: dict[str, dict[str, TensorEntry]] = {entry.name: {} for entry in self._entries}
        for full, tensor in saved.items():
            name, _, key = full.rpartition(".")
            if name in found:
                found[name][key] = tensor
        for entry in self._entries:
            shape = tuple(entry.tensor.shape)
            for key, tensor in found[entry.name].items():
                if tensor.shape and tensor.shape != shape and isinstance(entry.tensor, DTensor):
                    raise ConfigError(
                        f"{key} of {entry.name} has shape {tensor.shape}, its parameter {shape}: it cannot be sharded"
                    )
                if key == MASTER and (tensor.shape != shape or to_dtype(tensor) != entry.tensor.dtype):
                    raise ConfigError(f"the float32 copy of {entry.name} has another shape or dtype in the checkpoint")
        return found

    def _find_options(self, facts: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Each group with its saved options; ConfigError if the options of its parameters differ."""
        found = []
        for group in (group for one in self._optimizers for group in one.param_groups):
            numbers = {facts["group_of"][entry.name] for entry in self._entries if entry.group is group}
            if len(numbers) > 1:
                one, other = (facts["groups"][number] for number in sorted(numbers)[:2])
                key = next(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
                raise ConfigError(
                    f"parameters of one group have {key}={one.get(key)} and {key}={other.get(key)} in the checkpoint; "
                    "use the same groups"
                )
            if numbers:
                options = facts["groups"][numbers.pop()]
                found.append((group, {key: value for key, value in options.items() if key != _GROUP_KIND}))
        return found

    def create_templates(self, saved: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
        """Tensors with the layout that the loaded state will have, to find the shards that it needs."""
        tensors = self._find_tensors(saved)
        return {
            f"{entry.name}.{key}": entry.tensor.detach()
            if tensor.shape == tuple(entry.tensor.shape)
            else torch.empty(tensor.shape)
            for entry in self._entries
            for key, tensor in tensors[entry.name].items()
        }

    def reset(self, saved: Mapping[str, TensorEntry], facts: Mapping[str, Any]) -> dict[str, list[Tensor]]:
        """Replace state and options by the saved ones, without values; returns the tensors to read, by name."""
        targets: dict[str, list[Tensor]] = {}
        tensors = self._find_tensors(saved)
        for entry in self._entries:
            entry.optimizer.state.pop(entry.tensor, None)
            state = {}
            for key, tensor in tensors[entry.name].items():
                if key == MASTER:
                    target = entry.tensor
                else:
                    target = state[key] = _create_empty(entry, key, tensor)
                targets.setdefault(f"{entry.name}.{key}", []).append(target)
            state |= {key: decode(value, {}) for key, value in facts["numbers"].get(entry.name, {}).items()}
            if state:
                entry.optimizer.state[entry.tensor] = state
        for group, options in self._find_options(facts):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(decode(value, {}))
                else:
                    group[key] = decode(value, {})
        return targets


def _add_value(state: OptimizerState, entry: _Entry, key: str, value: Any) -> None:
    """Add one value of an optimizer's state of a parameter; ConfigError if a checkpoint cannot hold it."""
    if "." in key:
        raise ConfigError(f"the optimizer has a state called {key!r}: its name must not have dots")
    if isinstance(value, Tensor):
        is_sharded = isinstance(entry.tensor, DTensor)
        has_same_layout = isinstance(value, DTensor) == is_sharded and value.shape == entry.tensor.shape
        if value.ndim and is_sharded and not has_same_layout:
            raise ConfigError(
                f"{key} of {entry.name} is not sharded as its parameter is: the state of {entry.kind} can be saved for "
                "unsharded parameters only"
            )
        state.tensors[f"{entry.name}.{key}"] = value.detach()
    elif value is None or isinstance(value, bool | int | float | str):
        state.numbers.setdefault(entry.name, {})[key] = encode(value, key, {})
    else:
        raise ConfigError(
            f"{key} of {entry.name} in the optimizer is a {type(value).__name__}: must be a tensor or a number"
        )


def _create_empty(entry: _Entry, key: str, saved: TensorEntry) -> Tensor:
    """An empty state tensor with the layout of its parameter; `step` on the device where torch expects it."""
    parameter, dtype = entry.tensor, to_dtype(saved)
    if isinstance(parameter, DTensor) and saved.shape == tuple(parameter.shape):
        return sharded_like(parameter, torch.empty_like(to_local(parameter.detach()), dtype=dtype))
    on_cpu = key == "step" and not entry.group.get("fused") and not entry.group.get("capturable")
    return torch.empty(saved.shape, dtype=dtype, device="cpu" if on_cpu else to_local(parameter).device)


def _to_list(optimizer: Any) -> list[Any]:
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def has_master_weights(optimizer: Any) -> bool:
    """Whether an optimizer keeps float32 copies of some parameters."""
    return any(isinstance(one, MasterWeights) for one in _to_list(optimizer))


def _to_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def free_masters(optimizer: Any) -> None:
    """Free the float32 copies that were made to save or load them, where an optimizer keeps their lower bits only."""
    for one in _to_list(optimizer):
        if isinstance(one, MasterWeights):
            one.compress()
