"""`app`: the web page."""

from __future__ import annotations

import click

from zeropipe.cli import options as opt
from zeropipe.errors import ConfigError


@click.command()
@click.argument("schedules", nargs=-1)
@click.option("--port", type=click.IntRange(0, 65535), help="Port; the first free one from 8420 by default.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 lets others in.")
@click.option(
    "--allow-host", "allowed", multiple=True, metavar="NAME",
    help="A name under which the page may be opened, beside addresses and localhost; may be given again.",
)  # fmt: skip
@click.option("--no-browser", is_flag=True, help="Do not open the page.")
@opt.json_option
def app(
    schedules: tuple[str, ...], port: int | None, host: str, allowed: tuple[str, ...], no_browser: bool, as_json: bool
) -> None:
    """The web page: choose schedules, sizes and costs, and see at once what they do.

    SCHEDULES are chosen at the start: names, or path/to/mine.py:my_schedule, which gets a card like all others.
    """
    from urllib.parse import quote

    from zeropipe.app.serve import serve
    from zeropipe.schedules.user import entry_of

    for spec in schedules:
        if spec.endswith((".csv", ".json", ".toml")):
            raise ConfigError(f"{spec}: start the page without it, and drop the file there")
    names = ",".join(quote(entry_of(spec).name, safe="") for spec in schedules)
    serve(
        host, port, hosts=allowed, schedules=[spec for spec in schedules if ".py:" in spec],
        browser=not no_browser, query=f"?schedules={names}" if names else "", as_json=as_json,
    )  # fmt: skip
