"""What the engine asks of a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import nn

from zeropipe.errors import ConfigError

Microbatch = Mapping[str, Any]
Pick = Callable[[Microbatch], tuple[tuple[Any, ...], dict[str, Any]]]
# called after an I, it gives what runs the weight gradients of that I: torch's dw_builder
BuildWeights = Callable[[], Callable[[], Any]]


class Tied(NamedTuple):
    """A parameter of this stage that must stay equal to a parameter of another stage."""

    name: str
    stage: int
    other: str


class Stage(Protocol):
    """A module that tells the engine about itself. A plain nn.Module is a stage too: it tells nothing."""

    blocks: Sequence[nn.Module]  # what is compiled and checkpointed, each whole
    layers: range  # the numbers of these blocks in the whole model
    tied_pairs: Sequence[Tied]

    def pick(self, microbatch: Microbatch) -> Mapping[str, Any]:
        """What forward wants of a microbatch, as keyword arguments, beside the tensors of the stage before."""
        ...

    def full_names(self) -> Mapping[str, str]:
        """This stage's parameters, by their name here: their name in the whole model."""
        ...


def _nothing_wrong(microbatch: Microbatch) -> None:
    return None


@dataclass(frozen=True, eq=False)
class Told:
    """What a stage tells, or what holds for a module that tells nothing. Nobody else asks which it was."""

    number: int
    module: nn.Module
    pick: Pick
    blocks: tuple[nn.Module, ...] | None  # None: it names none, so they cannot be compiled or checkpointed
    ties: tuple[Tied, ...]
    summed_over_tp: tuple[str, ...]  # parameters of which every process of `tp` has a share of the gradient
    first_layer: int = 0  # the number of the first block in the whole model
    build_weights: BuildWeights | None = None  # its layers put off their weight gradients themselves
    keeps_factors: bool = False  # sharded, and its owner says how gradients are scaled
    refusal: Callable[[Microbatch], str | None] = _nothing_wrong  # why a microbatch cannot run, before anything does


def told(number: int, module: nn.Module | Told) -> Told:
    """Ask a stage once, at set-up. Who has asked already gives the answers."""
    if isinstance(module, Told):
        return module
    blocks, layers = _blocks(module), getattr(module, "layers", None)
    return Told(
        number,
        module,
        _picker(number, module),
        blocks,
        tuple(Tied(*tie) for tie in getattr(module, "tied_pairs", ())),
        tuple(getattr(module, "summed_over_tp", ())),
        layers.start if blocks is not None and isinstance(layers, range) else 0,
        refusal=getattr(module, "refusal", _nothing_wrong),
    )


def _blocks(module: nn.Module) -> tuple[nn.Module, ...] | None:
    """The blocks it names; a model may use that word for something else."""
    named = getattr(module, "blocks", None)
    if isinstance(named, nn.ModuleDict):
        return tuple(named.values())
    blocks = tuple(named) if isinstance(named, Iterable) else (None,)
    return blocks if all(isinstance(block, nn.Module) for block in blocks) else None


def _picker(number: int, module: nn.Module) -> Pick:
    pick = getattr(module, "pick", None)
    if pick is not None:
        return lambda microbatch: ((), dict(pick(microbatch)))
    return _first_inputs if number == 0 else _nothing


def inputs_of(microbatch: Microbatch) -> Any:
    """What a model without a pick() starts from."""
    if "inputs" not in microbatch:
        raise ConfigError(f"a microbatch has {sorted(microbatch)}: it needs 'inputs', or the first stage a pick()")
    return microbatch["inputs"]


def _first_inputs(microbatch: Microbatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = inputs_of(microbatch)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def _nothing(microbatch: Microbatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {}
