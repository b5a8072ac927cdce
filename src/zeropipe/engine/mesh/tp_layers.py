"""Single layers sharded over `tp`: linear layers, experts and embeddings.

A weight is stored as a DTensor, so optimizers, FSDP and checkpoints have its layout. Layers compute with its local
shard, so a weight gradient is a local product, which can be put off to W like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zeropipe.engine.backward.expert_adapters import has_foreign_adapters
from zeropipe.engine.backward.experts import defer_experts, is_routed_stack, keep_local_experts, num_local_experts
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.linear import Deferred, defer
from zeropipe.engine.mesh.tp_collectives import Copy, Gather, GatherCopy, Reduce, ReduceScatter, Scatter, TPGroup
from zeropipe.engine.stages.adapters import is_adapter_layer, is_adapter_name
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import ConfigError

SEQUENCE = 1  # the dimension of tokens in hidden states


@dataclass
class ParameterShards:
    """The parameters that were sharded over `tp` or `ep`, collected while stages are sharded."""

    group: Any  # with this process's rank, and the size: a TPGroup or ExpertGroup
    mesh: DeviceMesh | None  # None in a simulation: shards are plain parameters then
    dimensions: dict[str, int] = field(default_factory=dict)  # name in the full model -> sharded dimension
    _shards: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)  # full, shard; by id of full

    def shard(self, module: nn.Module, name: str, module_name: str, dimension: int) -> None:
        """Replace a module's parameter by this rank's shard of it; one that is shared by modules stays shared."""
        parameter = module._parameters[name]
        assert parameter is not None
        if id(parameter) not in self._shards:
            self._shards[id(parameter)] = (parameter, self._create_shard(parameter, dimension))
        self.dimensions[f"{module_name}.{name}"] = dimension
        setattr(module, name, self._shards[id(parameter)][1])

    def _create_shard(self, parameter: nn.Parameter, dimension: int) -> nn.Parameter:
        """This rank's shard of a parameter; one that is sharded already is sharded once more."""
        local = to_local(parameter).detach()
        shard = local.chunk(self.group.size, dimension)[self.group.rank].contiguous().clone()
        if self.mesh is not None:
            mesh, placements = self.mesh, (Shard(dimension),)
            if isinstance(parameter, DTensor):
                mesh = torch_comm.concatenate(parameter.device_mesh, mesh)
                placements = (*parameter.placements, *placements)
            shard = DTensor.from_local(
                shard, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        return nn.Parameter(shard, requires_grad=parameter.requires_grad)

    def all_shards(self) -> list[nn.Parameter]:
        return [shard for _, shard in self._shards.values()]

    def divides(self, size: int) -> bool:
        return size % self.group.size == 0


def shard_linear(name: str, module: Any, dimension: int, shards: ParameterShards) -> list[str]:
    """Shard the outputs (dimension 0) or inputs (1) of a linear layer; the bias of the latter is added once.

    Returns the names of parameters with partial gradients.
    """
    defer(module)  # a deferred layer computes with local shards, also where backward is not split
    if not isinstance(module, nn.Linear) or not isinstance(module, Deferred):
        raise ConfigError(f"{name} is a {type(module).__name__}: only plain linear layers can be sharded over tp")
    size = module.weight.shape[dimension]
    if not shards.divides(size):
        raise ConfigError(
            f"{name} has {size} {'inputs' if dimension else 'outputs'}: tp={shards.group.size} must divide it"
        )
    shards.shard(module, "weight", name, dimension)
    if dimension == 1:
        module.adds_bias = shards.group.rank == 0
        return ["bias"] if module.bias is not None else []
    if module.bias is not None:
        shards.shard(module, "bias", name, 0)
    return []


def shard_experts(name: str, module: Any, shards: ParameterShards) -> list[str]:
    """Keep some of a stack of experts, each unsharded, so that their weights are contiguous shards.

    All processes have an adapter on them, with the gradients of their own experts: returns the names of its parameters.
    """
    group = shards.group
    partial = [parameter for parameter, _ in module.named_parameters() if is_adapter_name(f".{parameter}")]
    defer_experts(module)
    if has_foreign_adapters(module, is_routed_stack):
        raise ConfigError(f"the adapter on {name} cannot be sharded over tp; leave it out of the adapter")
    if is_adapter_layer(module):
        module = module.get_base_layer()
    if not keep_local_experts(module, group.rank, group.size):
        raise ConfigError(f"{name} is a {type(module).__name__}, whose experts cannot be sharded over tp; leave out tp")
    require_divisor(name, module, shards, "tp")
    for weight, _ in list(module.named_parameters(recurse=False)):
        shards.shard(module, weight, name, 0)
    module.register_forward_pre_hook(create_hooks(group).copy_experts_input)
    module.register_forward_hook(create_hooks(group).reduce_output)
    return partial


def require_divisor(name: str, module: Any, shards: ParameterShards, dimension: str) -> None:
    """ConfigError if the processes of a mesh dimension cannot have equally many experts of a stack."""
    number = num_local_experts(module)
    if not shards.divides(number):
        here = "" if number == module.num_experts else f", of which {number} are here"
        raise ConfigError(
            f"{name} has {module.num_experts} experts{here}: {dimension}={shards.group.size} must divide "
            f"{'it' if not here else 'them'}"
        )


def shard_embedding(name: str, module: Any, shards: ParameterShards) -> None:
    """Shard the rows of an embedding: each rank looks up the tokens of its rows, and the results are summed."""
    shards.shard(module, "weight", name, 0)
    module.tp_group = shards.group
    module.__class__ = _sharded_embedding_class(type(module))


@functools.cache
def _sharded_embedding_class(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, ids: Tensor) -> Tensor:
        weight = to_local(self.weight)
        num_rows = len(weight)
        first = num_rows * self.tp_group.rank
        is_local = (ids >= first) & (ids < first + num_rows)
        # The embedding's own forward, which may scale, called on a copy of the module with the local rows.
        copy = kind.__new__(kind)
        copy.__dict__.update(self.__dict__)
        copy.__dict__["_parameters"] = {"weight": weight}
        if self.padding_idx is not None:
            padding = self.padding_idx - first
            copy.__dict__["padding_idx"] = padding if 0 <= padding < num_rows else None
        rows = kind.forward(copy, torch.where(is_local, ids - first, 0))
        return Reduce.apply(torch.where(is_local[..., None], rows, 0), self.tp_group)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@dataclass(frozen=True)
class Hooks:
    """Forward hooks of layers. All layers of a kind have the same function, so equal blocks compile to equal graphs."""

    copy_input: Callable[..., Any]
    gather_copy_input: Callable[..., Any]
    gather_input: Callable[..., Any]
    scatter_input: Callable[..., Any]
    scatter_features: Callable[..., Any]
    copy_experts_input: Callable[..., Any]
    reduce_output: Callable[..., Any]
    reduce_scatter_output: Callable[..., Any]
    scatter_output: Callable[..., Any]
    scatter_tokens: Callable[..., Any]
    gather_features: Callable[..., Any]


@functools.cache
def create_hooks(group: TPGroup) -> Hooks:
    """The hooks of a group. Those of inputs are registered with keyword arguments, except copy_experts_input."""

    def on_input(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

        return hook

    def on_output(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        return hook

    def scatter_tokens(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        shape = (args[0] if args else kwargs["hidden_states"]).shape  # some return rows of tokens, not sequences
        return on_output(lambda y: Scatter.apply(y.view(shape), SEQUENCE, group))(module, args, output)

    def copy_experts_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(Copy.apply(x, group) if x.is_floating_point() else x for x in args)

    return Hooks(
        copy_input=on_input(lambda x: Copy.apply(x, group)),
        gather_copy_input=on_input(lambda x: GatherCopy.apply(x, SEQUENCE, group)),
        gather_input=on_input(lambda x: Gather.apply(x, SEQUENCE, group)),
        scatter_input=on_input(lambda x: Scatter.apply(x, SEQUENCE, group)),
        scatter_features=on_input(lambda x: Scatter.apply(x, -1, group)),
        copy_experts_input=copy_experts_input,
        reduce_output=on_output(lambda y: Reduce.apply(y, group)),
        reduce_scatter_output=on_output(lambda y: ReduceScatter.apply(y, SEQUENCE, group)),
        scatter_output=on_output(lambda y: Scatter.apply(y, SEQUENCE, group)),
        scatter_tokens=scatter_tokens,
        gather_features=on_output(lambda y: Gather.apply(y, -1, group)),
    )


@functools.cache
def create_copy_last_hook(group: TPGroup, size: int) -> Callable[..., Any]:
    """A hook that copies the last `size` features of an output, which go into column-wise layers, and no others."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        rest, last = output.split([output.shape[-1] - size, size], -1)
        return torch.cat([rest, Copy.apply(last, group)], -1)

    return hook
