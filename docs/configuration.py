"""Write the tables of docs/configuration.md: `python docs/configuration.py [file]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zeropipe.train.config.fields import choices_of, describe_rule, is_optional, tables
from zeropipe.train.config.tables import RunConfig

FILE = Path(__file__).parent / "configuration.md"
MARK = "<!-- from here on written by docs/configuration.py -->\n"


def format_tables() -> str:
    """The text after the mark."""
    return "\n".join(_table(name, model) for name, model in tables().items())


def _table(name: str, model: type[BaseModel]) -> str:
    optional = " Optional." if is_optional(RunConfig.model_fields[name]) else ""
    rows = [_row(field_name, field) for field_name, field in model.model_fields.items()]
    head = [
        f"## `[{name}]`",
        "",
        f"{model.__doc__}{optional}",
        "",
        "| field | default | values | |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _row(name: str, field: FieldInfo) -> str:
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = "" if value is None else f"`{json.dumps(value)}`"
    choices = ", ".join(f"`{choice}`" for choice in choices_of(field))
    rule = choices or describe_rule(field)
    return f"| `{name}` | {default} | {rule} | {field.description} |"


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    text = FILE.read_text().partition(MARK)[0]
    target.write_text(text + MARK + "\n" + format_tables())


if __name__ == "__main__":
    main()
