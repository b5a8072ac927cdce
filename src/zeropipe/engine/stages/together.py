"""Ranks that do one thing together, and know it if one of them could not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from zeropipe.core.placement import Placement
from zeropipe.errors import ConfigError, EngineError

T = TypeVar("T")


class Together:
    """The ranks of a pipeline: of torch.distributed, or calls for one rank after the other in a single process."""

    def __init__(self, placement: Placement, rank: int, group: Any = None) -> None:
        self.num_ranks = 1 + max(max(table) for table in placement.copies)
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self._rank, self._group = rank, group
        if not self.is_distributed:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ConfigError("several processes must agree on this: call init_process_group() first")
            if not 0 <= rank < self.num_ranks:
                raise ConfigError(f"rank={rank}: the placement has ranks 0 to {self.num_ranks - 1}")
        elif dist.get_world_size(group) != self.num_ranks or dist.get_rank(group) != rank:
            raise ConfigError(
                f"rank={rank} of {self.num_ranks} in the placement is process {dist.get_rank(group)} of "
                f"{dist.get_world_size(group)}: give group=, the process group of one pipeline"
            )

    def each(self, work: Callable[[], T]) -> list[T]:
        """Every rank does its work. What one of them cannot do is an error on all."""
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        if not self.is_distributed:
            if failure is not None:
                raise failure
            return [result]
        outcomes: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(outcomes, (failure and _line(failure), result), self._group)
        if failure is not None:
            raise failure
        for rank, (line, _) in enumerate(outcomes):
            if line is not None:
                raise EngineError(f"rank {rank} failed: {line}")
        return [value for _, value in outcomes]

    def first(self, work: Callable[[], T]) -> T:
        """The first rank does it for all, and all get what it gives."""
        return self.each(lambda: work() if self._rank == 0 or not self.is_distributed else None)[0]  # type: ignore[return-value]


def _line(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0] if isinstance(error, ConfigError) and text else f"{type(error).__name__}: {text[0] if text else ''}"
