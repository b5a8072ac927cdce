"""Runs one rank's row of a Program: a flat list of callables, built once, called in order every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.core.action import COMPUTE, OFFLOADING, SHARDING, Action, Kind, Overlap, Step, actions_of
from zeropipe.core.collectives import Collective, collectives, gathers_for_backward
from zeropipe.core.schedule import Program, Schedule
from zeropipe.engine.backward.gradients import FirstGradients
from zeropipe.engine.backward.splitters import Splitter
from zeropipe.engine.backward.turn_times import TurnTimes
from zeropipe.engine.backward.vectors import VectorGradients
from zeropipe.engine.blocks.checkpointing import checkpointed_blocks
from zeropipe.engine.comm.channels import Channel, Receiver, Sender
from zeropipe.engine.comm.messages import Message, ShapeCache, Spec
from zeropipe.engine.comm.threads import HelperThread
from zeropipe.engine.mesh.sharded_stage import ShardedStage, UnitReducer
from zeropipe.engine.options import Options
from zeropipe.engine.stages.contract import Microbatch, StageInfo
from zeropipe.engine.step.cell_runner import Call, Cell, CellRunner, FindTargets, Finish, OnInput
from zeropipe.engine.step.dynamic import IdleTime, find_movable
from zeropipe.engine.step.in_place import StageBuffers
from zeropipe.engine.step.offload import Copy, Offloader
from zeropipe.engine.step.overlaps import take_turns
from zeropipe.engine.step.streams import Streams
from zeropipe.engine.step.watchers import Watcher
from zeropipe.errors import EngineError


@dataclass(frozen=True, eq=False)
class ExecutorContext:
    """What all executors of an engine share."""

    schedule: Schedule
    rank: int  # in the pipeline
    stages: Mapping[int, StageInfo]
    senders: Mapping[int, Sender]  # by peer
    channels: Mapping[tuple[int, int], Channel]
    shapes: ShapeCache
    device: torch.device
    splitter: Splitter
    shards: Mapping[int, ShardedStage]
    parameters: list[nn.Parameter]
    options: Options
    helper: HelperThread  # for one of two computations that take turns
    offloader: Offloader


class CollectiveOrder:
    """Checks every collective of a step before it is called: out of order it would be paired with another one."""

    def __init__(self, order: Sequence[Collective]) -> None:
        self._order, self._next = order, 0

    def begin(self) -> None:
        """Start a step."""
        self._next = 0

    def check(self, collective: Collective) -> None:
        """EngineError unless this collective is the next one."""
        expected = self._order[self._next] if self._next < len(self._order) else None
        if collective != expected:
            raise EngineError(
                f"this rank was about to {collective}, and the processes that share its stages agreed to "
                f"{expected or 'end the step'} next: please report this as a bug"
            )
        self._next += 1

    def end(self) -> None:
        """EngineError if a collective was left out."""
        if self._next < len(self._order):
            raise EngineError(
                "this rank was about to end its step, and the processes that share its stages agreed to "
                f"{self._order[self._next]} next: please report this as a bug"
            )


class Executor:
    """One rank's row of a Program, ready to run any number of times. `use`: "train", "record" or "forward"."""

    def __init__(self, context: ExecutorContext, program: Program, use: str, watchers: Sequence[Watcher] = ()) -> None:
        self._context, self._watchers = context, watchers
        self._splitter, self._shards = context.splitter, context.shards
        self.schedule = program.schedule
        stages, train, row = context.stages, use != "forward", program.rows[context.rank]
        self._runner = CellRunner(
            program.schedule.num_stages - 1, {stage: StageBuffers(info.module) for stage, info in stages.items()},
            {stage: self._vector_gradients(stage) for stage in stages}, train=train, device=context.device,
            shapes=context.shapes,
        )  # fmt: skip
        self._num_parts = program.schedule.problem.num_weight_parts
        self._next_part: Counter[tuple[int, int]] = Counter()  # of the W of a (stage, microbatch)
        self._reductions: dict[int, UnitReducer] = {}  # of stages whose reduce has begun
        units = {stage: len(sharded.units) for stage, sharded in self._shards.items()}
        self._regather = any(sharded.regather for sharded in self._shards.values())
        self._order = CollectiveOrder(collectives(row, units, self._regather))
        self.cells = _create_cells(row, stages)
        self._offloaded = {(a.stage, a.microbatch) for a in actions_of(row) if a.kind is Kind.OFFLOAD}
        self._receivers, self._indices = self._create_receivers(row)
        self._streams = Streams(row, self.cells, stages, context.device, two=context.options.overlap == "streams")
        self._first_gradients = {
            stage: FirstGradients(self._find_parameters(stage)) for stage in (stages if train else ())
        }
        self._movable = find_movable(row, stages) if context.options.dynamic_weights and train else {}
        self._idle_time = IdleTime(context.device)
        self.turn_times = TurnTimes(context.device)
        self._early: dict[Action, Call] = {}  # what runs a W before its own position
        self._calls: list[Call] = []
        self._labels: list[str] = []
        reducing = _find_reducing(row)
        for index, step in enumerate(row):
            if isinstance(step, Action) and step.kind in SHARDING:
                self._add_sharding(step, row, index)
            elif isinstance(step, Action) and step.kind in OFFLOADING:
                self._add_copy(step)
            else:
                self._add(step, reduces=index in reducing)
        self._labels.append("the last sends of the step")
        self._current = 0

    def run(
        self,
        microbatches: Sequence[Microbatch],
        kinds: Sequence[int],
        finish: Finish,
        on_input: OnInput | None = None,
        find_targets: FindTargets | None = None,
    ) -> None:
        """Run one step. `finish` gets the last stage's outputs and returns what backward starts from.

        Microbatches of one kind have the same shapes everywhere in the pipeline. `on_input` is called with the tensors
        of microbatches that need a gradient, before they get one. `find_targets` says what a fused head computes.
        """
        self._runner.begin(microbatches, kinds, finish, on_input, find_targets)
        self._order.begin()
        self._context.offloader.clear()
        self.turn_times.begin_step()
        self._current = 0
        for cell in self.cells.values():
            cell.clear()
        for info in self._context.stages.values():
            if (slices := getattr(info.module, "slices", None)) is not None:
                slices.clear()
        for receiver in self._receivers.values():
            receiver.begin(self._runner.key_of, self._output_spec)
        for sharded in self._shards.values():
            sharded.begin_step(self._order.check)
        for first in self._first_gradients.values():
            first.begin()
        try:
            calls = self._calls
            for self._current, call in enumerate(calls):
                call()
            self._current = len(calls)
            self._order.end()
        finally:
            for sharded in self._shards.values():
                sharded.end_step()
        for sender in self._context.senders.values():
            sender.drain()
        self._runner.end()

    def close(self) -> None:
        """Release everything: the calls refer to this object, which would live until it is collected."""
        self._calls.clear()
        self.cells.clear()
        self._receivers.clear()
        self._early.clear()
        self._first_gradients.clear()
        self._idle_time.clear()

    @property
    def current_action(self) -> str:
        """The action that runs now."""
        return self._labels[self._current]

    def _output_spec(self, message: Message) -> Spec | None:
        return self._runner.output_spec(message, self.cells[message.stage, message.microbatch])

    def _find_parameters(self, stage: int) -> Callable[[], Iterable[Tensor]]:
        """A function that lists the tensors of a stage that accumulate gradients."""
        sharded = self._shards.get(stage)
        return self._context.stages[stage].module.parameters if sharded is None else sharded.accumulating_tensors

    def _vector_gradients(self, stage: int) -> VectorGradients:
        return VectorGradients(self._find_parameters(stage), keeps_dtype=stage in self._shards)

    # the list of callables

    def _create_receivers(self, row: Sequence[Step]) -> tuple[dict[int, Receiver], dict[Message, tuple[int, int]]]:
        """The receivers by peer, and for every message its peer and its index in the receiver's order."""
        messages: dict[int, list[Message]] = {}
        indices: dict[Message, tuple[int, int]] = {}
        for step in row:
            if isinstance(step, Action) and step.kind in (Kind.RECV_F, Kind.RECV_B):
                peer = self.schedule.placement.peer_of(step)
                message = Message(step.kind is Kind.RECV_F, step.stage, step.microbatch)
                indices[message] = (peer, len(messages.setdefault(peer, [])))
                messages[peer].append(message)
        context = self._context
        receivers = {
            peer: Receiver(context.channels[peer, context.rank], order, context.options.recv_ahead, context.shapes)
            for peer, order in messages.items()
        }
        return receivers, indices

    def _append(self, call: Call, label: object) -> None:
        self._calls.append(call)
        self._labels.append(str(label))

    def _add_sharding(self, action: Action, row: Sequence[Step], index: int) -> None:
        sharded = self._shards.get(action.stage)
        if sharded is None:
            return
        call: Call = sharded.reshard
        if action.kind is Kind.UNSHARD:
            call = partial(sharded.unshard, gathers_for_backward(row, index, self._regather))
        elif action.kind is Kind.REDUCE_GRAD:
            call = partial(self._reduce, action.stage)
        for watcher in self._watchers:
            call = watcher.wrap_sharding(call, action)
        self._append(call, action)

    def _add_copy(self, action: Action) -> None:
        """An OFFLOAD or RELOAD."""
        cell, offloader = self.cells[action.stage, action.microbatch], self._context.offloader
        run = offloader.offload if action.kind is Kind.OFFLOAD else offloader.reload

        def wrap(copy: Copy, stream: Any) -> Copy:
            for watcher in self._watchers:
                copy = watcher.wrap_copy(copy, action, stream)
            return copy

        self._append(partial(run, cell, wrap), action)

    def _reduce(self, stage: int) -> None:
        """Reduce the units that the B or W before has not reduced."""
        reduction = self._reductions.pop(stage, None) or UnitReducer(self._shards[stage], ())
        reduction.finish()
        self._first_gradients[stage].begin()

    def _add(self, step: Step, reduces: bool) -> None:
        if isinstance(step, Overlap):
            for action in step:
                self._add_receive(action)
            cells = [self.cells[action.stage, action.microbatch] for action in step]
            both = self._run_both([self._compute(action) for action in step], cells)
            self._append(self._wrap(both, step, cells), step)
            return
        cell = self.cells[step.stage, step.microbatch]
        if step.kind in (Kind.RECV_F, Kind.RECV_B):
            peer, index = self._indices[Message(step.kind is Kind.RECV_F, step.stage, step.microbatch)]
            if self._receivers[peer].posts_in_order:  # otherwise it is posted ahead of the action that waits for it
                self._append(partial(self._receivers[peer].post_until, index), step)
            return
        if step.kind in (Kind.SEND_F, Kind.SEND_B):
            sender = self._context.senders[self.schedule.placement.peer_of(step)]
            send = self._runner.send_forward if step.kind is Kind.SEND_F else self._runner.send_backward
            call = self._streams.run_on_stream(partial(send, cell, sender), cell)
        else:
            self._add_receive(step)
            compute = self._compute_and_reduce(step) if reduces and step.stage in self._shards else self._compute(step)
            call = self._wrap(self._streams.run_together((compute,), (cell,)), (step,), (cell,))
        self._append(call, step)

    def _run_both(self, calls: Sequence[Call], cells: Sequence[Cell]) -> Call:
        """One call for the F and the B of an Overlap."""
        context = self._context
        if context.options.overlap == "streams":
            return self._streams.run_together(calls, cells)
        forward, backward = calls
        return take_turns(forward, backward, cells[0].module, context.helper, context.device, self.turn_times)

    def _add_receive(self, action: Action) -> None:
        """The wait for the message of an action; with dynamic W, pending Ws run until it has arrived."""
        is_forward = action.kind is Kind.F
        found = self._indices.get(Message(is_forward, action.stage, action.microbatch))
        if found is None or action.kind is Kind.W:
            return
        (peer, index), cell = found, self.cells[action.stage, action.microbatch]
        receiver = self._receivers[peer]
        if pending := self._movable.get(action):
            has_arrived = partial(receiver.has_arrived, index)
            self._append(partial(self._run_pending, pending, has_arrived), f"W pending before {action}")
        receive = self._runner.receive_inputs if is_forward else self._runner.receive_gradients
        self._append(partial(receive, cell, receiver, index), action)

    def _run_pending(self, pending: Sequence[Action], has_arrived: Callable[[], bool]) -> None:
        """Run pending Ws until a message has arrived."""
        self._idle_time.has_arrived = has_arrived
        for action in pending:
            if self._splitter.pending_parameters(action.stage, action.microbatch):
                if self._idle_time.is_over():
                    return
                if action not in self._early:
                    self._early[action] = self._compute_early(action)
                self._early[action]()

    def _compute_early(self, action: Action) -> Call:
        cell, is_over = self.cells[action.stage, action.microbatch], self._idle_time.is_over
        call = partial(self._splitter.run_early, action.stage, action.microbatch, self._num_parts, is_over)
        return self._wrap(self._streams.run_together((call,), (cell,)), (action,), (cell,))

    def _compute(self, action: Action) -> Call:
        cell = self.cells[action.stage, action.microbatch]
        if action.kind is Kind.F:
            forward = partial(self._runner.forward, cell)
            if action.checkpointed:
                forward = partial(_run_checkpointed, forward)
            return self._with_offload(self._with_weights(forward, action), action)
        if action.kind in (Kind.B, Kind.I):
            run = self._splitter.backward if action.kind is Kind.B else self._splitter.backward_input
            backward = partial(self._run_backward, partial(self._runner.backward, cell, run), action)
            return self._with_offload(self._with_weights(backward, action), action)
        part = self._next_part[cell.stage, cell.microbatch]
        self._next_part[cell.stage, cell.microbatch] += 1
        weights = partial(self._splitter.backward_weight, cell.stage, cell.microbatch, part, self._num_parts)
        return partial(self._run_backward, weights, action)

    def _run_backward(self, call: Callable[..., None], action: Action, **options: Any) -> None:
        """Run B, I or W; then copy gradients and stored tensors that share memory with others."""
        if action.kind is not Kind.I and action.stage in self._shards:
            self._shards[action.stage].limit.wait()
        call(**options)
        self._first_gradients[action.stage].copy_shared()
        if action.kind is Kind.I:
            self._splitter.copy_shared(action.stage, action.microbatch)

    def _with_offload(self, call: Call, action: Action) -> Call:
        """An F whose activations will be offloaded, or a backward that waits until they are back."""
        if (action.stage, action.microbatch) not in self._offloaded:
            return call
        cell, offloader = self.cells[action.stage, action.microbatch], self._context.offloader

        def forward() -> None:
            with offloader.collect(cell):
                call()

        def backward() -> None:
            offloader.wait(cell)
            call()

        return forward if action.kind is Kind.F else backward

    def _with_weights(self, call: Call, action: Action) -> Call:
        """An F, B or I, which uses the unsharded weights of its stage."""
        sharded = self._shards.get(action.stage)
        if sharded is None:
            return call

        def run() -> None:
            is_forward = action.kind is Kind.F
            with sharded.during_forward(action.microbatch) if is_forward else sharded.during_backward():
                call()

        return run

    def _compute_and_reduce(self, action: Action) -> Call:
        """A B or W before a reduce of its stage: each unit is reduced as soon as its gradients are complete."""
        call, sharded = self._compute(action), self._shards[action.stage]

        def backward() -> None:
            reduction = self._reductions[action.stage] = UnitReducer(sharded, sharded.trained_weights, gathers=True)
            with sharded.observe_gradients(action.microbatch, reduction):
                call()
            reduction.finish()

        def weights() -> None:
            pending = self._splitter.pending_parameters(action.stage, action.microbatch)
            reduction = self._reductions[action.stage] = UnitReducer(sharded, pending)
            call(on_product=reduction.on_gradient)  # type: ignore[call-arg]
            reduction.finish()  # also where all products ran early: all processes must reduce at the same action

        return backward if action.kind is Kind.B else weights

    def _wrap(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        for watcher in self._watchers:
            call = watcher.wrap(call, actions, cells)
        return call


def _run_checkpointed(forward: Call) -> None:
    with checkpointed_blocks():
        forward()


def _create_cells(row: Sequence[Step], stages: Mapping[int, StageInfo]) -> dict[tuple[int, int], Cell]:
    cells: dict[tuple[int, int], Cell] = {}
    for action in actions_of(row):
        if action.kind is Kind.F:
            info = stages[action.stage]
            cells[action.stage, action.microbatch] = Cell(action.stage, action.microbatch, info.module, info.pick)
    for (stage, microbatch), cell in cells.items():
        cell.previous = cells.get((stage - 1, microbatch))
        cell.next = cells.get((stage + 1, microbatch))
    return cells


def _find_reducing(row: Sequence[Step]) -> set[int]:
    """The indices of those B and W right after which their stage is reduced, so that reducing can start in them."""
    found, last = set(), None
    for index, step in enumerate(row):
        if isinstance(step, Overlap):
            last = None
        elif step.kind in COMPUTE:
            last = (index, step.stage) if step.kind in (Kind.B, Kind.W) else None
        elif step.kind is Kind.REDUCE_GRAD:
            if last is not None and last[1] == step.stage:
                found.add(last[0])
            last = None  # every process reduces stages in the order of its row
    return found
