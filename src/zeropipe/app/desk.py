"""Where requests are worked on: off the event loop, small ones in threads, large ones in processes that can be stopped.

A small request never waits for a large one, and what the browser no longer waits for leaves the queue or is stopped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any

from fastapi import HTTPException, Request

from zeropipe.app.hands import WorkerHand
from zeropipe.app.lanes import Busy, Here, Job, Lane, Load, Stopped
from zeropipe.schedules.registry import ENTRY_POINTS, Entry
from zeropipe.schedules.user import entry_of

SMALL = 20_000  # actions: below this a thread of the server answers in about a tenth of a second
SMALL_ROOM, LARGE_ROOM = 256, 64  # requests that may wait
RETRY = 5  # seconds after which a request that found no room may come again


class Gone(Exception):
    """The browser has stopped waiting for this answer."""


class Desk:
    """Three lanes. `schedules` are those of the user's files, path/to/mine.py:name, which the workers load too."""

    def __init__(self, schedules: Sequence[str] = ()) -> None:
        self._loaded = {entry_of(spec).name for spec in schedules}
        specs = [f"{os.path.abspath(path)}:{name}" for path, _, name in (spec.rpartition(":") for spec in schedules)]
        self.small = Lane(Here, 2, SMALL_ROOM)
        self.large = Lane(lambda: WorkerHand(specs), max(2, min(4, os.cpu_count() or 1)), LARGE_ROOM)
        self.own = Lane(Here, 1, LARGE_ROOM)  # large, but of a schedule that only this process knows

    def warm(self) -> None:
        """Start a worker before it is needed."""
        self.large.warm()

    def close(self) -> None:
        """Give up all work, and leave no process behind. A request that comes later begins anew."""
        for lane in (self.small, self.large, self.own):
            lane.close()

    @property
    def load(self) -> dict[str, Load]:
        return {"small": self.small.load, "large": self.large.load, "own": self.own.load}

    def lane(self, effort: int, entries: Iterable[Entry] = ()) -> Lane:
        """Where work of `effort` actions, with these schedules, belongs."""
        if effort <= SMALL:
            return self.small
        return self.large if all(map(self._known_to_workers, entries)) else self.own

    def _known_to_workers(self, entry: Entry) -> bool:
        packages = {"zeropipe", *(point.module.split(".")[0] for point in entry_points(group=ENTRY_POINTS))}
        return entry.name in self._loaded or entry.function.__module__.split(".")[0] in packages

    async def work(self, request: Request, lane: Lane, job: Job, urgent: bool = True) -> Any:
        """The job's result, unless the browser leaves before it is there."""
        try:
            ticket = lane.add(job, urgent)
        except Busy:
            raise HTTPException(503, _full(lane.load), {"Retry-After": str(RETRY)}) from None
        answer = asyncio.ensure_future(asyncio.wrap_future(ticket.future))
        left = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise Gone
            if answer.cancelled() or isinstance(answer.exception(), Stopped):
                raise HTTPException(503, "the server is ending: start it again")
            return answer.result()
        finally:
            left.cancel()
            if not answer.done():
                lane.give_up(ticket)
                answer.cancel()


def _full(load: Load) -> str:
    return f"{load.waiting} requests wait already, which is all the page keeps: try again in {RETRY} seconds"


async def _left(request: Request) -> None:
    """Returns when the browser is gone. The body has been read, so nothing else comes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
