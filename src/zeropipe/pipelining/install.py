"""Replace torch's schedule classes, for programs whose imports cannot be edited."""

from __future__ import annotations

import sys
from typing import Any

from zeropipe.pipelining import private, schedules

_originals: list[tuple[Any, str, Any]] = []  # module, name, original value


def install() -> None:
    """Replace torch's schedule classes by ours, also in modules that have imported them already."""
    if _originals:
        return
    torch_schedules = private.schedules
    ours = {kind.__name__: kind for kind in schedules.CLASSES.values() if hasattr(torch_schedules, kind.__name__)} | {
        "get_schedule_class": schedules.get_schedule_class,
        "_PipelineScheduleRuntime": schedules.PipelineSchedule,
    }
    replaced = {id(getattr(torch_schedules, name)): kind for name, kind in ours.items()}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("zeropipe."):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replaced:
                _originals.append((module, name, value))
                setattr(module, name, replaced[id(value)])


def uninstall() -> None:
    """Restore torch's own classes."""
    while _originals:
        module, name, value = _originals.pop()
        setattr(module, name, value)
