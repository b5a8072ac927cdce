"""The operators of a layer: what they compute, transfer and keep; derived from shapes or counted on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENDS = ("embedding", "head")  # the parts of a model besides its decoder layers
HEAD, FULL_HEAD, LOSS = "head", "head-full", "loss"  # the second of stages with full backwards
ADDED = 3  # times the bytes of experts' weights: W reads the product, and reads and writes the gradient


@dataclass(frozen=True)
class Op:
    """One operator. Bytes and FLOPs are for one microbatch on one GPU.

    Pairs are (eager, compiled). `kept` are bytes kept from F to I without checkpointing; `kept_op` with `selective:op`.
    `moved` are bytes that F reads and writes. `stash` are bytes kept from I to W, of which `gradient` is the gradient
    of its output. `summed` are bytes that F sums over `tp`, `exchanged` those that it gets over `cp`, I as many unless
    `exchanged_back` says how many; the part `hides` of attention runs while they are under way. `routed`: of the rows
    that this GPU has for its experts.
    """

    name: str
    flops: float = 0.0  # of F, as executed
    useful: float | None = None  # of F, as the model requires; None: all
    parameters: int = 0
    met: int | None = None  # parameters active for one token; None: all
    trained: int | None = None  # trained parameters; None: all
    linear: tuple[int, int] | None = None  # inputs and outputs of a linear layer
    attention: bool = False
    float32: bool = False  # computes in float32, whatever the model's dtype
    deferred: bool = False  # has a W
    back: float = 1.0  # FLOPs of I divided by those of F; attention has its own ratio
    kept: tuple[float, float] = (0.0, 0.0)
    kept_op: float = 0.0
    moved: tuple[float, float] = (0.0, 0.0)
    moved_back: float | None = None  # by I; None: twice as much as by F
    stash: float = 0.0
    added: float = 0.0  # bytes that W moves after its product: for experts it is added to the gradient separately
    gradient: float = 0.0
    summed: float = 0.0
    exchanged: float = 0.0
    exchanged_back: float | None = None
    hides: float = 0.0
    keys: float = 0.0  # keys and values, which slices of a sequence share; 0 if it cannot run in slices
    repeated: float = 0.0  # a copy of these for all heads, which a slice after the first makes
    workspace: tuple[float, float] = (0.0, 0.0)  # that F needs only while it runs
    chunk: float = 0.0  # the part of it that is of a chunk of logits, uncompiled
    chunks: float = 0.0  # of logits, which F computes one after the other
    kernels: tuple[int, int] = (0, 0)  # that F launches, if they are counted
    routed: bool = False
    divided: int = 0  # parameters of experts, which ep divides

    @property
    def is_product(self) -> bool:
        return self.flops > 0


@dataclass(frozen=True)
class Counted:
    """The operators of each kind of layer, counted by running a microbatch on the meta device.

    The kinds are those of the decoder layers, and ENDS.
    """

    layers: tuple[str, ...]  # the kind of each decoder layer
    kinds: Mapping[str, tuple[Op, ...]]
    message: float  # bytes from layer to layer
    logits: int  # per token, on one GPU
    tied: int  # parameters that embedding and head share
    fused_head: tuple[Op, ...] | None = None  # the head up to its products; None: its logits stay whole
