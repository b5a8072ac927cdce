"""The dimensions of a mesh of processes, and their text form: pp=2,dp_shard=2,tp=2,ep=2."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from zeropipe.errors import ConfigError, short

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_DIMENSIONS = ("dp_replicate", "dp_shard")  # processes that differ in these have different microbatches
COPY_DIMENSIONS = (*DATA_DIMENSIONS, "cp")  # these have copies (or shards) of the same weights, and other tokens
EXPERTS = "ep"  # divides experts over processes of a data dimension, so it adds none

Mesh = tuple[tuple[str, int], ...]  # (dimension, size), the outermost first: consecutive ranks differ in the last


def parse_mesh(text: str) -> Mesh:
    """The mesh of a text like pp=2,tp=2; ConfigError for any other text."""
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        name, equals, size = (part.strip() for part in entry.partition("="))
        if name not in (*DIMENSIONS, EXPERTS):
            raise ConfigError(
                f"mesh {short(text)} has the dimension {short(name)}: must be one of {', '.join(DIMENSIONS)}, {EXPERTS}"
            )
        if name in sizes:
            raise ConfigError(f"mesh {short(text)} has {name} twice; write it once")
        if not equals or not size.isascii() or not size.isdecimal() or not 0 < len(size) < 7 or int(size) == 0:
            raise ConfigError(f"mesh {short(text)}: write a number of processes for {name}, like {name}=2")
        sizes[name] = int(size)
    if reason := refuse_ep(sizes):
        raise ConfigError(f"mesh {short(text)}: {reason}")
    return tuple((name, sizes[name]) for name in (*DIMENSIONS, EXPERTS) if name in sizes)


def format_mesh(sizes: Mapping[str, int] | Mesh) -> str:
    """The text form of a mesh."""
    return ",".join(f"{name}={size}" for name, size in dict(sizes).items())


def num_processes(mesh: Mesh) -> int:
    """The number of processes of a mesh."""
    return prod(size for name, size in mesh if name != EXPERTS)


def expert_dimension(sizes: Mapping[str, int]) -> str:
    """The data dimension that ep divides experts over: dp_shard, or without it dp_replicate."""
    return "dp_shard" if sizes.get("dp_shard", 1) > 1 else "dp_replicate"


def refuse_ep(sizes: Mapping[str, int]) -> str | None:
    """Why experts cannot be divided over this mesh, whose sizes include ep; None if they can be."""
    ep, name = sizes.get(EXPERTS, 1), expert_dimension(sizes)
    if ep == 1:
        return None
    size = sizes.get(name, 1)
    if size == 1:
        return f"ep={ep} divides experts over data-parallel processes; use dp_shard of at least {ep}, or leave out ep"
    if size % ep:
        return f"ep={ep}: must divide {name}={size}"
    return None
