"""One run for each folder: two would write over each other's checkpoints and metrics."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from zeropipe.errors import ConfigError

PATIENCE = 5.0  # seconds for a run that is just ending, killed say
LOOK = 0.1


class Sole:
    """Holds a folder for a run. The kernel lets go of it when the process ends, however it does."""

    def __init__(self) -> None:
        self._file: int | None = None

    def __enter__(self) -> Sole:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.close(self._file)

    def take(self, folder: str, patience: float = PATIENCE) -> None:
        """ConfigError if another run holds it."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder, os.O_RDONLY)
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ConfigError(
                        f"train.output={folder!r} is in use by another run: wait for its end, or give another one"
                    ) from None
            except OSError:  # a file system that cannot hold folders
                return
            time.sleep(LOOK)
