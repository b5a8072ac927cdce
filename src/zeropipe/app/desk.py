"""Where requests are worked on: off the event loop, a few at a time, while the browser still waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any, TypeVar

from fastapi import Request

FOREGROUND, BACKGROUND = "foreground", "background"
LINES = {FOREGROUND: 2, BACKGROUND: 1}  # requests at the same time; what is large does not keep the others waiting
LOOK = 0.1  # seconds between two looks whether the browser is still there
Out = TypeVar("Out")
Pulse = Callable[[], None]


class Gone(Exception):
    """The browser has stopped waiting for this answer."""


class Desk:
    """Runs functions in threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(sum(LINES.values()), "zeropipe")
        self._lines = {name: asyncio.Semaphore(count) for name, count in LINES.items()}

    async def work(self, request: Request, function: Callable[..., Out], *args: Any, line: str = FOREGROUND) -> Out:
        """`function(pulse, *args)`. It calls `pulse` now and then, which ends it when the browser has left."""
        async with self._lines[line]:
            if await request.is_disconnected():
                raise Gone
            left = Event()

            def pulse() -> None:
                if left.is_set():
                    raise Gone

            watch = asyncio.create_task(_watch(request, left))
            try:
                return await asyncio.get_running_loop().run_in_executor(self._pool, function, pulse, *args)
            finally:
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch


async def _watch(request: Request, left: Event) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(LOOK)
    left.set()
