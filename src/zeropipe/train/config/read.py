"""A training file and the fields of the command line -> RunConfig. What is wrong is told in a line per mistake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zeropipe.core.files import COSTS, SCHEDULES, has_suffix, read_text
from zeropipe.core.formats.parse import parse_toml
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.errors import ConfigError
from zeropipe.train.config.models import BYTE_TOKENIZER, RunConfig, TrainTable
from zeropipe.train.config.overrides import merged, parse_overrides
from zeropipe.train.config.words import lines_of

FILES = (  # fields that name files
    "model.path", "lora.adapter", "schedule.name", "schedule.costs", "data.path", "data.tokenizer", "evaluation.path",
    "train.output", "checkpoint.resume",
)  # fmt: skip


def read_run(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a TOML file (None: there is none) and of arguments like ["--mesh.pp", "4"], which win.

    Names of files are meant from the folder of the file that names them, or from the current one on a command line.
    ConfigError with a line for each mistake.
    """
    given = parse_overrides(overrides)
    return validated(_file(Path(path)) if path is not None else {}, given, str(path or "command line"))


def validated(table: dict[str, Any], overrides: dict[str, Any], where: str) -> RunConfig:
    """The config of a table with other values; ConfigError with a line for each mistake, as `where` has it."""
    try:
        return RunConfig.model_validate(merged(table, overrides))
    except ValidationError as error:
        raise ConfigError("\n".join(lines_of(error, overrides, where))) from None


def _file(path: Path) -> dict[str, Any]:
    try:
        table = parse_toml(read_text(path, COMMAND_LINE, "the training file"))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    if isinstance(table.setdefault("train", {}), dict):  # the default is a name of a file as well
        table["train"].setdefault("output", TrainTable.model_fields["output"].default)
    for name in FILES:
        section, _, field = name.partition(".")
        inner = table.get(section)
        if isinstance(inner, dict) and field in inner:
            inner[field] = _beside(inner[field], path.parent, name)
    return table


def _beside(value: Any, folder: Path, name: str) -> Any:
    """A file's name as it is from here."""
    if isinstance(value, list):
        return [_beside(one, folder, name) for one in value]
    if not isinstance(value, str) or not value or not is_file(value, name):
        return value
    return str(folder / Path(value).expanduser())


def is_file(value: str, name: str) -> bool:
    """Whether it is no name of a model, a schedule or a GPU, and no word."""
    from zeropipe.core.model.configs import BUILT_IN, CONFIGS

    if name == "model.path":
        return value not in BUILT_IN and value.lower() not in CONFIGS
    if name == "data.tokenizer":
        return value != BYTE_TOKENIZER
    if name == "schedule.name":
        return has_suffix(value.partition(":")[0], *SCHEDULES, ".py")
    if name == "checkpoint.resume":
        return value not in ("auto", "never")
    return name != "schedule.costs" or has_suffix(value, *COSTS)
