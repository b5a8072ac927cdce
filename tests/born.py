"""Scripts run as torchrun runs them, at a fraction of its cost: ranks are forked from a process that has torch."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import NamedTuple

PRELOAD = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
    "zeropipe.engine.stages.build",
)  # fmt: skip


class Done(NamedTuple):
    """How a script ended: 0 if all ranks did well, and what all of them printed."""

    returncode: int
    output: str


def torchrun(number: int, words: Sequence[str], folder: Path, environment: Mapping[str, str], patience=240.0) -> Done:
    """`torchrun --nproc-per-node number words...` in a folder."""
    from zeropipe.engine.run.nursery import nursery

    born = nursery()
    born.preload(PRELOAD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile(mode="r") as said:
        job = (number, port, list(words), str(folder), dict(environment), said.name)
        pipes, pids = [], []
        for rank in range(number):
            ours, theirs = Pipe()
            with theirs:
                pids.append(born.bear(_rank, (rank, *job), theirs.fileno(), patience))
            pipes.append(ours)
        end = time.monotonic() + patience
        codes = [born.wait(pid, max(0.0, end - time.monotonic())) for pid in pids]
        for pipe in pipes:  # a rank that has not ended by now ends with its pipe
            pipe.close()
        return Done(next((1 if code is None else code for code in codes if code != 0), 0), said.read())


def _rank(
    end: int, rank: int, number: int, port: int, words: list[str], folder: str, environment: dict[str, str], out: str
) -> None:
    file = os.open(out, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(environment)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(number)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = words
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as leave:
        if leave.code:
            raise
