"""Lanes: jobs in the order they came, a few at a time, and a bound on how many wait. Plain threads, no event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, NamedTuple, Protocol


class Job(NamedTuple):
    """A function of a module and its arguments, so that it can be sent to another process."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


class Busy(Exception):
    """A lane has no room for another job."""


class Stopped(BaseException):
    """The job was given up while it ran. No ordinary Exception: a schedule that catches those must not go on."""


class Hand(Protocol):
    """Does one job at a time."""

    def warm(self) -> None:
        """Get ready for the first job."""

    def do(self, job: Job) -> Any:
        """The job's result, or what it raises; Stopped if it was given up."""

    def stop(self) -> None:
        """Give up the job at hand. Returns at once; `do` ends soon."""

    def close(self) -> None:
        """Leave nothing behind."""


class Here:
    """Does jobs in its thread: for small ones, which are done before anybody could stop them."""

    def do(self, job: Job) -> Any:
        return job.function(*job.args)

    def warm(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Ticket:
    """A job that waits or runs; `future` will have its result."""

    def __init__(self, job: Job, urgent: bool) -> None:
        self.job, self.urgent = job, urgent
        self.future: Future[Any] = Future()


class Load(NamedTuple):
    """How full a lane is."""

    running: int
    waiting: int
    room: int


class Lane:
    """Jobs that wait, and up to `count` hands at work, each in a thread of its own, which starts when it is needed.

    Urgent jobs go first, and those that are not leave one hand free, where there are several. More than `room` waiting
    jobs are turned away.
    """

    def __init__(self, make_hand: Callable[[], Hand], count: int, room: int) -> None:
        self._make_hand, self._count, self._room = make_hand, count, room
        self._hands: list[Hand] = []
        self._waiting: dict[bool, deque[Ticket]] = {True: deque(), False: deque()}
        self._running: dict[Ticket, Hand] = {}
        self._change = Condition()

    @property
    def load(self) -> Load:
        with self._change:
            return Load(len(self._running), self._num_waiting, self._room)

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def warm(self) -> None:
        """Have a hand ready for the first job."""
        with self._change:
            if not self._hands:
                self._add_hand().warm()

    def add(self, job: Job, urgent: bool = True) -> Ticket:
        """A place in the lane; Busy if there is none."""
        ticket = Ticket(job, urgent)
        with self._change:
            if self._num_waiting >= self._room:
                raise Busy
            self._waiting[urgent].append(ticket)
            if self._num_waiting + len(self._running) > len(self._hands) < self._count:
                self._add_hand()
            self._change.notify()
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        """Nobody waits for this any more: it leaves the queue, or its hand stops. Returns at once."""
        with self._change:
            if ticket in self._waiting[ticket.urgent]:
                self._waiting[ticket.urgent].remove(ticket)
                ticket.future.cancel()
            if ticket in self._running:
                self._running[ticket].stop()

    def close(self) -> None:
        """Give up everything, and leave nothing behind. A job that comes later begins anew."""
        with self._change:
            for waiting in self._waiting.values():
                for ticket in waiting:
                    ticket.future.cancel()
                waiting.clear()
            hands, self._hands = self._hands, []
            self._change.notify_all()
        for hand in hands:
            hand.close()

    def _add_hand(self) -> Hand:
        hand = self._make_hand()
        self._hands.append(hand)
        Thread(target=self._work, args=(hand,), name="zeropipe", daemon=True).start()
        return hand

    def _work(self, hand: Hand) -> None:
        while (ticket := self._next(hand)) is not None:
            result, error = None, None
            try:
                result = hand.do(ticket.job)
            except BaseException as raised:  # whoever waits gets it, whatever it is
                error = raised
            with self._change:
                del self._running[ticket]
                self._change.notify()  # another hand may take what is not urgent now
            if error is None:
                ticket.future.set_result(result)
            else:
                ticket.future.set_exception(error)

    def _next(self, hand: Hand) -> Ticket | None:
        """The next job for `hand`, when there is one; None when the lane was closed."""
        with self._change:
            while hand in self._hands:
                waiting = self._waiting[True] or (self._waiting[False] if self._may_take_others() else None)
                if not waiting:
                    self._change.wait()
                    continue
                ticket = waiting.popleft()
                if ticket.future.set_running_or_notify_cancel():
                    self._running[ticket] = hand
                    return ticket
        return None

    def _may_take_others(self) -> bool:
        return sum(not ticket.urgent for ticket in self._running) < max(1, self._count - 1)
