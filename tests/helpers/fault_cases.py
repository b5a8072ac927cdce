"""What the local ranks run in test_faults.py: things that go wrong on one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import Block, SquareLoss, blocks, microbatches, nccl_on_one_gpu, own, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, module_stages
from zeropipe.engine.comm import channels, faults, threads, watchdog
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.comm.faults import ErrorBoard, StoreThread
from zeropipe.engine.comm.ranks import default_store
from zeropipe.engine.layout import Layout
from zeropipe.engine.run import rank
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import ConfigError, EngineError
from zeropipe.schedules.registry import build


class Faulty(nn.Module):
    """Does something bad in the forward or the backward of its `when`-th microbatch."""

    def __init__(self, seed: int, kind: str, when: int) -> None:
        super().__init__()
        self.block, self.kind, self.left = Block(seed), kind, when

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left >= 0:
            return self.block(x)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "raise":
            raise ValueError("the cat sat on the keyboard")
        y = self.block(x)
        if self.kind == "nan":
            return y * float("nan")
        if self.kind == "nan-back":
            y.register_hook(lambda gradient: gradient * float("inf"))
        elif self.kind == "raise-back":
            y.register_hook(self.refuse)
        return y

    def refuse(self, gradient: Tensor) -> None:
        raise ValueError("no way back")


def fail(schedule: Schedule, stage: int, kind: str, when: int, check_finite: bool = False, device: str = "cpu") -> Any:
    """Two good steps' worth of microbatches, with a fault on the way."""
    modules = blocks(schedule.num_stages)
    modules[stage] = Faulty(stage, kind, when)
    stages = {index: module.to(device) for index, module in own(modules, schedule).items()}
    engine = Engine(schedule, stages, check_finite=check_finite, timeout=60)
    try:
        for step in range(2):
            engine.train_step(microbatches(schedule.num_microbatches, seed=step), SquareLoss())
    except Exception as error:
        again = ""
        try:
            engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
        except Exception as second:
            again = str(second)
        return type(error).__name__, str(error), repr(error.__cause__), again
    return "no error"


def fail_over_nccl(schedule: Schedule, stage: int, kind: str, when: int) -> Any:
    """`fail` where ranks wait inside kernels."""
    nccl_on_one_gpu()
    return fail(schedule, stage, kind, when, device="cuda")


def fail_and_go_on(schedule: Schedule, stage: int) -> dict[str, float]:
    """An error in the middle of an I, then a new engine on the same ranks."""
    assert fail(schedule, stage, "raise-back", 1)[0] == "EngineError"
    return train(schedule, 2)


def bad_setup(what: str, schedule: Schedule, other: Schedule) -> None:
    """An Engine that cannot be made."""
    rank = dist.get_rank()
    stages = own(blocks(schedule.num_stages), schedule)
    if what == "schedule" and rank == 2:
        schedule = other
    if what == "stages" and rank == 1:
        stages.popitem()
    if what == "blocks":
        if rank == 1:
            stages[1].blocks = [1]  # what the others do not have: no modules
        for stage in stages.values():
            stage.blocks, stage.layers = getattr(stage, "blocks", []), range(0)
        Engine(schedule, stages, ac="full")
    if what == "meta" and rank == 1:
        stages[1].to("meta")
    if what == "option":
        Engine(schedule, stages, split="halves")
    if what == "tie" and rank == 3:
        stages[3].tied_pairs = (("weihgt", 0, "weight"),)
    if what == "wrapped" and rank == 0:
        stages[0] = nn.Sequential(
            DistributedDataParallel(Block(0), process_group=dist.new_group([0], use_local_synchronization=True))
        )
    Engine(schedule, stages)


def mistaken(what: str, schedule: Schedule) -> Any:
    """A mistake in how the engine is called, the same on all ranks, or a call of its own on rank 2."""
    modules = blocks(schedule.num_stages)
    if what == "name":
        return Engine(schedule.name, own(modules, schedule))
    if what == "list":
        return Engine(schedule, modules)
    if what == "function":
        return Engine(schedule, {dist.get_rank(): modules[dist.get_rank()].forward})
    if what in ("group", "mesh", "device"):
        return Engine(schedule, own(modules, schedule), **{what: "pp"})
    if what == "cut off":
        modules[-1].register_forward_hook(lambda module, args, output: output.detach())
    if what == "module":
        return module_stages(modules[0], schedule, dist.get_rank())
    if what == "numbers":
        return module_stages([1, 2, 3, 4], schedule, dist.get_rank())
    batch = microbatches(schedule.num_microbatches)
    given = {
        "table": batch[0], "generator": (one for one in batch), "nothing": None, "pairs": [*batch[:-1], (1, 2)]
    }.get(what, batch)  # fmt: skip
    losses = {
        "detached": _detached,
        "exhausted": lambda output, microbatch: next(iter(())),
        "labels": CausalLMLoss(),
        "zero": _zero_for_the_first,
        "no loss": None,
        "class": CausalLMLoss,
    }
    shapes = "dynamic" if what == "zero" else "auto"  # there some microbatches have a gradient and others none
    with Engine(schedule, own(modules, schedule), timeout=60, shapes=shapes) as engine:
        if what == "outputs":
            engine.forward(one for one in batch)
        if what == "broadcast":
            engine.forward(batch, broadcast=dist.get_rank() == 2)
        if dist.get_rank() == 2 and what == "evaluation":
            engine.eval_step(batch, SquareLoss())
        if dist.get_rank() == 2 and what == "only one":
            engine.grad_norm()
        result = engine.train_step(given, losses.get(what, SquareLoss()))
        if what == "norm":
            engine.clip_grad_norm(-1.0)
        return result.loss, engine.grad_norm() > 0


