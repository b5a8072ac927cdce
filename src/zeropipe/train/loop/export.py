"""The export at the end of a run: a directory for transformers (or peft), from the last checkpoint."""

from __future__ import annotations

from pathlib import Path

from zeropipe.engine.checkpoint.convert import convert
from zeropipe.engine.engine import Engine
from zeropipe.engine.run.job import DTYPES
from zeropipe.errors import ConfigError
from zeropipe.train.config.tables import BYTE_TOKENIZER, RunConfig


def export(config: RunConfig, engine: Engine, checkpoint: Path, is_first: bool) -> Path:
    """Export the model on the first rank, while the others wait."""
    target = Path(config.train.output) / "export"
    with engine.together("the export") as team:
        status = team.comm.status

        def report_progress(name: str) -> None:
            status.phase = f"the export, {name}"

        if is_first:
            like = None if config.data.tokenizer == BYTE_TOKENIZER else config.data.tokenizer
            try:
                convert(checkpoint, target, like=like, dtype=DTYPES[config.model.dtype], begin=report_progress)
            except (ConfigError, OSError) as error:  # for example, the disk is full
                raise ConfigError(
                    f"{error}; the checkpoint is complete: `zeropipe checkpoint convert {checkpoint} DIRECTORY` writes "
                    "the model elsewhere, and the same command tries the export again"
                ) from error
        team.comm.exchange(None)
    return target
