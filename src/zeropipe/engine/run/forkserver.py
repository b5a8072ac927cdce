"""A process that imports torch once, forks ranks from there, and ends with them.

It does nothing but wait, so it notices at once when the process that started it is gone, for whatever reason, and then
kills all ranks, also busy and stopped ones. If the fork server itself is killed, the kernel kills the ranks. It
communicates over a pair of sockets: nothing is left on disk.

Processes of the standard library's fork server survive the process that started them if they are busy or stopped.
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
from multiprocessing import spawn
from typing import Any

from zeropipe.engine.run.python_private import importing_main, interpreter_flags, is_importing_main, run_exit_functions
from zeropipe.errors import ConfigError, EngineError

PR_SET_PDEATHSIG = 1
SIZE = struct.Struct("<q")  # of the request that follows
EVENT = struct.Struct("<cqq")  # kind, process id, exit code
STARTED, ENDED = b"b", b"e"


class ForkServer:
    """The client side, in the process that starts ranks."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from zeropipe.engine.run.forkserver import serve; serve({theirs.fileno()}, {os.getpid()})"
        )
        self._process = start_process(code, theirs.fileno())
        theirs.close()
        self._socket, self._lock, self._owner = ours, threading.Lock(), os.getpid()
        self._exit_codes: dict[int, int] = {}
        self._started: list[int] = []
        self.ended = False
        atexit.register(self.close)

    @property
    def is_usable(self) -> bool:
        """Whether it runs and belongs to this process: a fork of the process needs one of its own."""
        with self._lock:
            self._receive(0)
        return not self.ended and self._owner == os.getpid()

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules that ranks will need."""
        with self._lock:
            self._send((list(sys.path), list(modules)))

    def start_rank(self, function: Callable[..., None], args: tuple[Any, ...], connection: int, timeout: float) -> int:
        """Start a process that calls `function(connection, *args)`; returns its process id.

        `connection`: file descriptor of the rank's end of a connection.
        """
        with self._lock:
            self._send((preparation_data(), dict(os.environ), function, args), connection)
            deadline = time.monotonic() + timeout
            while not self._started:
                if self.ended or time.monotonic() > deadline:
                    raise EngineError("local ranks could not be started: the process that starts them does not answer")
                self._receive(deadline - time.monotonic())
            return self._started.pop()

    def wait(self, pid: int, timeout: float) -> int | None:
        """The exit code of a rank (0 to 255, or minus a signal's number), None if it still runs after `timeout`."""
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            with self._lock:  # other threads may wait, too, or start ranks
                self._receive(min(0.05, remaining))
                if pid in self._exit_codes or self.ended or remaining <= 0:
                    return self._exit_codes.get(pid, -signal.SIGKILL if self.ended else None)

    def close(self) -> None:
        """End it, and with it all remaining ranks."""
        if self._owner == os.getpid():
            self._socket.close()
            self.ended = True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def _send(self, request: object, *files: int) -> None:
        data = pickle.dumps(request)
        try:
            socket.send_fds(self._socket, [SIZE.pack(len(data))], files)
            self._socket.sendall(data)
        except OSError:
            self.ended = True

    def _receive(self, timeout: float) -> None:
        """Receive all events that are there, waiting at most `timeout` seconds for the first one."""
        while not self.ended and select.select([self._socket], [], [], max(0.0, timeout))[0]:
            try:
                kind, pid, code = EVENT.unpack(_receive_exactly(self._socket, EVENT.size))
            except (OSError, EOFError):
                self.ended = True
                return
            if kind == STARTED:
                self._exit_codes.pop(pid, None)  # of an earlier process with this id
                self._started.append(pid)
            else:
                self._exit_codes[pid] = code
            timeout = 0


def start_process(code: str, file: int) -> subprocess.Popen[bytes]:
    """Start a Python process that runs `code` and inherits our file descriptor `file`.

    Imported code may check for GPUs. torch then queries NVML instead of CUDA, which would not work in ranks that are
    forks of a process that has used it: not even an optimizer on the CPU, since that checks for GPUs, too.
    """
    environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = [sys.executable, *interpreter_flags(), "-c", code]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[file], env=environment)


