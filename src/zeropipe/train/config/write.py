"""A RunConfig as the text of a training file, and an example of one that explains itself."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from zeropipe.train.config.models import RunConfig
from zeropipe.train.config.overrides import choices_of, is_optional, parse_overrides, tables
from zeropipe.train.config.read import FILES, is_file, validated

# what a new file trains: seconds on a laptop, without any file
EXAMPLE = {
    "model.path": "tiny-qwen3", "model.weights": "random", "mesh.pp": 2, "data.sequence": 128, "train.steps": 20,
}  # fmt: skip
WIDTH, BEHIND = 118, 32  # columns of an example; of what stands before an explanation


def to_toml(config: RunConfig) -> str:
    """All fields that have a value; names of files from the root, so that the text may be kept anywhere."""
    blocks = []
    for table, values in config.model_dump(exclude_none=True).items():
        inner = {name: _anywhere(f"{table}.{name}", value) for name, value in values.items()}
        plain = {name: value for name, value in inner.items() if not isinstance(value, dict)}
        blocks.append("\n".join([f"[{table}]", *(f"{name} = {toml_value(value)}" for name, value in plain.items())]))
        for name, value in inner.items():
            if isinstance(value, dict) and value:
                lines = [f"{json.dumps(key)} = {toml_value(one)}" for key, one in value.items()]
                blocks.append("\n".join([f"[{table}.{name}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def example(overrides: Sequence[str] = (), folder: Path = Path()) -> str:
    """A training file for `folder` with every field explained. What has its default is a comment; `overrides` are
    written out."""
    values = {**EXAMPLE, **parse_overrides(overrides)}
    validated({}, values, "command line")
    if folder.resolve() != Path().resolve():  # on the command line names are meant from the current folder
        values = {name: _anywhere(name, value) for name, value in values.items()}
    blocks = []
    for table, model in tables().items():
        given = any(name.startswith(f"{table}.") for name in values)
        off = "# " if is_optional(RunConfig.model_fields[table]) and not given else ""
        lines = [f"# {model.__doc__}", f"{off}[{table}]"]
        for name, field in model.model_fields.items():
            lines += _field(_line(name, field, values, f"{table}.{name}"), explained(field))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def explained(field: FieldInfo) -> str:
    """What a field is, and what it may be where that is a choice."""
    text = str(field.description)
    choices = choices_of(field)
    return text if not choices or f"`{choices[-1]}`" in text else f"{text} One of {', '.join(choices)}."


def _field(line: str, text: str) -> list[str]:
    """A field's line with what it is behind it, or above it where that is long."""
    if len(text) <= WIDTH - BEHIND - 2:
        return [f"{line:<{BEHIND}}# {text}"]
    return [*textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# "), line.rstrip()]


def _line(name: str, field: FieldInfo, values: dict[str, Any], full: str) -> str:
    inner = {key.removeprefix(f"{full}."): value for key, value in values.items() if key.startswith(f"{full}.")}
    if inner:
        return f"{name} = {{{', '.join(f'{json.dumps(key)} = {toml_value(one)}' for key, one in inner.items())}}} "
    if values.get(full) is not None:
        return f"{name} = {toml_value(values[full])} "
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return f"# {name} = {'...' if default is None else toml_value(default)} "


def toml_value(value: Any) -> str:
    """Texts, numbers and lists are written in TOML as in JSON, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _anywhere(name: str, value: Any) -> Any:
    if name not in FILES:
        return value
    if isinstance(value, (list, tuple)):
        return [_anywhere(name, one) for one in value]
    return str(Path(value).absolute()) if is_file(value, name) else value
