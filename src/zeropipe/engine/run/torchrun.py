"""The processes of a job join: those that torchrun started, or those of LocalRanks."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from zeropipe.engine.comm.faults import StoreLost
from zeropipe.engine.comm.ranks import DEFAULT_TIMEOUT_S, Ranks
from zeropipe.engine.torch_private.comm import clone, init_group, store_outlives_ranks
from zeropipe.errors import ConfigError, EngineError

HOW = (
    "torchrun must start all machines with the same --nnodes and --rdzv-id (or --master-addr and --master-port); look "
    "there for what ended"
)


def join_torchrun(backend: str, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """`init_process_group` on the processes of torchrun; EngineError names those that do not come within `timeout`."""
    rank, size, host, port = _given()
    is_agents = store_outlives_ranks()  # else the first rank hosts it

    def open_store() -> dist.Store:
        return dist.TCPStore(
            host, port, is_master=rank == 0 and not is_agents, timeout=timedelta(seconds=timeout),
            wait_for_workers=False, multi_tenant=not is_agents,
        )  # fmt: skip

    try:
        join(open_store, backend, rank, size, timeout, HOW)
    except StoreLost as lost:
        whose = "torchrun's store" if is_agents else "the job's store, which rank 0 hosts"
        raise EngineError(
            f"rank {rank} cannot join the others over {whose}, {host}:{port}: {lost.reason}; if another rank ended, "
            "its output says why"
        ) from None


def join(
    open_store: Callable[[], dist.Store], backend: str, rank: int, size: int, timeout: float, hint: str = ""
) -> None:
    """`init_process_group` on the processes that have a store in common; StoreLost if it cannot be reached."""
    opened: list[dist.Store] = []

    def connect() -> dist.Store:
        opened.append(open_store())
        return clone(opened[0])

    with Ranks(connect, range(size), rank, timeout, "started", hint) as ranks:
        ranks.enter("making the process group")
        store = dist.PrefixStore(ranks.name, opened[0])  # gloo must not find addresses of processes that are gone
        ranks.call(lambda: init_group(backend, ranks.connect_timeout, store=store, rank=rank, world_size=size))


def _given() -> tuple[int, int, str, int]:
    """Rank, number of ranks, host and port, as torchrun says them; ConfigError for what makes no sense."""
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            told = f"RANK={os.environ['RANK']} is set and {name} is not"
            raise ConfigError(f"{told}: start with torchrun, which sets both, or unset RANK")
    rank, size = number_given("RANK"), number_given("WORLD_SIZE")
    if rank >= size:
        raise ConfigError(f"RANK={rank} with WORLD_SIZE={size}: ranks are counted from 0, so give {size - 1} at most")
    return rank, size, os.environ["MASTER_ADDR"], number_given("MASTER_PORT")


def number_given(name: str, otherwise: str = "0") -> int:
    """A number in the environment."""
    text = os.environ.get(name, otherwise)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment: a number is needed, as torchrun sets it")
    return int(text)


def ranks_here() -> int:
    """How many processes torchrun has started on this machine."""
    return number_given("LOCAL_WORLD_SIZE", "1")
