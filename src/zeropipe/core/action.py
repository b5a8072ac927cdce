"""The unit of work, and its text form (`2F0`), which is that of torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from zeropipe.errors import ScheduleError


class Kind(IntEnum):
    """What an action does."""

    F = 0  # forward
    B = 1  # full backward: I and W together
    I = 2  # noqa: E741  gradient of the inputs
    W = 3  # gradient of the weights
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    UNSHARD = 8  # gather the full weights of a sharded stage
    RESHARD = 9  # free them
    REDUCE_GRAD = 10  # sum the full gradients of a sharded stage, and keep a shard of the sum
    OFFLOAD = 11  # copy the activations of an F to the host, and free them
    RELOAD = 12  # copy them back


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
BACKWARD = frozenset({Kind.B, Kind.I})  # the kinds whose result the backward of the previous stage needs
SHARDING = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})  # of a stage, without a microbatch
OFFLOADING = frozenset({Kind.OFFLOAD, Kind.RELOAD})  # copies between a device and its host
COMM = frozenset(Kind) - COMPUTE - SHARDING - OFFLOADING  # messages between ranks

# the kinds as plain integers, for kernels (see jit.py)
F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD, OFFLOAD, RELOAD = map(int, Kind)  # noqa: E741

MAX_STAGES = 1 << 16
MAX_MICROBATCHES = 1 << 42
MAX_SLICES = 1 << 12


class Action(NamedTuple):
    """One unit of work: `Action(2, Kind.F, 0)`, in text `2F0`. SHARDING kinds have microbatch 0, and none in text.

    In a schedule with slices, each action is of one slice of a microbatch: `2F0.3` is that of slice 3. An F that is
    `checkpointed` keeps little, and its backward computes it again: `2F0c`.
    """

    stage: int
    kind: Kind
    microbatch: int
    slice: int | None = None  # None in a schedule without slices
    checkpointed: bool = False

    def __str__(self) -> str:
        of_slice, mark = "" if self.slice is None else f".{self.slice}", "c" if self.checkpointed else ""
        return f"{self.stage}{self.kind.name}{'' if self.kind in SHARDING else self.microbatch}{of_slice}{mark}"


class Overlap(NamedTuple):
    """A forward and a backward executed together as one step, in text `(1F1;2B0)OVERLAP_F_B`."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step = Action | Overlap


def actions_of(steps: Iterable[Step]) -> list[Action]:
    """The actions of steps; an Overlap has two."""
    return [action for step in steps for action in (step if isinstance(step, Overlap) else (step,))]


def peer_stage(stage: int, kind: int) -> int:
    """The stage at the other end of a message: the receiver of a SEND, the sender of a RECV."""
    return stage + 1 if kind in (SEND_F, RECV_B) else stage - 1


def peer_message(message: Action) -> Action:
    """The RECV of a SEND, or the SEND of a RECV."""
    return message._replace(stage=peer_stage(message.stage, message.kind), kind=Kind(message.kind ^ 1))


_ACTION = re.compile(
    r"\s*([0-9]{1,18})\s*(?:(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|OFFLOAD|RELOAD)\s*([0-9]{1,18})"
    r"(?:\.([0-9]{1,18}))?(c?)|(UNSHARD|RESHARD|REDUCE_GRAD))\s*"
)
_OVERLAP = re.compile(r"\s*\(([^;()]+);([^;()]+)\)\s*OVERLAP_F_B\s*")


def parse_action(text: str) -> Action:
    """The Action of a text such as `2F0`; ScheduleError for any other text."""
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"{text.strip()[:40]!r} is not an action; write stage, kind (F, B, I or W) and microbatch, like 2F0, "
            "or (1F1;2B0)OVERLAP_F_B"
        )
    stage = int(match[1])
    if stage >= MAX_STAGES:
        raise ScheduleError(f"{text.strip()!r} has stage {stage}: at most {MAX_STAGES} stages are supported")
    if match[6]:
        return Action(stage, Kind[match[6]], 0)
    microbatch = int(match[3])
    if microbatch >= MAX_MICROBATCHES:
        raise ScheduleError(f"{text.strip()!r} has microbatch {microbatch}: at most {MAX_MICROBATCHES} are supported")
    slice_ = None if match[4] is None else int(match[4])
    if slice_ is not None and slice_ >= MAX_SLICES:
        raise ScheduleError(f"{text.strip()!r} has slice {slice_}: at most {MAX_SLICES} slices are supported")
    if match[5] and match[2] != "F":
        raise ScheduleError(f"{text.strip()!r} is marked c: only an F can be checkpointed")
    return Action(stage, Kind[match[2]], microbatch, slice_, bool(match[5]))


def parse_step(text: str) -> Step:
    """The step of a text such as `2F0` or `(1F1;2B0)OVERLAP_F_B`."""
    match = _OVERLAP.fullmatch(text)
    if match is None:
        return parse_action(text)
    forward, backward = parse_action(match[1]), parse_action(match[2])
    if forward.kind is not Kind.F or backward.kind not in BACKWARD:
        raise ScheduleError(f"{text.strip()!r} is not an Overlap: it must have an F and a B (or I), in that order")
    return Overlap(forward, backward)
