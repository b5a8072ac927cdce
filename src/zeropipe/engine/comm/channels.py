"""Channels between ranks: one 2-rank group per directed edge, shapes that travel with the data.

Forward messages may have any shapes. The first message of its kind on a channel is preceded by a header; later ones are
not, and the sender checks that they have the same shapes. The receiver of gradients knows their shapes, since it made
the outputs; the first header says which of the outputs have a gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropipe.engine.comm.faults import PeerLost, transport_reason
from zeropipe.engine.comm.heartbeat import RankStatus
from zeropipe.engine.comm.messages import (
    HEADER_SIZE,
    Message,
    ShapeCache,
    Spec,
    TensorSpec,
    decode_header,
    encode_header,
    gradient_key,
    gradient_spec,
    shapes_text,
)  # fmt: skip
from zeropipe.engine.comm.threads import PendingReceive, ReceiveThread, start_thread
from zeropipe.engine.torch_private import comm as torch_comm
from zeropipe.errors import EngineError

HEADER_TAG = 1
OnSent = Callable[[], None]  # called when tensors were sent; EngineError if their values have changed meanwhile


class Channel(NamedTuple):
    """One directed edge as one of its two ranks uses it."""

    group: Any  # the edge's own 2-rank group
    peer: int
    peer_in_group: int
    headers: Any  # the gloo group of all ranks
    is_staged: bool  # CUDA tensors that travel through pinned CPU memory
    device: torch.device
    status: RankStatus
    receive_thread: ReceiveThread | None = None  # on gloo, where arrivals are polled

    @property
    def is_nccl(self) -> bool:
        return self.device.type == "cuda" and not self.is_staged

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for messages; PeerLost if the connection breaks."""
        with self.status.waiting_for((self.peer,)):
            try:
                for work in works:
                    if isinstance(work, PendingReceive):
                        work.wait()
                    else:
                        torch_comm.wait(work)
            except RuntimeError as error:
                raise PeerLost((self.peer,), transport_reason(error)) from error


class SendRequest(NamedTuple):
    """Tensors for the thread of a channel to send."""

    group: Any
    peer: int
    tag: int
    tensors: Sequence[Tensor]
    ready: torch.cuda.Event | None = None
    on_sent: OnSent | None = None


