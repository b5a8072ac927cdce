"""A bounded queue of jobs and the runners that work on it. Plain threads, no event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, NamedTuple, Protocol


class Job(NamedTuple):
    """A function of a module and its arguments, which can be sent to another process."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


class QueueFull(Exception):
    """As many jobs wait as the queue may hold."""


class Runner(Protocol):
    """Runs one call at a time: `zeropipe.core.workers.Worker` in a process, ThreadRunner in the calling thread."""

    def start(self) -> None:
        """Prepare for the first call."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`; CallCancelled if it was cancelled."""

    def cancel(self) -> None:
        """Cancel the running call. Returns at once; `call` ends soon."""

    def close(self) -> None:
        """Release all resources."""


class ThreadRunner:
    """Runs calls in the calling thread: for small jobs, which end before they could be cancelled."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def start(self) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class Ticket:
    """A job that waits or runs; `future` gets its result."""

    def __init__(self, job: Job, urgent: bool) -> None:
        self.job, self.urgent = job, urgent
        self.future: Future[Any] = Future()


class Load(NamedTuple):
    """How full a queue is."""

    running: int
    waiting: int
    room: int  # jobs that may wait


class JobQueue:
    """Waiting jobs, and up to `num_runners` runners, each in a thread of its own that starts when it is needed.

    Urgent jobs run first. Other jobs leave one runner free, if there are several.
    """

    def __init__(self, create_runner: Callable[[], Runner], num_runners: int, max_waiting: int) -> None:
        self._create_runner, self._num_runners, self._max_waiting = create_runner, num_runners, max_waiting
        self._runners: list[Runner] = []
        self._waiting: dict[bool, deque[Ticket]] = {True: deque(), False: deque()}  # by urgency
        self._running: dict[Ticket, Runner] = {}
        self._changed = Condition()

    @property
    def load(self) -> Load:
        with self._changed:
            return Load(len(self._running), self._num_waiting, self._max_waiting)

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def start(self) -> None:
        """Start the first runner before it is needed."""
        with self._changed:
            if not self._runners:
                self._add_runner().start()

    def put(self, job: Job, urgent: bool = True) -> Ticket:
        """Add a job; QueueFull if too many wait already."""
        ticket = Ticket(job, urgent)
        with self._changed:
            if self._num_waiting >= self._max_waiting:
                raise QueueFull
            self._waiting[urgent].append(ticket)
            if self._num_waiting + len(self._running) > len(self._runners) < self._num_runners:
                self._add_runner()
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Remove a waiting job, or cancel a running one. Returns at once."""
        with self._changed:
            if ticket in self._waiting[ticket.urgent]:
                self._waiting[ticket.urgent].remove(ticket)
                ticket.future.cancel()
            if ticket in self._running:
                self._running[ticket].cancel()

    def close(self) -> None:
        """Cancel all jobs and close all runners. A later job starts a new runner."""
        with self._changed:
            for waiting in self._waiting.values():
                for ticket in waiting:
                    ticket.future.cancel()
                waiting.clear()
            runners, self._runners = self._runners, []
            self._changed.notify_all()
        for runner in runners:
            runner.close()

    def _add_runner(self) -> Runner:
        runner = self._create_runner()
        self._runners.append(runner)
        Thread(target=self._run_jobs, args=(runner,), name="zeropipe", daemon=True).start()
        return runner

    def _run_jobs(self, runner: Runner) -> None:
        while (ticket := self._next_job(runner)) is not None:
            result, error = None, None
            try:
                result = runner.call(ticket.job.function, *ticket.job.args)
            except BaseException as raised:  # the caller gets it, whatever it is
                error = raised
            with self._changed:
                del self._running[ticket]
                self._changed.notify()  # another runner may take a job that is not urgent now
            if error is None:
                ticket.future.set_result(result)
            else:
                ticket.future.set_exception(error)

    def _next_job(self, runner: Runner) -> Ticket | None:
        """Wait for the runner's next job; None when the queue was closed."""
        with self._changed:
            while runner in self._runners:
                waiting = self._waiting[True] or (self._waiting[False] if self._may_run_others() else None)
                if not waiting:
                    self._changed.wait()
                    continue
                ticket = waiting.popleft()
                if ticket.future.set_running_or_notify_cancel():
                    self._running[ticket] = runner
                    return ticket
        return None

    def _may_run_others(self) -> bool:
        """Whether a job that is not urgent may start."""
        return sum(not ticket.urgent for ticket in self._running) < max(1, self._num_runners - 1)
