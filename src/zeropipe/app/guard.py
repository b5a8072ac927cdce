"""Around every request: a limit on the body, and headers that keep the page to its own host."""

from __future__ import annotations

import json
from typing import Any

from zeropipe.app.limits import MAX_BODY

POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


class TooLarge(Exception):
    """More bytes came than the page takes."""


class Guard:
    """An ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY:
                raise TooLarge
            return message

        async def with_headers(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        try:
            if _length(scope) > MAX_BODY:
                raise TooLarge
            await self.app(scope, counted, with_headers)
        except TooLarge:
            if not started:
                await _refuse(with_headers)


def _length(scope: Any) -> int:
    given = dict(scope["headers"]).get(b"content-length", b"0")
    return int(given) if given.isdigit() else 0


async def _refuse(send: Any) -> None:
    message = f"the request is larger than {MAX_BODY // 2**20} MiB: use the command line for files of that size"
    body = json.dumps({"errors": [{"field": "", "message": message}]}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})
