"""Scripts run as python and torchrun run them, at a fraction of the cost: in processes that have torch already."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PRELOAD = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
    "zeropipe.engine.stages.build", "zeropipe.engine.engine",
)  # fmt: skip


class Done(NamedTuple):
    """How a script ended: 0 if all ranks did well, and what all of them printed."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def torchrun(number: int, words: Sequence[str], folder: Path, environment: Mapping[str, str], patience=240.0) -> Done:
    """`torchrun --nproc-per-node number words...` in a folder."""
    from zeropipe.engine.run.forkserver import fork_server

    server = fork_server()
    server.preload(PRELOAD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile(mode="r") as stdout, tempfile.NamedTemporaryFile(mode="r") as stderr:
        job = (number, port, list(words), str(folder), dict(environment), stdout.name, stderr.name)
        pipes, pids = [], []
        for rank in range(number):
            ours, theirs = Pipe()
            with theirs:
                pids.append(server.start_rank(_rank, (rank, *job), theirs.fileno(), patience))
            pipes.append(ours)
        end = time.monotonic() + patience
        codes = [server.wait(pid, max(0.0, end - time.monotonic())) for pid in pids]
        for pipe in pipes:  # a rank that has not ended by now ends with its pipe
            pipe.close()
        failed = next((1 if code is None else code for code in codes if code != 0), 0)
        return Done(failed, stdout.read(), stderr.read())


def script(words: Sequence[str]) -> None:
    """`python words...`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(words))
        file = Path(words[0]).absolute()  # ranks that it starts would look for it in the folder of the first process
        patch.syspath_prepend(str(file.parent))
        runpy.run_path(str(file), run_name="__main__")


def ranks_print_into(stdout: Path, stderr: Path, patch: pytest.MonkeyPatch) -> None:
    """What local ranks print goes to these files: the process they come from may be older than a test's own output."""
    from zeropipe.engine.run import launch

    patch.setattr(launch, "rank_main", partial(_printing_rank, str(stdout), str(stderr)))


def _printing_rank(stdout: str, stderr: str, end: int, *args: Any) -> None:
    from zeropipe.engine.run.rank import rank_main

    _print_into(stdout, stderr)
    rank_main(end, *args)


def _print_into(*names: str) -> None:
    for stream, name in enumerate(names, 1):
        file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)


def _rank(
    end: int, rank: int, number: int, port: int, words: list[str], folder: str, environment: dict[str, str], *out: str
) -> None:
    _print_into(*out)
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
