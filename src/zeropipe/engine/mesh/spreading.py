"""How a single layer is spread over the processes of `tp`.

A weight at rest is a DTensor, so that optimizers, FSDP and checkpoints know what it is. Layers compute with this
process's piece of it, so a weight gradient is a local product and can wait for W like any other.
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

from zeropipe.engine.backward.experts import keep_local_experts
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.linear import Deferred, defer
from zeropipe.engine.mesh.talk import Enter, EnterJoined, Join, Leave, LeaveTaken, Peers, Take
from zeropipe.errors import ConfigError

SEQUENCE = 1  # the dimension of tokens in hidden states


@dataclass
class Sharing:
    """How the parameters of some stages are shared among processes, found out while they are spread."""

    peers: Peers
    mesh: DeviceMesh | None  # None in a proof, whose peers are threads: pieces are plain parameters then
    dimensions: dict[str, int] = field(default_factory=dict)  # name in the whole model -> what it is cut along
    _pieces: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    def keep_piece(self, module: nn.Module, name: str, full: str, dimension: int) -> None:
        """Let a module keep only this process's piece of a parameter; parameters that were one stay one."""
        parameter = module._parameters[name]
        assert parameter is not None
        if id(parameter) not in self._pieces:
            self._pieces[id(parameter)] = (parameter, self._piece(parameter, dimension))
        self.dimensions[f"{full}.{name}"] = dimension
        setattr(module, name, self._pieces[id(parameter)][1])

    def _piece(self, parameter: nn.Parameter, dimension: int) -> nn.Parameter:
        peers = self.peers
        piece = parameter.detach().chunk(peers.number, dimension)[peers.place].contiguous().clone()
        if self.mesh is not None:
            piece = DTensor.from_local(
                piece, self.mesh, (Shard(dimension),), run_check=False, shape=parameter.shape,
                stride=parameter.stride(),
            )  # fmt: skip
        return nn.Parameter(piece, requires_grad=parameter.requires_grad)

    def pieces(self) -> list[nn.Parameter]:
        """The pieces that this process keeps."""
        return [piece for _, piece in self._pieces.values()]

    def divides(self, size: int) -> bool:
        return size % self.peers.number == 0


def spread_linear(name: str, module: Any, dimension: int, sharing: Sharing) -> None:
    """Keep some outputs (dimension 0) or inputs (1) of a linear layer; the bias of the latter is added once."""
    defer(module)  # a deferred layer computes with pieces, also where nothing is split
    if not isinstance(module, nn.Linear) or not isinstance(module, Deferred):
        raise ConfigError(f"{name} is a {type(module).__name__}: only plain linear layers can be spread over tp")
    size = module.weight.shape[dimension]
    if not sharing.divides(size):
        raise ConfigError(
            f"{name} has {size} {'inputs' if dimension else 'outputs'}: tp={sharing.peers.number} must divide it"
        )
    sharing.keep_piece(module, "weight", name, dimension)
    if dimension == 1:
        module.adds_bias = sharing.peers.place == 0
    elif module.bias is not None:
        sharing.keep_piece(module, "bias", name, 0)


def spread_experts(name: str, module: Any, sharing: Sharing) -> None:
    """Keep some of the experts of a stack whole: their weights stay contiguous pieces, as checkpoints want them."""
    if not keep_local_experts(module, sharing.peers.place, sharing.peers.number):
        raise ConfigError(f"{name} is a {type(module).__name__}, whose experts cannot be spread over tp: leave tp out")
    if not sharing.divides(module.num_experts):
        raise ConfigError(f"{name} has {module.num_experts} experts: tp={sharing.peers.number} must divide it")
    for weight, _ in list(module.named_parameters(recurse=False)):
        sharing.keep_piece(module, weight, name, 0)
    enter, leave = hooks(sharing.peers).experts, hooks(sharing.peers).leave
    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def spread_embedding(name: str, module: Any, sharing: Sharing) -> None:
    """Keep some rows of an embedding: each process looks up the tokens that it has, and the results are summed."""
    sharing.keep_piece(module, "weight", name, 0)
    module.peers = sharing.peers
    module.__class__ = _spread_embedding(type(module))


@functools.cache
def _spread_embedding(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, ids: Tensor) -> Tensor:
        weight = to_local(self.weight)
        rows = len(weight)
        first = rows * self.peers.place
        is_mine = (ids >= first) & (ids < first + rows)
        # The embedding's own forward, which may scale, with this process's rows: a copy of the module has them.
        own = kind.__new__(kind)
        own.__dict__.update(self.__dict__)
        own.__dict__["_parameters"] = {"weight": weight}
        if self.padding_idx is not None:
            own.__dict__["padding_idx"] = self.padding_idx - first if 0 <= self.padding_idx - first < rows else None
        found = kind.forward(own, torch.where(is_mine, ids - first, 0))
        return Leave.apply(torch.where(is_mine[..., None], found, 0), self.peers)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


@dataclass(frozen=True)
class Hooks:
    """What is done around layers. One function for all layers of a kind, so that equal blocks make equal graphs."""

    enter: Callable[..., Any]
    enter_joined: Callable[..., Any]
    join: Callable[..., Any]
    take_input: Callable[..., Any]
    split_input: Callable[..., Any]
    experts: Callable[..., Any]
    leave: Callable[..., Any]
    leave_taken: Callable[..., Any]
    take: Callable[..., Any]
    take_output: Callable[..., Any]
    gather_output: Callable[..., Any]


@functools.cache
def hooks(peers: Peers) -> Hooks:
    """The hooks of some peers. Those of inputs are registered with keyword arguments, but for those of experts."""

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

    def take_output(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        shape = (args[0] if args else kwargs["hidden_states"]).shape  # some give back rows of tokens, not sequences
        return on_output(lambda y: Take.apply(y.view(shape), SEQUENCE, peers))(module, args, output)

    def experts(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(Enter.apply(x, peers) if x.is_floating_point() else x for x in args)

    return Hooks(
        enter=on_input(lambda x: Enter.apply(x, peers)),
        enter_joined=on_input(lambda x: EnterJoined.apply(x, SEQUENCE, peers)),
        join=on_input(lambda x: Join.apply(x, SEQUENCE, peers)),
        take_input=on_input(lambda x: Take.apply(x, SEQUENCE, peers)),
        split_input=on_input(lambda x: Take.apply(x, -1, peers)),
        experts=experts,
        leave=on_output(lambda y: Leave.apply(y, peers)),
        leave_taken=on_output(lambda y: LeaveTaken.apply(y, SEQUENCE, peers)),
        take=on_output(lambda y: Take.apply(y, SEQUENCE, peers)),
        take_output=take_output,
        gather_output=on_output(lambda y: Join.apply(y, -1, peers)),
    )


@functools.cache
def enter_last(peers: Peers, size: int) -> Callable[..., Any]:
    """A hook: the last `size` entries of an output go into layers that are spread by columns, past all others."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        rest, last = output.split([output.shape[-1] - size, size], -1)
        return torch.cat([rest, Enter.apply(last, peers)], -1)

    return hook