class Sender:
    """The sending end. On gloo a thread of its own sends, while this rank goes on computing."""

    def __init__(self, channel: Channel, shapes: ShapeCache) -> None:
        self._channel, self._shapes = channel, shapes
        self._is_threaded = not channel.is_nccl
        self._transport_error: Exception | None = None  # nothing can be sent any more
        self._modified_error: EngineError | None = None  # sent values were wrong; sending goes on until it is raised
        self._pending: list[tuple[Any, Tensor, OnSent | None]] = []
        self._headers: list[tuple[Any, Tensor]] = []
        self.threads: list[threading.Thread] = []
        if self._is_threaded:
            self._queue: SimpleQueue[SendRequest | threading.Event | None] = SimpleQueue()
            self.threads.append(start_thread(f"to-{channel.peer}", self._serve))

    def send_forward(self, tensors: Sequence[Tensor], spec: Spec, key: Hashable, name: str, on_sent: OnSent) -> None:
        """Send a stage's output, with a header if the receiver does not know its shapes."""
        key = ("sent", self._channel.peer, key)
        known = self._shapes.get(key)
        if known is None:
            self._shapes.set(key, spec)
            self._send_header(encode_header(spec))
        elif known != spec:
            raise EngineError(
                f"{name} returned {shapes_text(spec)} where the same microbatch shapes gave {shapes_text(known)} "
                "before: pass Engine(..., shapes='dynamic') for stages whose output shapes depend on values"
            )
        self.send(tensors, on_sent)

    def send_backward(self, gradients: Sequence[Tensor | None], key: Hashable) -> None:
        """Send the gradients that exist, with a header if the receiver does not know which do."""
        key = ("sent", self._channel.peer, key)
        spec = tuple(TensorSpec(torch.bool, (), gradient is not None) for gradient in gradients)
        if gradients and self._shapes.get(key) != spec:
            self._shapes.set(key, spec)
            self._send_header(encode_header(spec))
        self.send([gradient for gradient in gradients if gradient is not None])

    def _send_header(self, header: Tensor) -> None:
        # never waits here: the receiver may wait for another message of this rank before it receives the header
        channel = self._channel
        if self._is_threaded:
            self._queue.put(SendRequest(channel.headers, channel.peer, HEADER_TAG, [header]))
        else:
            self._headers.append((channel.headers.send([header], channel.peer, HEADER_TAG), header))

    def send(self, tensors: Sequence[Tensor], on_sent: OnSent | None = None) -> None:
        """Send contiguous tensors whose shapes the receiver knows; they are kept until they were sent."""
        if not tensors:
            return
        channel = self._channel
        if not self._is_threaded:
            self._release_sent()
            for tensor in tensors:
                self._pending.append((channel.group.send([tensor], channel.peer_in_group, 0), tensor, on_sent))
            return
        self._raise_error()
        event = None
        if channel.is_staged:
            tensors = [_pinned_copy(tensor) for tensor in tensors]
            event = torch.cuda.Event()
            event.record()
            if on_sent is not None:
                on_sent()
                on_sent = None
        self._queue.put(SendRequest(channel.group, channel.peer_in_group, 0, tensors, event, on_sent))

    def drain(self) -> None:
        """Wait until everything was sent."""
        if self._is_threaded:
            done = threading.Event()
            self._queue.put(done)
            with self._channel.status.waiting_for((self._channel.peer,)):
                done.wait()
            self._raise_error()
        for work, _, on_sent in self._pending:
            work.wait()
            if on_sent is not None:
                on_sent()
        self._pending.clear()
        if self._headers:
            self._channel.wait([work for work, _ in self._headers])
            self._headers.clear()

    def _release_sent(self) -> None:
        """Release the tensors that were sent."""
        pending, self._pending = self._pending, []
        for entry in pending:
            work, _, on_sent = entry
            if not work.is_completed():
                self._pending.append(entry)
            elif on_sent is not None:
                on_sent()

    def _raise_error(self) -> None:
        """Raise the error of the thread."""
        if self._modified_error is not None:
            raise self._modified_error
        if self._transport_error is not None:
            raise PeerLost((self._channel.peer,), transport_reason(self._transport_error))

    def close(self) -> None:
        """End the thread."""
        if self._is_threaded:
            self._queue.put(None)

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
            elif self._transport_error is None:
                try:
                    if entry.ready is not None:
                        entry.ready.synchronize()
                    _send_all(entry)
                    if entry.on_sent is not None:
                        entry.on_sent()
                except EngineError as error:
                    self._modified_error = error
                except Exception as error:
                    self._transport_error = error
            del entry


