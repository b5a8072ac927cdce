"""Checkpoints of a pipelined Trainer.

checkpoint-10/zeropipe     weights and optimizer, which any layout loads (docs/checkpoints.md)
checkpoint-10/             all else as Trainer writes it: the model for `from_pretrained`, scheduler, random states
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from zeropipe.engine.checkpoint.manifest import read_manifest
from zeropipe.errors import ConfigError

FOLDER = "zeropipe"
SCHEDULER = "scheduler.pt"
_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def shards_of(checkpoint: str | Path) -> Path:
    """The folder of a checkpoint with weights and optimizer; ConfigError if there is none."""
    folder = Path(checkpoint) / FOLDER
    if not folder.exists():
        raise ConfigError(
            f"{checkpoint} has no folder {FOLDER!r}, so it is not of a pipelined trainer, or of one with "
            "save_only_model: pass its directory as the model, and start without resume_from_checkpoint"
        )
    return folder


def find_newest(output: str | Path) -> Path | None:
    """The newest complete checkpoint: one whose save was killed is passed over."""
    found = [(int(match[1]), path) for path in Path(output).glob("*") if (match := _NAME.fullmatch(path.name))]
    return next((path for _, path in sorted(found, reverse=True) if _is_complete(path)), None)


def _is_complete(path: Path) -> bool:
    try:
        read_manifest(path / FOLDER)
        json.loads((path / _STATE).read_text())
    except (ConfigError, OSError, ValueError):
        return False
    return True
