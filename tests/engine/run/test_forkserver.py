"""The fork server that starts local ranks."""

import os
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Barrier

import pytest

pytest.importorskip("torch")

from zeropipe.engine.run import forkserver


def answer(end, number):
    with Connection(end) as connection:
        connection.send((number, os.getpid()))


def test_threads_share_one_fork_server(monkeypatch):
    """They start ranks and preload modules at the same time; every rank is waited for where it was started."""
    monkeypatch.setattr(forkserver, "_current", None)
    barrier = Barrier(6)

    def start(number):
        barrier.wait()
        server = forkserver.fork_server()
        server.preload(["json"])
        ours, theirs = Pipe()
        with theirs:
            pid = server.start_rank(answer, (number,), theirs.fileno(), 60.0)
        assert ours.poll(60)
        assert ours.recv() == (number, pid)
        assert forkserver.fork_server().wait(pid, 60.0) == 0
        return server

    with ThreadPoolExecutor(6) as pool:
        servers = set(pool.map(start, range(6)))
    assert len(servers) == 1
    servers.pop().close()
