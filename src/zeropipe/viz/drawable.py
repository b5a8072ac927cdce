"""Refuses timelines that cannot be drawn: any program may have created them."""

from __future__ import annotations

from dataclasses import replace

from zeropipe.core.jit import Floats, Ints, arrays
from zeropipe.core.packed import is_joined
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError
from zeropipe.viz.words import one_line

LARGEST = 1e100  # of times and sizes: sums of their squares are finite


def drawable(timeline: Timeline) -> Timeline:
    """The timeline, its title and units reduced to one line. ConfigError if its times or sizes cannot be drawn."""
    title, unit, memory_unit = (one_line(text) for text in (timeline.title, timeline.unit, timeline.memory_unit))
    require_drawable(timeline)
    if (title, unit, memory_unit) == (timeline.title, timeline.unit, timeline.memory_unit):
        return timeline
    return replace(timeline, label=title, unit=unit, memory_unit=memory_unit)


def require_drawable(timeline: Timeline) -> None:
    """ConfigError, naming the first action whose times or memory cannot be drawn."""
    where = f"cannot draw {one_line(timeline.title)!r}"
    if timeline.num_ranks < 1:
        raise ConfigError(f"{where}: it has no ranks")
    size, memory = timeline.schedule.num_actions, timeline.memory or ()
    if any(len(column) != 8 * size for column in (timeline.start, timeline.end, *memory)):
        raise ConfigError(f"{where}: its columns must have one entry for each action of its schedule")
    _require_times(timeline, where)
    _require_sharding_times(timeline, where)
    xp = arrays(size)
    for column in map(xp.floats, memory):
        at = int(xp.call(find_large, column))
        if at >= 0:
            raise ConfigError(
                f"{where}: {_action(timeline, at)} has memory {column[at]:g}: must be at most {LARGEST:g}"
            )


def _require_times(timeline: Timeline, where: str) -> None:
    packed = timeline.schedule.packed
    xp = arrays(packed.num_codes)
    start, end = xp.floats(timeline.start), xp.floats(timeline.end)
    large = [at for column in (start, end) if (at := int(xp.call(find_large, column))) >= 0]
    turned = int(xp.call(find_turned, start, end))
    early = int(xp.call(find_early, xp.list_ints(packed.offsets), xp.ints(packed.codes), start))
    for at, rule in (
        (min(large, default=-1), f"times must be at most {LARGEST:g}"), (turned, "an end must not be before its start"),
        (early, "the actions of a rank must start in the order of its row"),
    ):  # fmt: skip
        if at >= 0:
            raise ConfigError(f"{where}: {_action(timeline, at)} runs from {start[at]:g} to {end[at]:g}; {rule}")


def _require_sharding_times(timeline: Timeline, where: str) -> None:
    if timeline.sharding is None:
        return
    xp = arrays(timeline.sharding.packed.num_codes)
    first, last = xp.floats(timeline.sharding.start), xp.floats(timeline.sharding.end)
    found = (xp.call(find_large, first), xp.call(find_large, last), xp.call(find_turned, first, last))
    if any(at >= 0 for at in found):
        raise ConfigError(
            f"{where}: times of gathers and reductions must be at most {LARGEST:g}, and start before they end"
        )


def find_large(values: Floats) -> int:
    """The first index of a value above `LARGEST`, or NaN; -1 if there is none."""
    for at in range(len(values)):
        if not abs(values[at]) <= LARGEST:
            return at
    return -1


def find_turned(start: Floats, end: Floats) -> int:
    """The first index of an end before its start; -1 if there is none."""
    for at in range(len(start)):
        if end[at] < start[at]:
            return at
    return -1


def find_early(offsets: Ints, codes: Ints, start: Floats) -> int:
    """The first index of an action that starts before the one before it on its rank; -1 if there is none."""
    for rank in range(len(offsets) - 1):
        for at in range(offsets[rank] + 1, offsets[rank + 1]):
            if start[at] < start[at - 1] and not is_joined(codes[at - 1]):
                return at
    return -1


def _action(timeline: Timeline, at: int) -> str:
    return str(timeline.schedule.decode(memoryview(timeline.schedule.packed.codes).cast("q")[at]))
