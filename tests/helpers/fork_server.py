"""Processes for pytest workers and their local ranks, forked from one process that has imported all tests.

Importing torch, transformers and the test files takes ten seconds of CPU time per process. `pytest -n` starts one
`ForkServer`, which imports them once. It forks a process for every client that connects to its socket, and kills it
when that client disconnects. Run as a script in place of python, this file asks for a fork that runs the given command.
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

ADDRESS = "ZEROPIPE_TEST_FORK_SERVER"  # environment variable: path of the server's socket
EXIT_TIMEOUT_S = 10.0  # for forks to end by themselves
STARTED: set[int] = set()  # process ids of this process's forks


class ForkServer:
    """The server process, for the process that starts it."""

    def __init__(self, tests: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = str(Path(self._folder.name, "socket"))
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from fork_server import serve; serve({self.address!r}, {tests!r})"
        )
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process.stdout.readline()  # until it listens

    @property
    def python(self) -> str:
        """The command to use in place of python."""
        return shlex.join([sys.executable, "-S", "-E", __file__])

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


class Fork:
    """A process that runs `code` and inherits these file descriptors; like a subprocess.Popen."""

    def __init__(self, code: str, descriptors: list[int]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[ADDRESS])
        request = pickle.dumps((code, descriptors, dict(os.environ), os.getcwd()))
        socket.send_fds(self._socket, [len(request).to_bytes(8, "little")], descriptors)
        self._socket.sendall(request)
        self.pid = int.from_bytes(self._socket.recv(8), "little")
        STARTED.add(self.pid)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the process has ended."""
        self._socket.settimeout(timeout)
        try:
            self._socket.recv(1)
        except TimeoutError:
            raise subprocess.TimeoutExpired("fork", timeout) from None


# in the server process


def serve(address: str, tests: list[str]) -> None:
    """Import the tests, then fork for every client until standard input is closed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    os.write(1, b"ready\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the process group; the first process handles it
    _import_tests(tests)
    wakeup, wakeup_end = socket.socketpair()
    wakeup_end.setblocking(False)
    signal.set_wakeup_fd(wakeup_end.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}  # by process id
    while True:
        ready = select.select([0, listener, wakeup, *clients.values()], [], [])[0]
        if wakeup in ready:
            wakeup.recv(4096)
            _reap(clients)
        if 0 in ready:
            break
        if listener in ready:
            client = listener.accept()[0]
            try:
                request, descriptors = _receive(client)
            except (OSError, EOFError):  # the client has gone
                continue
            pid = os.fork()
            if pid == 0:
                client.sendall(os.getpid().to_bytes(8, "little"))
                for end in (listener, wakeup, wakeup_end, client, *clients.values()):
                    end.close()
                _run(descriptors, *request)
                sys.exit()
            for descriptor in descriptors:
                os.close(descriptor)
            clients[pid] = client
        for pid, client in clients.items():
            if client in ready:  # clients send one request, so this is a disconnect
                os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + EXIT_TIMEOUT_S
    while clients and time.monotonic() < end:
        time.sleep(0.02)
        _reap(clients)
    for pid in clients:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _import_tests(tests: list[str]) -> None:
    import pytest

    class ImportOnly:
        """Import the modules, collect nothing in them."""

        @pytest.hookimpl(tryfirst=True)
        def pytest_pycollect_makeitem(self):
            return []

    # a worker reports import errors
    pytest.main(["--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], [ImportOnly()])
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._inductor.compile_fx")  # a second for every process that compiles
    if mapping := sys.modules.get("transformers.conversion_mapping"):
        mapping.get_checkpoint_conversion_mapping("llama")  # the first call builds a table, in half a second


def _receive(client: socket.socket) -> tuple[tuple, list[int]]:
    head, descriptors, *_ = socket.recv_fds(client, 8, 16)
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < max(size, 1):
        received = client.recv(size - len(data))
        if not received:
            raise EOFError
        data += received
    return pickle.loads(data), descriptors


def _reap(clients: dict[int, socket.socket]) -> None:
    """Close the connections of processes that have ended."""
    while clients:
        pid = os.waitpid(-1, os.WNOHANG)[0]
        if pid == 0:
            return
        clients.pop(pid).close()


def _run(descriptors: list[int], code: str, numbers: list[int], environment: dict[str, str], folder: str) -> None:
    """Run the code of a request in a fork."""
    from types import ModuleType

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, numbers):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["-c"]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(code, main.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fork = Fork(sys.argv[sys.argv.index("-c") + 1], [0, 1, 2])
    for stream in (0, 1):  # they belong to the fork now
        os.close(stream)
    fork.wait()
