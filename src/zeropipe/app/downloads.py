"""A comparison as a file, written by the code of `zeropipe draw` and `zeropipe compare -o`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from zeropipe.app.comparison import ResolvedChoice, build_timelines
from zeropipe.app.errors import Refusal
from zeropipe.app.models import FileRequest, Format
from zeropipe.app.uploads import LoadedFiles
from zeropipe.core.formats.csv import to_csv
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError
from zeropipe.viz import draw

MEDIA_TYPES = {
    "html": "text/html", "svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf",
    "csv": "text/csv", "json": "application/json",
}  # fmt: skip
assert MEDIA_TYPES.keys() == set(get_args(Format))
# actions of a file that is written in a few seconds and opens in a few more; the command line has no such limit
MAX_ACTIONS = {"svg": 400_000, "png": 400_000, "pdf": 100_000, "json": 200_000}


def require_format(format: Format, choices: Sequence[ResolvedChoice]) -> None:
    """Raise Refusal if a file of this format cannot hold the schedules."""
    count = sum(choice.num_actions for choice in choices)
    if format == "csv" and len(choices) > 1:
        raise Refusal(("format", f"a .csv holds one schedule, not {len(choices)}: download each one's own file"))
    if count > MAX_ACTIONS.get(format, count):
        raise Refusal((
            "format",
            f"a .{format} of {count:,} actions is more than the page writes ({MAX_ACTIONS[format]:,}): "
            "use .html, fewer microbatches, or the command line",
        ))  # fmt: skip


def create_file(request: FileRequest, format: Format, files: LoadedFiles) -> tuple[str, bytes]:
    """Return a file's name and content; Refusal if any schedule of the request cannot be built."""
    shown, errors = build_timelines(request, files)
    if errors:
        raise Refusal(*errors)
    timelines = [one.timeline for one in shown]
    name = re.sub(r"[^\w.-]+", "-", "-".join(t.title for t in timelines[:4]), flags=re.ASCII).strip("-")[:80]
    try:
        return f"{name or 'zeropipe'}.{format}", _content(request, format, timelines)
    except ConfigError as error:
        raise Refusal(("format", str(error))) from None


def _content(request: FileRequest, format: Format, timelines: list[Timeline]) -> bytes:
    if format == "csv":
        return to_csv(timelines[0].schedule).encode()
    options: dict[str, Any] = {} if format == "json" else {"theme": request.theme, "labels": request.labels}
    if format in ("svg", "png", "pdf") and request.width is not None:
        options["width"] = request.width
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"picture.{format}"
        draw(timelines if len(timelines) > 1 else timelines[0], path, **options)
        return path.read_bytes()
