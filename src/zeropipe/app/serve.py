"""Start the server on this machine and open the page."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Sequence
from threading import Thread

from zeropipe.errors import ConfigError, MissingExtra

PORT = 8420
PATIENCE = 1  # seconds that open requests get to end when the server is told to


def serve(
    host: str = "127.0.0.1", port: int | None = None, *, hosts: Sequence[str] = (), schedules: Sequence[str] = (),
    browser: bool = True, query: str = "", as_json: bool = False,
) -> None:  # fmt: skip
    """Serve the page until interrupted. Without `port`, the first free one from 8420 on.

    `hosts` are names under which it answers, beside addresses and `localhost`; `schedules` as for `create_app`.
    """
    from zeropipe.app.server import create_app

    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("uvicorn", "app") from None
    listener = listen(host, port)
    address = page_address(listener) + query
    said = json.dumps({"url": address}) if as_json else f"zeropipe: the page is at {address} (stop with Ctrl-C)"
    print(said, flush=True)
    if browser:
        import webbrowser

        # the socket listens already: the browser waits until the server answers; some browsers return when they end
        Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    app = create_app(hosts=[host, *hosts], schedules=schedules, warm=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=PATIENCE)

    class Server(uvicorn.Server):
        """Tells those who still wait that it ends, instead of letting them wait for its time-out."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.queues.close()
            await super().shutdown(sockets)

    Server(config).run(sockets=[listener])


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket; ConfigError names what is wrong with the host or the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in [port] if port is not None else [*range(PORT, PORT + 20), 0]:
        try:
            return socket.create_server((host, number), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"--port {port}: another program listens there; choose another, or leave it out"
                ) from None
            if error.errno == errno.EACCES:
                raise ConfigError(f"--port {port}: ports below 1024 are not open to you; choose another") from None
            raise ConfigError(f"--host {host!r}: this machine has no such address ({error.strerror})") from None
    raise AssertionError("port 0 is always free")


def page_address(listener: socket.socket) -> str:
    """What to type into a browser."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"
