"""Cells, one microbatch in one stage each, and the computations of their actions: F, B and I, sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropipe.engine.backward.splitters import BackwardPass
from zeropipe.engine.backward.vectors import VectorGradients
from zeropipe.engine.comm.channels import Receiver, Sender
from zeropipe.engine.comm.messages import Message, ShapeCache, Spec, describe_tensors, gradient_key, make_sendable
from zeropipe.engine.stages.contract import Microbatch, Pick, Targets
from zeropipe.engine.stages.slices import SLICE
from zeropipe.engine.step import dtensor_messages
from zeropipe.engine.step.in_place import StageBuffers, require_unmodified
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.errors import EngineError

Call = Callable[[], None]  # a part of a step
Finish = Callable[[Any, Microbatch, int], Tensor | None]  # (last stage's output, microbatch, its index) -> loss
OnInput = Callable[[Tensor], None]
FindTargets = Callable[[Microbatch], Targets | None]


class Cell:
    """One microbatch in one stage, on this rank: its inputs, and what its backward starts from."""

    __slots__ = (
        "gradient_edges", "input_gradients", "inputs", "loss", "microbatch", "module", "next", "output",
        "output_gradients", "output_spec", "output_version", "pick", "previous", "requested", "stage", "stream_index",
    )  # fmt: skip

    def __init__(self, stage: int, microbatch: int, module: nn.Module, pick: Pick) -> None:
        self.stage, self.microbatch, self.module, self.pick = stage, microbatch, module, pick
        self.previous: Cell | None = None  # the neighbours, where they are on this rank
        self.next: Cell | None = None
        self.stream_index: int | None = None  # which of two streams an Overlap puts it on
        self.clear()

    def clear(self) -> None:
        """Reset the state of a step."""
        self.inputs: Sequence[Tensor] = ()  # from the previous stage, as leaves of this stage's graph
        self.gradient_edges: Sequence[Any] = ()  # of the outputs: no data
        self.output_spec: Spec | None = None
        self.output: Sequence[Tensor] = ()  # to be sent
        self.output_version = 0  # when the outputs were returned
        self.output_gradients: Sequence[Tensor | None] = ()  # None: that output was not used
        self.input_gradients: Sequence[Tensor | None] = ()  # to be sent
        self.requested: tuple[bool, ...] = ()  # which of the inputs need a gradient
        self.loss: Tensor | None = None  # on the last stage

    @property
    def name(self) -> str:
        return f"{self.stage}F{self.microbatch}"


class CellRunner:
    """Runs forward and backward of cells, and their messages to and from other ranks."""

    def __init__(
        self,
        last_stage: int,
        buffers: Mapping[int, StageBuffers],
        vectors: Mapping[int, VectorGradients],
        *,
        train: bool,
        device: torch.device,
        shapes: ShapeCache,
    ) -> None:
        self._last_stage, self._buffers, self._vectors = last_stage, buffers, vectors
        self._train, self._device, self._shapes = train, device, shapes

    def begin(
        self,
        microbatches: Sequence[Microbatch],
        kinds: Sequence[int],
        finish: Finish,
        on_input: OnInput | None,
        find_targets: FindTargets | None,
    ) -> None:
        """Start a step. `on_input` is called with each tensor of a microbatch that needs a gradient.

        `find_targets`: what the last stage computes losses of, if its head is fused.
        """
        self._microbatches, self._kinds, self._finish, self._on_input = microbatches, kinds, finish, on_input
        self._find_targets = find_targets
        for buffers in self._buffers.values():
            buffers.locate()

    def end(self) -> None:
        """Release the caller's data and outputs."""
        del self._microbatches, self._finish, self._on_input, self._find_targets

    def key_of(self, message: Message) -> tuple[bool, int, int]:
        """What the shapes of a message depend on."""
        return (self._train, message.stage, self._kinds[message.microbatch])

    def output_spec(self, message: Message, cell: Cell) -> Spec | None:
        """The outputs whose gradients a message has, also before they are computed if such a cell ran before."""
        return self._shapes.get(("output", *self.key_of(message))) if cell.output_spec is None else cell.output_spec

    def receive_inputs(self, cell: Cell, receiver: Receiver, index: int) -> None:
        """Take the inputs of a cell from another rank."""
        spec, tensors = receiver.take(index)
        cell.inputs = [
            (
                dtensor_messages.build_dtensor(tensor, part.dtensor_layout, cell.module, cell.stage)
                if part.dtensor_layout
                else tensor
            ).requires_grad_(part.needs_grad)
            for part, tensor in zip(spec, tensors)
        ]

    def receive_gradients(self, cell: Cell, receiver: Receiver, index: int) -> None:
        """Take the gradients of a cell's outputs from another rank."""
        spec, tensors = receiver.take(index)
        received = iter(tensors)
        gradients = [next(received) if part.needs_grad else None for part in spec]
        cell.output_gradients = [
            dtensor_messages.build_dtensor(shard, part.dtensor_layout, cell.module, cell.stage, is_gradient=True)
            if part.dtensor_layout and shard is not None
            else shard
            for part, shard in zip(spec, gradients)
        ]

    def forward(self, cell: Cell) -> None:
        """Run F."""
        microbatch = self._microbatches[cell.microbatch]
        args, kwargs = cell.pick(microbatch)
        is_fused = self._find_targets is not None and getattr(cell.module, "fused_head", None) is not None
        if is_fused and (targets := self._find_targets(microbatch)) is not None:
            kwargs["targets"] = targets
        if self._on_input is not None:
            for tensor in torch_tensors.tensors_in((args, kwargs)):
                if tensor.requires_grad:
                    self._on_input(tensor)
        if self._device.type != "cpu":
            args, kwargs = to_device(args, self._device), to_device(kwargs, self._device)
        if cell.previous is not None:
            require_unmodified(cell.inputs, cell.previous.output_version, cell.previous.name)
        with self._during_slice(cell, microbatch, backward=False):
            output = cell.module(*cell.inputs, *args, **kwargs)
        if not self._train:
            cell.inputs = ()
        if cell.stage == self._last_stage:
            self._compute_loss(cell, output, microbatch)
        else:
            self._set_output(cell, as_tuple(output, cell.name))

    def _during_slice(self, cell: Cell, microbatch: Microbatch, backward: bool) -> AbstractContextManager[None]:
        """Around a forward or backward: tells the stage which slice runs, in a schedule with slices."""
        part, slices = microbatch.get(SLICE), getattr(cell.module, "slices", None)
        if part is None or slices is None:
            return nullcontext()
        found: AbstractContextManager[None] = slices.during(part, cell.microbatch // (len(part.bounds) - 1), backward)
        return found

    def _compute_loss(self, cell: Cell, output: Any, microbatch: Microbatch) -> None:
        if self._device.type != "cpu":
            microbatch = to_device(dict(microbatch), self._device)
        cell.loss = self._finish(self._buffers[cell.stage].copy_all_shared(output), microbatch, cell.microbatch)
        if self._train and cell.loss is not None and not cell.loss.requires_grad:
            _require_gradient(cell, output)

    def _set_output(self, cell: Cell, outputs: Sequence[Tensor]) -> None:
        """Give the outputs to the next stage. The cell keeps only their gradient edges: the data is released."""
        if not self._train:  # no gradients come back
            outputs = tuple(tensor.detach() for tensor in outputs)
        copy_shared = self._buffers[cell.stage].copy_shared
        data = [_to_plain(copy_shared(tensor), cell.name) for tensor in outputs]
        needs_grad = [tensor.requires_grad for tensor in outputs]
        layouts = [dtensor_messages.describe_layout(tensor, cell.name) for tensor in outputs]
        cell.output_spec = describe_tensors(data, needs_grad, layouts)
        self._shapes.set(("output", self._train, cell.stage, self._kinds[cell.microbatch]), cell.output_spec)
        cell.gradient_edges = [torch_autograd.gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        if cell.next is not None:
            inputs = [
                copy_shared(tensor).detach() if isinstance(tensor, DTensor) else plain
                for tensor, plain in zip(outputs, data)
            ]
            cell.next.inputs = [tensor.requires_grad_(needs) for tensor, needs in zip(inputs, needs_grad)]
            cell.output_version = torch_tensors.sum_versions(cell.next.inputs)
        else:
            # contiguous here, where the step is joined with all streams: a send allocates nothing on the device
            cell.output = [make_sendable(tensor) for tensor in data]
            cell.output_version = torch_tensors.sum_versions(cell.output)

    def backward(self, cell: Cell, run: Callable[[BackwardPass], None]) -> None:
        """Run B or I with a method of the splitter."""
        with self._during_slice(cell, self._microbatches[cell.microbatch], backward=True):
            run(_backward_pass(cell, self._vectors[cell.stage]))  # no name, so that nothing of it outlives the cell
        gradients = [x.grad for x in cell.inputs if x.requires_grad]
        if cell.previous is None and cell.stage > 0:
            cell.requested = tuple(x.requires_grad for x in cell.inputs)
            gradients = self._fill_missing(cell, gradients)
            inputs = (x for x in cell.inputs if x.requires_grad)
            gradients = [
                None if gradient is None else dtensor_messages.local_gradient(gradient, x)
                for gradient, x in zip(gradients, inputs)
            ]
            del inputs
        cell.inputs, cell.gradient_edges, cell.output_gradients, cell.loss = (), (), (), None
        # autograd may use the same memory for gradients that are added to
        gradients = [g.clone() if g is not None and torch_tensors.is_shared(g) else g for g in gradients]
        if cell.previous is not None:
            cell.previous.output_gradients = gradients
        elif cell.stage > 0:
            cell.input_gradients = [None if gradient is None else make_sendable(gradient) for gradient in gradients]

    def _fill_missing(self, cell: Cell, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Zeros for gradients that are missing now: the receiver expects those that existed the first time."""
        present = tuple(gradient is not None for gradient in gradients)
        expected = self._shapes.setdefault(("gradients", cell.stage, cell.requested), present)
        if present == expected:
            return gradients
        if any(now and not then for now, then in zip(present, expected)):
            raise EngineError(
                f"stage {cell.stage} computed a gradient for an input that had none before: pass shapes='dynamic' for "
                "stages that do not use all of their inputs every time"
            )
        inputs = [x for x in cell.inputs if x.requires_grad]
        return [
            torch.zeros_like(x) if then and gradient is None else gradient
            for x, gradient, then in zip(inputs, gradients, expected)
        ]

    def send_forward(self, cell: Cell, sender: Sender) -> None:
        """Send the outputs of a cell to another rank."""
        output, cell.output = cell.output, ()
        assert cell.output_spec is not None
        key = (self._train, cell.stage + 1, self._kinds[cell.microbatch])
        on_sent = partial(require_unmodified, output, cell.output_version, cell.name)
        sender.send_forward(output, cell.output_spec, key, cell.name, on_sent)

    def send_backward(self, cell: Cell, sender: Sender) -> None:
        """Send the gradients of a cell's inputs to another rank."""
        gradients, cell.input_gradients = cell.input_gradients, ()
        sender.send_backward(gradients, gradient_key(cell.stage - 1, cell.requested))


def _backward_pass(cell: Cell, vectors: VectorGradients) -> BackwardPass:
    inputs = [x for x in cell.inputs if x.requires_grad]
    if cell.loss is not None:
        roots = [cell.loss] if cell.loss.requires_grad else []
        return BackwardPass(cell.stage, cell.microbatch, cell.module, roots, None, inputs, vectors)
    pairs = [(edge, grad) for edge, grad in zip(cell.gradient_edges, cell.output_gradients) if grad is not None]
    edges, gradients = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
    return BackwardPass(cell.stage, cell.microbatch, cell.module, edges, gradients, inputs, vectors)


def _require_gradient(cell: Cell, output: Any) -> None:
    """TypeError where the last stage's output has no gradient, so that a loss of it trains nothing."""
    trained = [*cell.inputs, *cell.module.parameters()]
    has_gradient = any(tensor.requires_grad for tensor in torch_tensors.tensors_in(output))
    if has_gradient or not any(x.requires_grad for x in trained):
        return  # the loss itself was checked, or nothing is trained
    if cell.loss is not None and float(cell.loss) != 0:
        raise TypeError(
            f"{cell.name} returned no gradient, so that nothing would learn: leave out detach() and no_grad() in the "
            "last stage"
        )


def _to_plain(tensor: Tensor, name: str) -> Tensor:
    """The data of one of a stage's outputs as a plain Tensor, which can be sent."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return tensor.detach()
    if isinstance(tensor, DTensor):
        return dtensor_messages.local_shard(tensor)
    ready = torch_tensors.wait_for(tensor.detach())
    if type(ready) is not Tensor:
        raise TypeError(
            f"{name} returned a {type(ready).__name__}, which cannot be sent to another stage: return a plain Tensor "
            "or a DTensor"
        )
    return ready


def as_tuple(output: Any, name: str) -> tuple[Tensor, ...]:
    """A stage's output as a tuple of tensors."""
    outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
    for tensor in outputs:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} returned {type(tensor).__name__}: a stage returns a Tensor or a tuple of Tensors")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} returned a Tensor of layout {tensor.layout}: a stage returns dense ones")
    if not outputs:
        raise TypeError(f"{name} returned an empty tuple: a stage returns a Tensor or a tuple of Tensors")
    return outputs


def to_device(value: Any, device: torch.device) -> Any:
    """The same value with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type != "cpu")  # a copy on the CPU is read at once
    if isinstance(value, tuple | list):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return value
