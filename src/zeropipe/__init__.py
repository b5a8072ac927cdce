"""zeropipe plans, shows and runs pipeline-parallel training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeropipe.core import notebook

if TYPE_CHECKING:
    from zeropipe.balancing.balance import balance
    from zeropipe.core.action import Action, Kind, Overlap
    from zeropipe.core.check import check
    from zeropipe.core.formats.csv import from_csv, to_csv
    from zeropipe.core.formats.json import from_json, to_json
    from zeropipe.core.lower import lower
    from zeropipe.core.placement import Placement, Problem, linear, loop, mirror, vee
    from zeropipe.core.schedule import Program, Schedule
    from zeropipe.core.timeline import Span, Timeline
    from zeropipe.errors import ConfigError, DeadlockError, EngineError, ScheduleError, ZeropipeError
    from zeropipe.estimating.estimate import estimate
    from zeropipe.planning.plan import plan
    from zeropipe.schedules.advice import advice
    from zeropipe.schedules.lane import Lane
    from zeropipe.schedules.registry import build, names, register
    from zeropipe.searching.search import search
    from zeropipe.sim.checkpointing import with_checkpointing
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.fill import fill_gaps
    from zeropipe.sim.offload import with_offload
    from zeropipe.sim.overlaps import with_overlaps
    from zeropipe.sim.simulate import simulate
    from zeropipe.viz import draw

__version__ = "0.1.0"

# module -> public names, imported on first use: `import zeropipe` stays fast
_MEMBERS = {
    "zeropipe.core.action": ("Action", "Kind", "Overlap"),
    "zeropipe.core.check": ("check",),
    "zeropipe.core.formats.csv": ("from_csv", "to_csv"),
    "zeropipe.core.formats.json": ("from_json", "to_json"),
    "zeropipe.core.lower": ("lower",),
    "zeropipe.core.placement": ("Placement", "Problem", "linear", "loop", "mirror", "vee"),
    "zeropipe.core.schedule": ("Program", "Schedule"),
    "zeropipe.core.timeline": ("Span", "Timeline"),
    "zeropipe.errors": ("ConfigError", "DeadlockError", "EngineError", "ScheduleError", "ZeropipeError"),
    "zeropipe.schedules.advice": ("advice",),
    "zeropipe.schedules.lane": ("Lane",),
    "zeropipe.schedules.registry": ("build", "names", "register"),
    "zeropipe.balancing.balance": ("balance",),
    "zeropipe.estimating.estimate": ("estimate",),
    "zeropipe.planning.plan": ("plan",),
    "zeropipe.searching.search": ("search",),
    "zeropipe.sim.checkpointing": ("with_checkpointing",),
    "zeropipe.sim.costs": ("Costs",),
    "zeropipe.sim.fill": ("fill_gaps",),
    "zeropipe.sim.offload": ("with_offload",),
    "zeropipe.sim.overlaps": ("with_overlaps",),
    "zeropipe.sim.simulate": ("simulate",),
    "zeropipe.viz": ("draw",),
}
_MODULE_OF = {name: module for module, members in _MEMBERS.items() for name in members}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zeropipe' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _render_in_notebook(timeline: Timeline) -> str:
    from zeropipe.viz.html import to_notebook

    return to_notebook(timeline)


notebook.render_html = _render_in_notebook
