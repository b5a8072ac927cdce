"""The names of actions in the traces of other people's trainers, by a pattern of the user."""

from __future__ import annotations

import re

from zeropipe.core.action import Action, Kind
from zeropipe.errors import ConfigError, short

GROUPS = ("kind", "stage", "microbatch")
_KINDS = {
    "f": Kind.F, "fwd": Kind.F, "forward": Kind.F, "b": Kind.B, "bwd": Kind.B, "backward": Kind.B,
    "i": Kind.I, "dgrad": Kind.I, "w": Kind.W, "wgrad": Kind.W,
}  # fmt: skip


class ActionNames:
    """A pattern like `(?P<kind>forward|backward) stage (?P<stage>\\d+) mb (?P<microbatch>\\d+)`.

    Without `stage`, each rank has one stage, of its own number. Without `microbatch`, a stage's actions of a kind have
    the numbers 0, 1, ... in their order.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self.pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"--actions {short(pattern)}: not a regular expression ({error})") from None
        groups = self.pattern.groupindex.keys()
        if not {"kind"} <= groups <= {*GROUPS}:
            raise ConfigError(
                f"--actions {short(pattern)}: must have a group kind, and maybe microbatch and stage, like "
                "'(?P<kind>forward|backward) (?P<microbatch>\\d+)'"
            )
        self.is_numbered = "microbatch" in groups

    def parse(self, name: str, rank: int) -> Action | None:
        """The action of an event of a rank; None for other events. ConfigError for a kind that is none.

        The microbatch of a name without one is 0.
        """
        match = self.pattern.fullmatch(name)
        if match is None:
            return None
        found = match.groupdict()
        kind = _KINDS.get((found["kind"] or "").lower())
        if kind is None:
            kinds = ", ".join(_KINDS)
            raise ConfigError(f"--actions: {short(name)} has kind {short(found['kind'])}: must be one of {kinds}")
        stage = found.get("stage")
        try:
            return Action(rank if stage is None else int(stage), kind, int(found.get("microbatch", 0)))
        except (TypeError, ValueError):
            raise ConfigError(f"--actions: {short(name)}: stage and microbatch must be integers") from None
