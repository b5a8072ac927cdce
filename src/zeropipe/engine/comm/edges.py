"""Messages between ranks: one 2-rank group per directed edge, shapes that travel with the data.

Forward messages may have any shapes. The first one of its kind on an edge (same stage, same microbatch signature) is
preceded by a header; later ones are not, and the sender checks that they still fit. Of gradients the rank that waits
for them knows the shapes, since it made the tensors they belong to; the first header says which of them there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropipe.engine.comm.faults import PeerLost, reason
from zeropipe.engine.comm.listener import Arrival, Listener
from zeropipe.engine.comm.pulse import Place
from zeropipe.engine.comm.threads import started
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import EngineError

HEADER = 256  # int64 words: room for tuples of about 30 tensors, or of three DTensors
HEADER_TAG = 1
DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


class Part(NamedTuple):
    """One tensor of a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    needs_grad: bool
    words: str = ""  # what the other end must know beyond that: how a DTensor is spread


Spec = tuple[Part, ...]


def spec_of(tensors: Sequence[Tensor], needs_grad: Sequence[bool], words: Sequence[str]) -> Spec:
    """What a receiver must know before the tensors come."""
    return tuple(Part(t.dtype, tuple(t.shape), needs, said) for t, needs, said in zip(tensors, needs_grad, words))


def as_sent(tensor: Tensor) -> Tensor:
    """The tensor with its values in its memory, in their order: nothing still to be transposed, conjugated, negated."""
    return tensor.resolve_conj().resolve_neg().contiguous()


Present = Sequence[bool]  # which of the gradients that were asked for there are: an output may be used by nobody


def gradient_spec(spec: Spec, present: Present) -> Spec:
    """The gradients that answer a message; those that do not come need none."""
    asked = (part for part in spec if part.needs_grad)
    return tuple(part._replace(needs_grad=is_there) for part, is_there in zip(asked, present, strict=True))


def answer_key(stage: int, asked: Sequence[bool]) -> Hashable:
    """Names the gradients that a stage gets for outputs of which some ask for one; shapes do not matter for it."""
    return ("answer", stage, tuple(asked))


def write_header(spec: Spec) -> Tensor:
    """A spec as a fixed number of words."""
    words = [len(spec)]
    for part in spec:
        text = part.words.encode()
        words += [DTYPES.index(part.dtype), part.needs_grad, len(part.shape), *part.shape, len(text), *text]
    if len(words) > HEADER:
        raise EngineError(f"a stage's output has {len(spec)} tensors: too many for one message, stack some of them")
    return torch.tensor(words + [0] * (HEADER - len(words)), device="cpu")


def read_header(header: Tensor) -> Spec:
    """The spec of a header."""
    words = iter(header.tolist())
    parts = []
    for _ in range(next(words)):
        dtype, needs_grad, rank = DTYPES[next(words)], bool(next(words)), next(words)
        shape = tuple(next(words) for _ in range(rank))
        text = bytes(next(words) for _ in range(next(words)))
        parts.append(Part(dtype, shape, needs_grad, text.decode()))
    return tuple(parts)


