"""Middleware for every request: allowed hosts, a limit on bodies, and headers that keep the page to its host."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from zeropipe.core.limits import PAGE
from zeropipe.errors import short

MAX_JSON_BYTES = 2**20  # of a request that is not an upload
MAX_HELD_BYTES = 4 * PAGE.file_bytes  # of all bodies at the same time
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
    """An ASGI middleware.

    A page of another site can let its own name point to this machine and then read the server's answers (DNS
    rebinding). So a request must name an IP address, localhost, or one of `hosts`.
    """

    def __init__(self, app: Any, hosts: Sequence[str] = ()) -> None:
        self.app = app
        self._hosts = {host.lower().rstrip(".") for host in hosts}
        self._held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        max_bytes = PAGE.file_bytes if scope["path"] == "/api/uploads" else MAX_JSON_BYTES
        refusal = self._check(headers, max_bytes)
        if refusal:  # the body is not read
            status, message = refusal
            answer = JSONResponse({"errors": [{"field": "", "message": message}]}, status)
            await answer(scope, receive, send_with_headers)
            return
        size = 0

        async def receive_counted() -> Any:
            nonlocal size
            event = await receive()
            received = len(event.get("body", b""))
            size += received
            self._held += received
            if size > max_bytes:
                raise HTTPException(413, _too_large(max_bytes))
            if self._held > MAX_HELD_BYTES:
                message = "too many files are uploaded at the same time: try again"
                raise HTTPException(503, message, {"Retry-After": "5"})
            return event

        try:
            await self.app(scope, receive_counted, send_with_headers)
        finally:
            self._held -= size

    def _check(self, headers: dict[bytes, str], max_bytes: int) -> tuple[int, str] | None:
        """Status and message for a request that is refused because of its headers."""
        host = headers.get(b"host", "")
        if not self._is_allowed(host):
            name = _name(host) or "NAME"
            return 403, f"Host {short(host)} is not a name of this page: start it with --allow-host {short(name)}"
        origin = headers.get(b"origin")
        if origin is not None and not (_authority(origin) == host.lower() or _name(_authority(origin)) in self._hosts):
            name = _name(_authority(origin)) or "NAME"
            return 403, (
                f"Origin {short(origin)}: pages of other sites are not allowed; "
                f"if it is this page behind a proxy, start it with --allow-host {short(name)}"
            )
        length = headers.get(b"content-length", "0")
        if length.isdigit() and int(length[:20]) > max_bytes:
            return 413, _too_large(max_bytes)
        return None

    def _is_allowed(self, host: str) -> bool:
        name = _name(host)
        if name == "localhost" or name.endswith(".localhost") or name in self._hosts:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def _name(host: str) -> str:
    """A Host header without its port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _authority(origin: str) -> str:
    return origin.partition("//")[2].lower()


def _too_large(max_bytes: int) -> str:
    return f"the request is larger than {max_bytes / 2**20:.0f} MiB, the page's limit: use the command line"
