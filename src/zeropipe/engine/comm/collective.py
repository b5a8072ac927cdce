"""Work that all ranks do: an error on one of them is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

from zeropipe.errors import ConfigError, ZeropipeError, short

Own = TypeVar("Own")
Shared = TypeVar("Shared")


class Exchange(Protocol):
    """Ranks that can exchange values: Ranks, or the Communicator of an Engine."""

    @property
    def rank(self) -> int: ...

    def exchange(self, value: object) -> list[Any]: ...


def nothing(value: object) -> None:
    """`on_all_ranks(..., share=nothing)` sends no result to the other ranks."""


@overload
def on_all_ranks(
    ranks: Exchange | None,
    work: Callable[[], Own],
    *,
    error: type[ZeropipeError] = ConfigError,
    names_rank: bool = True,
) -> tuple[Own, list[Own]]: ...


@overload
def on_all_ranks(
    ranks: Exchange | None,
    work: Callable[[], Own],
    share: Callable[[Own], Shared],
    *,
    error: type[ZeropipeError] = ConfigError,
    names_rank: bool = True,
) -> tuple[Own, list[Shared]]: ...


def on_all_ranks(
    ranks: Exchange | None,
    work: Callable[[], Any],
    share: Callable[[Any], Any] = lambda value: value,
    *,
    error: type[ZeropipeError] = ConfigError,
    names_rank: bool = True,
) -> tuple[Any, list[Any]]:
    """Run `work()` on every rank; returns (this rank's result, `share(result)` of all ranks). All ranks call this.

    If the work fails on a rank, all ranks raise the same text: a ConfigError for a ConfigError, else an `error`.
    `names_rank=False` leaves out which rank failed: for work that fails on all of them alike, or that one rank does for
    all. `ranks`: None for a single process.
    """
    if ranks is None:
        own = work()
        return own, [share(own)]
    own, shared, failure, cause = None, None, None, None
    try:
        own = work()
        shared = share(own)
    except Exception as found:  # of any kind: the other ranks must not wait for this one
        failure, cause = (_error_text(found), isinstance(found, ConfigError)), found
    everyone = ranks.exchange((shared, failure))
    for rank, (_, failure) in enumerate(everyone):
        if failure is not None:
            text, is_config = failure
            kind = ConfigError if is_config else error
            raise kind(f"rank {rank}: {text}" if names_rank else text) from (cause if rank == ranks.rank else None)
    return own, [theirs for theirs, _ in everyone]


def on_first_rank(ranks: Exchange | None, work: Callable[[], Own], *, error: type[ZeropipeError] = ConfigError) -> Own:
    """Run `work()` on the first rank; all ranks call this, and return or raise what it did."""

    def own() -> Own | None:
        return work() if ranks is None or ranks.rank == 0 else None

    _, everyone = on_all_ranks(ranks, own, error=error, names_rank=False)
    return everyone[0]  # type: ignore[return-value]


def require_same(ranks: Exchange, facts: Callable[[], Mapping[str, object]], what: str = "value") -> None:
    """ConfigError on all ranks unless `facts()` is the same on all of them; all ranks call this."""
    _, everyone = on_all_ranks(ranks, facts)
    require_equal(everyone, what)


def require_equal(everyone: Sequence[Mapping[str, object]], what: str = "value") -> None:
    """ConfigError for the first fact of a rank that differs from the first rank's."""
    first = everyone[0]
    for rank, facts in enumerate(everyone):
        for name in first | facts:
            one, other = first.get(name), facts.get(name)
            if one != other:
                raise ConfigError(
                    f"rank {rank} has {name}={short(other)}, rank 0 has {name}={short(one)}: every rank must have the "
                    f"same {what}"
                )


def _error_text(error: Exception) -> str:
    """An error as other ranks raise it: without its type if it is one of zeropipe."""
    return str(error) if isinstance(error, ZeropipeError) else f"{type(error).__name__}: {error}".removesuffix(": ")