class Receiver:
    """The receiving end: takes messages by their index in the channel's order, posts receives ahead of need.

    On NCCL a receive is a kernel that spins until the message arrives, and CUDA may hold other kernels back until it
    ends (to load one that is new, for example). So there no receive is posted before its own action in the Program: in
    that order even ranks that stop at every message reach the end.
    """

    def __init__(self, channel: Channel, messages: Sequence[Message], ahead: int, shapes: ShapeCache) -> None:
        self.posts_in_order = channel.is_nccl or ahead == 0  # each at its own action in the Program
        self._channel, self._messages, self._shapes = channel, messages, shapes
        self._ahead = 0 if self.posts_in_order else ahead
        self._posted: list[tuple[Spec, list[Tensor], Sequence[Any]] | None] = []
        self._num_waiting = 0  # posted and not taken

    def begin(self, key_of: Callable[[Message], Hashable], output_of: Callable[[Message], Spec | None]) -> None:
        """Start a step. `key_of`: what a forward message's shapes depend on. `output_of`: what a gradient answers."""
        self._key_of, self._output_of = key_of, output_of
        self._posted.clear()
        self._num_waiting = 0
        self._post_ahead()

    def _post_ahead(self) -> None:
        """Post receives until `ahead` are waiting or the next one's shapes are unknown."""
        while self._num_waiting < self._ahead and len(self._posted) < len(self._messages):
            spec = self._find_spec(self._messages[len(self._posted)])
            if spec is None:
                return
            self._post(spec)

    def post_until(self, index: int) -> None:
        """Post the receive of the message at `index`, and those before it."""
        while len(self._posted) <= index:
            message = self._messages[len(self._posted)]
            spec = self._find_spec(message)
            self._post(self._receive_header(message) if spec is None else spec)

    def has_arrived(self, index: int) -> bool:
        """Whether the message at `index` has arrived. True if its shapes are unknown: only `take` can receive them."""
        while len(self._posted) <= index:
            spec = self._find_spec(self._messages[len(self._posted)])
            if spec is None:
                return True
            self._post(spec)
        entry = self._posted[index]
        assert entry is not None, "a message that was taken is not polled"
        return all(work.done.is_set() if isinstance(work, PendingReceive) else work.is_completed() for work in entry[2])

    def take(self, index: int) -> tuple[Spec, list[Tensor]]:
        """Wait for the tensors of the message at `index`."""
        self.post_until(index)
        entry = self._posted[index]
        assert entry is not None, "every message is taken once"
        spec, buffers, works = entry
        if self._channel.is_nccl:
            for work in works:
                work.wait()  # only the stream waits
        else:
            self._channel.wait(works)
        self._posted[index] = None
        self._num_waiting -= 1
        self._post_ahead()
        if self._channel.is_staged:
            buffers = [buffer.to(self._channel.device, non_blocking=True) for buffer in buffers]
        return spec, buffers

    def _find_spec(self, message: Message) -> Spec | None:
        """The spec of a message; None if its header has not been received."""
        if message.forward:
            found: Spec | None = self._shapes.get(self._shape_key(message))
            return found
        output = self._output_of(message)
        if output is None:
            return None
        if not any(tensor.needs_grad for tensor in output):
            return ()
        header = self._shapes.get(self._shape_key(message, output))
        return None if header is None else gradient_spec(output, [tensor.needs_grad for tensor in header])

    def _receive_header(self, message: Message) -> Spec:
        data = torch.empty(HEADER_SIZE, dtype=torch.int64, device="cpu")
        self._channel.wait(self._receive(self._channel.headers, self._channel.peer, HEADER_TAG, [data]))
        header = decode_header(data)
        if message.forward:
            self._shapes.set(self._shape_key(message), header)
            return header
        output = self._output_of(message)
        assert output is not None, "a gradient is received after its forward"
        self._shapes.set(self._shape_key(message, output), header)
        return gradient_spec(output, [tensor.needs_grad for tensor in header])

    def _shape_key(self, message: Message, output: Spec = ()) -> Hashable:
        key = gradient_key(message.stage, [tensor.needs_grad for tensor in output])
        return ("received", self._channel.peer, self._key_of(message) if message.forward else key)

    def _post(self, spec: Spec) -> None:
        channel = self._channel
        sent = [tensor for tensor in spec if tensor.needs_grad or self._messages[len(self._posted)].forward]
        if channel.is_staged:
            buffers = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True) for tensor in sent]
        else:
            buffers = [torch.empty(tensor.shape, dtype=tensor.dtype, device=channel.device) for tensor in sent]
        works = self._receive(channel.group, channel.peer_in_group, 0, buffers)
        thread = channel.receive_thread
        self._posted.append((spec, buffers, works if thread is None else [thread.add(works)]))
        self._num_waiting += 1

    def _receive(self, group: Any, peer: int, tag: int, buffers: Sequence[Tensor]) -> list[Any]:
        try:
            return [group.recv([buffer], peer, tag) for buffer in buffers]
        except RuntimeError as error:  # the connection is closed already
            raise PeerLost((self._channel.peer,), transport_reason(error)) from error


def _send_all(request: SendRequest) -> None:
    """Send, and wait; a function of its own because a work holds its tensor until it is deleted."""
    for work in [request.group.send([tensor], request.peer, request.tag) for tensor in request.tensors]:
        torch_comm.wait(work)


def _pinned_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
