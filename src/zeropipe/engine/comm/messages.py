"""Shapes of messages between stages, the headers that announce them, and the cache of shapes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropipe.errors import EngineError

HEADER_SIZE = 256  # integers: enough for about 30 tensors, or three DTensors
MAX_KINDS = 1024  # of microbatches whose shapes are cached
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


class Message(NamedTuple):
    """The output of a stage's forward, or the gradients for it."""

    forward: bool
    stage: int  # of the receiver
    microbatch: int


class TensorSpec(NamedTuple):
    """One tensor of a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    dtensor_layout: str = ""  # mesh dimensions and placements of a DTensor


Spec = tuple[TensorSpec, ...]


class ShapeCache:
    """The shapes that an engine knows: of messages sent and received, and of outputs, by kind of microbatch.

    Microbatches of one kind have the same shapes everywhere in a pipeline. All ranks of a pipeline number the same
    kinds in the same order, and start over together when there are more than `max_kinds`. With `is_dynamic` nothing is
    cached: shapes depend on values.
    """

    def __init__(self, is_dynamic: bool = False, max_kinds: int = MAX_KINDS) -> None:
        self._is_dynamic, self._max_kinds = is_dynamic, max_kinds
        self._kinds: dict[Hashable, int] = {}
        self._next_kind = 0
        self._shapes: dict[Hashable, Any] = {}

    def number_kinds(self, kinds: Sequence[Hashable]) -> tuple[int, ...]:
        """The number of each kind."""
        num_new = len({kind for kind in kinds if kind not in self._kinds})
        if len(self._kinds) + num_new > self._max_kinds:
            self._kinds.clear()
            self._shapes.clear()
        for kind in kinds:
            if kind not in self._kinds:
                self._kinds[kind] = self._next_kind
                self._next_kind += 1
        return tuple(self._kinds[kind] for kind in kinds)

    def get(self, key: Hashable) -> Any:
        return self._shapes.get(key)

    def set(self, key: Hashable, value: Any) -> None:
        if not self._is_dynamic:
            self._shapes[key] = value

    def setdefault(self, key: Hashable, value: Any) -> Any:
        return value if self._is_dynamic else self._shapes.setdefault(key, value)


def describe_tensors(tensors: Sequence[Tensor], needs_grad: Sequence[bool], layouts: Sequence[str]) -> Spec:
    """What a receiver has to know before the tensors arrive."""
    return tuple(
        TensorSpec(t.dtype, tuple(t.shape), needs, layout) for t, needs, layout in zip(tensors, needs_grad, layouts)
    )


def make_sendable(tensor: Tensor) -> Tensor:
    """The tensor with its values in memory in their order: contiguous, with no lazy conjugate or negation."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def gradient_spec(spec: Spec, is_present: Sequence[bool]) -> Spec:
    """The gradients that answer a forward message; `needs_grad` is False for those that are not sent."""
    requested = (tensor for tensor in spec if tensor.needs_grad)
    return tuple(tensor._replace(needs_grad=present) for tensor, present in zip(requested, is_present, strict=True))


def gradient_key(stage: int, requested: Sequence[bool]) -> Hashable:
    """Names the gradients that a stage receives, by which of its outputs need one; shapes do not matter for it."""
    return ("gradients", stage, tuple(requested))


def encode_header(spec: Spec) -> Tensor:
    """A spec as HEADER_SIZE integers."""
    values = [len(spec)]
    for tensor in spec:
        layout = tensor.dtensor_layout.encode()
        values += [DTYPES.index(tensor.dtype), tensor.needs_grad, len(tensor.shape), *tensor.shape]
        values += [len(layout), *layout]
    if len(values) > HEADER_SIZE:
        raise EngineError(f"a stage's output has {len(spec)} tensors: too many for one message, stack some of them")
    return torch.tensor(values + [0] * (HEADER_SIZE - len(values)), device="cpu")


def decode_header(header: Tensor) -> Spec:
    values = iter(header.tolist())
    tensors = []
    for _ in range(next(values)):
        dtype, needs_grad, num_dims = DTYPES[next(values)], bool(next(values)), next(values)
        shape = tuple(next(values) for _ in range(num_dims))
        layout = bytes(next(values) for _ in range(next(values)))
        tensors.append(TensorSpec(dtype, shape, needs_grad, layout.decode()))
    return tuple(tensors)


def shapes_text(spec: Spec) -> str:
    """`float32[2, 8], int64[2] without gradient`."""
    return ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        f"{'' if tensor.needs_grad else ' without gradient'}"
        for tensor in spec
    )
