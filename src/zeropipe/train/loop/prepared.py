"""Data that is made ready once: by the first rank, while the others wait for its word."""

from __future__ import annotations

import time
from secrets import token_hex

import torch.distributed as dist

from zeropipe.engine.comm.fabric import name_start
from zeropipe.engine.run.launch import heartbeat
from zeropipe.engine.torch_private import default_store
from zeropipe.errors import ConfigError
from zeropipe.train.config.models import RunConfig
from zeropipe.train.data import prepare
from zeropipe.train.loop.metrics import tell


def named() -> str:
    """A name for this call of `train` that all ranks share: torchrun's store keeps the words of killed processes."""
    names = [token_hex(6)]
    dist.broadcast_object_list(names, src=0)
    name_start(names[0])
    return names[0]


def prepared(config: RunConfig, name: str) -> None:
    """All ranks leave this when the data is ready, or with the first rank's error.

    The word goes through the job's store and not through a collective, which would time out while files are read.
    """
    key = f"zeropipe/train/{name}/prepared"
    store = default_store()
    if dist.get_rank() == 0:
        fault = "the first rank has ended"
        try:
            prepare(config, _tell)
            fault = ""
        except Exception as error:
            fault = str(error)
            raise
        finally:
            store.set(key, fault)
        return
    while not store.check([key]):
        time.sleep(0.02)
    if fault := store.get(key).decode():
        raise ConfigError(fault)


def _tell(line: str) -> None:
    heartbeat()
    tell(line)
