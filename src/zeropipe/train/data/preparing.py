"""Files into stored samples, once per job. The other processes wait until they are there."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from zeropipe.core.files import settle
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, EngineError
from zeropipe.train.config.models import RunConfig
from zeropipe.train.data.chats import write_chats
from zeropipe.train.data.library import Library
from zeropipe.train.data.reading import Reader
from zeropipe.train.data.rows import write_rows
from zeropipe.train.data.store import Facts, Stored, read_facts, write_facts
from zeropipe.train.data.texts import write_texts
from zeropipe.train.data.tokenfile import write_token_files
from zeropipe.train.data.tokenizer import open_tokenizer
from zeropipe.train.data.wanted import Wanted, wanted_of
from zeropipe.train.data.writer import Writer

Tell = Callable[[str], None]
Look = Callable[[], None]
_PROGRESS = "progress"
_TELL_EVERY, _BEAT_EVERY, _LOOK_EVERY = 10.0, 1.0, 0.2  # seconds


def prepare(config: RunConfig, tell: Tell, look: Look = lambda: None) -> None:
    """Make the samples of `data` and `evaluation`, unless they are on the disk. `tell` is given lines of text.

    `look` is called about every second while files are read. What it raises ends that, and leaves nothing behind.
    """
    for table, wanted in wanted_of(config).items():
        if not wanted.folder.is_dir():
            _make(wanted, tell, look)
        facts = read_facts(wanted.folder)
        rows = count_text(facts.num_rows, "row")
        if facts.is_packed:
            filled = facts.num_tokens / (facts.num_rows * wanted.sequence)
            rows += f" of {wanted.sequence:,} ({filled:.1%} filled)"
        samples = count_text(facts.num_samples, "sample")
        tell(
            f"{table}: {samples}, {count_text(facts.num_tokens, 'token')}, {facts.num_losses:,} with a loss, in {rows}"
        )
        if facts.left_out:
            tell(f"{table}: left out {counted(facts.left_out)}")


def wait_for(wanted: Wanted, timeout: float) -> Stored:
    """Stored samples, as soon as another process has made them. `timeout`: seconds without progress."""
    folder, seen, since = wanted.folder, "", time.monotonic()
    while not folder.is_dir():
        progress = _read(_part(folder) / _PROGRESS)
        if progress != seen:
            seen, since = progress, time.monotonic()
        if time.monotonic() - since > timeout:
            raise EngineError(
                f"{wanted.table}: no samples in {folder} after {timeout:g} s without progress ({seen or 'none yet'}): "
                "the first process makes them; train.output must be a folder that all machines see"
            )
        time.sleep(_LOOK_EVERY)
    return Stored(folder, wanted.files)


def _make(wanted: Wanted, tell: Tell, look: Look) -> None:
    """Write the folder of some samples, whole or not at all."""
    folder = wanted.folder
    part = _part(folder)
    try:
        shutil.rmtree(part, ignore_errors=True)  # of a job that was killed
        part.mkdir(parents=True)
        try:
            facts = _write(wanted, part, _Progress(wanted.table, part, tell, look))
            write_facts(part, facts)
            (part / _PROGRESS).unlink(missing_ok=True)
            for path in part.iterdir():
                settle(path)
            settle(part)
            os.rename(part, folder)
            settle(folder.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error


def _write(wanted: Wanted, part: Path, progress: _Progress) -> Facts:
    library = Library(wanted.files, wanted.field) if wanted.kind == "datasets" else None
    is_chat = wanted.kind == "chat" or (library is not None and library.is_chat)
    writer = Writer(part, wanted.sequence, wanted.vocabulary, has_mask=is_chat)
    try:
        if wanted.kind == "tokens":
            digest, parts = write_token_files(wanted.files, writer, wanted.vocabulary, progress.beat)
        else:
            digest, parts = _write_tokens(wanted, library or Reader(wanted.files), is_chat, writer, progress), []
        writer.finish()
    finally:
        writer.close()
    if writer.num_samples == 0:
        why = f": left out {counted(writer.left_out)}" if writer.left_out else ""
        raise ConfigError(f"{wanted.table}.path: {wanted.files[0]} gives no samples to learn from{why}")
    num_rows = writer.num_samples
    if wanted.packing:
        num_rows = write_rows(part, writer.num_samples, wanted.sequence, wanted.is_shuffled, progress.beat)
    return writer.facts(num_rows, digest, parts)


def _write_tokens(wanted: Wanted, source: Reader | Library, is_chat: bool, writer: Writer, progress: _Progress) -> str:
    """What a tokenizer makes of texts or chats; a digest of them."""

    def beat() -> None:
        progress.beat(f"{source.place}: {count_text(writer.num_tokens, 'token')}")

    tokenizer = open_tokenizer(str(wanted.tokenizer))
    if is_chat:
        write_chats(source.lines(), tokenizer, writer, wanted.sequence, wanted.vocabulary, beat)
    else:
        pieces = source.documents(wanted.field)
        write_texts(pieces, tokenizer, writer, wanted.vocabulary, beat)
    return source.digest


def counted(left_out: dict[str, int]) -> str:
    """`empty documents (1), chats longer than 512 tokens (3)`."""
    return ", ".join(f"{why} ({number:,})" for why, number in left_out.items())


def _part(folder: Path) -> Path:
    """Where samples are while they are not complete."""
    return folder.with_name(f".{folder.name}.part")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class _Progress:
    """Tells people and the processes that wait how far it is, not too often."""

    def __init__(self, table: str, part: Path, tell: Tell, look: Look) -> None:
        self._table, self._part, self._tell, self._look = table, part, tell, look
        self._told = self._beaten = time.monotonic()

    def beat(self, text: str) -> None:
        now = time.monotonic()
        if now - self._beaten > _BEAT_EVERY:
            self._beaten = now
            (self._part / _PROGRESS).write_text(text)
            self._look()
        if now - self._told > _TELL_EVERY:
            self._told = now
            self._tell(f"{self._table}: {text}")
