"""What a recorded run was of: how its model was cut, and how its blocks ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from zeropipe.core.checkpointing import Checkpointing
from zeropipe.errors import ConfigError, ScheduleError, short


@dataclass(frozen=True)
class Origin:
    """Costs of other settings say nothing about such a run."""

    layers: tuple[int, ...]  # of each stage
    ac: str = "none"
    microbatch_size: int = 1  # sequences
    sequence: int = 0  # tokens; 0 where they differ
    dtype: str = "float32"
    tp: int = 1
    compile: bool = False
    lora: bool = False

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def origin_of(data: Any, num_stages: int) -> Origin:
    """The Origin of plain data; ScheduleError for what is none."""
    rules: dict[str, Callable[[Any], bool]] = {
        "layers": lambda v: isinstance(v, list) and len(v) == num_stages and all(type(n) is int and n >= 0 for n in v),
        "ac": _is_checkpointing,
        "sequence": lambda v: type(v) is int and v >= 0,
        "dtype": lambda v: isinstance(v, str),
        **{name: lambda v: type(v) is int and v >= 1 for name in ("microbatch_size", "tp")},
        **{name: lambda v: isinstance(v, bool) for name in ("compile", "lora")},
    }
    if not isinstance(data, dict) or data.keys() != rules.keys():
        raise ScheduleError(f"origin is {short(data)}: a table with {', '.join(rules)} is needed, or null")
    for name, rule in rules.items():
        if not rule(data[name]):
            raise ScheduleError(f"{name} of origin is {short(data[name])}, which no run had: take origin out")
    return Origin(**{**data, "layers": tuple(data["layers"])})


def _is_checkpointing(value: Any) -> bool:
    try:
        return bool(Checkpointing.parse(value))
    except ConfigError:
        return False
