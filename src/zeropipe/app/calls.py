"""What the page's calls compute: plain functions of plain values, run in a thread or in a worker process.

Encoding a large answer takes as long as computing it, so that is done here too: a reply is ready to be sent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from zeropipe import __version__
from zeropipe.app.downloads import MEDIA, file_of
from zeropipe.app.models import Ask, FileAsk, Format, Size
from zeropipe.app.pictures import picture
from zeropipe.app.uploads import Files, Found, read_upload
from zeropipe.app.work import chart, results, timelines_of
from zeropipe.core.jit import live_on
from zeropipe.core.limits import PAGE
from zeropipe.errors import ZeropipeError
from zeropipe.schedules.registry import entries
from zeropipe.schedules.user import entry_of
from zeropipe.viz.colors import palette
from zeropipe.viz.payload import payload

SHADES = 2  # of a colour on the cards


class Reply(NamedTuple):
    """An answer as it goes over the wire; `name` is that of a file to keep."""

    body: bytes
    media: str = MEDIA["json"]
    name: str = ""


def encoded(content: Any) -> bytes:
    """JSON in ASCII, so that no text whatsoever fails to be sent."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def listed(errors: Any) -> list[dict[str, str]]:
    """Errors by field, as they go over the wire."""
    return [{"field": field, "message": message} for field, message in errors]


def catalog_call() -> Reply:
    cards = [
        {
            "name": e.name, "summary": e.summary, "placement": e.placement_name,
            "stages_per_rank": list(e.stages_per_rank), "splits_backward": e.splits_backward, "overlaps": e.overlaps,
            "options": e.plain_options, "limits": e.limits, "paper": e.paper, "picture": picture(e),
        }
        for e in entries()
    ]  # fmt: skip
    return Reply(encoded({
        "version": __version__, "max_file_bytes": PAGE.file_bytes, "schedules": cards,
        "palette": {theme: palette(theme, SHADES) for theme in ("light", "dark")},
    }))  # fmt: skip


def simulate_call(ask: Ask, files: Files) -> Reply:
    shown, refused = timelines_of(ask, files)
    return Reply(encoded({
        "results": results(shown, ask.per), "errors": listed(refused), "costs_per": ask.per,
        "viewer": payload([one.timeline for one in shown]),
    }))  # fmt: skip


def chart_call(size: Size) -> Reply:
    return Reply(encoded(chart(size)))


def file_call(ask: FileAsk, form: Format, files: Files) -> Reply:
    name, data = file_of(ask, form, files)
    return Reply(data, MEDIA[form], name)


def upload_call(name: str, data: bytes) -> tuple[Reply, str, Found | None]:
    """The facts, and what is to be kept under which id."""
    facts, found = read_upload(name, data)
    return Reply(encoded(facts)), facts["id"] or "", found


def prepare_worker(schedules: Sequence[str]) -> None:
    """Load what large jobs need. The first time after an installation, this compiles kernels for some seconds."""
    for spec in schedules:
        try:
            entry_of(spec)
        except ZeropipeError as error:
            print(f"zeropipe: {error}", file=sys.stderr)
    live_on()
    simulate_call(Ask.model_validate({"ranks": 8, "microbatches": 64, "schedules": [{"name": "zbv"}]}), {})
