"""What the actions of a step compute: a microbatch's way through a stage and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.backward.splitters import BackwardPass
from zeropipe.engine.comm.channels import Receiver, Sender
from zeropipe.engine.comm.messages import Message, ShapeCache, Spec, describe_tensors, gradient_key, make_sendable
from zeropipe.engine.stages.contract import Microbatch
from zeropipe.engine.step import spread
from zeropipe.engine.step.cells import Cell, as_tuple, moved, plain
from zeropipe.engine.step.outputs import Buffers, require_unmodified
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.errors import EngineError

Finish = Callable[[Any, Microbatch, int], Tensor | None]
See = Callable[[Tensor], None]


class Passes:
    """Forward and backward of cells, and what they take from and give to other ranks."""

    def __init__(
        self,
        last: int,
        buffers: Mapping[int, Buffers],
        *,
        train: bool,
        device: torch.device,
        shapes: ShapeCache,
    ) -> None:
        self._last, self._buffers, self._train = last, buffers, train
        self._device, self._shapes = device, shapes

    def begin(self, microbatches: Sequence[Microbatch], kinds: Sequence[int], finish: Finish, see: See | None) -> None:
        """What a step works on."""
        self._microbatches, self._kinds, self._finish, self._see = microbatches, kinds, finish, see
        for buffers in self._buffers.values():
            buffers.begin()

    def end(self) -> None:
        """A caller's data and outputs are the caller's alone again."""
        del self._microbatches, self._finish, self._see

    def key_of(self, message: Message) -> tuple[bool, int, int]:
        """What the shapes of a message depend on."""
        return (self._train, message.stage, self._kinds[message.microbatch])

    def made(self, message: Message, cell: Cell) -> Spec | None:
        """The shapes of a message that comes for a cell, if they are known before it does."""
        return self._shapes.get(("output", *self.key_of(message))) if cell.spec is None else cell.spec

    def take_forward(self, cell: Cell, incoming: Receiver, place: int) -> None:
        """The inputs of a cell, from another rank."""
        spec, tensors = incoming.take(place)
        inputs = [
            spread.made_again(tensor, part.dtensor_layout, cell.module, cell.stage) if part.dtensor_layout else tensor
            for part, tensor in zip(spec, tensors)
        ]
        cell.inputs = [tensor.requires_grad_(part.needs_grad) for part, tensor in zip(spec, inputs)]

    def take_backward(self, cell: Cell, incoming: Receiver, place: int) -> None:
        """The gradients of a cell's outputs, from another rank."""
        spec, tensors = incoming.take(place)
        there = iter(tensors)
        gradients = [next(there) if part.needs_grad else None for part in spec]
        cell.gradients = [
            spread.gradient_again(piece, part.dtensor_layout, cell.module, cell.stage)
            if part.dtensor_layout and piece is not None
            else piece
            for part, piece in zip(spec, gradients)
        ]

    def forward(self, cell: Cell) -> None:
        """F: what it made is kept where the next one takes it."""
        microbatch = self._microbatches[cell.microbatch]
        args, kwargs = cell.pick(microbatch)
        if self._see is not None:
            for tensor in torch_tensors.tensors_in((args, kwargs)):
                if tensor.requires_grad:
                    self._see(tensor)
        if self._device.type != "cpu":
            args, kwargs = moved(args, self._device), moved(kwargs, self._device)
        if cell.before is not None:
            require_unmodified(cell.inputs, cell.before.version, f"{cell.before.stage}F{cell.microbatch}")
        output = cell.module(*cell.inputs, *args, **kwargs)
        if not self._train:
            cell.inputs = ()
        if cell.stage == self._last:
            if self._device.type != "cpu":
                microbatch = moved(dict(microbatch), self._device)
            cell.root = self._finish(self._buffers[cell.stage].own_all(output), microbatch, cell.microbatch)
            if self._train and cell.root is not None and not cell.root.requires_grad:
                _require_way_back(cell, output)
            return
        name = f"{cell.stage}F{cell.microbatch}"
        outputs = as_tuple(output, name)
        if not self._train:  # nothing comes back
            outputs = tuple(tensor.detach() for tensor in outputs)
        own = self._buffers[cell.stage].own
        data = [plain(own(tensor), name) for tensor in outputs]
        needs_grad = [tensor.requires_grad for tensor in outputs]
        cell.spec = describe_tensors(data, needs_grad, [spread.words_of(tensor, name) for tensor in outputs])
        self._shapes.set(("output", self._train, cell.stage, self._kinds[cell.microbatch]), cell.spec)
        # from here on only the way back is kept: the data goes when it has been sent or used
        cell.edges = [torch_autograd.gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        if cell.after is not None:
            pairs = zip(outputs, data)
            handed = [own(tensor).detach() if spread.is_spread(tensor) else piece for tensor, piece in pairs]
            cell.after.inputs = [tensor.requires_grad_(needs) for tensor, needs in zip(handed, needs_grad)]
            cell.version = torch_tensors.sum_versions(cell.after.inputs)
        else:
            # contiguous here, where the step is joined with all streams: a send allocates nothing on the device
            cell.output = [make_sendable(tensor) for tensor in data]
            cell.version = torch_tensors.sum_versions(cell.output)

    def backward(self, cell: Cell, run: Callable[[BackwardPass], None]) -> None:
        """B or I, as the splitter's `run` does it."""
        run(self._way_of(cell))  # named nowhere, so that nothing of it outlives the cell
        self._hand_back(cell)

    def _way_of(self, cell: Cell) -> BackwardPass:
        ways = [way for way in zip(cell.edges, cell.gradients) if way[1] is not None]
        roots: Sequence[Any] = [root for root, _ in ways]
        gradients: Sequence[Tensor] | None = [gradient for _, gradient in ways]
        if cell.root is not None:
            roots, gradients = ([cell.root] if cell.root.requires_grad else []), None
        inputs = [x for x in cell.inputs if x.requires_grad]
        return BackwardPass(cell.stage, cell.microbatch, cell.module, roots, gradients, inputs)

    def _hand_back(self, cell: Cell) -> None:
        """Give the gradients of the inputs to the stage before; the rest of the cell is done with."""
        gradients = [x.grad for x in cell.inputs if x.requires_grad]
        if cell.before is None and cell.stage > 0:
            cell.asked = tuple(x.requires_grad for x in cell.inputs)
            gradients = self._as_before(cell, gradients)
            asking = (x for x in cell.inputs if x.requires_grad)
            gradients = [None if g is None else spread.piece_of_gradient(g, x) for g, x in zip(gradients, asking)]
            del asking
        cell.inputs, cell.edges, cell.gradients, cell.root = (), (), (), None
        # autograd may have given the same memory to others, which add to it
        gradients = [g.clone() if g is not None and torch_tensors.is_shared(g) else g for g in gradients]
        if cell.before is not None:
            cell.before.gradients = gradients
        elif cell.stage > 0:
            cell.returned = [None if gradient is None else make_sendable(gradient) for gradient in gradients]

    def _as_before(self, cell: Cell, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The other end expects the gradients that were there the first time: zeros for one that is missing now."""
        there = tuple(gradient is not None for gradient in gradients)
        before = self._shapes.setdefault(("gradients", cell.stage, cell.asked), there)
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

    def send_forward(self, cell: Cell, outgoing: Sender) -> None:
        """The outputs of a cell, to another rank."""
        output, cell.output = cell.output, ()
        assert cell.spec is not None
        key = (self._train, cell.stage + 1, self._kinds[cell.microbatch])
        name = f"{cell.stage}F{cell.microbatch}"
        outgoing.send_forward(output, cell.spec, key, name, partial(require_unmodified, output, cell.version, name))

    def send_backward(self, cell: Cell, outgoing: Sender) -> None:
        """The gradients of a cell's inputs, to another rank."""
        returned, cell.returned = cell.returned, ()
        outgoing.send_backward(returned, gradient_key(cell.stage - 1, cell.asked))


def _require_way_back(cell: Cell, output: Any) -> None:
    """TypeError where the last stage cuts its output off from what learns: a loss made of it teaches nothing."""
    learns = [*cell.inputs, *cell.module.parameters()]
    if any(one.requires_grad for one in torch_tensors.tensors_in(output)) or not any(x.requires_grad for x in learns):
        return  # the loss itself knows, or nothing is to learn
    if cell.root is not None and float(cell.root) != 0:
        raise TypeError(
            f"{cell.stage}F{cell.microbatch} returned no gradient, so that nothing would learn: leave out detach() and "
            "no_grad() in the last stage"
        )
