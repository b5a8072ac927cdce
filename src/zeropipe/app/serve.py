"""Start the server on this machine and open the page."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Sequence
from threading import Thread

from zeropipe.errors import ConfigError, MissingExtra

DEFAULT_PORT = 8420
SHUTDOWN_TIMEOUT_S = 1  # for open requests


def serve(
    host: str = "127.0.0.1", port: int | None = None, *, hosts: Sequence[str] = (), schedules: Sequence[str] = (),
    browser: bool = True, query: str = "", as_json: bool = False,
) -> None:  # fmt: skip
    """Serve the page until interrupted. Without `port`, use the first free one from 8420.

    The page is opened in the browser with `query` behind its address. `hosts` and `schedules` as for `create_app`.
    """
    from zeropipe.app.server import create_app

    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("uvicorn", "app") from None
    listener = listen(host, port)
    address = page_address(listener) + query
    line = json.dumps({"url": address}) if as_json else f"zeropipe: the page is at {address} (stop with Ctrl-C)"
    print(line, flush=True)
    if browser:
        import webbrowser

        # the socket listens already, so the browser waits; in a thread, because some browsers return only at their end
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    app = create_app(hosts=[host, *hosts], schedules=schedules, start_worker=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S)

    class Server(uvicorn.Server):
        """Answers open requests before it shuts down."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.queues.close()
            await super().shutdown(sockets)

    Server(config).run(sockets=[listener])


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; ConfigError for a host or port that cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + 20), 0]:
        try:
            return socket.create_server((host, number), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"--port {port}: in use by another program; use another port, or leave it out"
                ) from None
            if error.errno == errno.EACCES:
                raise ConfigError(f"--port {port}: ports below 1024 need privileges; use another port") from None
            raise ConfigError(f"--host {host!r}: not an address of this machine ({error.strerror})") from None
    raise AssertionError("port 0 is always free")


def page_address(listener: socket.socket) -> str:
    """The URL of the page."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"