def told(function: Callable[..., Any], whats: Sequence[str], *args: Any) -> dict[str, Any]:
    """What `function(what, *args)` raised, for each of some mistakes that all ranks find: these ranks go on."""
    found = {}
    for what in whats:
        try:
            found[what] = function(what, *args)
        except Exception as error:
            found[what] = type(error).__name__, str(error)
    return found


def _detached(output: Tensor, microbatch: Any) -> tuple[Tensor, int]:
    return output.detach().square().sum(), output.numel()


def _zero_for_the_first(output: Tensor, microbatch: Any) -> tuple[Tensor, int]:
    """As a loss of tokens may do where none of them counts."""
    is_first = output.shape == microbatches(1)[0]["inputs"].shape
    return (torch.zeros(()), 0) if is_first else (output.square().sum(), output.numel())


def leave_early(schedule: Schedule) -> None:
    """An error of the training script on one rank, between two steps."""
    with Engine(schedule, own(blocks(schedule.num_stages), schedule), timeout=60) as engine:
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
        if dist.get_rank() == 1:
            raise OSError("no space left on device")
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())


def what_a_failure_keeps(schedule: Schedule) -> tuple[bool, str]:
    """Whether tensors of a step that failed stay alive; and what a step without gradients says."""
    modules = blocks(schedule.num_stages)
    modules[1] = Faulty(1, "raise-back", 1)
    engine = Engine(schedule, own(modules, schedule), timeout=60)
    refused = ""
    try:
        with torch.no_grad():
            engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
    except ConfigError as error:
        refused = str(error)
    executor = engine._executors.get("train", schedule.num_microbatches, True)
    with contextlib.suppress(EngineError):
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
    return bool(executor.cells), refused


def watched_by_the_next(culprit: int) -> str:
    """What ranks that wait for nothing learn of one that is killed: by their watchdogs alone."""
    comm = Communicator(Layout.create(None), torch.device("cpu"), 60.0)
    comm.exchange(None)
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 20
    while not comm.closed and time.monotonic() < end:
        time.sleep(0.02)
    text = comm.board.read_error()
    comm.close()
    return text or "nothing"


def closed_one_after_the_other() -> str | None:
    """What is on the board after ranks that listen to each other have closed, each at its own time."""
    comm = Communicator(Layout.create(None), torch.device("cpu"), 60.0)
    comm.exchange(None)
    time.sleep(0.2 * dist.get_rank())
    board = ErrorBoard(StoreThread(default_store, 5.0, 5.0), comm.name, comm.rank, comm.size)
    comm.close()
    time.sleep(1.0)
    return board.read_error()


def silent(schedule: Schedule) -> None:
    """Rank 1 sleeps in a stage far longer than the time-out."""

    class Sleepy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(60)
            return x

    modules = blocks(schedule.num_stages)
    modules[1] = Sleepy()
    Engine(schedule, own(modules, schedule), timeout=2).train_step(
        microbatches(schedule.num_microbatches), SquareLoss()
    )


def wrong_output(schedule: Schedule) -> None:
    """A stage returns a dict."""

    class Dict(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"hidden": x}

    modules = blocks(schedule.num_stages)
    modules[1] = Dict()
    Engine(schedule, own(modules, schedule)).train_step(microbatches(schedule.num_microbatches), SquareLoss())


def no_group() -> None:
    """An Engine without torch.distributed."""
    dist.destroy_process_group()
    Engine(build("gpipe", ranks=1, microbatches=1), {0: torch.nn.Identity()})


def sleep_forever() -> None:
    """For the launcher's own time-out."""
    torch.ones(1)
    signal.pause()


def unlike_numbers(schedule: Schedule) -> str:
    """One rank passes one microbatch less, then both the same."""
    found = ""
    with Engine(schedule, own(blocks(schedule.num_stages), schedule)) as engine:
        for step in (engine.train_step, engine.eval_step):
            try:
                step(microbatches(4 - dist.get_rank()), SquareLoss())
            except ConfigError as error:
                found = str(error)
        assert engine.train_step(microbatches(5), SquareLoss()).count > 0
    return found


