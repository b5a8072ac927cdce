"""`app`: the web page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from zeropipe.cli import options as opt
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.cli.request import Request, Spec


@click.command(short_help="The web page.")
@click.argument("schedules", nargs=-1)
@click.option("--port", type=click.IntRange(0, 65535), help="Port; the first free one from 8420 by default.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 lets others in.")
@click.option(
    "--allow-host", "allowed", multiple=True, metavar="NAME",
    help="A name under which the page may be opened, beside addresses and localhost; may be given again.",
)  # fmt: skip
@click.option("--no-browser", is_flag=True, help="Do not open the page.")
@opt.json_option
@opt.size_options
@opt.cost_options
def app(
    schedules: tuple[str, ...], port: int | None, host: str, allowed: tuple[str, ...], no_browser: bool, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """The web page: choose schedules, sizes and costs, and see at once what they do.

    \b
    zeropipe app
    zeropipe app 1f1b mine.py:my_schedule -p 8 -m 32 --p2p 0.1
    zeropipe app job.toml             (schedules, sizes and costs in one file)

    SCHEDULES, sizes and costs are what the page starts with. A schedule of your own gets a card like all others.
    """
    from zeropipe.app.serve import serve
    from zeropipe.cli.request import request_of

    request = request_of(schedules, given, several=("schedule",))
    serve(
        host, port, hosts=allowed, schedules=[spec.name for spec in request.specs if ".py:" in spec.name],
        browser=not no_browser, query=address(request), as_json=as_json,
    )  # fmt: skip


def address(request: Request) -> str:
    """What follows the page's address so that it starts with this request: `?ranks=4&schedules=zbv`."""
    request = _with_stages(request)
    parts = [(name, str(values[0])) for name in _SIZES if (values := getattr(request, name))]
    if request.weight_parts:
        parts.append(("weight_parts", str(request.weight_parts)))
    if request.specs:
        parts.append(("schedules", ",".join(_choice(spec, request) for spec in request.specs)))
    if request.per != "rank":
        parts.append(("per", request.per))
    parts += [(name, quote(text, safe=",:-=")) for name, text in _costs(request)]
    return "?" + "&".join(f"{name}={text}" for name, text in parts) if parts else ""


def _with_stages(request: Request) -> Request:
    """Costs of layers as those of the first schedule's stages, which the page adds up or shares out for others."""
    if request.per in ("rank", "stage") or not request.specs:
        return request
    schedule = request.schedule_of(request.specs[0])
    costs = request.costs_of(schedule.problem, schedule.placement)
    return replace(request, file_costs=costs, per="rank")


_SIZES = ("ranks", "microbatches", "stages_per_rank")


def _choice(spec: Spec, request: Request) -> str:
    """`interleaved:v=4:group_size=8`; --option holds for those that know it."""
    from zeropipe.schedules.user import entry_of

    if spec.is_file:
        raise ConfigError(f"{spec.name}: start the page without it, and drop the file there")
    entry = entry_of(spec.name)
    options = {name: value for name, value in request.options.items() if name in entry.options} | dict(spec.options)
    settings = [("v", spec.stages_per_rank)] if spec.stages_per_rank is not None else []
    more = "".join(f":{name}={_escaped(value)}" for name, value in [*settings, *options.items()])
    return _escaped(entry.name) + more


def _escaped(value: Any) -> str:
    """Quoted twice: an address is read once, and then its list of schedules."""
    return quote(quote(str(value), safe=" "), safe="")


def _costs(request: Request) -> Iterator[tuple[str, str]]:
    """The costs that are not at their defaults, as the page writes them."""
    from zeropipe.sim.costs import Costs, Sparse

    costs, default = request.costs, Costs()
    for name in (field.name for field in fields(costs)):
        value = getattr(costs, name)
        if value == getattr(default, name):
            continue
        if name == "inter_node":
            yield from ((f"inter_{part}", str(n)) for part, n in value._asdict().items() if n is not None)
        elif name == "edges":
            texts = (":".join("" if n is None else str(n) for n in link) for link in value.values())
            yield name, ",".join(f"{a}-{b}:{text}" for (a, b), text in zip(value, texts, strict=True))
        elif isinstance(value, bool):
            yield name, str(int(value))
        elif isinstance(value, Sparse):
            others = [] if value.default is None else [("default", value.default)]
            yield name, ",".join(f"{stage}={given}" for stage, given in [*value.entries, *others])
        else:
            yield name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
