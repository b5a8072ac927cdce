"""What processes of `cp` exchange in attention: one rule for the engine, estimates and plans.

heads   tokens for heads, where `cp` divides the heads: attention then runs as without `cp`.
ring    else, where keys and values that are gathered would be large, or where processes of several machines exchange
        them and a message takes no longer than the attention beside it.
gather  else: few large messages.
"""

from __future__ import annotations

from typing import NamedTuple

from zeropipe.errors import ConfigError, short

HEADS, GATHER, RING = EXCHANGES = ("heads", "gather", "ring")
LARGE_KEYS = 2**29  # elements of keys and values of a sequence, for all heads, as attention to gathered ones has them
# Tokens of a part whose attention takes as long as its message between machines, with a key head for each head. It is
# 2.4 x 600e12 / 40e9, rounded down: a backward passes on 6 bytes for 2.5 times the FLOPs of F, of an H100's attention.
HIDING_TOKENS = 32_768


class AttentionHeads(NamedTuple):
    """The heads of a model's attention, divided over `tp`."""

    total: int | None  # None: not known
    total_keys: int
    width: int  # of a key and a value together
    tp: int = 1

    @property
    def number(self) -> int:
        """Those of a process of `tp`; 0 if they do not divide."""
        return 0 if not self.total or self.total % self.tp else self.total // self.tp

    @property
    def num_keys(self) -> int:
        return max(1, self.total_keys // self.tp)

    def allow_exchange(self, cp: int) -> bool:
        """Whether each of `cp` processes can have some of the heads."""
        return self.number > 0 and self.number % cp == 0


class Exchange(NamedTuple):
    """What is exchanged, and why keys and values are gathered where a ring would be chosen."""

    name: str
    no_ring: str = ""


def choose_exchange(
    heads: AttentionHeads, cp: int, sequence: int | None = None, *, crosses: bool = False, no_ring: str = ""
) -> Exchange:
    """The exchange for sequences of so many tokens. Without a length it is not a ring.

    `crosses`: the processes of `cp` are in several machines; `no_ring`: why there cannot be a ring.
    """
    if heads.allow_exchange(cp):
        return Exchange(HEADS)
    if sequence is None or not heads.number:
        return Exchange(GATHER)
    is_large = sequence * heads.number * heads.width >= LARGE_KEYS
    hides = sequence // cp * heads.number >= HIDING_TOKENS * heads.num_keys
    if not is_large and not (crosses and hides):
        return Exchange(GATHER)
    return Exchange(GATHER, no_ring) if no_ring else Exchange(RING)


def parse_exchange(
    wanted: object, heads: AttentionHeads, cp: int, sequence: int | None = None, *, crosses: bool = False,
    no_ring: str = "",
) -> Exchange:  # fmt: skip
    """The wanted exchange, for "auto" the chosen one; ConfigError for one that cannot be."""
    if wanted == "auto":
        return choose_exchange(heads, cp, sequence, crosses=crosses, no_ring=no_ring)
    if wanted not in EXCHANGES:
        raise ConfigError(f"cp_exchange={short(wanted)}: must be auto, {HEADS}, {GATHER} or {RING}")
    if wanted == HEADS and not heads.allow_exchange(cp):
        raise ConfigError(
            f"cp_exchange='heads': cp={cp} x tp={heads.tp} must divide num_attention_heads={heads.total}; "
            "use cp_exchange='gather'"
        )
    if wanted == RING and no_ring:
        raise ConfigError(f"cp_exchange='ring': {no_ring}; use heads or gather")
    return Exchange(str(wanted))
