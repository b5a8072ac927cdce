"""Work that all ranks do: what fails on one of them is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

from zeropipe.errors import ConfigError, ZeropipeError, short

Mine = TypeVar("Mine")
Shared = TypeVar("Shared")


class Exchange(Protocol):
    """Ranks that can tell each other something: Ranks, or the Fabric of an Engine."""

    @property
    def rank(self) -> int: ...

    def exchange(self, value: object) -> list[Any]: ...


def nothing(value: object) -> None:
    """Share nothing of it."""


@overload
def on_all_ranks(
    ranks: Exchange | None,
    work: Callable[[], Mine],
    *,
    error: type[ZeropipeError] = ConfigError,
    names_rank: bool = True,
) -> tuple[Mine, list[Mine]]: ...


@overload
def on_all_ranks(
    ranks: Exchange | None,
    work: Callable[[], Mine],
    share: Callable[[Mine], Shared],
    *,
    error: type[ZeropipeError] = ConfigError,
    names_rank: bool = True,
) -> tuple[Mine, list[Shared]]: ...


def on_all_ranks(
    ranks: Exchange | None,
    work: Callable[[], Any],
    share: Callable[[Any], Any] = lambda value: value,
    *,
    error: type[ZeropipeError] = ConfigError,
    names_rank: bool = True,
) -> tuple[Any, list[Any]]:
    """(What `work()` returned here, everybody's or what `share` makes of it); all ranks call this.

    If the work fails anywhere, all ranks raise with the same text: a ConfigError for a ConfigError, else an `error`.
    Without `names_rank` it does not say which rank failed: for work that would fail on all alike, or that one rank does
    for all. `ranks`: None for a process that is alone.
    """
    if ranks is None:
        own = work()
        return own, [share(own)]
    mine, shared, fault, cause = None, None, None, None
    try:
        mine = work()
        shared = share(mine)
    except Exception as found:  # whatever it is, the others must not wait for this rank
        fault, cause = (fault_text(found), isinstance(found, ConfigError)), found
    everyone = ranks.exchange((shared, fault))
    for rank, (_, problem) in enumerate(everyone):
        if problem is not None:
            text, is_config = problem
            kind = ConfigError if is_config else error
            raise kind(f"rank {rank}: {text}" if names_rank else text) from (cause if rank == ranks.rank else None)
    return mine, [theirs for theirs, _ in everyone]


def on_first_rank(
    ranks: Exchange | None, work: Callable[[], Mine], *, error: type[ZeropipeError] = ConfigError
) -> Mine:
    """What `work()` returns on the first rank, which does it for all; all ranks call this."""

    def own() -> Mine | None:
        return work() if ranks is None or ranks.rank == 0 else None

    _, everyone = on_all_ranks(ranks, own, error=error, names_rank=False)
    return everyone[0]  # type: ignore[return-value]


def require_same(ranks: Exchange, look: Callable[[], Mapping[str, object]], what: str = "") -> None:
    """ConfigError on all ranks unless they all see the same facts; all ranks call this."""
    _, everyone = on_all_ranks(ranks, look)
    require_equal(everyone, what)


def require_equal(everyone: Sequence[Mapping[str, object]], what: str = "") -> None:
    """ConfigError for facts of ranks that differ from the first rank's."""
    first = everyone[0]
    for rank, facts in enumerate(everyone):
        for name in first | facts:
            one, other = first.get(name), facts.get(name)
            if one != other:
                raise ConfigError(
                    f"rank {rank} has {name}={short(other)}, rank 0 has {name}={short(one)}: give every rank the same"
                    + (f" {what}" if what else "")
                )


def fault_text(error: Exception) -> str:
    """What went wrong, for the others: an error of our own says it all."""
    return str(error) if isinstance(error, ZeropipeError) else f"{type(error).__name__}: {error}".removesuffix(": ")
