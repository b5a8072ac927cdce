"""Files that are read within a limit, and written whole or not at all.

The new content goes to a temporary file in the same folder, which takes the place of the old one in a single step when
it is complete and on the disk. Whoever looks sees the old file or the new one, also after a crash, a full disk or
Ctrl-C in between. What is no ordinary file (/dev/stdout, a pipe) is written directly: nothing may take its place.
A process that is killed cannot remove its temporary file; whoever writes the same file next does.
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

SCHEDULES = (".csv", ".json")  # names that end so are of files with a schedule
COSTS = (".json", ".toml")
_LONGEST_STEM = 100  # of a temporary's name: with what is added it stays below the 255 that file systems allow


def has_suffix(path: str | os.PathLike[str], *suffixes: str) -> bool:
    """Whether the name of a file ends in one of these (lower case); `RUN.JSON` ends in ".json"."""
    return os.fspath(path).lower().endswith(suffixes)


def read_text(path: str | Path, limits: Limits, what: str = "") -> str:
    """The text of a file, without a byte-order mark. ConfigError if it cannot be read, is too large, or is no text.

    `what` says what the file is for: `cannot read the costs file x.toml: ...`.
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
    """Write `data` (a str as UTF-8) to `path`. ConfigError, and the old file as it was, if that fails."""
    try:
        content = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError as error:
        raise ConfigError(f"cannot write {path}: {error.object[error.start]!r} is no character of UTF-8") from None
    with writing(path) as temporary, temporary.open("wb") as out:
        out.write(content)


@contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """For code that writes files by itself: the name to write to, which becomes `path` when the block ends well.

    It has the suffix of `path`, and exists, empty. A block that raises leaves neither it nor a changed `path`.
    """
    require_writable(path)
    old = _mode(path)
    if _is_direct(path, old):
        with _named(path, path):
            yield Path(path)
        return
    target = Path(os.path.realpath(path))  # a symbolic link stays one
    start = f".{target.stem[:_LONGEST_STEM]}."
    _remove_abandoned(target.parent, start, target.suffix)
    temporary = target.with_name(f"{start}{token_hex(6)}{target.suffix}")
    try:
        with _named(path, temporary), _held(temporary):
            yield temporary
            if old is not None:
                temporary.chmod(stat.S_IMODE(old))
            settle(temporary)
            os.replace(temporary, target)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def _held(temporary: Path) -> Iterator[None]:
    """Make a file, and hold a lock on it as long as this process lives: nobody else takes it for abandoned."""
    while True:
        file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            if _locked(file, wait=True) and os.fstat(file).st_nlink == 0:
                continue  # removed by another writer before it was locked
            yield
            return
        finally:
            os.close(file)


def _locked(file: int, wait: bool) -> bool:
    """Lock an open file; False where another writer has a lock on it, or where files cannot be locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (OSError, AttributeError):
        return False
    return True


def _remove_abandoned(folder: Path, start: str, suffix: str) -> None:
    """Remove what writers of one file left behind that were killed."""
    name = re.compile(rf"{re.escape(start)}[0-9a-f]{{12}}{re.escape(suffix)}")
    with suppress(OSError):
        for entry in [entry for entry in os.scandir(folder) if name.fullmatch(entry.name)]:
            file = os.open(entry.path, os.O_RDONLY)
            try:
                if _locked(file, wait=False):
                    os.unlink(entry.path)
            finally:
                os.close(file)


def require_writable(path: str | Path) -> None:
    """ConfigError for a file that `writing` would refuse: to be asked before long work."""
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
        place = f"{parent}, to which it leads" if Path(path).is_symlink() else Path(path).parent
        raise ConfigError(f"cannot write {path}: there is no folder {place}; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: Permission denied; no file can be made in its folder")


def _mode(path: str | Path) -> int | None:
    """Type and permissions of what has that name, None if nothing has."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_direct(path: str | Path, mode: int | None) -> bool:
    """A device, a pipe, or a name of an open file, which others go on writing to."""
    open_files = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
    return mode is not None and (not stat.S_ISREG(mode) or os.path.abspath(path).startswith(open_files))


@contextmanager
def _named(path: str | Path, written: str | Path) -> Iterator[None]:
    """An operating system's error about the file being written as a ConfigError that names `path`."""
    try:
        yield
    except OSError as error:
        # write(2) names no file; an error that names another one is not ours to explain
        if error.filename is not None and str(error.filename) != str(written):
            raise
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def settle(path: Path) -> None:
    """Have the content of a file, or the names in a folder, on the disk before anything that relies on it is done.

    A file that is renamed before can be left with its new name and no content by a power cut.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
