"""The process that local ranks are born in: it imports torch once, forks ranks from there, and ends with them.

It does nothing but wait, so it notices at once when the process that started it is gone, however that ended, and then
kills all ranks, also busy and stopped ones. If the nursery itself is killed, the kernel kills the ranks. It speaks over
a pair of sockets: nothing is left on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import process, spawn, util
from typing import Any

from zeropipe.errors import ConfigError, EngineError

PR_SET_PDEATHSIG = 1
WORD = struct.Struct("<q")
NEWS = struct.Struct("<cqq")  # b"b", pid, 0: born; b"e", pid, exit code: ended


def _environment() -> dict[str, str]:
    """The nursery's own.

    Code that it imports may ask whether there are GPUs. torch then asks NVML and not CUDA, which would not work in the
    ranks, forks of a process that has used it: not even an optimizer on the CPU would, since it asks for GPUs too.
    """
    return os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def start(code: str, file: int) -> Any:
    """A new process that runs `code` and has our open `file`."""
    command = [sys.executable, *util._args_from_interpreter_flags(), "-c", code]  # type: ignore[attr-defined]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[file], env=_environment())


class Nursery:
    """The starting process's side."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from zeropipe.engine.run.nursery import serve; serve({theirs.fileno()}, {os.getpid()})"
        )
        self._process = start(code, theirs.fileno())
        theirs.close()
        self._socket, self._lock, self._owner = ours, threading.Lock(), os.getpid()
        self._codes: dict[int, int] = {}
        self._born: list[int] = []
        self.gone = False
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """Whether it belongs to this process and lives: a fork of the process needs one of its own."""
        with self._lock:
            self._hear(0)
        return not self.gone and self._owner == os.getpid()

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules that ranks will want."""
        self._send((list(sys.path), list(modules)))

    def bear(self, function: Callable[..., None], args: tuple[Any, ...], end: int, patience: float) -> int:
        """Start a rank that calls `function(end, *args)` with its own end of a connection; returns its process id."""
        with self._lock:
            self._send((preparation(), dict(os.environ), function, args), end)
            deadline = time.monotonic() + patience
            while not self._born:
                if self.gone or time.monotonic() > deadline:
                    raise EngineError("local ranks could not be started: the process that starts them does not answer")
                self._hear(deadline - time.monotonic())
            return self._born.pop()

    def wait(self, pid: int, patience: float) -> int | None:
        """How a rank ended, None if it has not; 0 to 255, or minus a signal's number."""
        deadline = time.monotonic() + patience
        while True:
            left = deadline - time.monotonic()
            with self._lock:  # others may wait too, or start ranks
                self._hear(min(0.05, left))
                if pid in self._codes or self.gone or left <= 0:
                    return self._codes.get(pid, -signal.SIGKILL if self.gone else None)

    def close(self) -> None:
        """End it, and with it all ranks that are left."""
        if self._owner == os.getpid():
            self._socket.close()
            self.gone = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def _send(self, request: object, *files: int) -> None:
        data = pickle.dumps(request)
        try:
            socket.send_fds(self._socket, [WORD.pack(len(data))], files)
            self._socket.sendall(data)
        except OSError:
            self.gone = True

    def _hear(self, patience: float) -> None:
        """Take in what it says, waiting at most `patience` seconds for the first word."""
        while not self.gone and select.select([self._socket], [], [], max(0.0, patience))[0]:
            try:
                word, pid, code = NEWS.unpack(_exactly(self._socket, NEWS.size))
            except (OSError, EOFError):
                self.gone = True
                return
            if word == b"b":
                self._codes.pop(pid, None)  # of one that ended long ago: numbers of processes come again
                self._born.append(pid)
            else:
                self._codes[pid] = code
            patience = 0


def preparation() -> dict[str, Any]:
    """What a rank needs to know of this process, as multiprocessing tells it."""
    setting = spawn.get_preparation_data("zeropipe-rank")
    del setting["authkey"]  # of multiprocessing, which refuses to send it
    if not os.path.exists(setting.get("init_main_from_path", "")):  # a script from stdin
        setting.pop("init_main_from_path", None)
    return setting


_current: Nursery | None = None


def nursery() -> Nursery:
    """This process's nursery."""
    global _current
    if getattr(process.current_process(), "_inheriting", False):  # as multiprocessing marks it
        raise ConfigError(
            "local ranks are started where the script is imported, which every rank does: start them in a function, "
            "or under `if __name__ == '__main__':`"
        )
    if _current is None or not _current.usable:
        _current = Nursery()
    return _current


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


# inside the nursery


def serve(number: int, first: int) -> None:
    """Fork ranks as the process `first` asks for them, report how they end, and leave none behind."""
    asked = socket.socket(fileno=number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they may go to a whole group of processes; the first one decides
    heard, woken = socket.socketpair()
    for end in (heard, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    alive: set[int] = set()
    with contextlib.suppress(OSError, EOFError):
        # a fork of the first process may hold its end of the socket open, so the process is watched as well
        parent = os.pidfd_open(first) if hasattr(os, "pidfd_open") else None
        watched: list[Any] = [asked, heard, *([parent] if parent is not None else [])]
        while True:
            ready = select.select(watched, [], [])[0]
            if parent in ready:
                break
            if heard in ready:
                heard.recv(4096)
                _report(asked, alive)
            if asked in ready:
                _answer(asked, (heard, woken), alive)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
    for pid in alive:
        os.waitpid(pid, 0)
    os._exit(0)


def _report(asked: socket.socket, alive: set[int]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        alive.discard(pid)
        asked.sendall(NEWS.pack(b"e", pid, os.waitstatus_to_exitcode(status)))


def _answer(asked: socket.socket, own: Sequence[socket.socket], alive: set[int]) -> None:
    head, files, *_ = socket.recv_fds(asked, WORD.size, 1)
    if not head:
        raise EOFError
    (size,) = WORD.unpack(head + _exactly(asked, WORD.size - len(head)))
    data = _exactly(asked, size)
    if not files:
        path, modules = pickle.loads(data)
        sys.path[:] = path
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        return
    os.set_inheritable(files[0], False)
    server = os.getpid()
    gc.freeze()  # ranks look for garbage among their own objects, and share the memory of those that are here
    pid = os.fork()
    if pid == 0:
        for end in (asked, *own):
            end.close()
        _live(data, files[0], server)
    os.close(files[0])
    alive.add(pid)
    asked.sendall(NEWS.pack(b"b", pid, 0))


def _live(data: bytes, end: int, server: int) -> None:
    """The whole life of a rank."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(code)
        threading.Thread(target=_leave_with_parent, args=(end,), name="zeropipe-parent", daemon=True).start()
        setting, environment, function, args = pickle.loads(data)
        os.environ.clear()
        os.environ.update(environment)
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        spawn.prepare(setting)
        del process.current_process()._inheriting  # type: ignore[attr-defined]
        function(end, *args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            util._exit_function()  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _leave_with_parent(end: int) -> None:
    """For systems without PR_SET_PDEATHSIG, and for a stopped nursery: the connection closes with its other end."""
    poll = select.poll()
    poll.register(end, select.POLLHUP)
    poll.poll()
    time.sleep(1)  # an idle rank ends by itself
    os._exit(1)
