"""Walks one rank's row of a Program: a flat list of callables, made once, called in order every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zeropipe.core.action import SHARDING, Action, Kind, Overlap, Step, actions_of
from zeropipe.core.schedule import Program
from zeropipe.engine import torch_private
from zeropipe.engine.backward.splitters import Pass, Splitter
from zeropipe.engine.comm.edges import Incoming, Message, Outgoing, Spec, Wire, answer_key, spec_of
from zeropipe.engine.mesh.shards import Reduction, Shards
from zeropipe.engine.stages.contract import Microbatch, Told
from zeropipe.engine.step import spread
from zeropipe.engine.step.cells import Cell, as_tuple, moved, plain
from zeropipe.engine.step.dynamic import Gap, movable
from zeropipe.engine.step.plans import next_use, reduced_within
from zeropipe.errors import EngineError

Call = Callable[[], None]
Finish = Callable[[Any, Microbatch, int], Tensor | None]
See = Callable[[Tensor], None]


class Watcher(Protocol):
    """Wraps the computation of a step: the recorder, the search for NaN."""

    def watch(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call: ...


class ShardWatcher(Protocol):
    """Wraps what the Program does for a sharded stage."""

    def watch(self, call: Call, action: Action) -> Call: ...


# What stages made of a kind of microbatch, by (training, stage, kind): so a receive of a gradient can be posted early.
Made = dict[tuple[bool, int, int], Spec]


class Executor:
    """One rank's part of a Program, ready to run any number of times."""

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Told],
        outgoing: Mapping[int, Outgoing],
        wires: Mapping[tuple[int, int], Wire],
        *,
        train: bool,
        device: torch.device,
        splitter: Splitter,
        shards: Mapping[int, Shards],
        recv_ahead: int,
        dynamic: bool,
        dynamic_weights: bool,
        made: Made,
        present: dict[Any, tuple[bool, ...]],
        watchers: Sequence[Watcher] = (),
        gauge: ShardWatcher | None = None,
    ) -> None:
        self._rank, self._outgoing, self._train = rank, outgoing, train
        self._device, self._splitter, self._dynamic, self._watchers = device, splitter, dynamic, watchers
        self.schedule = program.schedule
        self._last = program.schedule.num_stages - 1
        self._num_parts = program.schedule.problem.num_weight_parts
        self._parts: Counter[tuple[int, int]] = Counter()  # of a W: how many have a call
        self._shards = shards
        self._gauge = gauge
        self._reductions: dict[int, Reduction] = {}  # of stages whose last W has begun
        self._placement = program.schedule.placement
        row = program.rows[rank]
        self.cells: dict[tuple[int, int], Cell] = {}
        for action in actions_of(row):
            if action.kind is Kind.F:
                stage, microbatch = action.stage, action.microbatch
                told = stages[stage]
                self.cells[stage, microbatch] = Cell(stage, microbatch, told.module, told.pick)
        for (stage, microbatch), cell in self.cells.items():
            cell.before = self.cells.get((stage - 1, microbatch))
            cell.after = self.cells.get((stage + 1, microbatch))
        self._incoming, self._places = self._receives(row, wires, recv_ahead)
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        if colour(row, self.cells) and device.type == "cuda":
            self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))
            torch_private.quiet_streams()
            # Gradients are accumulated on the stream their accumulator was made on. Made on one of the two, it would
            # keep a backward on the other waiting for the forward beside it.
            parameters = (p for told in stages.values() for p in told.module.parameters() if p.requires_grad)
            self._accumulators = [torch_private.gradient_edge(parameter) for parameter in parameters]
        self._made_of, self._present = made, present
        self._movable = movable(row, stages) if dynamic_weights and train else {}
        self._gap = Gap(device)
        self._ahead: dict[Action, Call] = {}  # what runs a W before its place
        self._calls: list[Call] = []
        self._labels: list[str] = []
        within = reduced_within(row)
        for at, step in enumerate(row):
            if isinstance(step, Action) and step.kind in SHARDING:
                self._add_sharding(step, row, at)
            else:
                self._add(step, reduces=at in within)
        self._labels.append("the last sends of the step")
        self._at = 0

    def run(
        self,
        microbatches: Sequence[Microbatch],
        kinds: Sequence[int],
        finish: Finish,
        see: See | None = None,
    ) -> None:
        """One step. `finish` takes the last stage's output and gives what backward starts from.

        Microbatches of one kind have the same shapes in all of the pipeline. `see` is shown the tensors of microbatches
        that need a gradient, before they get one.
        """
        self._microbatches, self._finish, self._see = microbatches, finish, see
        self._at = 0
        self._kinds = kinds
        for cell in self.cells.values():
            cell.clear()
        for incoming in self._incoming.values():
            incoming.begin(self._key_of, self._made)
        calls = self._calls
        for self._at, call in enumerate(calls):
            call()
        self._at = len(calls)
        for outgoing in self._outgoing.values():
            outgoing.drain()
        del self._microbatches, self._finish, self._see  # a caller's data and outputs are the caller's alone again

    def close(self) -> None:
        """Let go of everything: the calls refer to this object, so it would live until it is collected."""
        self._calls.clear()
        self.cells.clear()
        self._incoming.clear()
        self._ahead.clear()
        self._gap.forget()
        self._outgoing = {}

    @property
    def where(self) -> str:
        """The action being run."""
        return self._labels[self._at]

    # what an edge must know about shapes

    def _key_of(self, message: Message) -> tuple[bool, int, int]:
        return (self._train, message.stage, self._kinds[message.microbatch])

    def _made(self, message: Message) -> Spec | None:
        cell = self.cells[message.stage, message.microbatch]
        spec = cell.spec
        if spec is None and not self._dynamic:
            spec = self._made_of.get(self._key_of(message))
        return spec

    # the list of callables

    def _receives(
        self, row: Sequence[Step], wires: Mapping[tuple[int, int], Wire], ahead: int
    ) -> tuple[dict[int, Incoming], dict[Message, tuple[int, int]]]:
        orders: dict[int, list[Message]] = {}
        places: dict[Message, tuple[int, int]] = {}
        for step in row:
            if isinstance(step, Action) and step.kind in (Kind.RECV_F, Kind.RECV_B):
                forward = step.kind is Kind.RECV_F
                peer = self._placement.peer_of(step)
                message = Message(forward, step.stage, step.microbatch)
                places[message] = (peer, len(orders.setdefault(peer, [])))
                orders[peer].append(message)
        incoming = {
            peer: Incoming(wires[peer, self._rank], order, ahead, self._dynamic) for peer, order in orders.items()
        }
        return incoming, places

    def _add_sharding(self, action: Action, row: Sequence[Step], at: int) -> None:
        shards = self._shards.get(action.stage)
        if shards is None:  # this stage is whole on every rank
            return
        call: Call = shards.drop
        if action.kind is Kind.UNSHARD:
            call = partial(shards.gather, backward=next_use(row, at) is not Kind.F)
        elif action.kind is Kind.REDUCE_GRAD:
            call = partial(self._reduce, action.stage)
        self._calls.append(call if self._gauge is None else self._gauge.watch(call, action))
        self._labels.append(str(action))

    def _reduce(self, stage: int) -> None:
        """What the stage's last B or W has not reduced already."""
        reduction = self._reductions.pop(stage, None) or Reduction(self._shards[stage], ())
        reduction.rest()

    def _add(self, step: Step, reduces: bool) -> None:
        if isinstance(step, Overlap):
            for action in step:
                self._add_take(action)
            cells = [self.cells[action.stage, action.microbatch] for action in step]
            together = self._placed([self._compute(action) for action in step], cells)
            self._calls.append(self._watched(together, step, cells))
            self._labels.append(str(step))
            return
        cell = self.cells[step.stage, step.microbatch]
        if step.kind in (Kind.RECV_F, Kind.RECV_B):
            peer, place = self._places[Message(step.kind is Kind.RECV_F, step.stage, step.microbatch)]
            if self._incoming[peer].in_place:  # else it is posted ahead of the take that waits for it
                self._calls.append(partial(self._incoming[peer].reach, place))
                self._labels.append(str(step))
            return
        if step.kind in (Kind.SEND_F, Kind.SEND_B):
            outgoing = self._outgoing[self._placement.peer_of(step)]
            send = self._send_forward if step.kind is Kind.SEND_F else self._send_backward
            call = self._beside(partial(send, cell, outgoing), cell)
        else:
            self._add_take(step)
            compute = self._reducing(step) if reduces and step.stage in self._shards else self._compute(step)
            call = self._watched(self._placed((compute,), (cell,)), (step,), (cell,))
        self._calls.append(call)
        self._labels.append(str(step))

    def _add_take(self, action: Action) -> None:
        forward = action.kind is Kind.F
        place = self._places.get(Message(forward, action.stage, action.microbatch))
        if place is None or action.kind is Kind.W:
            return
        cell = self.cells[action.stage, action.microbatch]
        incoming = self._incoming[place[0]]
        if owed := self._movable.get(action):
            self._calls.append(partial(self._fill, owed, partial(incoming.arrived, place[1])))
            self._labels.append(f"W owed before {action}")
        take = self._take_forward if forward else self._take_backward
        self._calls.append(partial(take, cell, incoming, place[1]))
        self._labels.append(str(action))

    def _fill(self, owed: Sequence[Action], arrived: Callable[[], bool]) -> None:
        """Run Ws that are owed until a message is here."""
        self._gap.arrived = arrived
        for action in owed:
            if self._splitter.waiting(action.stage, action.microbatch):
                if self._gap.over():
                    return
                if action not in self._ahead:
                    self._ahead[action] = self._ahead_of(action)
                self._ahead[action]()

    def _ahead_of(self, action: Action) -> Call:
        cell = self.cells[action.stage, action.microbatch]
        call = partial(self._splitter.ahead, action.stage, action.microbatch, self._num_parts, self._gap.over)
        return self._watched(self._placed((call,), (cell,)), (action,), (cell,))

    def _compute(self, action: Action) -> Call:
        cell = self.cells[action.stage, action.microbatch]
        if action.kind is Kind.F:
            return partial(self._forward, cell)
        if action.kind in (Kind.B, Kind.I):
            return partial(
                self._backward, cell, self._splitter.whole if action.kind is Kind.B else self._splitter.inputs
            )
        part = self._parts[cell.stage, cell.microbatch]
        self._parts[cell.stage, cell.microbatch] += 1
        return partial(self._splitter.weights, cell.stage, cell.microbatch, part, self._num_parts)

    def _reducing(self, action: Action) -> Call:
        """The last B or W of a sharded stage: a unit is reduced as soon as its gradients are complete."""
        call, shards = self._compute(action), self._shards[action.stage]

        def backward() -> None:
            reduction = self._reductions[action.stage] = Reduction(shards, shards.trained, keep=True)
            with shards.told(reduction.ran):
                call()
            reduction.rest()

        def weights() -> None:
            waiting = self._splitter.waiting(action.stage, action.microbatch)
            reduction = self._reductions[action.stage] = Reduction(shards, waiting)
            call(ran=reduction.ran)  # type: ignore[call-arg]
            reduction.rest()  # here also where all products ran before: processes must reduce at the same place

        return backward if action.kind is Kind.B else weights

    def _watched(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        for watcher in self._watchers:
            call = watcher.watch(call, actions, cells)
        return call

    # Streams: backward runs on the stream of its forward, so the two cells of an Overlap belong to different ones. The
    # main stream waits for both, but a send follows its own cell's stream: what is done first leaves first.

    def _stream_of(self, cell: Cell) -> torch.cuda.Stream | None:
        return self._streams[cell.side] if self._streams and cell.side is not None else None

    def _placed(self, calls: Sequence[Call], cells: Sequence[Cell]) -> Call:
        """A step's computations, each on its cell's stream: after all that was issued, before all that will be."""
        placed = [self._beside(call, cell) for call, cell in zip(calls, cells)]
        streams = [stream for cell in cells if (stream := self._stream_of(cell)) is not None]

        def in_order() -> None:
            for call in placed:
                call()

        def forked() -> None:
            main = torch.cuda.current_stream(self._device)
            for stream in streams:
                stream.wait_stream(main)
            in_order()
            for stream in streams:
                main.wait_stream(stream)

        if streams:
            return forked
        return in_order if len(placed) > 1 else placed[0]

    def _beside(self, call: Call, cell: Cell) -> Call:
        stream = self._stream_of(cell)
        if stream is None:
            return call

        def run() -> None:
            with torch.cuda.stream(stream):
                call()

        return run

    # the actions

    def _take_forward(self, cell: Cell, incoming: Incoming, place: int) -> None:
        spec, tensors = incoming.take(place)
        inputs = [
            spread.made_again(tensor, part.words, cell.module, cell.stage) if part.words else tensor
            for part, tensor in zip(spec, tensors)
        ]
        cell.inputs = [tensor.requires_grad_(part.needs_grad) for part, tensor in zip(spec, inputs)]

    def _take_backward(self, cell: Cell, incoming: Incoming, place: int) -> None:
        spec, tensors = incoming.take(place)
        there = iter(tensors)
        gradients = [next(there) if part.needs_grad else None for part in spec]
        cell.gradients = [
            spread.gradient_again(piece, part.words, cell.module, cell.stage)
            if part.words and piece is not None
            else piece
            for part, piece in zip(spec, gradients)
        ]

    def _forward(self, cell: Cell) -> None:
        microbatch = self._microbatches[cell.microbatch]
        args, kwargs = cell.pick(microbatch)
        if self._see is not None:
            for tensor in torch_private.tensors_in((args, kwargs)):
                if tensor.requires_grad:
                    self._see(tensor)
        if self._device.type != "cpu":
            args, kwargs = moved(args, self._device), moved(kwargs, self._device)
        output = cell.module(*cell.inputs, *args, **kwargs)
        if not self._train:
            cell.inputs = ()
        if cell.stage == self._last:
            if self._device.type != "cpu":
                microbatch = moved(dict(microbatch), self._device)
            cell.root = self._finish(output, microbatch, cell.microbatch)
            return
        name = f"{cell.stage}F{cell.microbatch}"
        outputs = as_tuple(output, name)
        if not self._train:  # nothing comes back
            outputs = tuple(tensor.detach() for tensor in outputs)
        data = [plain(tensor, name) for tensor in outputs]
        needs_grad = [tensor.requires_grad for tensor in outputs]
        cell.spec = spec_of(data, needs_grad, [spread.words_of(tensor, name) for tensor in outputs])
        self._made_of[self._train, cell.stage, self._kinds[cell.microbatch]] = cell.spec
        # from here on only the way back is kept: the data goes when it has been sent or used
        cell.edges = [torch_private.gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        if self._splitter.keeps_outputs:
            cell.kept = [tensor for tensor in outputs if tensor.requires_grad]
        if cell.after is not None:
            handed = [tensor.detach() if spread.is_spread(tensor) else piece for tensor, piece in zip(outputs, data)]
            cell.after.inputs = [tensor.requires_grad_(needs) for tensor, needs in zip(handed, needs_grad)]
        else:
            # contiguous here, where the step is joined with all streams: a send allocates nothing on the device
            cell.output = [tensor.contiguous() for tensor in data]

    def _backward(self, cell: Cell, run: Callable[[Pass], None]) -> None:
        ways = [way for way in zip(cell.kept or cell.edges, cell.gradients) if way[1] is not None]
        roots: Sequence[Any] = [root for root, _ in ways]
        gradients: Sequence[Tensor] | None = [gradient for _, gradient in ways]
        if cell.root is not None:
            roots, gradients = ([cell.root] if cell.root.requires_grad else []), None
        inputs = [x for x in cell.inputs if x.requires_grad]
        run(Pass(cell.stage, cell.microbatch, cell.module, roots, gradients, inputs))
        self._hand_back(cell)

    def _hand_back(self, cell: Cell) -> None:
        """Give the gradients of the inputs to the stage before; the rest of the cell is done with."""
        gradients = [x.grad for x in cell.inputs if x.requires_grad]
        if cell.before is None and cell.stage > 0:
            cell.asked = tuple(x.requires_grad for x in cell.inputs)
            gradients = self._as_before(cell, gradients)
            asking = (x for x in cell.inputs if x.requires_grad)
            gradients = [None if g is None else spread.piece_of_gradient(g, x) for g, x in zip(gradients, asking)]
        cell.inputs, cell.edges, cell.gradients, cell.kept, cell.root = (), (), (), (), None
        if cell.before is not None:
            cell.before.gradients = gradients
        elif cell.stage > 0:
            cell.returned = [None if gradient is None else gradient.contiguous() for gradient in gradients]

    def _as_before(self, cell: Cell, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The other end expects the gradients that were there the first time: zeros for one that is missing now."""
        there = tuple(gradient is not None for gradient in gradients)
        before = there if self._dynamic else self._present.setdefault((cell.stage, cell.asked), there)
        if there == before:
            return gradients
        if any(now and not then for now, then in zip(there, before)):
            raise EngineError(
                f"stage {cell.stage} made a gradient for an input that had none before: pass shapes='dynamic' for "
                "stages that do not use all of their inputs every time"
            )
        inputs = [x for x in cell.inputs if x.requires_grad]
        return [
            torch.zeros_like(x) if then and gradient is None else gradient
            for x, gradient, then in zip(inputs, gradients, before)
        ]

    def _send_forward(self, cell: Cell, outgoing: Outgoing) -> None:
        output, cell.output = cell.output, ()
        assert cell.spec is not None
        key = (self._train, cell.stage + 1, self._kinds[cell.microbatch])
        outgoing.send_forward(output, cell.spec, key, f"{cell.stage}F{cell.microbatch}")

    def _send_backward(self, cell: Cell, outgoing: Outgoing) -> None:
        returned, cell.returned = cell.returned, ()
        outgoing.send_backward(returned, answer_key(cell.stage - 1, cell.asked))


def colour(row: Sequence[Step], cells: Mapping[tuple[int, int], Cell]) -> bool:
    """Put the two cells of every Overlap on different streams; whether there is any Overlap.

    A cell meets at most one cell that started before it (as a forward) and one that starts after it (as a backward),
    so walking the row once is enough.
    """
    needed = False
    for step in row:
        if isinstance(step, Overlap):
            forward, backward = (cells[a.stage, a.microbatch] for a in step)
            if forward is backward:
                raise EngineError(f"{step} joins the forward and the backward of one microbatch in one stage")
            backward.side = backward.side or 0
            forward.side = 1 - backward.side
            needed = True
    return needed
