"""Recorded steps on the disk, so that the report of a resumed run begins where the run began.

Each is a timeline's JSON file with a few words more: `zeropipe trace compare` and `zeropipe draw` read it, too.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from zeropipe.core.files import read_text, write_whole
from zeropipe.core.formats.json import from_plain, plain
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ZeropipeError
from zeropipe.train.report.drift import Recorded

FIELD = "train"  # beside the fields of the timeline


def save(recorded: Recorded, folder: Path) -> None:
    """Write one recorded step."""
    folder.mkdir(parents=True, exist_ok=True)
    more = {"step": recorded.step, "seconds": recorded.seconds, "setup": recorded.setup}
    write_whole(_path(folder, recorded.step), json.dumps({**plain(recorded.timeline), FIELD: more}))


def load(folder: Path, last: int) -> list[Recorded]:
    """What was recorded up to step `last`; later ones are removed: the run makes these steps again."""
    found = []
    for path in sorted(folder.glob("step-*.json")):
        with suppress(ZeropipeError, ValueError, KeyError, TypeError):
            data = json.loads(read_text(path, COMMAND_LINE))
            more, timeline = data[FIELD], from_plain(data)
            if more["step"] > last:
                path.unlink()
            elif isinstance(timeline, Timeline):
                found.append(Recorded(int(more["step"]), timeline, float(more["seconds"]), str(more["setup"])))
    return sorted(found, key=lambda one: one.step)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.json"
