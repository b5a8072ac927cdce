"""A checkpoint on its way to the disk: a thread on every rank writes, the first rank's makes it visible.

The threads talk over the engine's board, never over its connections: steps go on meanwhile. What one rank cannot write
is an error on all, and the checkpoint before stays.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from zeropipe.engine.checkpoint.manifest import Target
from zeropipe.engine.comm.fabric import Fabric
from zeropipe.engine.comm.faults import PeerLost
from zeropipe.engine.comm.pulse import BETWEEN
from zeropipe.errors import EngineError, ZeropipeError, first_line

if TYPE_CHECKING:
    from zeropipe.engine.checkpoint.pieces import Written

T = TypeVar("T")
Progress = Callable[[str], None]
Write = Callable[[Progress], "Written"]
Finish = Callable[[list["Written"], Progress], None]


class Saving:
    """What `save_checkpoint` returns. `wait` ends when the checkpoint is there, or raises why it is not."""

    def __init__(self, target: Target, fabric: Fabric, write: Write, finish: Finish) -> None:
        self.path: Path = target.path
        self._target, self._fabric, self._key = target, fabric, f"checkpoint/{target.folder.name}"
        self._where, self._error = "its start", ""
        self._looked, self._written = time.monotonic(), 0
        self._waits: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._run, args=(write, finish), name="zeropipe-saving", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is visible; EngineError on every rank if one of them could not write it."""
        place = self._fabric.place
        if not self.done:
            place.enter(f"the checkpoint {self.path}")
            while not self.done:
                place.name, place.waits = f"the checkpoint {self.path}, {self._where}{self._size()}", self._waits
                self._thread.join(0.02)
            place.waits = ()
            place.enter(BETWEEN)
        self._thread.join()
        error, self._error = self._error, ""  # told once
        if error:
            raise EngineError(error)

    def _run(self, write: Write, finish: Finish) -> None:
        try:
            if self._fabric.device.type == "cuda":  # a thread starts on the first GPU
                torch.cuda.set_device(self._fabric.device)
            written = _outcome(lambda: write(self._progress))
            self._fabric.board.note(f"{self._key}/{self._fabric.rank}", pickle.dumps(written))
            if self._fabric.rank == 0:
                told = self._conclude(finish)
                self._fabric.board.note(f"{self._key}/done", told)
            else:
                self._await((0,), "done")
                told = self._fabric.board.get(f"{self._key}/done").decode()
            self._error = f"the checkpoint {self.path} was not saved: {told}" if told else ""
        except PeerLost as error:
            self._error = str(self._fabric.board.explain(error, f"the checkpoint {self.path}"))
        except Exception as error:  # nobody else could report it
            self._error = f"the checkpoint {self.path} was not saved: {_line(error)}"

    def _progress(self, where: str) -> None:
        self._where = where

    def _size(self) -> str:
        """How much of a long file is there, at most every second: a rank that writes gets on."""
        if time.monotonic() - self._looked > 1.0:
            self._looked = time.monotonic()
            with suppress(OSError):
                files = self._target.folder.glob(f"__{self._fabric.rank}_*")
                self._written = sum(file.stat().st_size for file in files)
        return f" ({self._written:,} bytes)" if self._written else ""

    def _conclude(self, finish: Finish) -> str:
        """On the first rank: what is wrong, or nothing and the checkpoint is visible."""
        parts: list[Written] = []
        told = ""
        for rank in range(self._fabric.size):
            self._await((rank,) if rank else (), str(rank))
            outcome = pickle.loads(self._fabric.board.get(f"{self._key}/{rank}"))
            self._fabric.board.forget(f"{self._key}/{rank}")
            if isinstance(outcome, str):
                told = told or f"rank {rank}: {outcome}"
            else:
                parts.append(outcome)
        if not told:
            outcome = _outcome(lambda: finish(parts, self._progress))
            told = f"rank 0: {outcome}" if isinstance(outcome, str) else ""
        if told:
            self._target.close()
        return told

    def _await(self, ranks: tuple[int, ...], key: str) -> None:
        """Wait for a word on the board, however long it takes; PeerLost if there is an error there instead."""
        self._waits, self._where = ranks, "waiting for the others"
        pause, board = 0.001, self._fabric.board
        while not board.noted(f"{self._key}/{key}"):
            if board.read() is not None:
                raise PeerLost((), "another rank failed")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self._waits = ()


def _outcome(work: Callable[[], T]) -> T | str:
    try:
        return work()
    except Exception as error:
        return _line(error)


def _line(error: Exception) -> str:
    if isinstance(error, ZeropipeError):
        return first_line(error)
    failed = _system_error(error)
    if failed is not None:
        return f"{failed.strerror}{f' ({failed.filename})' if failed.filename else ''}"
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _system_error(error: BaseException | None) -> OSError | None:
    """What the operating system said first: torch's writer has words of its own about what followed."""
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error
        error = error.__cause__ or error.__context__
    return None
