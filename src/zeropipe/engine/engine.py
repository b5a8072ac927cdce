"""Engine: one rank of a pipeline. Trains, evaluates and runs forward by the schedule it was given."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeropipe.core.action import Kind, decode
from zeropipe.core.check import check
from zeropipe.core.lower import lower
from zeropipe.core.schedule import Program, Schedule, iter_codes
from zeropipe.core.timeline import Timeline
from zeropipe.engine import torch_private
from zeropipe.engine.backward.autograd import AutogradSplit
from zeropipe.engine.backward.linear import defer
from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.blocks.compiling import prepare_blocks
from zeropipe.engine.blocks.modes import Checkpointing
from zeropipe.engine.comm.edges import Outgoing
from zeropipe.engine.comm.fabric import Fabric
from zeropipe.engine.comm.faults import PeerLost, Watchdog
from zeropipe.engine.stages.contract import Microbatch
from zeropipe.engine.step.cells import moved
from zeropipe.engine.step.executor import Executor, ShapeBook, Watcher
from zeropipe.engine.step.finite import FiniteCheck
from zeropipe.engine.step.losses import LossFn, StepResult, Tally, combine
from zeropipe.engine.step.plans import edges_of, forward_only
from zeropipe.engine.step.recorder import Recorder, clock_offset, gather
from zeropipe.engine.step.sums import GradientSums, ties
from zeropipe.errors import ConfigError, EngineError, ZeropipeError

SPLITS = ("store", "autograd", "whole")
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}  # they reduce gradients by hooks


class Engine:
    """Runs a Schedule on torch.distributed. Every rank makes one, with its own stages, and calls it alike.

        engine = Engine(schedule, stages)                     # stages: {stage: nn.Module} of this rank
        result = engine.train_step(microbatches, loss_fn)     # the same microbatches on every rank
        engine.clip_grad_norm(1.0); optimizer.step(); optimizer.zero_grad()

    A stage is called as `stage(*tensors_of_the_stage_before, **stage.pick(microbatch))`; without a `pick` the first
    stage is called with `microbatch["inputs"]`. `loss_fn(output, microbatch)` runs on the last stage and returns
    `(sum, count)`, `(sum, count, metrics)`, or a scalar mean (see losses.Tally).

    `group`: the pipeline's ranks (default: all). `compile`: compile each block whole. `ac`: activation checkpointing of
    blocks, "none", "full", "selective:N", "selective:op" or "memory_budget:X" (see spec.Checkpointing).
    `split`: how I and W share the backward: "store", "autograd" (torch's way) or "whole" (all of it in I).
    `direct_gradients`: whole backwards too add the weight gradients of linear layers straight to `.grad`, which saves a
    tensor of the weight's size each time; autograd hooks on these weights do not fire.
    `recv_ahead`: receives posted before they are needed, per edge; 0, and always on NCCL: each at its place in the
    program. `shapes`: "auto" sends shapes when a microbatch has new ones, "dynamic" with every message, for stages
    whose output shapes depend on values.
    `check_finite`: stop at the first action that makes a NaN or an infinity. `timeout`: seconds without a message
    until a silent rank counts as lost.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        compile: bool = False,
        ac: str = "none",
        split: str = "store",
        direct_gradients: bool = False,
        recv_ahead: int = 2,
        shapes: str = "auto",
        record: bool = False,
        check_finite: bool = False,
        timeout: float = 600.0,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not running: start with torchrun and call init_process_group()")
        if dist.get_world_size(group) != schedule.num_ranks:
            raise ConfigError(
                f"the schedule {schedule.name} is for {schedule.num_ranks} ranks, {dist.get_world_size(group)} are "
                f"running: start {schedule.num_ranks} processes, or build the schedule for another number of ranks"
            )
        self.schedule, self.stages, self.record = schedule, dict(stages), record
        self._device = torch.device(device) if device is not None else _device_of(stages)
        if self._device.type == "cuda":  # streams and events belong to the current device
            self._device = torch.device(
                "cuda", torch.cuda.current_device() if self._device.index is None else self._device.index
            )
            torch.cuda.set_device(self._device)
        self._fabric = fabric = Fabric(group, self._device, timeout)
        self.rank = fabric.rank
        self._agree(lambda: self._check_setup(split, shapes, compile, ac, recv_ahead))
        self._program = lower(schedule)
        self._options: dict[str, Any] = {
            "recv_ahead": recv_ahead, "dynamic": shapes == "dynamic", "device": self._device, "shapes": ShapeBook()
        }  # fmt: skip
        self._check_finite = check_finite
        self._store = WeightStore()
        self._splitter = {"store": self._store, "autograd": AutogradSplit(), "whole": None}[split]

        def prepare() -> str:
            for stage in self.stages.values():
                if split == "store" and (direct_gradients or _splits(schedule, self.rank)):
                    defer(stage)
                if hasattr(stage, "blocks"):
                    prepare_blocks(stage, compile=compile, ac=ac)
            for number, name, *_ in ties(self.stages):
                self.stages[number].get_parameter(name)
            return ""

        self._agree(prepare)
        self._executors: dict[str, Executor] = {}
        self._recorder: Recorder | None = None
        self._offset: float | None = None
        self._stopped: str | None = None
        self._watchdog = Watchdog(fabric) if fabric.nccl else None
        with self._guard("set-up"):
            self._wires = fabric.connect(edges_of(self._program))
            self._outgoing = {
                b: Outgoing(wire, shapes == "dynamic") for (a, b), wire in self._wires.items() if a == self.rank
            }
            self._sums = GradientSums(schedule, self.stages, fabric)
        self._finalizer = weakref.finalize(self, _let_go, list(self._outgoing.values()), fabric, self._watchdog)

    # steps

    def train_step(self, microbatches: Sequence[Microbatch], loss_fn: LossFn) -> StepResult:
        """Forward and backward of all microbatches; gradients are added to what is there, as `backward()` does."""
        if not torch.is_grad_enabled():
            raise ConfigError(
                "train_step under torch.no_grad() would give no gradients: use eval_step, or leave it out"
            )
        with self._guard():
            executor = self._executor("record" if self.record else "train")
            self._check_microbatches(microbatches)
            tally = Tally(loss_fn, microbatches)
            with _set_aside(self._sums.shared if hasattr(loss_fn, "count") else self._sums.all):
                if self.record and self._recorder is not None:
                    self._recorder.begin()
                self._walk(executor, microbatches, tally.root)
                result, late = combine(self._fabric.exchange(tally.sums()))
                if late:
                    self._scale(1 / max(result.count, 1.0))
                self._sums.run()
            return result

    def eval_step(self, microbatches: Sequence[Microbatch], loss_fn: LossFn) -> StepResult:
        """The loss without gradients, stages in eval mode; gradients stay as they are."""
        with self._guard(), _evaluating(self.stages.values()):
            self._check_microbatches(microbatches)
            tally = Tally(loss_fn, microbatches)
            self._walk(self._executor("forward"), microbatches, tally.root)
            return combine(self._fabric.exchange(tally.sums()))[0]

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        *,
        post: Callable[[Any, Microbatch], Any] | None = None,
        broadcast: bool = False,
    ) -> list[Any]:
        """The last stage's outputs in microbatch order, in eval mode and without gradients.

        Ranks without the last stage get None in their places (a mirrored pipeline has it on two ranks, each with half
        of the microbatches) unless `broadcast`. `post(output, microbatch)` runs where the output is made: to send
        log-probabilities around, say, and not logits.
        """
        outputs: list[Any] = [None] * len(microbatches)

        def keep(output: Any, microbatch: Microbatch, index: int) -> None:
            outputs[index] = output if post is None else post(output, microbatch)

        with self._guard(), _evaluating(self.stages.values()):
            self._check_microbatches(microbatches)
            self._walk(self._executor("forward"), microbatches, keep)
            if not broadcast:
                self._fabric.exchange(None)
                return outputs
            everyone = self._fabric.exchange([moved(output, torch.device("cpu")) for output in outputs])
        last = self.schedule.num_stages - 1
        ranks = [self.schedule.placement.rank_of(last, index) for index in range(len(outputs))]
        return [moved(everyone[rank][index], self._device) for index, rank in enumerate(ranks)]

    # gradients

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once: for an optimizer."""
        return list(self._sums.all)

    def grad_norm(self) -> float:
        """The 2-norm of the whole model's gradient, the same on every rank; copies and ties count once."""
        with self._guard("the gradient norm"):
            return float(sum(self._fabric.exchange(self._sums.squares())) ** 0.5)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients so that the whole model's norm is at most `max_norm`; returns the norm before."""
        norm = self.grad_norm()
        if norm > max_norm:
            self._scale(max_norm / (norm + 1e-6))
        return norm

    # measurements

    def timeline(self) -> Timeline:
        """The Timeline of the last recorded step; every rank calls this and gets the same one."""
        if self._recorder is None:
            raise EngineError("no step was recorded: set record=True before train_step")
        with self._guard("gathering the timeline"):
            if self._offset is None:
                self._offset = clock_offset(self._fabric)
            return gather(self._recorder, self.schedule, self._fabric, self._offset)

    def close(self) -> None:
        """Give the connections back. Call it on every rank, after the last step."""
        if self._stopped is None and self._watchdog is not None:
            self._watchdog.stop()
            self._fabric.settle()
        self._finalizer()
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
        self._outgoing.clear()
        self._wires.clear()
        self._sums.close()
        self._stopped = self._stopped or "it was closed"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._stopped is None:  # the other ranks hear why this one leaves
            self._stop(str(self._fabric.board.explain(error, "a place between steps")))
        self.close()

    # inside

    def _walk(self, executor: Executor, microbatches: Sequence[Microbatch], finish: Any) -> None:
        self._walking: Executor | None = executor
        executor.run(microbatches, finish)
        self._walking = None

    def _executor(self, use: str) -> Executor:
        if use not in self._executors:
            watchers: list[Watcher] = []
            program: Program = self._program
            if use == "forward":
                program = forward_only(self.schedule)
            if self._check_finite:
                watchers.append(FiniteCheck())
            if use == "record":
                self._recorder = Recorder(self._device, self._sums.all, self._store)
                watchers.append(self._recorder)
            self._executors[use] = Executor(
                program, self.rank, self.stages, self._outgoing, self._wires, train=use != "forward",
                splitter=self._splitter, watchers=watchers, **self._options,
            )  # fmt: skip
        return self._executors[use]

    @contextmanager
    def _guard(self, where: str = "the start of the step") -> Iterator[None]:
        """An error in here stops all ranks with one message."""
        if self._stopped is not None:
            raise EngineError(f"this engine has stopped: {self._stopped}")
        self._walking, self._where = None, where
        try:
            yield
        except BaseException as error:
            place = self._walking.where if self._walking is not None else self._where
            explained = self._fabric.board.explain(error, place)
            self._stop(str(explained))
            if isinstance(error, PeerLost):  # the transport's own words help nobody
                raise explained from None
            if isinstance(error, Exception):
                raise explained from error
            raise

    def _stop(self, reason: str) -> None:
        """Break the connections, and keep nothing of the step alive."""
        self._stopped = reason
        self._fabric.abort()
        for executor in self._executors.values():
            executor.close()
        self._executors.clear()
        self._walking = None
        self._store.clear()
        if isinstance(self._splitter, AutogradSplit):
            self._splitter.clear()

    def _agree(self, look: Callable[[], str]) -> None:
        """Every rank looks; if one finds fault, or they see different things, all raise the same error."""
        try:
            found, fault = look(), None
        except Exception as error:  # whatever it is, the others must not wait for this rank
            found, fault = "", str(error) if isinstance(error, ZeropipeError) else f"{type(error).__name__}: {error}"
        seen = self._fabric.exchange((found, fault))
        for rank, (other, problem) in enumerate(seen):
            if problem is not None:
                raise ConfigError(f"rank {rank}: {problem}")
            if other != seen[0][0]:
                raise ConfigError(f"rank {rank} has another schedule than rank 0: build the same one on every rank")

    def _check_setup(self, split: str, shapes: str, compile: bool, ac: str, recv_ahead: int) -> str:
        if split not in SPLITS:
            raise ConfigError(f"split={split!r}: give one of {', '.join(SPLITS)}")
        if split == "autograd" and compile:
            raise ConfigError("split='autograd' cannot run compiled blocks: use split='store', or compile=False")
        wish = Checkpointing.parse(ac)
        if split == "autograd" and wish.mode == "op":
            raise ConfigError(f"split='autograd' cannot run ac={ac!r}: torch would go back twice; use split='store'")
        if compile or ac != "none":
            for stage, module in self.stages.items():
                if not hasattr(module, "blocks"):
                    raise ConfigError(f"stage {stage} names no blocks to compile or checkpoint: use module_stages()")
        if shapes not in ("auto", "dynamic"):
            raise ConfigError(f"shapes={shapes!r}: give 'auto' or 'dynamic'")
        if recv_ahead < 0:
            raise ConfigError(f"recv_ahead={recv_ahead}: give 0 or a number of messages")
        for stage, module in self.stages.items():
            wrapped = next((name for child in module.modules() for name in _WRAPPERS & _kinds(child)), None)
            if wrapped:
                raise ConfigError(
                    f"stage {stage} holds {wrapped}, which reduces gradients at the wrong time for a pipeline: "
                    "give plain modules and reduce gradients after the step"
                )
        wanted = self.schedule.placement.stages_of(self.rank)
        if tuple(sorted(self.stages)) != wanted:
            raise ConfigError(f"stages {sorted(self.stages)} were given, the placement puts {list(wanted)} here")
        check(self.schedule)
        lines = self.schedule.lines
        return hashlib.sha256(lines.codes + repr((lines.offsets, self.schedule.placement)).encode()).hexdigest()

    def _check_microbatches(self, microbatches: Sequence[Microbatch]) -> None:
        if len(microbatches) != self.schedule.num_microbatches:
            raise ConfigError(
                f"{len(microbatches)} microbatches were given, the schedule has {self.schedule.num_microbatches}: "
                "every rank passes all microbatches of the step"
            )

    def _scale(self, factor: float) -> None:
        gradients = [p.grad for p in self._sums.all if p.grad is not None]
        if gradients:
            torch_private.multiply(gradients, factor)


def _kinds(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    for stage in stages.values():
        for parameter in stage.parameters():
            return parameter.device
    return torch.device("cpu")


def _splits(schedule: Schedule, rank: int) -> bool:
    return any(decode(code).kind is Kind.I for code in iter_codes(schedule.lines, rank))


@contextmanager
def _set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients of earlier steps, which this step's sums and scaling must not touch; added again afterwards."""
    carried = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in carried:
        parameter.grad = None
    yield
    for parameter, gradient in carried:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


@contextmanager
def _evaluating(stages: Any) -> Iterator[None]:
    """Eval mode and no gradients inside; every module's mode as it was afterwards."""
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _let_go(outgoing: Sequence[Outgoing], fabric: Fabric, watchdog: Watchdog | None) -> None:
    if watchdog is not None:
        watchdog.stop()
    for edge in outgoing:
        edge.close()
    fabric.close()
