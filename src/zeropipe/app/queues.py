"""The server's queues: small requests run in threads, large ones in worker processes that can be cancelled.

A small request never waits for a large one. When the browser disconnects, its request is removed or cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any

from fastapi import HTTPException, Request

from zeropipe.app.calls import prepare_worker
from zeropipe.app.job_queue import Job, JobQueue, Load, QueueFull, ThreadRunner
from zeropipe.core.workers import CallCancelled, Limits, Worker
from zeropipe.schedules.registry import ENTRY_POINTS, Entry
from zeropipe.schedules.user import entry_of

MAX_SMALL = 20_000  # actions: a thread of the server simulates these in about a tenth of a second
MAX_WAITING_SMALL, MAX_WAITING_LARGE = 256, 64  # requests
RETRY_S = 5  # seconds after which a request that found a full queue may be sent again
WORKER_LIMITS = Limits(memory=4 * 2**30, niceness=10)  # ten times what counting a large model takes
WORKER_ENVIRON = {"HF_HUB_OFFLINE": "1"}  # nothing is downloaded


class Disconnected(Exception):
    """The browser no longer waits for this answer."""


class Queues:
    """`schedules` are the user's, path/to/mine.py:name; the worker processes load them too."""

    def __init__(self, schedules: Sequence[str] = ()) -> None:
        self._loaded = {entry_of(spec).name for spec in schedules}
        specs = [f"{os.path.abspath(path)}:{name}" for path, _, name in (spec.rpartition(":") for spec in schedules)]
        self.small = JobQueue(ThreadRunner, 2, MAX_WAITING_SMALL)
        self.large = JobQueue(
            lambda: Worker(prepare_worker, (specs,), limits=WORKER_LIMITS, environ=WORKER_ENVIRON),
            max(2, min(4, os.cpu_count() or 1)), MAX_WAITING_LARGE,
        )  # fmt: skip
        self.local = JobQueue(ThreadRunner, 1, MAX_WAITING_LARGE)  # large, with a schedule only this process knows

    def start(self) -> None:
        """Start a worker process before it is needed."""
        self.large.start()

    def close(self) -> None:
        """Cancel all work and end all processes. A later request starts new ones."""
        for queue in (self.small, self.large, self.local):
            queue.close()

    @property
    def load(self) -> dict[str, Load]:
        return {"small": self.small.load, "large": self.large.load, "own": self.local.load}

    def choose(self, num_actions: int, entries: Iterable[Entry] = ()) -> JobQueue:
        """Choose the queue for work on `num_actions` actions of these schedules."""
        if num_actions <= MAX_SMALL:
            return self.small
        return self.large if all(map(self._is_known_to_workers, entries)) else self.local

    def _is_known_to_workers(self, entry: Entry) -> bool:
        packages = {"zeropipe", *(point.module.split(".")[0] for point in entry_points(group=ENTRY_POINTS))}
        return entry.name in self._loaded or entry.function.__module__.split(".")[0] in packages

    async def run(self, request: Request, queue: JobQueue, job: Job, urgent: bool = True) -> Any:
        """Return the job's result; Disconnected if the browser disconnects before."""
        try:
            ticket = queue.put(job, urgent)
        except QueueFull:
            message = f"{queue.load.waiting} requests wait already: try again in {RETRY_S} seconds"
            raise HTTPException(503, message, {"Retry-After": str(RETRY_S)}) from None
        answer = asyncio.ensure_future(asyncio.wrap_future(ticket.future))
        disconnect = asyncio.create_task(_wait_for_disconnect(request))
        try:
            await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise Disconnected
            if answer.cancelled() or isinstance(answer.exception(), CallCancelled):
                raise HTTPException(503, "the server is shutting down: start it again")
            return answer.result()
        finally:
            disconnect.cancel()
            if not answer.done():
                queue.cancel(ticket)
                answer.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the browser has disconnected. The body has been read, so no other message comes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