class Wire(NamedTuple):
    """One directed edge as one of its two ends sees it."""

    group: Any  # the edge's own 2-rank group
    peer: int  # the other end's rank in the pipeline
    peer_in_group: int
    headers: Any  # the gloo group of the whole pipeline
    staged: bool  # CUDA tensors that travel through pinned CPU memory
    device: torch.device
    place: Place  # where this rank says for whom it waits
    heard: dict[Hashable, Spec]  # the shapes of forward messages that had a header, on the receiving end
    listener: Listener | None = None  # on gloo, where somebody asks whether messages are here

    @property
    def nccl(self) -> bool:
        return self.device.type == "cuda" and not self.staged

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for messages; PeerLost if the connection breaks."""
        self.place.waits = (self.peer,)
        try:
            for work in works:
                if isinstance(work, Arrival):
                    work.wait()
                else:
                    torch_comm.wait(work)
        except RuntimeError as error:
            raise PeerLost((self.peer,), reason(error)) from error
        finally:
            self.place.waits = ()


class Message(NamedTuple):
    """What an edge carries at one place of its order."""

    forward: bool
    stage: int  # of the receiver
    microbatch: int


Left = Callable[[], None]  # called when tensors have left; EngineError if they left with other values


class Parcel(NamedTuple):
    """Tensors for the thread of an edge to send."""

    group: Any
    peer: int
    tag: int
    tensors: Sequence[Tensor]
    ready: torch.cuda.Event | None = None
    left: Left | None = None


class Outgoing:
    """The sending end. On gloo a thread of its own feeds the socket, so computing goes on meanwhile."""

    def __init__(self, wire: Wire, dynamic: bool) -> None:
        self._wire, self._dynamic = wire, dynamic
        self.announced: dict[Hashable, Spec] = {}
        self._threaded = not wire.nccl
        self._error: Exception | None = None  # of the transport: nothing can be sent any more
        self._changed: EngineError | None = None  # what was sent is wrong; all goes on until this rank says so
        self._pending: list[tuple[Any, Tensor, Left | None]] = []
        self._headers: list[tuple[Any, Tensor]] = []
        self.threads: list[threading.Thread] = []
        if self._threaded:
            self._queue: SimpleQueue[Parcel | threading.Event | None] = SimpleQueue()
            self.threads.append(started(f"to-{wire.peer}", self._feed))

    def send_forward(self, tensors: Sequence[Tensor], spec: Spec, key: Hashable, name: str, left: Left) -> None:
        """Send a stage's output, with a header if the other end cannot know its shapes."""
        known = None if self._dynamic else self.announced.get(key)
        if known is None:
            self.announced[key] = spec
            self._send_header(write_header(spec))
        elif known != spec:
            raise EngineError(
                f"{name} made {_shapes(spec)} where the same microbatch shapes gave {_shapes(known)} before: "
                "pass Engine(..., shapes='dynamic') for stages whose output shapes depend on values"
            )
        self.send(tensors, left)

    def send_backward(self, gradients: Sequence[Tensor | None], key: Hashable) -> None:
        """Send the gradients that there are, with a header if the other end cannot know which."""
        spec = tuple(Part(torch.bool, (), gradient is not None) for gradient in gradients)
        if gradients and (self._dynamic or self.announced.get(key) != spec):
            self.announced[key] = spec
            self._send_header(write_header(spec))
        self.send([gradient for gradient in gradients if gradient is not None])

    def _send_header(self, header: Tensor) -> None:
        # never waits here: the other end may be waiting for something of ours before it asks for the header
        if self._threaded:
            self._queue.put(Parcel(self._wire.headers, self._wire.peer, HEADER_TAG, [header]))
        else:
            self._headers.append((self._wire.headers.send([header], self._wire.peer, HEADER_TAG), header))

    def send(self, tensors: Sequence[Tensor], left: Left | None = None) -> None:
        """Send contiguous tensors whose shapes the other end knows; they live until they have left."""
        if not tensors:
            return
        wire = self._wire
        if not self._threaded:
            self._forget_sent()
            for tensor in tensors:
                self._pending.append((wire.group.send([tensor], wire.peer_in_group, 0), tensor, left))
            return
        self._raise_error()
        event = None
        if wire.staged:
            tensors = [_pinned_copy(tensor) for tensor in tensors]
            event = torch.cuda.Event()
            event.record()
            if left is not None:
                left()
                left = None
        self._queue.put(Parcel(wire.group, wire.peer_in_group, 0, tensors, event, left))

    def drain(self) -> None:
        """Wait until everything has left."""
        if self._threaded:
            done = threading.Event()
            self._queue.put(done)
            self._wire.place.waits = (self._wire.peer,)
            done.wait()
            self._wire.place.waits = ()
            self._raise_error()
        for work, _, left in self._pending:
            work.wait()
            if left is not None:
                left()
        self._pending.clear()
        if self._headers:
            self._wire.wait([work for work, _ in self._headers])
            self._headers.clear()

    def _forget_sent(self) -> None:
        """Let go of tensors that have left."""
        pending, self._pending = self._pending, []
        for entry in pending:
            work, _, left = entry
            if not work.is_completed():
                self._pending.append(entry)
            elif left is not None:
                left()

    def _raise_error(self) -> None:
        """The error of the thread that sends."""
        if self._changed is not None:
            raise self._changed
        if self._error is not None:
            raise PeerLost((self._wire.peer,), reason(self._error))

    def forget(self) -> None:
        """Kinds of microbatches are numbered anew: all shapes are new again."""
        self.announced.clear()

    def close(self) -> None:
        """End the thread."""
        if self._threaded:
            self._queue.put(None)

    def _feed(self) -> None:
        while (entry := self._queue.get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
            elif self._error is None:
                try:
                    if entry.ready is not None:
                        entry.ready.synchronize()
                    _send_all(entry)
                    if entry.left is not None:
                        entry.left()
                except EngineError as error:
                    self._changed = error
                except Exception as error:
                    self._error = error
            del entry


class Incoming:
    """The receiving end: takes messages by their place in the edge's order, posts receives ahead of need.

    On NCCL a receive is a kernel that spins until the message is here, and CUDA may hold other kernels back until it
    ends (to load one it has not seen, say). So there nothing is posted before its place in the Program: in that
    order even ranks that stop at every message reach the end.
    """

    def __init__(self, wire: Wire, messages: Sequence[Message], ahead: int, dynamic: bool) -> None:
        self.in_place = wire.nccl or ahead == 0
        self._wire, self.messages, self._dynamic = wire, messages, dynamic
        self._ahead = 0 if self.in_place else ahead
        self._posted: list[tuple[Spec, list[Tensor], Sequence[Any]] | None] = []  # Arrivals where there is a listener
        self._waiting = 0  # posted and not taken

    def begin(self, key_of: Callable[[Message], Hashable], made: Callable[[Message], Spec | None]) -> None:
        """Start a step: `key_of` names a forward message's shapes, `made` what a gradient answers (None: not yet)."""
        self._key_of, self._made = key_of, made
        self._posted.clear()
        self._waiting = 0
        self.top_up()

    def top_up(self) -> None:
        """Post receives until enough are waiting or the next one's shapes are not known."""
        while self._waiting < self._ahead and len(self._posted) < len(self.messages):
            spec = self._known(self.messages[len(self._posted)])
            if spec is None:
                return
            self._post(spec)

    def reach(self, place: int) -> None:
        """Post the receive of the message at `place`, and those before it."""
        while len(self._posted) <= place:
            message = self.messages[len(self._posted)]
            spec = self._known(message)
            self._post(self._hear(message) if spec is None else spec)

    def arrived(self, place: int) -> bool:
        """Whether the message at `place` is here. Where its shapes are not known, only `take` can find out: True."""
        while len(self._posted) <= place:
            spec = self._known(self.messages[len(self._posted)])
            if spec is None:
                return True
            self._post(spec)
        entry = self._posted[place]
        assert entry is not None, "nobody asks after a message was taken"
        return all(item.done.is_set() if isinstance(item, Arrival) else item.is_completed() for item in entry[2])

    def take(self, place: int) -> tuple[Spec, list[Tensor]]:
        """The tensors of the message at `place`, once they are here."""
        self.reach(place)
        entry = self._posted[place]
        assert entry is not None, "every message is taken once"
        spec, buffers, works = entry
        if self._wire.nccl:
            for work in works:
                work.wait()  # only the stream does
        else:
            self._wire.wait(works)
        self._posted[place] = None
        self._waiting -= 1
        self.top_up()
        if self._wire.staged:
            buffers = [buffer.to(self._wire.device, non_blocking=True) for buffer in buffers]
        return spec, buffers

    def _known(self, message: Message) -> Spec | None:
        if message.forward:
            return None if self._dynamic else self._wire.heard.get(self._key_of(message))
        spec = self._made(message)
        if spec is None:
            return None
        if not any(part.needs_grad for part in spec):
            return ()
        answer = None if self._dynamic else self._wire.heard.get(_answer(message, spec))
        return None if answer is None else gradient_spec(spec, [part.needs_grad for part in answer])

    def _hear(self, message: Message) -> Spec:
        header = torch.empty(HEADER, dtype=torch.int64, device="cpu")
        self._wire.wait(self._receive(self._wire.headers, self._wire.peer, HEADER_TAG, [header]))
        heard = read_header(header)
        if message.forward:
            self._wire.heard[self._key_of(message)] = heard
            return heard
        spec = self._made(message)
        assert spec is not None, "a gradient is asked for after its forward"
        self._wire.heard[_answer(message, spec)] = heard
        return gradient_spec(spec, [part.needs_grad for part in heard])

    def _post(self, spec: Spec) -> None:
        wire = self._wire
        sent = [part for part in spec if part.needs_grad or self.messages[len(self._posted)].forward]
        if wire.staged:
            buffers = [torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True) for part in sent]
        else:
            buffers = [torch.empty(part.shape, dtype=part.dtype, device=wire.device) for part in sent]
        works = self._receive(wire.group, wire.peer_in_group, 0, buffers)
        self._posted.append((spec, buffers, works if wire.listener is None else [wire.listener.expect(works)]))
        self._waiting += 1

    def _receive(self, group: Any, peer: int, tag: int, buffers: Sequence[Tensor]) -> list[Any]:
        try:
            return [group.recv([buffer], peer, tag) for buffer in buffers]
        except RuntimeError as error:  # closed already
            raise PeerLost((self._wire.peer,), reason(error)) from error


def _answer(message: Message, spec: Spec) -> Hashable:
    return answer_key(message.stage, [part.needs_grad for part in spec])


def _send_all(parcel: Parcel) -> None:
    """In a function of its own: a work holds its tensor, and is gone when this returns."""
    for work in [parcel.group.send([tensor], parcel.peer, parcel.tag) for tensor in parcel.tensors]:
        torch_comm.wait(work)


def _pinned_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _shapes(spec: Spec) -> str:
    return ", ".join(
        f"{str(part.dtype).removeprefix('torch.')}{list(part.shape)}{'' if part.needs_grad else ' without gradient'}"
        for part in spec
    )
