"""A training file and the fields of the command line -> RunConfig, with an error line for each invalid field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zeropipe.core.files import COSTS_SUFFIXES, SCHEDULE_SUFFIXES, has_suffix, read_text
from zeropipe.core.formats.parse import parse_toml
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.core.model.configs import BUILT_IN
from zeropipe.errors import ConfigError, short
from zeropipe.train.config.fields import describe_rule, field_names, find_field, suggest_field, tables
from zeropipe.train.config.overrides import merge_overrides, parse_overrides
from zeropipe.train.config.tables import BYTE_TOKENIZER, RunConfig, TrainTable

PATH_FIELDS = (
    "model.path", "lora.adapter", "schedule.name", "schedule.costs", "data.path", "data.tokenizer", "evaluation.path",
    "train.output", "checkpoint.resume",
)  # fmt: skip
_MAX_ERROR_LINES = 6


def read_run(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (None: no file) and arguments like ["--mesh.pp", "4"], which take precedence.

    Relative paths in the file start at its folder, those in arguments at the current folder. ConfigError with a line
    for each invalid field. Without data.kind, the kind is that of the files in data.path.
    """
    values = parse_overrides(overrides)
    config = validate(_read_file(Path(path)) if path is not None else {}, values, str(path or "command line"))
    data = config.data
    if data.path is None or "kind" in data.model_fields_set:
        return config
    from zeropipe.train.data.detect import detect_kind

    return config.model_copy(update={"data": data.model_copy(update={"kind": detect_kind(data)})})


def validate(table: dict[str, Any], overrides: dict[str, Any], source: str) -> RunConfig:
    """The RunConfig of a file's data and overrides. ConfigError with a line for each invalid field of `source`."""
    try:
        return RunConfig.model_validate(merge_overrides(table, overrides))
    except ValidationError as error:
        lines: dict[str, str] = {}
        for one in error.errors():
            name = ".".join(map(str, one["loc"][:2]))  # what follows is inside the field's value
            lines.setdefault(name, _error_line(one, name, overrides, source))
        raise ConfigError("\n".join(limit_lines(list(lines.values())))) from None


def limit_lines(lines: list[str]) -> list[str]:
    """The first error lines, and the number of further ones."""
    more = len(lines) - _MAX_ERROR_LINES
    return lines if more <= 0 else [*lines[:_MAX_ERROR_LINES], f"and {more} more"]


def _error_line(error: Mapping[str, Any], name: str, overrides: Mapping[str, Any], source: str) -> str:
    field = find_field(name)
    if error["type"] == "missing":
        flag = name if "." in name else f"{name}.{next(iter(tables()[name].model_fields))}"
        return f"{source}: {name} is missing; set it in the file, or use --{flag} ..."
    if error["type"] == "extra_forbidden":
        return f"{source}: unknown field {name}: {suggest_field(name, [*tables(), *field_names()])}"
    if field is None:
        return f"{source}: {name}={short(error['input'])}: must be a table, written as [{name}] and its fields"
    value = overrides.get(name, error["input"])
    if name not in overrides:
        where = f"{source}: {name}={short(value)}"
    elif isinstance(value, list):
        where = f"--{name} {','.join(map(str, value))}"
    else:
        where = f"--{name} {short(value).strip(chr(39))}"
    if error["type"] == "less_than_equal" and isinstance(value, int):
        return f"{where}: must be at most {error['ctx']['le']:,}"
    return f"{where}: must be {describe_rule(field)}"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        table = parse_toml(read_text(path, COMMAND_LINE, "the training file"))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if isinstance(table.setdefault("train", {}), dict):  # the default is relative to the file's folder, too
        table["train"].setdefault("output", TrainTable.model_fields["output"].default)
    for name in PATH_FIELDS:
        section, _, field = name.partition(".")
        inner = table.get(section)
        if isinstance(inner, dict) and field in inner:
            inner[field] = _resolve_path(inner[field], path.parent, name)
    return table


def _resolve_path(value: Any, folder: Path, name: str) -> Any:
    """A path of a file in `folder`, from the current folder."""
    if isinstance(value, list):
        return [_resolve_path(one, folder, name) for one in value]
    if not isinstance(value, str) or not value or not is_path(value, name):
        return value
    return str(folder / Path(value).expanduser())


def is_path(value: str, name: str) -> bool:
    """Whether a value of PATH_FIELDS is a path, and not the name of a model, a schedule or a GPU, or a keyword."""
    if name == "model.path":
        return value.lower() not in BUILT_IN
    if name == "data.tokenizer":
        return value != BYTE_TOKENIZER
    if name == "schedule.name":
        return has_suffix(value.partition(":")[0], *SCHEDULE_SUFFIXES, ".py")
    if name == "checkpoint.resume":
        return value not in ("auto", "never")
    return name != "schedule.costs" or has_suffix(value, *COSTS_SUFFIXES)
