"""How the processes that torchrun started find each other, also after a restart.

torchrun's agent keeps one store over all restarts. gloo would find the addresses of processes there that are gone, and
wait for them. The number of restarts does not tell processes apart: agents on several machines do not count alike. So
every process makes a name of its own. The first rank writes its name down as that of the meeting, the others sign there
with theirs, and when all have signed, it writes the list of names. Who finds its own name in the list has met the
processes that run now: nobody who is gone can have answered to a name that was made just now.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from secrets import token_hex
from typing import Any

import torch.distributed as dist

from zeropipe.engine.torch_private import init_group
from zeropipe.errors import ConfigError, EngineError, first_line, short

KEY = "zeropipe/meeting"


def join_torchrun(backend: str, patience: float = 600.0) -> None:
    """`init_process_group` on the processes of torchrun; EngineError if some do not come within `patience` seconds."""
    rank, size, host, port = _given()
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # a store of its own for every start
            init_group(backend, patience)
            return
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=patience))
        name = meet(store, rank, size, patience)
        init_group(backend, patience, store=dist.PrefixStore(f"{KEY}/{name}", store), rank=rank, world_size=size)
    except EngineError:
        raise
    except RuntimeError as error:
        where, said = f"over torchrun's store, {host}:{port}", first_line(error).rstrip(".")
        raise EngineError(
            f"rank {rank} cannot join the others {where}: {said}; if another rank ended, its output says why"
        ) from None


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


def require_same(given: Mapping[str, object], what: str) -> None:
    """ConfigError on all ranks where one was given something else; all of them call this."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(given))
    for rank, theirs in enumerate(everyone):
        for name in everyone[0] | theirs:
            one, other = everyone[0].get(name), theirs.get(name)
            if one != other:
                raise ConfigError(
                    f"rank 0 has {name}={short(one)}, rank {rank} has {short(other)}: give all machines the same {what}"
                )


def ranks_here() -> int:
    """How many processes torchrun has started on this machine."""
    return number_given("LOCAL_WORLD_SIZE", "1")


def meet(store: Any, rank: int, size: int, patience: float, pause: float = 0.02) -> str:
    """The name of this meeting, the same on all ranks and never used before."""
    mine, end = token_hex(8), time.monotonic() + patience
    if rank == 0:
        store.set(KEY, mine)
    signed: str | None = None
    while True:
        name = mine if rank == 0 else _read(store, KEY)
        if name is not None and name != signed:
            store.set(f"{KEY}/{name}/{rank}", mine)
            signed = name
        keys = [f"{KEY}/{name}/{one}" for one in range(size)]
        if rank == 0 and store.check(keys):
            store.set(f"{KEY}/{name}/all", json.dumps([store.get(key).decode() for key in keys]))
        listed = _read(store, f"{KEY}/{name}/all")
        if listed is not None and json.loads(listed)[rank] == mine:
            return str(name)
        if time.monotonic() > end:
            raise EngineError(_missed(store, rank, keys, patience))
        time.sleep(pause)


def _missed(store: Any, rank: int, keys: list[str], patience: float) -> str:
    away = [str(one) for one, key in enumerate(keys) if one != rank and not store.check([key])] if rank == 0 else ["0"]
    who = f"rank{'s' * (len(away) > 1)} {', '.join(away)}"
    return (
        f"rank {rank} waited {patience:g} s for {who} to start: torchrun must start all machines with the same "
        "--nnodes and --rdzv-id (or --master-addr and --master-port); look there for what ended"
    )


def _read(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
