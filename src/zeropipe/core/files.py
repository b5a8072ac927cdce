"""Files that are read up to a size limit, and written atomically.

The new content goes to a temporary file in the same folder, which replaces the old one in a single step when it is
complete and on the disk. Readers see the old file or the new one, also after a crash, a full disk or Ctrl-C. A device
or a pipe (/dev/stdout) is written directly, since it cannot be replaced. A process that is killed leaves its temporary
file; the next writer of the same file removes it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.core.limits import Limits

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

SCHEDULE_SUFFIXES = (".csv", ".json")
COSTS_SUFFIXES = (".json", ".toml")
_MAX_STEM = 100  # characters of a temporary file's name; file systems allow 255 for all of it


def has_suffix(path: str | os.PathLike[str], *suffixes: str) -> bool:
    """Whether a file name ends in one of these suffixes (lower case), ignoring case: `RUN.JSON` ends in ".json"."""
    return os.fspath(path).lower().endswith(suffixes)


def read_text(path: str | Path, limits: Limits, what: str = "") -> str:
    """The text of a file, without a byte-order mark. ConfigError if it cannot be read, is too large, or is not text.

    `what` describes the file in errors: `cannot read the costs file x.toml: ...`.
    """
    name = f"{what} {path}".strip()
    try:
        with open(path, "rb") as file:
            data = file.read(limits.file_bytes + 1)  # a device has no size of its own
            if len(data) > limits.file_bytes:
                limits.require_bytes(max(len(data), os.fstat(file.fileno()).st_size), name)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from None
    except ConfigError:
        raise
    except ValueError as error:  # a zero byte in its name
        raise ConfigError(f"cannot read {what} {str(path)!r}: {error}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {name}: not text (byte {error.start + 1} is not UTF-8)") from None


def write_whole(path: str | Path, data: str | bytes) -> None:
    """Write `data` (a str as UTF-8) to `path`. If that fails, raise ConfigError and keep the old file."""
    try:
        content = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError as error:
        raise ConfigError(f"cannot write {path}: {error.object[error.start]!r} is not valid in UTF-8") from None
    with writing(path) as temporary, temporary.open("wb") as out:
        out.write(content)


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """Context manager: an empty temporary file with the suffix of `path`, which replaces `path` when the block ends.

    If the block raises, the temporary file is removed and `path` stays unchanged.
    """
    require_writable(path)
    old = _mode(path)
    if _is_direct(path, old):
        with _rename_errors(path, path):
            yield Path(path)
        return
    target = Path(os.path.realpath(path))  # a symbolic link stays one
    start = f".{target.stem[:_MAX_STEM]}."
    _remove_abandoned(target.parent, start, target.suffix)
    temporary = target.with_name(f"{start}{token_hex(6)}{target.suffix}")
    try:
        with _rename_errors(path, temporary), _create_locked(temporary):
            yield temporary
            if old is not None:
                temporary.chmod(stat.S_IMODE(old))
            sync_to_disk(temporary)
            os.replace(temporary, target)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def _create_locked(temporary: Path) -> Iterator[None]:
    """Create a file, and lock it while this process runs, so that no other writer takes it for abandoned."""
    while True:
        file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            if _lock(file, wait=True) and os.fstat(file).st_nlink == 0:
                continue  # removed by another writer before it was locked
            yield
            return
        finally:
            os.close(file)


def _lock(file: int, wait: bool) -> bool:
    """Lock an open file; False if another writer has locked it, or if files cannot be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (OSError, AttributeError):
        return False
    return True


def _remove_abandoned(folder: Path, start: str, suffix: str) -> None:
    """Remove the temporary files of writers that were killed."""
    name = re.compile(rf"{re.escape(start)}[0-9a-f]{{12}}{re.escape(suffix)}")
    with suppress(OSError):
        for entry in [entry for entry in os.scandir(folder) if name.fullmatch(entry.name)]:
            file = os.open(entry.path, os.O_RDONLY)
            try:
                if _lock(file, wait=False):
                    os.unlink(entry.path)
            finally:
                os.close(file)


def require_writable(path: str | Path) -> None:
    """ConfigError for a path that `writing` would refuse. Call it before long work."""
    try:
        mode, parent = _mode(path), Path(os.path.realpath(path)).parent
        folder = _mode(parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    except ValueError as error:  # a zero byte
        raise ConfigError(f"cannot write {str(path)!r}: {error}") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise ConfigError(f"cannot write {path}: it is a folder; name a file in it")
    if mode is not None and not os.access(path, os.W_OK):
        raise ConfigError(f"cannot write {path}: Permission denied; it is read-only")
    if _is_direct(path, mode):
        return
    if folder is None or not stat.S_ISDIR(folder):
        missing = f"{parent}, the target of the link" if Path(path).is_symlink() else Path(path).parent
        raise ConfigError(f"cannot write {path}: there is no folder {missing}; create it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: Permission denied; no file can be created in its folder")


def _mode(path: str | Path) -> int | None:
    """Type and permissions of a path; None if it does not exist."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_direct(path: str | Path, mode: int | None) -> bool:
    """Whether a path is a device, a pipe, or a name of an open file, which other processes may write to."""
    open_files = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
    return mode is not None and (not stat.S_ISREG(mode) or os.path.abspath(path).startswith(open_files))


@contextmanager
def _rename_errors(path: str | Path, written: str | Path) -> Iterator[None]:
    """Raise operating-system errors about the file being written as a ConfigError that names `path`."""
    try:
        yield
    except OSError as error:
        # errors of write(2) name no file; errors about other files are not ours to explain
        if error.filename is not None and str(error.filename) != str(written):
            raise
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def sync_to_disk(path: Path) -> None:
    """Write the content of a file, or the names in a folder, to the disk (fsync).

    Without it, a power cut can leave a renamed file with its new name and no content.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
