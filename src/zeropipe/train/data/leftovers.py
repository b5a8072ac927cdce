"""Samples on the disk that a run does not use: of other files or settings, and of jobs that were killed."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from zeropipe.core.units import size_text
from zeropipe.train.config.models import RunConfig
from zeropipe.train.data.store import FACTS
from zeropipe.train.data.wanted import wanted_of

_WHOLE, _PART = re.compile("[0-9a-f]{16}"), re.compile(r"\.[0-9a-f]{16}\.part")
_QUIET = 3600.0  # seconds after which nobody writes to a part any more


def remove_leftovers(config: RunConfig) -> str:
    """Remove them, and say so; to be called once the run's own samples are known to be the right ones."""
    wanted = {one.folder.name for one in wanted_of(config).values()}
    folder = Path(config.train.output) / "data"
    if not wanted or not folder.is_dir():  # random tokens need none: somebody may only try something
        return ""
    unused = [path for path in folder.iterdir() if path.name not in wanted and _is_leftover(path)]
    size = sum(_size(path) for path in unused)
    for path in unused:
        shutil.rmtree(path, ignore_errors=True)
    what = f"{len(unused)} set{'s' * (len(unused) > 1)} of samples of other files or settings"
    return f"removed {what} from {folder} ({size_text(size, 'B')})" if unused else ""


def _is_leftover(path: Path) -> bool:
    """A folder that this program has made, and nothing else."""
    if path.is_symlink() or not path.is_dir():
        return False
    if _WHOLE.fullmatch(path.name):
        return (path / FACTS).is_file()
    return _PART.fullmatch(path.name) is not None and time.time() - _newest(path) > _QUIET


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _newest(path: Path) -> float:
    return max(one.stat().st_mtime for one in (path, *path.iterdir()))
