"""What an operator of a layer computes, moves and keeps: known from shapes, or counted in a run without memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENDS = ("embedding", "head")  # what a model has beside its layers
ADDED = 3  # times the bytes of experts' weights: their product is read, and the gradient read and written


@dataclass(frozen=True)
class Op:
    """One operator. Bytes and FLOPs are of one microbatch on one GPU.

    `kept` are bytes kept from F to I without checkpointing, run one by one or compiled; `kept_op` with `selective:op`.
    `moved` are bytes that its F reads and writes, run one by one or compiled. `stash` is what it keeps from I to W, of
    which `gradient` is the gradient of its output. `summed` are bytes that F sums over `tp`.
    """

    name: str
    flops: float = 0.0  # of F, as run
    useful: float | None = None  # of F, as the model needs them; the same by default
    parameters: int = 0
    met: int | None = None  # of these, by one token; all by default
    attention: bool = False
    deferred: bool = False  # has a W
    back: float = 1.0  # FLOPs of I over those of F; attention has a share of its own
    kept: tuple[float, float] = (0.0, 0.0)
    kept_op: float = 0.0
    moved: tuple[float, float] = (0.0, 0.0)
    moved_back: float | None = None  # by I, where it is not twice as much
    stash: float = 0.0
    added: float = 0.0  # bytes that W moves after its product: of experts it is not added to the gradient at once
    gradient: float = 0.0
    summed: float = 0.0
    kernels: tuple[int, int] = (0, 0)  # that its F starts, run one by one or compiled, where they are counted

    @property
    def is_product(self) -> bool:
        return self.flops > 0


@dataclass(frozen=True)
class Counted:
    """A model whose pieces were run without memory, with one microbatch: the operators of each kind of layer.

    The kinds are those of the decoder layers, and of ENDS.
    """

    layers: tuple[str, ...]  # the kind of each decoder layer
    kinds: Mapping[str, tuple[Op, ...]]
    message: float  # bytes that a layer hands on
    logits: int  # per token, on one GPU
    tied: int  # parameters of the embedding that are the head's as well
