"""Rebinds torch's names, for programs whose imports cannot be edited."""

from __future__ import annotations

import sys
from typing import Any

from zeropipe.pipelining import private, schedules

_originals: list[tuple[Any, str, Any]] = []  # module, name, what it was


def install() -> None:
    """From here on torch's schedule classes are ours, also in modules that have imported them already."""
    if _originals:
        return
    torchs = private.schedules
    ours = {kind.__name__: kind for kind in schedules.CLASSES.values() if hasattr(torchs, kind.__name__)} | {
        "get_schedule_class": schedules.get_schedule_class,
        "_PipelineScheduleRuntime": schedules.PipelineSchedule,
    }
    replaced = {id(getattr(torchs, name)): kind for name, kind in ours.items()}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("zeropipe."):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replaced:
                _originals.append((module, name, value))
                setattr(module, name, replaced[id(value)])


def uninstall() -> None:
    """torch's own classes are back."""
    while _originals:
        module, name, value = _originals.pop()
        setattr(module, name, value)