def preparation_data() -> dict[str, Any]:
    """The state of this process that a rank takes over: sys.argv, the main script, ..."""
    data = spawn.get_preparation_data("zeropipe-rank")
    del data["authkey"]  # of multiprocessing, which refuses to send it
    if not os.path.exists(data.get("init_main_from_path", "")):  # a script from stdin
        data.pop("init_main_from_path", None)
    return data


_current: ForkServer | None = None
_current_lock = threading.Lock()


def fork_server() -> ForkServer:
    """This process's fork server, which is started if there is none."""
    global _current
    if is_importing_main():
        raise ConfigError(
            "local ranks are started while the script is imported, which every rank does: start them in a function or "
            "under `if __name__ == '__main__':`"
        )
    with _current_lock:  # threads of a process share one
        if _current is None or not _current.is_usable:
            _current = ForkServer()
        return _current


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


# inside the fork server


def serve(file: int, client: int) -> None:
    """Fork ranks as the process `client` requests them, report how they end, and leave none behind."""
    requests = socket.socket(fileno=file)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they may be sent to a process group; the client decides
    wakeup, waker = socket.socketpair()
    for end in (wakeup, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: set[int] = set()
    with contextlib.suppress(OSError, EOFError):
        # a fork of the client may hold its end of the socket open, so the process is monitored as well
        process = os.pidfd_open(client) if hasattr(os, "pidfd_open") else None
        sources: list[Any] = [requests, wakeup, *([process] if process is not None else [])]
        while True:
            ready = select.select(sources, [], [])[0]
            if process in ready:
                break
            if wakeup in ready:
                wakeup.recv(4096)
                _report_ended(requests, running)
            if requests in ready:
                _handle_request(requests, (wakeup, waker), running)
    for pid in running:
        os.kill(pid, signal.SIGKILL)  # not waited for yet, so the id is still that of the rank
    for pid in running:
        os.waitpid(pid, 0)
    os._exit(0)


def _report_ended(requests: socket.socket, running: set[int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        running.discard(pid)
        requests.sendall(EVENT.pack(ENDED, pid, os.waitstatus_to_exitcode(status)))


def _handle_request(requests: socket.socket, own: Sequence[socket.socket], running: set[int]) -> None:
    """Import modules, or fork a rank if the request comes with a file descriptor."""
    head, files, *_ = socket.recv_fds(requests, SIZE.size, 1)
    if not head:
        raise EOFError
    (size,) = SIZE.unpack(head + _receive_exactly(requests, SIZE.size - len(head)))
    data = _receive_exactly(requests, size)
    if not files:
        path, modules = pickle.loads(data)
        sys.path[:] = path
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        return
    os.set_inheritable(files[0], False)
    server = os.getpid()
    gc.freeze()  # ranks collect garbage among their own objects, and share the memory of existing ones
    pid = os.fork()
    if pid == 0:
        for end in (requests, *own):
            end.close()
        _run_rank(data, files[0], server)
    os.close(files[0])
    running.add(pid)
    requests.sendall(EVENT.pack(STARTED, pid, 0))


def _run_rank(data: bytes, connection: int, server: int) -> None:
    """Run a rank in the forked process, from its start to its exit."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(code)
        threading.Thread(target=_exit_with_client, args=(connection,), name="zeropipe-parent", daemon=True).start()
        preparation, environment, function, args = pickle.loads(data)
        os.environ.clear()
        os.environ.update(environment)
        with importing_main():
            spawn.prepare(preparation)
        function(connection, *args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            run_exit_functions()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _exit_with_client(connection: int) -> None:
    """Exit when the connection is closed: for systems without PR_SET_PDEATHSIG, and for a stopped fork server."""
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    poll.poll()
    time.sleep(1)  # an idle rank ends by itself
    os._exit(1)
