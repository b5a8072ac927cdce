"""Around every request: the hosts it may name, a limit on its body, and headers that keep the page to its host."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from zeropipe.core.limits import PAGE
from zeropipe.errors import short

MAX_ASK = 2**20  # bytes of a request that is no file
MAX_HELD = 4 * PAGE.file_bytes  # bytes of all bodies at the same time
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

    A page of another site can let its own name point to this machine and then read what the server answers (DNS
    rebinding). So a request must name this server as its user would: by an address, as localhost, or by one of `hosts`.
    """

    def __init__(self, app: Any, hosts: Sequence[str] = ()) -> None:
        self.app = app
        self._hosts = {host.lower().rstrip(".") for host in hosts}
        self._held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
            await send(message)

        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        most = PAGE.file_bytes if scope["path"] == "/api/uploads" else MAX_ASK
        refused = self._refusal(headers, most)
        if refused:  # nothing of it is read
            status, message = refused
            answer = JSONResponse({"errors": [{"field": "", "message": message}]}, status)
            await answer(scope, receive, with_headers)
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            size = len(message.get("body", b""))
            seen += size
            self._held += size
            if seen > most:
                raise HTTPException(413, _too_large(most))
            if self._held > MAX_HELD:
                raise HTTPException(503, "too many files are read at the same time: try again", {"Retry-After": "5"})
            return message

        try:
            await self.app(scope, counted, with_headers)
        finally:
            self._held -= seen

    def _refusal(self, headers: dict[bytes, str], most: int) -> tuple[int, str] | None:
        """Status and reason to turn a request away by what it says of itself."""
        host = headers.get(b"host", "")
        if not self._is_ours(host):
            name = _name(host) or "NAME"
            return 403, f"Host {short(host)} is not a name of this page: start it with --allow-host {short(name)}"
        origin = headers.get(b"origin")
        if origin is not None and not (_authority(origin) == host.lower() or _name(_authority(origin)) in self._hosts):
            name = _name(_authority(origin)) or "NAME"
            return 403, (
                f"Origin {short(origin)}: a page of another site may not ask here; "
                f"if it is this one behind a proxy, start it with --allow-host {short(name)}"
            )
        length = headers.get(b"content-length", "0")
        if length.isdigit() and int(length[:20]) > most:
            return 413, _too_large(most)
        return None

    def _is_ours(self, host: str) -> bool:
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


def _too_large(most: int) -> str:
    return f"the request is larger than {most / 2**20:.0f} MiB, which is all the page takes: use the command line"
