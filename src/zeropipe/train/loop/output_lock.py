"""A lock of a run's folder: two runs would overwrite each other's checkpoints and metrics."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from zeropipe.errors import ConfigError

TIMEOUT_S = 5.0  # for a run that is just ending
RETRY_EVERY_S = 0.1


class OutputLock:
    """A lock of train.output. The kernel releases it when the process ends, even if it is killed."""

    def __init__(self) -> None:
        self._file: int | None = None

    def __enter__(self) -> OutputLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.close(self._file)

    def acquire(self, folder: str, timeout: float = TIMEOUT_S) -> None:
        """Create and lock a folder. ConfigError if that is not possible, or if another run holds the lock."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder, os.O_RDONLY)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"train.output={folder!r} cannot be created: {reason}; use another folder") from None
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"train.output={folder!r} is in use by another run; wait for its end, or use another folder"
                    ) from None
            except OSError:  # a file system without locks
                return
            time.sleep(RETRY_EVERY_S)
