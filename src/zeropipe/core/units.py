"""Numbers: from other libraries to Python, and to short texts for readers."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import Any

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B"))  # as limits and GPUs have them


def to_python(value: Any) -> Any:
    """Python's own number, or list of numbers, for one of numpy, torch or jax; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def number(value: float, digits: int = 4) -> str:
    """At most `digits` significant digits, without an exponent unless it is tiny: 3, 0.25, 12.5, 1234000, 1e-15."""
    if value == 0:
        return "0"
    places = max(0, digits - 1 - floor(log10(abs(value))))
    if places > 12:
        return f"{value:.{digits}g}"
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def time_text(value: float, unit: str) -> str:
    """A time with its unit: `3.5`, or `1.2 ms` for seconds."""
    return _scaled(value, _SECONDS) if unit == "s" else f"{number(value)} {unit}".strip()


def size_text(value: float, unit: str) -> str:
    """A memory level with its unit: `4`, or `1.5 GB` for bytes."""
    return _scaled(value, _BYTES) if unit == "B" else f"{number(value)} {unit}".strip()


def gigabytes(size: float) -> str:
    """Bytes in the unit that limits are given in: `75.8 GB`; what is small `42 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{number(size / 1e6, 2)} MB"


def count_text(count: int, word: str) -> str:
    """So many of something: `1 rank`, `4,096 tokens`, `2 batches`, `3 entries`."""
    if count != 1:
        word = f"{word[:-1]}ies" if word.endswith("ry") else f"{word}es" if word.endswith(("s", "ch")) else f"{word}s"
    return f"{count:,} {word}"


def parameters_text(count: int) -> str:
    """`8,190.7M parameters`; few of them one by one, `42,560 parameters`."""
    return count_text(count, "parameter") if count < 1e6 else f"{count / 1e6:,.1f}M parameters"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _scaled(value: float, scales: tuple[tuple[float, str], ...]) -> str:
    for factor, name in scales:
        if abs(value) >= factor:
            return f"{number(value / factor)} {name}"
    factor, name = next(scale for scale in scales if scale[0] == 1) if value == 0 else scales[-1]
    return f"{number(value / factor)} {name}"


def tick_step(span: float, most: int) -> float:
    """The step of 1, 2 or 5 times a power of ten that puts at most `most` ticks on `span`."""
    if span <= 0:
        return 1.0
    base = 10.0 ** ceil(log10(span / most) - 1)
    most_and_rounding = most * (1 + 1e-9)
    return next(base * factor for factor in (1, 2, 5, 10) if span / (base * factor) <= most_and_rounding)
