"""What the ranks of test_setup_faults.py run: set-up, and in it a moment at which something happens to one of them."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from engine_helpers import SquareLoss, blocks, microbatches, own
from machines import Machine

import zeropipe as zp
from zeropipe.engine import Engine, join_torchrun
from zeropipe.engine.comm.faults import StoreThread
from zeropipe.train import start
from zeropipe.train.config.tables import RunConfig

# what is about to be called: in `zeropipe train`, in the order in which it comes, ...
TRAINING = {
    "start": "zeropipe.train.start.join_torchrun",
    "store": "zeropipe.engine.run.torchrun.clone",
    "meeting": "zeropipe.engine.comm.ranks.rendezvous",
    "process group": "zeropipe.engine.run.torchrun.init_group",
    "beginning": "zeropipe.train.loop.trainer.job_ranks",
    "options": "zeropipe.train.loop.setup.require_same",
    "mesh": "zeropipe.engine.run.job.init_device_mesh",
    "data": "zeropipe.train.loop.data_barrier.on_first_rank",
    "stages": "zeropipe.train.loop.setup.hf_stages",
    "sharding": "zeropipe.train.loop.setup.parallelize",
    "engine": "zeropipe.engine.engine.Communicator",
    "connections": "zeropipe.engine.torch_private.comm.gloo_group",
    "stages told": "zeropipe.engine.setup.check_stages",
    "edges": "zeropipe.engine.comm.communicator.Communicator.connect",
    "sums": "zeropipe.engine.engine.GradientSums",
    "optimizer": "zeropipe.train.loop.trainer.make_optimizer",
    "checkpoint": "zeropipe.train.loop.trainer.resume",
    "first step": "zeropipe.engine.engine.agree_on_step",
    "weights": "zeropipe.engine.step.equal.describe_shared_weights",
}
# ... and in a script that makes an Engine
SCRIPT = {name: TRAINING[name] for name in ("engine", "connections", "stages told", "edges", "sums", "weights")}


class Moment:
    """Tells the test that it is reached, and goes on when that says so: once."""

    def __init__(self, line: Connection, number: int = 1) -> None:
        self._line, self._left, self._lock = line, number, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            is_now = self._left == 0
        if is_now:
            self._line.send("reached")
            self._line.recv()


def before(target: str, moment: Moment) -> None:
    """Come to the moment whenever `target`, a name with dots, is about to be called."""
    path, _, name = target.rpartition(".")
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, inside = path.rpartition(".")
        owner = getattr(importlib.import_module(module), inside)
    original = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        moment()
        return original(*args, **options)

    setattr(owner, name, call)


def rank_main(
    end: int,
    machine: Machine | None,
    environment: dict[str, str],
    moment: str | int,
    work: Callable[..., None],
    *args: Any,
) -> None:
    """A rank on a machine: `moment` is one of the names above, a number of questions to the store, or nothing."""
    line = Connection(end)
    if machine is not None:
        machine.enter()
    torch.set_num_threads(1)
    os.environ.update(environment)
    if isinstance(moment, int):
        before(f"{StoreThread.__module__}.{StoreThread.__name__}.ask", Moment(line, moment))
    elif moment:
        before(TRAINING[moment], Moment(line))
    try:
        work(*args)
        line.send(("no error", ""))
    except BaseException as error:
        line.send((type(error).__name__, str(error)))


def train(fields: dict[str, Any]) -> None:
    """`zeropipe train` on the processes of torchrun."""
    start.start(RunConfig.model_validate(fields))


def script(timeout: float, joins: bool = False) -> None:
    """A script of a user's own, that trains for ever; `joins`: without torch's own init_process_group."""
    if joins:
        join_torchrun("gloo", timeout)
    else:
        dist.init_process_group("gloo")
    schedule = zp.build("zb-h1", ranks=dist.get_world_size(), microbatches=4)
    with Engine(schedule, own(blocks(schedule.num_stages), schedule), timeout=timeout) as engine:
        while True:
            engine.train_step(microbatches(4), SquareLoss())


def agent(end: int, machine: Machine | None, address: str, port: int) -> None:
    """What torchrun's agent is to ranks: a process that serves their store, until the test is over."""
    line = Connection(end)
    if machine is not None:
        machine.enter()
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    line.send("serves")
    line.poll(None)
    del store
