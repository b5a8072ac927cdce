"""The modes of activation checkpointing, by their text: for the engine, the estimates and the planner."""

from __future__ import annotations

from dataclasses import dataclass

from zeropipe.errors import ConfigError, short

_RULE = "give none, full, selective:N, selective:op or memory_budget:X with X from 0 to 1"


@dataclass(frozen=True)
class Checkpointing:
    """Which blocks are checkpointed and how.

    | text | kept from F to I |
    |---|---|
    | `none` | everything |
    | `full` | each block's input |
    | `selective:N` | everything, but only the input of every Nth block of the model |
    | `selective:op` | the results of matrix products and attention; the cheap rest is computed again |
    | `memory_budget:X` | what the compiler chooses within the share X of everything |
    """

    mode: str = "none"
    every: int = 1
    budget: float | None = None

    @staticmethod
    def parse(text: str) -> Checkpointing:
        """From its text form."""
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
        """How layer number `layer` of the whole model is wrapped: `none`, `full` or `op`."""
        if self.mode == "full":
            return "full" if layer % self.every == 0 else "none"
        return "op" if self.mode == "op" else "none"
