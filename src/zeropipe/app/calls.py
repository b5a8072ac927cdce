"""The functions that requests run, in a thread or in a worker process.

Encoding a large answer takes as long as computing it, so answers are encoded here too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from zeropipe import __version__
from zeropipe.app.comparison import build_timelines, chart_data, compare_figures
from zeropipe.app.downloads import MEDIA_TYPES, create_file
from zeropipe.app.models import CompareRequest, FileRequest, Format, SizeRequest
from zeropipe.app.thumbnails import thumbnail
from zeropipe.app.uploads import LoadedFile, LoadedFiles, read_upload
from zeropipe.core.jit import use_compiled
from zeropipe.core.limits import PAGE
from zeropipe.errors import ZeropipeError
from zeropipe.schedules.registry import entries
from zeropipe.schedules.user import entry_of
from zeropipe.viz.colors import palette
from zeropipe.viz.payload import payload

NUM_SHADES = 2  # of each colour in a thumbnail


class Reply(NamedTuple):
    """An encoded answer; `name` is the file name of a download."""

    body: bytes
    media_type: str = MEDIA_TYPES["json"]
    name: str = ""


def encode_json(content: Any) -> bytes:
    """Encode as ASCII, so that lone surrogates can be sent too."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def error_data(errors: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Pairs of field and message as JSON data."""
    return [{"field": field, "message": message} for field, message in errors]


def catalog_call() -> Reply:
    cards = [
        {
            "name": e.name, "summary": e.summary, "placement": e.placement_name,
            "stages_per_rank": list(e.stages_per_rank), "splits_backward": e.splits_backward, "overlaps": e.overlaps,
            "options": e.plain_options, "limits": e.limits, "paper": e.paper, "picture": thumbnail(e),
        }
        for e in entries()
    ]  # fmt: skip
    return Reply(encode_json({
        "version": __version__, "max_file_bytes": PAGE.file_bytes, "schedules": cards,
        "palette": {theme: palette(theme, NUM_SHADES) for theme in ("light", "dark")},
    }))  # fmt: skip


def simulate_call(request: CompareRequest, files: LoadedFiles) -> Reply:
    shown, errors = build_timelines(request, files)
    return Reply(encode_json({
        "results": compare_figures(shown, request.per), "errors": error_data(errors), "costs_per": request.per,
        "viewer": payload([one.timeline for one in shown]),
    }))  # fmt: skip


def chart_call(size: SizeRequest) -> Reply:
    return Reply(encode_json(chart_data(size)))


def file_call(request: FileRequest, format: Format, files: LoadedFiles) -> Reply:
    name, data = create_file(request, format, files)
    return Reply(data, MEDIA_TYPES[format], name)


def upload_call(name: str, data: bytes) -> tuple[Reply, str, LoadedFile | None]:
    """Return the answer, and the id and content of a file to keep."""
    info, loaded = read_upload(name, data)
    return Reply(encode_json(info)), info["id"] or "", loaded


def prepare_worker(schedules: Sequence[str]) -> None:
    """Load what large jobs need. The first time after an installation, this compiles kernels for some seconds."""
    for spec in schedules:
        try:
            entry_of(spec)
        except ZeropipeError as error:
            print(f"zeropipe: {error}", file=sys.stderr)
    use_compiled()
    request = {"ranks": 8, "microbatches": 64, "schedules": [{"name": "zbv"}]}
    simulate_call(CompareRequest.model_validate(request), {})
