"""What lives between the actions of one stage and microbatch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.comm.messages import Spec
from zeropipe.engine.stages.contract import Microbatch, Pick
from zeropipe.engine.step import spread
from zeropipe.engine.torch_private import tensors as torch_tensors

Call = Callable[[], None]  # a part of a step
LONG = 64  # characters of a text, or items of a list


class Cell:
    """One microbatch in one stage, on this rank: its inputs, and the way back through its outputs."""

    __slots__ = (
        "after", "asked", "before", "edges", "gradients", "inputs", "microbatch", "module", "output", "pick",
        "returned", "root", "side", "spec", "stage", "version",
    )  # fmt: skip

    def __init__(self, stage: int, microbatch: int, module: nn.Module, pick: Pick) -> None:
        self.stage, self.microbatch, self.module, self.pick = stage, microbatch, module, pick
        self.before: Cell | None = None  # the neighbours, where they are on this rank
        self.after: Cell | None = None
        self.side: int | None = None  # which of two streams an Overlap puts it on
        self.clear()

    def clear(self) -> None:
        """Forget everything, before a step."""
        self.inputs: Sequence[Tensor] = ()  # from the stage before, as leaves of this stage's graph
        self.edges: Sequence[Any] = ()  # gradient edges of the outputs: no data
        self.spec: Spec | None = None  # of the outputs
        self.output: Sequence[Tensor] = ()  # on its way out
        self.version = 0  # of the outputs, when they were returned
        self.gradients: Sequence[Tensor | None] = ()  # of the outputs; None: nobody used that one
        self.returned: Sequence[Tensor | None] = ()  # gradients of the inputs, on their way out
        self.asked: tuple[bool, ...] = ()  # which of the inputs asked for one
        self.root: Tensor | None = None  # the loss, on the last stage


def plain(tensor: Tensor, name: str) -> Tensor:
    """The data of one of a stage's outputs, as other ranks can take it."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return tensor.detach()
    if spread.is_spread(tensor):
        return spread.piece_of(tensor)
    settled = torch_tensors.settled(tensor.detach())
    if type(settled) is not Tensor:
        raise TypeError(
            f"{name} returned a {type(settled).__name__}, which cannot be sent to another stage: return a plain Tensor "
            "or a DTensor"
        )
    return settled


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


def signature(microbatch: Microbatch) -> tuple[Any, ...]:
    """What the shapes inside a pipeline may depend on: the shapes, dtypes and plain values of a microbatch."""
    return tuple((key, _sign(microbatch[key])) for key in sorted(microbatch, key=str))


def _sign(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, (bool, int, type(None))):
        return value
    if isinstance(value, str):
        return value if len(value) < LONG else _digest(value)
    if isinstance(value, (tuple, list)):
        signs = tuple(map(_sign, value))
        return signs if len(signs) < LONG else _digest(repr(signs))
    if isinstance(value, Mapping):
        return signature(value)
    return type(value).__name__


def _digest(text: str) -> bytes:
    """For what is too long to be kept."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def moved(value: Any, device: torch.device) -> Any:
    """The same value with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=device.type != "cpu")  # what comes to the CPU is read at once
    if isinstance(value, tuple | list):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return value
