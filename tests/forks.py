"""Pytest's workers, and the processes their local ranks come from, as forks of one process that has imported all tests.

To import torch, transformers and the test files takes ten seconds of a processor, in each process that does so.
`pytest -n` starts one that does, a `Stock`; it forks a process for whoever asks over its socket, and ends it when the
one who asked is gone. This file run in the place of python asks for a fork that runs a command, as python would.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pickle
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ADDRESS = "ZEROPIPE_TEST_STOCK"
PATIENCE = 10.0  # seconds for forks to end by themselves


class Stock:
    """The process that has everything, as who starts it sees it."""

    def __init__(self, tests: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = str(Path(self._folder.name, "asked"))
        code = f"import sys; sys.path[:] = {sys.path!r}; from forks import serve; serve({self.address!r}, {tests!r})"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process.stdout.readline()  # it listens

    @property
    def python(self) -> str:
        """The command in the place of python."""
        return shlex.join([sys.executable, "-S", "-E", __file__])

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


class Fork:
    """A process that runs `code`, with these of our files under the same numbers; much like a subprocess.Popen."""

    def __init__(self, code: str, files: list[int]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[ADDRESS])
        request = pickle.dumps((code, files, dict(os.environ), os.getcwd()))
        socket.send_fds(self._socket, [len(request).to_bytes(8, "little")], files)
        self._socket.sendall(request)
        self.pid = int.from_bytes(self._socket.recv(8), "little")

    def wait(self, patience: float | None = None) -> None:
        """Until it has ended."""
        self._socket.settimeout(patience)
        try:
            self._socket.recv(1)
        except TimeoutError:
            raise subprocess.TimeoutExpired("fork", patience) from None


# inside the stock


def serve(address: str, tests: list[str]) -> None:
    """Import the tests, then fork for whoever asks, until the standard input ends."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    os.write(1, b"ready\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes to all processes; the first one decides
    _import(tests)
    heard, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks: dict[int, socket.socket] = {}  # process: who asked for it
    while True:
        ready = select.select([0, listening, heard, *forks.values()], [], [])[0]
        if heard in ready:
            heard.recv(4096)
            _bury(forks)
        if 0 in ready:
            break
        if listening in ready:
            asked = listening.accept()[0]
            try:
                request, files = _heard(asked)
            except (OSError, EOFError):  # who asked is gone already
                continue
            pid = os.fork()
            if pid == 0:
                asked.sendall(os.getpid().to_bytes(8, "little"))
                for end in (listening, heard, woken, asked, *forks.values()):
                    end.close()
                _live(files, *request)
                sys.exit()
            for file in files:
                os.close(file)
            forks[pid] = asked
        for pid, asked in forks.items():
            if asked in ready:  # they say no more than once what they want
                os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while forks and time.monotonic() < end:
        time.sleep(0.02)
        _bury(forks)
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _import(tests: list[str]) -> None:
    import pytest

    class Nothing:
        """Modules are imported; what is in them is left to the workers."""

        @pytest.hookimpl(tryfirst=True)
        def pytest_pycollect_makeitem(self):
            return []

    # what it cannot import the workers tell of
    pytest.main(["--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], [Nothing()])
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._inductor.compile_fx")  # a second of every process that compiles


def _heard(asked: socket.socket) -> tuple[tuple, list[int]]:
    head, files, *_ = socket.recv_fds(asked, 8, 16)
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < max(size, 1):
        piece = asked.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return pickle.loads(data), files


def _bury(forks: dict[int, socket.socket]) -> None:
    while forks:
        pid = os.waitpid(-1, os.WNOHANG)[0]
        if pid == 0:
            return
        forks.pop(pid).close()


def _live(files: list[int], code: str, numbers: list[int], environment: dict[str, str], folder: str) -> None:
    """The whole life of a fork."""
    from types import ModuleType

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c"]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(code, main.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fork = Fork(sys.argv[sys.argv.index("-c") + 1], [0, 1, 2])
    for stream in (0, 1):  # they are the fork's
        os.close(stream)
    fork.wait()
