"""Refuses timelines that cannot be drawn: any program may have created them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from zeropipe.core.packed import decode, is_joined
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
    start, end, *memory = (np.frombuffer(column) for column in (timeline.start, timeline.end, *(timeline.memory or ())))
    if any(len(column) != timeline.schedule.num_actions for column in (start, end, *memory)):
        raise ConfigError(f"{where}: its columns must have one entry for each action of its schedule")
    too_large = ~((np.abs(start) <= LARGEST) & (np.abs(end) <= LARGEST))  # NaN, too
    turned = end < start
    early = np.append(False, start[1:] < start[:-1])
    early[[at for at in timeline.schedule.packed.offsets if at < len(start)]] = False  # another rank begins there
    early[1:] &= is_joined(np.frombuffer(timeline.schedule.packed.codes, np.int64))[:-1] == 0  # halves of an Overlap
    for wrong, rule in (
        (too_large, f"times must be at most {LARGEST:g}"), (turned, "an end must not be before its start"),
        (early, "the actions of a rank must start in the order of its row"),
    ):  # fmt: skip
        if wrong.any():
            at = int(wrong.argmax())
            raise ConfigError(f"{where}: {_action(timeline, at)} runs from {start[at]:g} to {end[at]:g}; {rule}")
    if timeline.sharding is not None:
        first, last = (np.frombuffer(column) for column in (timeline.sharding.start, timeline.sharding.end))
        if not ((np.abs(first) <= LARGEST) & (np.abs(last) <= LARGEST) & (first <= last)).all():
            raise ConfigError(
                f"{where}: times of gathers and reductions must be at most {LARGEST:g}, and start before they end"
            )
    for column in memory:
        wrong = ~(np.abs(column) <= LARGEST)
        if wrong.any():
            at = int(wrong.argmax())
            raise ConfigError(
                f"{where}: {_action(timeline, at)} has memory {column[at]:g}: must be at most {LARGEST:g}"
            )


def _action(timeline: Timeline, at: int) -> str:
    return str(decode(memoryview(timeline.schedule.packed.codes).cast("q")[at]))
