"""`app`: the local web page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from zeropipe.cli import options as opt
from zeropipe.cli.options import option
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.cli.request import Request, Spec
    from zeropipe.sim.costs import Costs


@opt.command(short_help="The web page.")
@click.argument("schedules", nargs=-1)
@option("--port", type=click.IntRange(0, 65535), help="Port; by default the first free one from 8420.")
@option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all of the network.")
@option(
    "--allow-host", "allowed", multiple=True, metavar="NAME",
    help="Host name of the page, beside addresses and localhost; may be repeated.",
)  # fmt: skip
@option("--no-browser", is_flag=True, help="Do not open a browser.")
@opt.json
@opt.size
@opt.costs
def app(
    schedules: tuple[str, ...], port: int | None, host: str, allowed: tuple[str, ...], no_browser: bool, as_json: bool,
    **values: Any,
) -> None:  # fmt: skip
    """Start the web page, which compares schedules and plans training runs.

    \b
    zeropipe app
    zeropipe app 1f1b mine.py:my_schedule -p 8 -m 32 --p2p 0.1
    zeropipe app job.toml             (schedules, sizes and costs in one file)

    The page starts with SCHEDULE_SUFFIXES, sizes and costs. A schedule of your own gets a card like the others.
    """
    from zeropipe.app.serve import serve
    from zeropipe.cli.request import create_request

    request = create_request(schedules, values, several=("schedule",))
    serve(
        host, port, hosts=allowed, schedules=[spec.name for spec in request.specs if ".py:" in spec.name],
        browser=not no_browser, query=page_query(request), as_json=as_json,
    )  # fmt: skip


def page_query(request: Request) -> str:
    """The query of the page's address for this request: `?ranks=4&schedules=zbv`."""
    from zeropipe.cli.request import SIZES

    parts = [(name, str(values[0])) for name in SIZES if (values := getattr(request, name))]
    if request.weight_parts:
        parts.append(("weight_parts", str(request.weight_parts)))
    if request.specs:
        parts.append(("schedules", ",".join(_choice_text(spec, request) for spec in request.specs)))
    if request.source.name == "stage":
        parts.append(("per", "stage"))
    parts += [(name, quote(text, safe=",:-=")) for name, text in _cost_texts(_page_costs(request))]
    return "?" + "&".join(f"{name}={text}" for name, text in parts) if parts else ""


def _page_costs(request: Request) -> Costs:
    """Costs per rank or stage; of costs per layer, those of the first schedule's stages."""
    if request.source.name in ("rank", "stage") or not request.specs:
        return request.source.plain_costs
    schedule = request.load_schedule(request.specs[0])
    return request.source.stage_costs(schedule.problem, schedule.placement, schedule)


def _choice_text(spec: Spec, request: Request) -> str:
    """`interleaved:v=4:group_size=8`; --option applies to the schedules that have it."""
    from zeropipe.schedules.user import entry_of

    if spec.is_file:
        raise ConfigError(f"{spec.name}: start the page without it, and drop the file there")
    entry = entry_of(spec.name)
    options = {name: value for name, value in request.options.items() if name in entry.options} | dict(spec.options)
    settings = [("v", spec.stages_per_rank)] if spec.stages_per_rank is not None else []
    return _quote_twice(entry.name) + "".join(
        f":{name}={_quote_twice(value)}" for name, value in [*settings, *options.items()]
    )


def _quote_twice(value: Any) -> str:
    """Once for the address, and once for the list of schedules in it."""
    return quote(quote(str(value), safe=" "), safe="")


def _cost_texts(costs: Costs) -> Iterator[tuple[str, str]]:
    """The costs that differ from their defaults, as the page writes them."""
    from zeropipe.sim.costs import Costs, StageTable

    default = Costs()
    for name in (field.name for field in fields(costs)):
        value = getattr(costs, name)
        if value == getattr(default, name):
            continue
        if name == "inter_node":
            yield from ((f"inter_{part}", str(n)) for part, n in value._asdict().items() if n is not None)
        elif name == "edges":
            links = (":".join("" if n is None else str(n) for n in link) for link in value.values())
            yield name, ",".join(f"{a}-{b}:{link}" for (a, b), link in zip(value, links, strict=True))
        elif isinstance(value, bool):
            yield name, str(int(value))
        elif isinstance(value, StageTable):
            others = [] if value.default is None else [("default", value.default)]
            yield name, ",".join(f"{stage}={number}" for stage, number in [*value.entries, *others])
        else:
            yield name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
