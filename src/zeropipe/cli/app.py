"""`app`: the web page."""

from __future__ import annotations

import click


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Port; the first free one from 8420 by default.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 lets others in.")
@click.option("--no-browser", is_flag=True, help="Do not open the page.")
def app(port: int | None, host: str, no_browser: bool) -> None:
    """The web page: choose schedules, sizes and costs, and see at once what they do."""
    from zeropipe.app.serve import serve

    serve(host, port, browser=not no_browser)
