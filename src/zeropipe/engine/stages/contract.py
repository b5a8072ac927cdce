"""The interface between the engine and a stage.

Any nn.Module is a stage: it is called with the outputs of the previous stage, the first one with
`microbatch["inputs"]`. A module may describe itself further with these attributes, all of them optional:

blocks            its transformer blocks: the modules that are compiled and checkpointed
layers            a range: the indices of these blocks in the full model
pick(microbatch)  the keyword arguments that its forward takes from a microbatch
refusal(microbatch)  why a microbatch cannot run, or None; called before a step starts
tied_pairs        (own name, other stage, name there) of each parameter that is tied to one of another stage
summed_over_tp    names of parameters whose gradient is summed over the `tp` dimension of the mesh
running_state     what its forward has collected while it runs, not to be mixed with what a backward recomputes
full_names()      own parameter name -> name in the full model, for checkpoints
fused_head        of a last stage: its forward takes `targets` and then returns TokenLosses instead of logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from zeropipe.errors import ConfigError

Microbatch = Mapping[str, Any]
Pick = Callable[[Microbatch], tuple[tuple[Any, ...], dict[str, Any]]]


class Targets(NamedTuple):
    """What a last stage computes losses of."""

    labels: Tensor  # of each token, the next one: (sequences, tokens); -1 for none
    factor: float | None = None  # of each loss in the loss of the step; None: not known before the backward
    entropies: bool = False
    is_slice: bool = False  # the tokens are a slice of their rows: also the last one has a next one


class TokenLosses(NamedTuple):
    """The losses of all tokens but the last of each row, and the entropies of their distributions if requested.

    Of a slice of rows, those of all its tokens.
    """

    losses: Tensor
    entropies: Tensor | None = None


class Tie(NamedTuple):
    """A parameter of a stage, and the parameter of another stage that it must stay equal to."""

    stage: int
    name: str
    partner_stage: int
    partner_name: str

    @property
    def ends(self) -> tuple[tuple[int, str], tuple[int, str]]:
        """Both (stage, name), sorted: equal for the two partners."""
        own, partner = (self.stage, self.name), (self.partner_stage, self.partner_name)
        return (own, partner) if own < partner else (partner, own)


def _accept(microbatch: Microbatch) -> None:
    return None


@dataclass(frozen=True, eq=False)
class StageInfo:
    """The description of a stage that the engine works with; attributes that a module lacks have their defaults."""

    number: int
    module: nn.Module
    pick: Pick
    blocks: tuple[nn.Module, ...] | None  # None: the module has no `blocks`, so compile and ac are refused
    ties: tuple[Tie, ...]
    summed_over_tp: tuple[str, ...]
    first_layer: int = 0  # index of the first block in the full model
    # torch's dw_builder: called after an I, it returns the function that computes the weight gradients of that I
    build_weights: Callable[[], Callable[[], Any]] | None = None
    keeps_factors: bool = False  # sharded, and its owner has set how FSDP scales gradients
    refusal: Callable[[Microbatch], str | None] = _accept


def list_ties(stages: Mapping[int, StageInfo]) -> list[Tie]:
    """All ties of this rank's stages; in the same order on all ranks."""
    found = [tie for info in stages.values() for tie in info.ties]
    return sorted(found, key=lambda tie: (tie.ends, tie))


def describe_stage(number: int, module: nn.Module | StageInfo) -> StageInfo:
    """Read the attributes of a stage, once, at set-up; a StageInfo is returned as it is."""
    if isinstance(module, StageInfo):
        return module
    blocks, layers = _blocks(module), getattr(module, "layers", None)
    return StageInfo(
        number,
        module,
        _pick_function(number, module),
        blocks,
        tuple(Tie(number, *pair) for pair in getattr(module, "tied_pairs", ())),
        tuple(getattr(module, "summed_over_tp", ())),
        layers.start if blocks is not None and isinstance(layers, range) else 0,
        refusal=getattr(module, "refusal", _accept),
    )


def _blocks(module: nn.Module) -> tuple[nn.Module, ...] | None:
    """The modules in `blocks`; None if a model uses that name for something else."""
    blocks = getattr(module, "blocks", None)
    if isinstance(blocks, nn.ModuleDict):
        return tuple(blocks.values())
    found = tuple(blocks) if isinstance(blocks, Iterable) else (None,)
    return found if all(isinstance(block, nn.Module) for block in found) else None


def _pick_function(number: int, module: nn.Module) -> Pick:
    pick = getattr(module, "pick", None)
    if pick is not None:
        return lambda microbatch: ((), dict(pick(microbatch)))
    return _pick_inputs if number == 0 else lambda microbatch: ((), {})


def require_inputs(microbatch: Microbatch) -> Any:
    """`microbatch["inputs"]`, the input of a model without pick(); ConfigError if it is missing."""
    if "inputs" not in microbatch:
        raise ConfigError(
            f"a microbatch has the keys {sorted(microbatch)}: it must have 'inputs', or the first stage a pick()"
        )
    return microbatch["inputs"]


def _pick_inputs(microbatch: Microbatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = require_inputs(microbatch)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}
