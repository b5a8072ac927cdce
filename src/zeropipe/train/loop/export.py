"""The end of a run: a directory that transformers (or peft) loads, made from the last checkpoint."""

from __future__ import annotations

from pathlib import Path

from zeropipe.engine.checkpoint.convert import convert
from zeropipe.engine.engine import Engine
from zeropipe.engine.run.job import DTYPES
from zeropipe.errors import ConfigError
from zeropipe.train.config.tables import BYTE_TOKENIZER, RunConfig


def export(config: RunConfig, engine: Engine, checkpoint: Path, is_first: bool) -> Path:
    """The first rank writes it, the others wait."""
    target = Path(config.train.output) / "export"
    with engine.together("the export") as team:
        place = team.fabric.place

        def begin(name: str) -> None:
            place.name = f"the export, {name}"  # it gets on

        if is_first:
            like = None if config.data.tokenizer == BYTE_TOKENIZER else config.data.tokenizer
            try:
                convert(checkpoint, target, like=like, dtype=DTYPES[config.model.dtype], begin=begin)
            except (ConfigError, OSError) as error:  # the disk is full, say
                raise ConfigError(
                    f"{error}; the checkpoint is whole: `zeropipe checkpoint convert {checkpoint} DIRECTORY` writes "
                    "the model elsewhere, and the same command tries it again here"
                ) from error
        team.fabric.exchange(None)
    return target
