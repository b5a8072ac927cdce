"""The cache of samples in `train.output`/data: written once per job by one process, and removed when unused."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from zeropipe.core.files import sync_to_disk
from zeropipe.core.units import count_text, size_text
from zeropipe.errors import ConfigError, EngineError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.data.chats import write_chats
from zeropipe.train.data.reader import DatasetsReader, FileReader, Reader
from zeropipe.train.data.request import DataRequest, build_requests
from zeropipe.train.data.rows import write_rows
from zeropipe.train.data.store import INFO_FILE, SampleWriter, StoredSamples, StoreInfo
from zeropipe.train.data.token_files import write_token_files
from zeropipe.train.data.tokenizer import open_tokenizer, write_documents

Log = Callable[[str], None]  # takes a line of text
Check = Callable[[], None]
_LOG_EVERY_S, _CHECK_EVERY_S, _POLL_EVERY_S = 10.0, 1.0, 0.2
_COMPLETE, _INCOMPLETE = re.compile("[0-9a-f]{16}"), re.compile(r"\.[0-9a-f]{16}\.part")
_VISIBLE_AFTER_S = 60.0  # that a network file system may take to show a new folder
_ABANDONED_AFTER_S = 3600.0  # age of an incomplete folder that no process writes to any more


def prepare(config: RunConfig, log: Log, check: Check = lambda: None) -> None:
    """Write the samples of `data` and `evaluation`, unless they are cached, and log a summary.

    `check` is called about every second. An error that it raises stops the preparation, which leaves nothing behind.
    """
    for table, request in build_requests(config).items():
        if not request.folder.is_dir():
            _write_folder(request, log, check)
        info = StoreInfo.load(request.folder)
        rows = count_text(info.num_rows, "row")
        if info.is_packed:
            filled = info.num_tokens / (info.num_rows * request.sequence)
            rows += f" of {request.sequence:,} ({filled:.1%} filled)"
        samples = count_text(info.num_samples, "sample")
        log(f"{table}: {samples}, {count_text(info.num_tokens, 'token')}, {info.num_losses:,} with a loss, in {rows}")
        if info.example:
            log(f"{table}: {describe_chats(info.chat_formats, info.example)}")
        if info.skipped:
            log(f"{table}: skipped {_list_skipped(info.skipped)}")


def require_visible(config: RunConfig, patience: float = _VISIBLE_AFTER_S) -> None:
    """Raise unless this process sees the samples that another one has written: file systems may show them later."""
    deadline = time.monotonic() + patience
    for request in build_requests(config).values():
        while not request.folder.is_dir():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{request.table}: no samples in {request.folder} {patience:g} s after the first process has "
                    "written them: train.output must be a folder that all machines see"
                )
            time.sleep(_POLL_EVERY_S)


def open_samples(request: DataRequest) -> StoredSamples:
    """Open the samples of a request, which `prepare` has written."""
    if not request.folder.is_dir():
        raise EngineError(f"{request.table}: no samples in {request.folder}: call prepare(config) first")
    return StoredSamples(request.folder, request.files)


def remove_unused(config: RunConfig) -> str:
    """Remove cached samples that this run does not use, and return a line about it, empty if there are none.

    To be called after a resume has accepted the run's own samples: before that, the others may be the right ones.
    """
    used = {request.folder.name for request in build_requests(config).values()}
    folder = Path(config.train.output) / "data"
    if not used or not folder.is_dir():  # a run on synthetic data is often a trial: it removes nothing
        return ""
    unused = [path for path in folder.iterdir() if path.name not in used and _is_removable(path)]
    size = sum(file.stat().st_size for path in unused for file in path.rglob("*") if file.is_file())
    for path in unused:
        shutil.rmtree(path, ignore_errors=True)
    sets = f"{count_text(len(unused), 'set')} of samples of other files or settings"
    return f"removed {sets} from {folder} ({size_text(size, 'B')})" if unused else ""


def _is_removable(path: Path) -> bool:
    """Whether a path is a folder of samples, complete or abandoned."""
    if path.is_symlink() or not path.is_dir():
        return False
    if _COMPLETE.fullmatch(path.name):
        return (path / INFO_FILE).is_file()
    if not _INCOMPLETE.fullmatch(path.name):
        return False
    return time.time() - max(one.stat().st_mtime for one in (path, *path.iterdir())) > _ABANDONED_AFTER_S


def _write_folder(request: DataRequest, log: Log, check: Check) -> None:
    """Write the folder of a request, complete or not at all."""
    folder = request.folder
    staging = _staging_folder(folder)
    try:
        shutil.rmtree(staging, ignore_errors=True)  # of a job that was killed
        staging.mkdir(parents=True)
        try:
            _write_samples(request, staging, _Progress(request.table, log, check)).save(staging)
            for path in staging.iterdir():
                sync_to_disk(path)
            sync_to_disk(staging)
            os.rename(staging, folder)
            sync_to_disk(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error


def open_reader(request: DataRequest) -> tuple[Reader, bool]:
    """The reader of a request for texts or chats, and whether it is for chats."""
    if request.kind == "datasets":
        reader = DatasetsReader(request.files, request.field)
        return reader, reader.has_chats
    return FileReader(request.files), request.kind == "chat"


def _write_samples(request: DataRequest, folder: Path, progress: _Progress) -> StoreInfo:
    reader, has_chats = open_reader(request)
    writer = SampleWriter(folder, request.sequence, request.vocabulary, has_mask=has_chats)
    try:
        if request.kind == "tokens":
            digest, ranges = write_token_files(request.files, writer, request.vocabulary, progress.report)
        else:
            digest, ranges = _tokenize(request, reader, has_chats, writer, progress), []
        writer.finish()
    finally:
        writer.close()
    if writer.num_samples == 0:
        skipped = f": skipped {_list_skipped(writer.skipped)}" if writer.skipped else ""
        raise ConfigError(f"{request.table}.path: {request.files[0]} has no samples{skipped}")
    num_rows = writer.num_samples
    if request.packing:
        num_rows = write_rows(folder, writer.num_samples, request.sequence, request.is_shuffled, progress.report)
    return writer.make_info(num_rows, digest, ranges)


def _tokenize(
    request: DataRequest, reader: Reader, has_chats: bool, writer: SampleWriter,
    progress: _Progress,
) -> str:  # fmt: skip
    """Tokenize documents or chats, and return a digest of them."""

    def report() -> None:
        progress.report(f"{reader.position}: {count_text(writer.num_tokens, 'token')}")

    tokenizer = open_tokenizer(str(request.tokenizer))
    if has_chats:
        write_chats(reader.records(), tokenizer, writer, request.sequence, request.vocabulary, report)
    else:
        write_documents(reader.documents(request.field), tokenizer, writer, request.vocabulary, report)
    return reader.digest


def describe_chats(formats: dict[str, int], example: str) -> str:
    """`chats in the format ShareGPT (conversations); the first: <|user|>Hello<|assistant|>[loss: Hi<|end|>]`."""
    names = next(iter(formats)) if len(formats) == 1 else _list_skipped(formats)
    return f"chats in the format {names}; the first: {example}"


def _list_skipped(skipped: dict[str, int]) -> str:
    """`empty documents (1), chats longer than 512 tokens (3)`."""
    return ", ".join(f"{reason} ({number:,})" for reason, number in skipped.items())


def _staging_folder(folder: Path) -> Path:
    """The folder of incomplete samples."""
    return folder.with_name(f".{folder.name}.part")


class _Progress:
    """Reports progress to the log, at most every few seconds, and calls `check`."""

    def __init__(self, table: str, log: Log, check: Check) -> None:
        self._table, self._log, self._check = table, log, check
        self._logged_at = self._checked_at = time.monotonic()

    def report(self, text: str) -> None:
        now = time.monotonic()
        if now - self._checked_at > _CHECK_EVERY_S:
            self._checked_at = now
            self._check()
        if now - self._logged_at > _LOG_EVERY_S:
            self._logged_at = now
            self._log(f"{self._table}: {text}")
