"""One palette for every output: a hue per kind, lighter to darker by the stage's pass over the ranks.

The hues were chosen for the smallest distance between any two kinds and shades, as seen with normal sight and with
protanopia, deuteranopia and tritanopia (a test measures it).
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import cos, radians, sin
from typing import Any

from zeropipe.core.placement import Placement

# OKLCH: lightness, chroma, hue
KINDS = {"F": (0.50, 0.16, 260.0), "B": (0.525, 0.165, 32.0), "I": (0.81, 0.14, 87.0), "W": (0.83, 0.11, 168.0)}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
SHARDING = {"unshard": "weights gathered", "reduce": "gradients reduced"}  # in a lane below a rank's boxes
OFFLOADING = {"offload": "offloaded to the host", "reload": "reloaded"}  # in the same lane
LANE_WORDS = {**SHARDING, **OFFLOADING}
LANE_COLORS = {  # of copies; those of sharding are in the themes
    "light": {"offload": "#0e7490", "reload": "#7c3aed"}, "dark": {"offload": "#22d3ee", "reload": "#c4b5fd"},
}  # fmt: skip
DARK_INK = "#10141c"
MIXED = "#8b93a3"  # if no kind has more than half of the time
SPREAD = 0.055  # lightness above and below for the first and the last shade
MAX_SHADES = 64

THEMES: dict[str, dict[str, str]] = {
    "light": {"paper": "#ffffff", "lane": "#f3f4f7", "ink": "#1b2130", "soft": "#667085", "line": "#d9dde5",
              "limit": "#b42318", "memory": "#7a5af8", "path": "#111827", "unshard": "#64748b", "reduce": "#be185d"},
    "dark": {"paper": "#12151c", "lane": "#1b202a", "ink": "#e8ebf2", "soft": "#97a1b3", "line": "#333b4a",
             "limit": "#ff8a7a", "memory": "#a48afb", "path": "#ffffff", "unshard": "#94a3b8", "reduce": "#f472b6"},
}  # fmt: skip


def lane_color(theme: str, look: str) -> str:
    """The colour of a piece in the lane below a rank's boxes."""
    return THEMES[theme].get(look) or LANE_COLORS[theme][look]


@cache
def shades(kind: str, count: int) -> tuple[str, ...]:
    """`count` shades of a kind's colour, lightest first."""
    light, chroma, hue = KINDS[kind]
    if count == 1:
        return (_oklch(light, chroma, hue),)
    steps = (SPREAD * (1 - 2 * i / (count - 1)) for i in range(count))
    return tuple(_oklch(light + step, chroma * (0.9 if step > 0 else 1.0), hue) for step in steps)


def shade_table(placement: Placement) -> list[list[int]]:
    """Per copy and stage, a number that differs between the stages of a rank: its pass over the ranks, or its copy.

    If there are more than `MAX_SHADES` of them, neighbours share one: they could not be distinguished.
    """
    per_copy = max(max(Counter(table).values(), default=1) for table in placement.copies)
    table = []
    for copy, ranks in enumerate(placement.copies):
        seen: dict[int, int] = {}
        row = []
        for rank in ranks:
            row.append(copy * per_copy + seen.get(rank, 0))
            seen[rank] = seen.get(rank, 0) + 1
        table.append(row)
    count = max((max(row, default=0) for row in table), default=0) + 1
    return table if count <= MAX_SHADES else [[shade * MAX_SHADES // count for shade in row] for row in table]


def ink_on(color: str) -> str:
    """Black or white, whichever reads better on `color`."""
    return "#ffffff" if contrast(color, "#ffffff") > contrast(color, DARK_INK) else DARK_INK


def palette(theme: str, count: int) -> dict[str, Any]:
    """All colours of a theme as plain data."""
    kinds = {
        k: {"name": NAMES[k], "fill": shades(k, count), "ink": [ink_on(c) for c in shades(k, count)]} for k in KINDS
    }
    return {**THEMES[theme], **LANE_COLORS[theme], "kinds": kinds}


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    """Relative luminance (WCAG)."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _oklch(light: float, chroma: float, hue: float) -> str:
    """An OKLCH colour (Ottosson, 2020) as #rrggbb."""
    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    long = (light + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (light - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (light - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{_gamma(x):02x}" for x in linear)


def _gamma(value: float) -> int:
    value = min(1.0, max(0.0, value))
    return round(255 * (value * 12.92 if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055))
