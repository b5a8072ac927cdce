"""A .toml file that holds schedule, sizes and costs together, or a training file: either may stand wherever a schedule
is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropipe.cli.training_file import from_training_file, is_training_file
from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix, read_text
from zeropipe.core.formats.parse import parse_toml
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.errors import ConfigError, short, suggest

if TYPE_CHECKING:
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts
    from zeropipe.train.stage_costs import RunCosts

_COUNT = "a whole number from 1 on is needed, or a list of them"


@dataclass(frozen=True)
class Config:
    """What a file gives; empty or None where it gives nothing."""

    schedule: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()
    stages_per_rank: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    weight_parts: int | None = None
    per: str | None = None
    run: Mapping[str, Any] = field(default_factory=dict)  # flags of `zeropipe run`
    costs: Costs | LayerCosts | RunCosts | None = None


def read_config(path: str) -> Config:
    """The Config of a .toml file; ConfigError names the field, its value, the rule and the way out."""
    text = read_text(path, COMMAND_LINE)
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if is_training_file(data):
        return Config(**from_training_file(path))
    known = [one.name for one in fields(Config)]
    for name in data:
        if name not in known:
            raise ConfigError(f"{path}: unknown field {short(name)}: {_hint(name, known)}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        try:
            values[name] = _READERS[name](value, Path(path).parent)
        except _Wrong as rule:
            raise ConfigError(f"{path}: {name}={short(value)}: {rule}") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return Config(**values)


def _hint(name: str, known: list[str]) -> str:
    from zeropipe.sim.costs import Costs

    if name in {one.name for one in fields(Costs)}:
        return "costs belong into a table [costs]; a file of costs alone is given with --costs"
    return suggest(name, known)


class _Wrong(Exception):
    """The rule that a value breaks."""


def _schedules(value: Any, folder: Path) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(spec, str) and spec for spec in listed):
        raise _Wrong('the name of a schedule is needed, like "zbv", or a list of them')
    if any(has_suffix(spec, ".toml") for spec in listed):
        raise _Wrong("a file like this one cannot name another: name a schedule, or a .csv or .json file")
    return tuple(_beside(spec, folder) for spec in listed)


def _beside(spec: str, folder: Path) -> str:
    """A file's name is meant from the folder of the file that names it."""
    path = spec.partition(":")[0]
    return str(folder / spec) if has_suffix(path, *SCHEDULE_SUFFIXES, ".py") else spec


def _counts(value: Any, folder: Path) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(type(count) is int and count >= 1 for count in listed):
        raise _Wrong(_COUNT)
    return tuple(dict.fromkeys(listed))


def _options(value: Any, folder: Path) -> dict[str, Any]:
    plain = isinstance(value, dict) and all(isinstance(one, int | float | str) for one in value.values())
    if not plain:
        raise _Wrong("a table of the schedule's own options is needed, like {group_size = 4}")
    return dict(value)


def _parts(value: Any, folder: Path) -> int:
    if type(value) is not int or not 1 <= value <= MAX_WEIGHT_PARTS:
        raise _Wrong(f"a W is cut into 1 to {MAX_WEIGHT_PARTS} parts")
    return value


def _per(value: Any, folder: Path) -> str:
    if value not in ("rank", "stage"):
        raise _Wrong('costs are per "rank" or per "stage"')
    return str(value)


def _run(value: Any, folder: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong('a table of the flags of `zeropipe run` is needed, like {model = "qwen3-0.6b"}')
    return dict(value)


def _costs(value: Any, folder: Path) -> Costs | LayerCosts:
    from zeropipe.core.limits import require_costs
    from zeropipe.sim.costs import costs_from

    if isinstance(value, str) and value:
        from zeropipe.sim.fit import load_costs

        return load_costs(str(folder / value))
    if not isinstance(value, dict):
        raise _Wrong("a table of costs is needed, like {f = 1.0}, or the name of a costs file")
    require_costs(value, "costs.")
    return costs_from(value)


_READERS = {
    "schedule": _schedules, "ranks": _counts, "microbatches": _counts, "stages_per_rank": _counts,
    "options": _options, "weight_parts": _parts, "per": _per, "run": _run,
    "costs": _costs,
}  # fmt: skip
