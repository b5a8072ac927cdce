"""Numbers: from other libraries to Python, and to short texts for readers."""

from __future__ import annotations

from math import ceil, floor, log10
from typing import Any

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B"))  # decimal, as memory limits and GPUs


def to_python(value: Any) -> Any:
    """Python's own number, or list of numbers, for one of numpy, torch or jax; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def number(value: float, digits: int = 4) -> str:
    """A number with `digits` significant digits, without an exponent unless it is tiny: 3, 0.25, 1234000, 1e-15."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - floor(log10(abs(value))))
    if decimals > 12:
        return f"{value:.{digits}g}"
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def time_text(value: float, unit: str) -> str:
    """A time with its unit: `3.5`, or `1.2 ms` for seconds."""
    return _scaled(value, SECONDS) if unit == "s" else f"{number(value)} {unit}".strip()


def size_text(value: float, unit: str) -> str:
    """A memory size with its unit: `4`, or `1.5 GB` for bytes."""
    return _scaled(value, _BYTES) if unit == "B" else f"{number(value)} {unit}".strip()


def gigabytes(size: float) -> str:
    """Bytes in gigabytes, the unit of memory limits: `75.8 GB`; small sizes in megabytes: `42 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{number(size / 1e6, 2)} MB"


def count_text(count: int, noun: str) -> str:
    """A count with its noun, singular or plural: `1 rank`, `4,096 tokens`, `2 batches`, `3 entries`."""
    if count != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{count:,} {noun}"


def parameters_text(count: int) -> str:
    """`8,190.7M parameters`, or exactly if there are less than a million: `42,560 parameters`."""
    return count_text(count, "parameter") if count < 1e6 else f"{count / 1e6:,.1f}M parameters"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def _scaled(value: float, scales: tuple[tuple[float, str], ...]) -> str:
    for factor, name in scales:
        if abs(value) >= factor:
            return f"{number(value / factor)} {name}"
    factor, name = next(scale for scale in scales if scale[0] == 1) if value == 0 else scales[-1]
    return f"{number(value / factor)} {name}"


def tick_step(span: float, max_ticks: int) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten that puts at most `max_ticks` ticks on `span`."""
    if span <= 0:
        return 1.0
    base = 10.0 ** ceil(log10(span / max_ticks) - 1)
    limit = max_ticks * (1 + 1e-9)  # sums are rounded
    return next(base * factor for factor in (1, 2, 5, 10) if span / (base * factor) <= limit)