def beat_for(seconds: float) -> None:
    """A long job that says now and then that it gets on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rank.heartbeat()
        time.sleep(0.1)


def beats_of_a_run(schedule: Schedule) -> int:
    """Train until every rank has said twice that it gets on; returns how often this rank did."""
    with (
        mock.patch.object(rank, "_connection") as connection,
        Engine(schedule, own(blocks(schedule.num_stages), schedule), timeout=60.0) as engine,
    ):
        beats = connection.send_heartbeat
        while not _all_agree(beats.call_count >= 2):
            engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
            time.sleep(0.05)
        return beats.call_count


def _all_agree(here: bool) -> bool:
    """Whether it holds on every rank."""
    number = torch.tensor(float(here))
    dist.all_reduce(number)
    return bool(number == dist.get_world_size())


def strike(kind: str) -> Any:
    """What can happen to a rank."""
    if kind == "raise":
        raise ValueError("the cat sat on the keyboard")
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "leave":
        sys.exit("enough")
    if kind == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}[kind])
    return signal.pause()


PHASES = {  # what is struck, and the name of the place
    "loss": ("fault_cases.SquareLoss.__call__", "7F0"),
    "comparison": ("zeropipe.engine.step.equal.describe_shared_weights", "the comparison of weights"),
    "losses": ("zeropipe.engine.step.losses.LossAccumulator.sums", "the sum of losses"),
    "shared": ("zeropipe.engine.step.sums.GradientSums.run", "the sum of shared gradients"),
    "norm": ("zeropipe.engine.step.sums.GradientSums.squared_norm", "the gradient norm"),
    "timeline": ("zeropipe.engine.step.recorder.Recorder.rows", "gathering the timeline"),
    "between": ("torch.optim.SGD.step", "a point between steps"),
    "control": ("zeropipe.engine.torch_private.comm.gloo_group", "set-up"),
    "set-up": ("zeropipe.engine.engine.GradientSums", "set-up, connecting"),
}


def struck(schedule: Schedule, phase: str, kind: str, culprit: int, timeout: float = 60.0) -> tuple[str, str]:
    """Some steps and what belongs to them, where one rank is struck in one phase; the error this rank ends with."""

    def run() -> None:
        stages = own(blocks(schedule.num_stages), schedule)
        with Engine(schedule, stages, record=True, timeout=timeout) as engine:
            optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
            for step in range(3):
                engine.train_step(microbatches(schedule.num_microbatches, seed=step), SquareLoss())
                engine.clip_grad_norm(1.0)
                engine.timeline()
                optimizer.step()
                optimizer.zero_grad()

    try:
        if dist.get_rank() != culprit:
            run()
        else:
            with mock.patch(PHASES[phase][0], side_effect=lambda *_, **__: strike(kind)):
                run()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "no error", ""


def struck_and_failed(*args: Any) -> None:
    """`struck` that raises, so that whoever started the ranks knows at once."""
    raise EngineError(struck(*args)[1])


def slow_compiler(schedule: Schedule) -> float:
    """Rank 1 compiles its stage for far longer than the time-out."""

    def backend(graph: Any, inputs: Any) -> Any:
        time.sleep(17)
        return graph.forward

    stages = own(blocks(schedule.num_stages), schedule)
    if dist.get_rank() == 1:
        stages[1].compile(backend=backend)
    with Engine(schedule, stages, timeout=8.0) as engine:  # of one length, so that it is compiled once
        return engine.train_step(microbatches(schedule.num_microbatches, lengths=(3,)), SquareLoss()).count


def hosted_by_rank_0(schedule: Schedule, kind: str, port: int) -> None:
    """`struck` in a job whose store is on rank 0, which is struck."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    struck_and_failed(schedule, "losses", kind, 0, 6.0)


def left_early(schedule: Schedule) -> str:
    """One rank makes a step less than the others."""
    try:
        with Engine(schedule, own(blocks(schedule.num_stages), schedule)) as engine:
            for _ in range(1 if dist.get_rank() == 2 else 2):
                engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
    except EngineError as error:
        return str(error)
    return "no error"


def never_comes(schedule: Schedule) -> str:
    """One rank makes its Engine far too late."""
    if dist.get_rank() == 1:
        torch_comm.default_store().wait(["given up"], timedelta(seconds=50))
    try:
        Engine(schedule, own(blocks(schedule.num_stages), schedule), timeout=4.0)
    except EngineError as error:
        torch_comm.default_store().set("given up", "")
        return str(error)
    return "no error"


def threads_left(schedule: Schedule) -> list[str]:
    """Threads of an Engine that are there after its end, on a machine on which they take their time."""

    def slowly(name: str, function: Any, *args: Any) -> threading.Thread:
        def run() -> None:
            function(*args)
            time.sleep(0 if name.startswith("calling") else 0.2)

        thread = threading.Thread(target=run, name=f"slow-{name}", daemon=True)
        thread.start()
        return thread

    modules = (watchdog, threads, faults, channels)
    with contextlib.ExitStack() as patched:
        for module in modules:
            patched.enter_context(mock.patch.object(module, "start_thread", slowly))
        with Engine(schedule, own(blocks(schedule.num_stages), schedule), dynamic_weights=True) as engine:
            engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
            assert len({thread.name for thread in threading.enumerate() if thread.name.startswith("slow-")}) == 5
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("slow-")]
