"""The checkpoints of a run: when they are whole, which are kept, and which one a run goes on from.

    checkpoints/step-000123/    a checkpoint, as docs/checkpoints.md describes it
    checkpoints/latest          the name of the newest whole one
    checkpoints/best            the name of the one with the best evaluation

The first rank looks after the folder; all ranks write their parts of a checkpoint.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeropipe.core.files import write_whole
from zeropipe.engine.checkpoint.manifest import FILE, NoFolder, followed, read_manifest
from zeropipe.engine.checkpoint.save import require_savable, save_checkpoint
from zeropipe.engine.checkpoint.saving import Saving
from zeropipe.engine.engine import Engine
from zeropipe.errors import ConfigError, EngineError
from zeropipe.train.config.tables import RunConfig

_NAME = re.compile(r"step-(\d{6,})")
Tell = Callable[[str], None]


class Kept:
    """The folder of a run's checkpoints, as one rank sees it."""

    def __init__(self, config: RunConfig, engine: Engine, is_first: bool, tell: Tell) -> None:
        self._table, self._engine, self._is_first, self._tell = config.checkpoint, engine, is_first, tell
        self._saves_frozen = config.lora is None  # the model beside an adapter is where it was
        self.folder = Path(config.train.output) / "checkpoints"
        self._saving: Saving | None = None
        self._is_best = False
        self.saved: int | None = None  # the step of the newest one
        self.path: Path | None = None  # and where it is

    def require_savable(self, optimizer: Any) -> None:
        """ConfigError for a run of which no checkpoint can be made; all ranks call this alike."""
        require_savable(self._engine, optimizer, frozen=self._saves_frozen)

    def save(self, step: int, optimizer: Any, extra: Any, *, best: bool, last: bool) -> None:
        """Save after `step` steps; all ranks call this alike. The last one is waited for, and must succeed."""
        self.settle()
        path = self.folder / f"step-{step:06d}"
        try:
            self._saving = save_checkpoint(
                path, self._engine, optimizer, step=step, extra=extra, frozen=self._saves_frozen,
                asynchronous=self._table.asynchronous,
            )  # fmt: skip
        except (NoFolder, EngineError) as error:  # that may pass; another ConfigError does not, and ends the run
            self._failed(error, last)
            return
        self.saved, self.path, self._is_best = step, path, best
        if last or not self._table.asynchronous:
            self.settle(last)

    def look(self) -> None:
        """Between steps: once the checkpoint that is being written is whole, older ones may go."""
        if self._saving is not None and self._saving.done:
            self.settle()

    def settle(self, last: bool = False) -> None:
        """Wait for the checkpoint that is being written."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.wait()
        except EngineError as error:
            self._failed(error, last)
            return
        if self._is_first:
            try:
                self._tidy(saving.path.name)
            except (ConfigError, OSError) as error:  # the checkpoint itself is whole, and found without them
                self._tell(f"warning: {error}")

    def _tidy(self, name: str) -> None:
        """After a checkpoint: the names of the newest and the best, and no more than are to be kept."""
        mark(self.folder, "latest", name)
        if self._is_best:
            mark(self.folder, "best", name)
        prune(self.folder, self._table.keep, marked(self.folder, "best") if self._table.best else None)

    def _failed(self, error: Exception, last: bool) -> None:
        """Training goes on without this checkpoint, unless no later one would come."""
        self.saved = None
        if last:
            before = newest(self.folder)
            rest = f"the newest whole one is {before}" if before else "there is none before it"
            raise EngineError(f"{error}; {rest}: mend that and start again")
        if self._is_first:
            self._tell(f"warning: {error}; training goes on")


def mark(folder: Path, name: str, checkpoint: str) -> None:
    """Write `latest` or `best`."""
    if marked(folder, name) != checkpoint:
        write_whole(folder / name, checkpoint + "\n")


def marked(folder: Path, name: str) -> str | None:
    """What `latest` or `best` says."""
    try:
        return (folder / name).read_text().strip()
    except OSError:
        return None


def steps_in(folder: Path) -> dict[int, Path]:
    """The folders of checkpoints, whole or not, the newest first."""
    found = {int(match[1]): path for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is all there, as far as names and sizes can tell."""
    try:
        read_manifest(path)
    except ConfigError:
        return False
    return True


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Remove what is older than the newest `keep` whole checkpoints, but the best one, and what killed saves have left.

    A newer one that is damaged, or that cannot be read just now, stays.
    """
    whole = 0
    for path in steps_in(folder).values():
        is_old = whole >= keep and path.name != best
        if is_old or not (path / FILE).exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            whole += is_whole(path)


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    return next((path for path in steps_in(folder).values() if is_whole(path)), None)


def start_from(config: RunConfig) -> Path | None:
    """The checkpoint that a run goes on from; ConfigError if its folder holds later ones of another run."""
    folder, resume = Path(config.train.output) / "checkpoints", config.checkpoint.resume
    if resume == "auto":
        return newest(folder)
    found = None if resume == "never" else resolved(Path(resume))
    first = 0 if found is None else read_manifest(found).step or 0
    later = [step for step, path in steps_in(folder).items() if step > first and is_whole(path)]
    if later:
        raise ConfigError(
            f"{folder} has checkpoints up to step {later[0]}, this run begins at step {first}: give another "
            "train.output, remove them, or use checkpoint.resume=auto"
        )
    return found


def resolved(path: Path) -> Path:
    """A checkpoint by its own path, by `latest` or `best`, or by a run or its checkpoints: then the newest one."""
    path = followed(path)
    for folder in (path, path / "checkpoints"):
        if steps_in(folder) and (found := newest(folder)) is not None:
            return found
    return path
