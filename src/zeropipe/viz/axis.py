"""The time axis: its unit and its ticks."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, log10

from zeropipe.core.units import number, tick_step

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def axis_unit(longest: float, unit: str) -> tuple[float, str]:
    """The unit of the axis, in the timelines' own unit, and its name; chosen so that numbers on the axis are short."""
    if unit == "s" and 1e-9 <= longest < 1e6:
        return next((factor, name) for factor, name in _SECONDS if longest >= factor)
    if 1e-3 <= longest < 1e6:
        return 1.0, unit
    power = 3 * floor(log10(longest) / 3)
    return 10.0**power, f"×10^{power} {unit}".rstrip()


def ticks(longest: float, factor: float, most: int) -> Iterator[tuple[float, str]]:
    """(time in the timelines' own unit, text) from 0, at most `most` steps."""
    step = tick_step(longest / factor, most)
    for n in range(int(longest / factor / step + 1e-9) + 1):
        yield n * step * factor, number(n * step, 6)
