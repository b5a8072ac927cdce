"""What must be known about a Hugging Face model to cut it into stages, and what cannot be found by looking at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeropipe.engine.stages.calls import Place
from zeropipe.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """Where a decoder model can be cut. It is found by running a small copy of the model, and proven on it."""

    layers: str  # the name of its list of layers
    num_layers: int
    before: frozenset[str]  # parameters that are used before the first layer
    carried: tuple[Place, ...]  # where in a layer's call the tensors are that come from the layers before
    form: int | None = None  # a layer returns a tuple of so many, the hidden states first; None: them alone
    keys: frozenset[str] = frozenset()  # inputs of its forward
    packs: bool = False  # position ids keep packed sequences apart ...
    packs_up_to: int | None = None  # ... in rows of at most so many tokens
    bare_ends: bool = False  # embedding and head may be stages without layers
    balances: bool = False  # its loss has a part that comes from the routers of all layers (output_router_logits)

    @property
    def base(self) -> str:
        """The name of the model without its head."""
        return self.layers.partition(".")[0]

    def home(self, name: str, cut: Sequence[range]) -> int:
        """The stage that holds a parameter or module, by its name in the whole model."""
        if name.startswith(f"{self.layers}."):
            index = int(name.removeprefix(f"{self.layers}.").partition(".")[0])
            return next(stage for stage, layers in enumerate(cut) if index in layers)
        return 0 if name in self.before else len(cut) - 1


@dataclass(frozen=True)
class Entry:
    """What the general rules get wrong about a model type. Most types need none."""

    small: Mapping[str, Any] = field(default_factory=dict)  # sizes of its small copy
    refused: str | None = None  # why it cannot be cut


ENTRIES: dict[str, Entry] = {
    "blt": Entry(refused="it is a pipeline of three models"),
    "gemma4_unified_assistant": Entry(refused="it drafts for another model"),
    "codegen": Entry(small={"n_head": 4}),  # its attention is written for four-fold heads
}


def entry_of(config: Any) -> Entry:
    """What is known about a model type beforehand."""
    return ENTRIES.get(config.model_type, Entry())


def refusal(config: Any, reason: str) -> ConfigError:
    """Why a model is not cut, in one line, and what to do instead."""
    reason = " ".join(reason.split())
    return ConfigError(
        f"model_type={config.model_type!r} cannot be cut into stages: {reason}; give the model as a list of modules "
        f"instead (module_stages)"
    )
