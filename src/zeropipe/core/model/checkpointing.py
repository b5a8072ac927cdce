"""The modes of activation checkpointing, and their text form."""

from __future__ import annotations

from dataclasses import dataclass

from zeropipe.errors import ConfigError, short

_RULE = "must be none, full, selective:N, selective:op or memory_budget:X with X from 0 to 1"


@dataclass(frozen=True)
class Checkpointing:
    """Which blocks are checkpointed, and how.

    | text | kept from F to I |
    |---|---|
    | `none` | all activations |
    | `full` | the input of each block |
    | `selective:N` | all activations, but only the input of every Nth block of the model |
    | `selective:op` | the results of matrix products and attention; the cheaper operators are recomputed |
    | `memory_budget:X` | the compiler's choice within the fraction X of all activations |
    """

    mode: str = "none"
    every: int = 1
    budget: float | None = None

    @staticmethod
    def parse(text: str) -> Checkpointing:
        """The mode of a text; ConfigError for any other text."""
        if not isinstance(text, str):
            raise ConfigError(f"activation checkpointing {short(text)}: {_RULE}")
        mode, _, option = text.partition(":")
        if text in ("none", "full"):
            return Checkpointing(mode)
        if text == "selective:op":
            return Checkpointing("op")
        if mode == "selective" and option.isdecimal() and int(option) > 0:
            return Checkpointing("full", every=int(option))
        if mode == "memory_budget" and option.replace(".", "", 1).isdecimal() and 0 <= float(option) <= 1:
            return Checkpointing("budget", budget=float(option))
        raise ConfigError(f"activation checkpointing {text!r}: {_RULE}")

    def of_layer(self, layer: int) -> str:
        """How layer number `layer` of the model is wrapped: `none`, `full` or `op`."""
        if self.mode == "full":
            return "full" if layer % self.every == 0 else "none"
        return "op" if self.mode == "op" else "none"
