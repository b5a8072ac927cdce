"""Join the processes that torchrun or LocalRanks started in torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from zeropipe.engine.comm.faults import StoreLost
from zeropipe.engine.comm.ranks import DEFAULT_TIMEOUT_S, Ranks
from zeropipe.engine.torch_private.comm import clone, init_group, store_outlives_ranks
from zeropipe.errors import ConfigError, EngineError

JOIN_HINT = (
    "torchrun must start all machines with the same --nnodes and --rdzv-id (or --master-addr and --master-port); look "
    "there for what ended"
)


def join_torchrun(backend: str, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """`init_process_group` on the processes of torchrun; EngineError names ranks that do not join in `timeout`."""
    rank, size, host, port = _read_environment()
    agent_hosts_store = store_outlives_ranks()  # else rank 0 does

    def open_store() -> dist.Store:
        return dist.TCPStore(
            host, port, is_master=rank == 0 and not agent_hosts_store, timeout=timedelta(seconds=timeout),
            wait_for_workers=False, multi_tenant=not agent_hosts_store,
        )  # fmt: skip

    try:
        join(open_store, backend, rank, size, timeout, JOIN_HINT)
    except StoreLost as lost:
        store = "torchrun's store" if agent_hosts_store else "the job's store, which rank 0 hosts"
        raise EngineError(
            f"rank {rank} cannot join the others over {store}, {host}:{port}: {lost.reason}; if another rank ended, "
            "its output says why"
        ) from None


def join(
    open_store: Callable[[], dist.Store], backend: str, rank: int, size: int, timeout: float, hint: str = ""
) -> None:
    """`init_process_group` on the processes that share a store; StoreLost if it cannot be reached."""
    opened: list[dist.Store] = []

    def connect() -> dist.Store:
        opened.append(open_store())
        return clone(opened[0])

    with Ranks(connect, range(size), rank, timeout, "started", hint) as ranks:
        ranks.enter("making the process group")
        store = dist.PrefixStore(ranks.name, opened[0])  # gloo must not find addresses of processes that are gone
        ranks.call(lambda: init_group(backend, ranks.connect_timeout, store=store, rank=rank, world_size=size))


def _read_environment() -> tuple[int, int, str, int]:
    """Rank, number of ranks, host and port, as torchrun sets them; ConfigError for invalid values."""
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(
                f"RANK={os.environ['RANK']} is set and {name} is not: start with torchrun, which sets both, or unset "
                "RANK"
            )
    rank, size = environment_int("RANK"), environment_int("WORLD_SIZE")
    if rank >= size:
        raise ConfigError(f"RANK={rank} with WORLD_SIZE={size}: must be at most {size - 1}")
    return rank, size, os.environ["MASTER_ADDR"], environment_int("MASTER_PORT")


def environment_int(name: str, default: str = "0") -> int:
    """An environment variable as a non-negative integer."""
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment: must be a non-negative integer, as torchrun sets it")
    return int(text)


def local_world_size() -> int:
    """The number of processes that torchrun has started on this machine."""
    return environment_int("LOCAL_WORLD_SIZE", "1")
