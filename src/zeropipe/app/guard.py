"""Around every request: a limit on the body, and headers that keep the page to its own host."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from zeropipe.core.limits import PAGE

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


class Guard:
    """An ASGI middleware."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > PAGE.file_bytes:
                raise HTTPException(413, _too_large())
            return message

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        if _length(scope) > PAGE.file_bytes:  # nothing of it is read
            answer = JSONResponse({"errors": [{"field": "", "message": _too_large()}]}, 413)
            await answer(scope, receive, with_headers)
        else:
            await self.app(scope, counted, with_headers)


def _length(scope: Any) -> int:
    given = dict(scope["headers"]).get(b"content-length", b"0")
    return int(given) if given.isdigit() else 0


def _too_large() -> str:
    return f"the request is larger than {PAGE.file_bytes / 2**20:.0f} MiB: use the command line for files of that size"
