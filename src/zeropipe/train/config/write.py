"""RunConfig -> the text of a training file, and an example file that explains every field."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from zeropipe.core.formats.toml import format_table, format_value
from zeropipe.train.config.fields import choices_of, is_optional, tables
from zeropipe.train.config.overrides import parse_overrides
from zeropipe.train.config.read import PATH_FIELDS, is_path, validate
from zeropipe.train.config.tables import RunConfig

# a run that takes seconds on a laptop and needs no files
EXAMPLE = {
    "model.path": "tiny-qwen3", "model.weights": "random", "mesh.pp": 2, "data.sequence": 128, "train.steps": 20,
}  # fmt: skip
_WIDTH, _COMMENT_COLUMN = 118, 32


def to_toml(config: RunConfig) -> str:
    """The text of a training file with all fields that have a value. Paths are absolute, so that it may be moved."""
    blocks = []
    for table, values in config.model_dump(exclude_none=True).items():
        values = {name: _absolute(f"{table}.{name}", value) for name, value in values.items()}
        inner = {name: value for name, value in values.items() if isinstance(value, dict)}
        blocks.append(format_table(table, {name: value for name, value in values.items() if name not in inner}))
        for name, value in inner.items():
            if value:
                blocks.append(format_table(f"{table}.{name}", {json.dumps(key): one for key, one in value.items()}))
    return "\n\n".join(blocks) + "\n"


def format_example(overrides: Sequence[str] = (), folder: Path = Path()) -> str:
    """The text of a training file for `folder` that explains every field. Fields with their default are comments."""
    values = {**EXAMPLE, **parse_overrides(overrides)}
    validate({}, values, "command line")
    if folder.resolve() != Path().resolve():  # relative paths of the command line start at the current folder
        values = {name: _absolute(name, value) for name, value in values.items()}
    blocks = []
    for table, model in tables().items():
        is_set = any(name.startswith(f"{table}.") for name in values)
        comment = "# " if is_optional(RunConfig.model_fields[table]) and not is_set else ""
        lines = [f"# {model.__doc__}", f"{comment}[{table}]"]
        for name, field in model.model_fields.items():
            lines += _explain(_field_line(name, field, values, f"{table}.{name}"), _describe(field))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _describe(field: FieldInfo) -> str:
    text, choices = str(field.description), choices_of(field)
    return text if not choices or f"`{choices[-1]}`" in text else f"{text} One of {', '.join(choices)}."


def _explain(line: str, text: str) -> list[str]:
    """A line of a field with its explanation after it, or before it if that is long."""
    if len(text) <= _WIDTH - _COMMENT_COLUMN - 2:
        return [f"{line:<{_COMMENT_COLUMN}}# {text}"]
    return [*textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# "), line.rstrip()]


def _field_line(name: str, field: FieldInfo, values: dict[str, Any], full_name: str) -> str:
    prefix = f"{full_name}."
    options = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    if options:
        return f"{name} = {{{', '.join(f'{json.dumps(key)} = {format_value(one)}' for key, one in options.items())}}} "
    if values.get(full_name) is not None:
        return f"{name} = {format_value(values[full_name])} "
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return f"# {name} = {'...' if default is None else format_value(default)} "


def _absolute(name: str, value: Any) -> Any:
    """A value with absolute paths."""
    if name not in PATH_FIELDS:
        return value
    if isinstance(value, (list, tuple)):
        return [_absolute(name, one) for one in value]
    return str(Path(value).absolute()) if is_path(value, name) else value
