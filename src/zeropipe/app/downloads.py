"""The answer as a file to keep, by the same code as `zeropipe draw` and `zeropipe compare -o`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from zeropipe.app.errors import Refusal
from zeropipe.app.models import FileAsk, Format
from zeropipe.app.uploads import Files
from zeropipe.app.work import Plan, timelines_of
from zeropipe.core.formats.csv import to_csv
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError
from zeropipe.viz import draw

MEDIA = {
    "html": "text/html", "svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf",
    "csv": "text/csv", "json": "application/json",
}  # fmt: skip
assert MEDIA.keys() == set(get_args(Format))
# actions in a file that is made in a few seconds and opens in a few more; the command line has no such limit
MOST = {"svg": 400_000, "png": 400_000, "pdf": 100_000, "json": 200_000}


def require_form(form: Format, plans: Sequence[Plan]) -> None:
    """A Refusal for a file that would hold too much."""
    count = sum(plan.count for plan in plans)
    if form == "csv" and len(plans) > 1:
        raise Refusal(("format", f"a .csv holds one schedule, not {len(plans)}: take each one's own file"))
    if count > MOST.get(form, count):
        raise Refusal((
            "format",
            f"a .{form} of {count:,} actions is more than the page writes ({MOST[form]:,}): "
            "take .html, fewer microbatches, or the command line",
        ))  # fmt: skip


def file_of(ask: FileAsk, form: Format, files: Files) -> tuple[str, bytes]:
    """A name and the content. A schedule that was refused is a Refusal here: a file says nothing beside a field."""
    shown, refused = timelines_of(ask, files)
    if refused:
        raise Refusal(*refused)
    timelines = [one.timeline for one in shown]
    name = re.sub(r"[^\w.-]+", "-", "-".join(t.title for t in timelines[:4]), flags=re.ASCII).strip("-")[:80]
    try:
        return f"{name or 'zeropipe'}.{form}", _content(ask, form, timelines)
    except ConfigError as error:
        raise Refusal(("format", str(error))) from None


def _content(ask: FileAsk, form: Format, timelines: list[Timeline]) -> bytes:
    if form == "csv":
        return to_csv(timelines[0].schedule).encode()
    options: dict[str, Any] = {} if form == "json" else {"theme": ask.theme, "labels": ask.labels}
    if form in ("svg", "png", "pdf") and ask.width is not None:
        options["width"] = ask.width
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"picture.{form}"
        draw(timelines if len(timelines) > 1 else timelines[0], path, **options)
        return path.read_bytes()
