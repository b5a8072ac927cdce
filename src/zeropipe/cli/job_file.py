"""A job file: a .toml file with schedule, sizes and costs. Commands take it, or a training file, for a schedule."""

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


@dataclass(frozen=True)
class JobFile:
    """The fields of a job file; empty or None where not set."""

    schedule: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    microbatches: tuple[int, ...] = ()
    stages_per_rank: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    weight_parts: int | None = None
    per: str | None = None
    run: Mapping[str, Any] = field(default_factory=dict)  # options of `zeropipe run`
    costs: Costs | LayerCosts | RunCosts | None = None


def read_job_file(path: str) -> JobFile:
    """Read a job file or a training file; ConfigError names the field, its value, the rule and the way out."""
    text = read_text(path, COMMAND_LINE)
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if is_training_file(data):
        return JobFile(**from_training_file(path))
    known = [one.name for one in fields(JobFile)]
    for name in data:
        if name not in known:
            raise ConfigError(f"{path}: unknown field {short(name)}: {_hint(name, known)}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        try:
            values[name] = _READERS[name](value, Path(path).parent)
        except _InvalidValue as rule:
            raise ConfigError(f"{path}: {name}={short(value)}: {rule}") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return JobFile(**values)


def _hint(name: str, known: list[str]) -> str:
    from zeropipe.sim.costs import Costs

    if name in {one.name for one in fields(Costs)}:
        return "costs belong in a table [costs]; pass a file of costs with --costs"
    return suggest(name, known)


class _InvalidValue(Exception):
    """The rule for a field, which its value breaks."""


def _schedules(value: Any, folder: Path) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(spec, str) and spec for spec in listed):
        raise _InvalidValue('must be the name of a schedule, like "zbv", or a list of names')
    if any(has_suffix(spec, ".toml") for spec in listed):
        raise _InvalidValue("must not be another .toml file; use a schedule's name, or a .csv or .json file")
    return tuple(_resolve(spec, folder) for spec in listed)


def _resolve(spec: str, folder: Path) -> str:
    """Resolve the path of a schedule file relative to the job file's folder."""
    path = spec.partition(":")[0]
    return str(folder / spec) if has_suffix(path, *SCHEDULE_SUFFIXES, ".py") else spec


def _counts(value: Any, folder: Path) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(type(count) is int and count >= 1 for count in listed):
        raise _InvalidValue("must be a positive integer, or a list of them")
    return tuple(dict.fromkeys(listed))


def _options(value: Any, folder: Path) -> dict[str, Any]:
    plain = isinstance(value, dict) and all(isinstance(one, int | float | str) for one in value.values())
    if not plain:
        raise _InvalidValue("must be a table of the schedule's options, like {group_size = 4}")
    return dict(value)


def _parts(value: Any, folder: Path) -> int:
    if type(value) is not int or not 1 <= value <= MAX_WEIGHT_PARTS:
        raise _InvalidValue(f"must be an integer from 1 to {MAX_WEIGHT_PARTS}")
    return value


def _per(value: Any, folder: Path) -> str:
    if value not in ("rank", "stage"):
        raise _InvalidValue('must be "rank" or "stage"')
    return str(value)


def _run(value: Any, folder: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _InvalidValue('must be a table of options of `zeropipe run`, like {model = "qwen3-0.6b"}')
    return dict(value)


def _costs(value: Any, folder: Path) -> Costs | LayerCosts:
    from zeropipe.core.limits import require_costs
    from zeropipe.sim.costs_file import costs_from_data

    if isinstance(value, str) and value:
        from zeropipe.sim.costs_file import load_costs

        return load_costs(str(folder / value))
    if not isinstance(value, dict):
        raise _InvalidValue("must be a table of costs, like {f = 1.0}, or the name of a costs file")
    require_costs(value, "costs.")
    return costs_from_data(value)


_READERS = {
    "schedule": _schedules, "ranks": _counts, "microbatches": _counts, "stages_per_rank": _counts,
    "options": _options, "weight_parts": _parts, "per": _per, "run": _run,
    "costs": _costs,
}  # fmt: skip
