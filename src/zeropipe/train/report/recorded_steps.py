"""Steps whose timelines were recorded, in memory and on disk, so that the report of a resumed run includes all of them.

On disk each is the JSON file of a timeline with one more field: `zeropipe trace compare` and `zeropipe draw` read it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeropipe.core.files import read_text, write_whole
from zeropipe.core.formats.json import from_data, to_data
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ZeropipeError

_FIELD = "train"  # beside the fields of the timeline


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """The measured timeline of a step. `seconds` is the time of the full step: also data, clipping and the optimizer.

    `setup` describes how it ran, because a run may be resumed on another layout.
    """

    step: int
    timeline: Timeline
    seconds: float
    setup: str = ""


def save_step(recorded: RecordedStep, folder: Path) -> None:
    """Write a recorded step."""
    folder.mkdir(parents=True, exist_ok=True)
    extra = {"step": recorded.step, "seconds": recorded.seconds, "setup": recorded.setup}
    data = json.dumps({**to_data(recorded.timeline), _FIELD: extra})
    write_whole(folder / f"step-{recorded.step:06d}.json", data)


def load_steps(folder: Path, last: int) -> list[RecordedStep]:
    """The recorded steps up to step `last`. Later ones, which the resumed run repeats, are deleted."""
    found = []
    for path in sorted(folder.glob("step-*.json")):
        with suppress(ZeropipeError, ValueError, KeyError, TypeError):
            data = json.loads(read_text(path, COMMAND_LINE))
            extra, timeline = data[_FIELD], from_data(data)
            if extra["step"] > last:
                path.unlink()
            elif isinstance(timeline, Timeline):
                found.append(RecordedStep(int(extra["step"]), timeline, float(extra["seconds"]), str(extra["setup"])))
    return sorted(found, key=lambda recorded: recorded.step)
