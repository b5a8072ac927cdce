"""Worker processes: results, failures, cancellation, memory limits, and none that outlives its parent."""

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import worker_jobs
from process_tools import PATIENCE, alive, until

from zeropipe.app.errors import Refusal
from zeropipe.core import workers
from zeropipe.core.worker_main import CallLoop
from zeropipe.core.workers import NO_LIMITS, CallCancelled, Limits, Status, Worker, WorkerError, WorkerMemoryError
from zeropipe.errors import MissingExtra

GIB = 2**30


@pytest.fixture(scope="module")
def worker():
    created = Worker(worker_jobs.prepare, (1, "a"), limits=Limits(4 * GIB, 3), environ={"ZEROPIPE_TEST": "yes"})
    yield created
    created.close()


def test_a_call_returns_its_result_from_a_prepared_process(worker):
    assert worker.call(worker_jobs.add, 1, 2) == 3
    assert worker.call(worker_jobs.process) not in (0, os.getpid())
    assert worker.call(worker_jobs.initargs) == (1, "a")
    assert worker.call(os.getenv, "ZEROPIPE_TEST") == "yes"
    assert worker.call(worker_jobs.niceness) == os.nice(0) + 3
    assert worker.call(worker_jobs.use_stdin_and_stdout) == b""  # a user's code does not reach the pipes


def test_errors_of_ours_arrive_as_they_are_and_keep_the_process(worker):
    before = worker.call(worker_jobs.process)
    with pytest.raises(Refusal) as refusal:
        worker.call(worker_jobs.refuse)
    assert refusal.value.errors == (("ranks", "ranks=0: no"),)
    with pytest.raises(MissingExtra, match=r"needs numba.*pip install 'zeropipe\[search\]'"):
        worker.call(worker_jobs.miss)
    assert worker.call(worker_jobs.process) == before


@pytest.mark.parametrize(
    ("function", "message"),
    [(worker_jobs.fail, "ValueError: two"), (worker_jobs.return_unpicklable, "pickle")],
)
def test_other_errors_are_one_error_and_replace_the_process(capfd, function, message):
    worker = Worker(worker_jobs.prepare)
    before = worker.call(worker_jobs.process)
    with pytest.raises(WorkerError, match=message):
        worker.call(function)
    assert "Traceback" in capfd.readouterr().err  # for whoever started the server
    assert worker.call(worker_jobs.process) != before
    worker.close()


def test_arguments_that_cannot_be_pickled_leave_the_process_usable(worker):
    before = worker.call(worker_jobs.process)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        worker.call(lambda: None)
    assert worker.call(worker_jobs.process) == before


def cancel_when_begun(worker, begun, function):
    """Cancel a call that creates the file `begun`; returns what it raised."""
    raised = []

    def call():
        try:
            worker.call(function, str(begun))
        except BaseException as error:
            raised.append(type(error))

    thread = threading.Thread(target=call)
    thread.start()
    until(begun.exists, "the call begins")
    worker.cancel()
    thread.join(PATIENCE)
    return raised


def test_a_call_that_checks_for_interrupts_is_cancelled_in_its_process(worker, tmp_path):
    before = worker.call(worker_jobs.process)
    assert cancel_when_begun(worker, tmp_path / "begun", worker_jobs.spin) == [CallCancelled]
    worker.cancel()  # no call is running: no effect
    assert worker.call(worker_jobs.process) == before


def test_a_call_that_does_not_check_is_killed_with_its_process(worker, tmp_path):
    before = worker.call(worker_jobs.process)
    begun = tmp_path / "begun"
    assert cancel_when_begun(worker, begun, worker_jobs.sleep) == [CallCancelled]
    assert not alive(before)
    assert not Path(begun.read_text()).exists()  # its temporary files are gone
    assert worker.call(worker_jobs.process) != before


def test_workers_of_a_killed_worker_end_with_it(worker, tmp_path):
    begun = tmp_path / "begun"
    assert cancel_when_begun(worker, begun, worker_jobs.sleep_with_worker) == [CallCancelled]
    until(lambda: not alive(int(begun.read_text())), "the inner worker ends")


def test_a_process_that_dies_is_reported_in_one_line_and_replaced(worker):
    with pytest.raises(WorkerError, match="ended with status 3; the machine may be out of memory"):
        worker.call(worker_jobs.die)
    assert worker.call(worker_jobs.add, 1, 2) == 3


def test_a_call_above_the_memory_limit_is_refused(worker):
    with pytest.raises(WorkerMemoryError, match="this takes more than 4 GiB of memory"):
        worker.call(worker_jobs.allocate, 64 * GIB)
    assert worker.call(worker_jobs.allocate, GIB) == GIB


def test_a_closed_worker_runs_no_more_calls():
    closed = Worker(worker_jobs.prepare)
    pid = closed.call(worker_jobs.process)
    closed.close()
    assert not alive(pid)
    with pytest.raises(CallCancelled):
        closed.call(worker_jobs.process)


def raise_cancelled():
    raise CallCancelled


def test_a_process_that_was_cancelled_within_torch_is_replaced(monkeypatch):
    """torch and transformers set global switches for a while: they may be left as they were at the interrupt."""
    monkeypatch.setitem(sys.modules, "torch", object())
    outcome = pickle.loads(CallLoop(None, None)._outcome(1, raise_cancelled, ()))
    assert outcome == (Status.CANCELLED_IN_TORCH, None)
    worker, replaced = Worker(worker_jobs.prepare), []
    monkeypatch.setattr(worker, "_replace", replaced.append)
    worker._process = process = SimpleNamespace(send=lambda message: None, receive=lambda: outcome)
    with pytest.raises(CallCancelled):
        worker.call(int)
    assert replaced == [process]


ENDLESS = """
import os, pickle
while True:
    os.write(1, pickle.dumps(["a message"] * 1000))
"""


def test_a_process_that_ends_in_the_middle_of_a_message_is_reported_as_such(monkeypatch):
    """A thread that reads meanwhile finds the end, not a file that was closed."""
    monkeypatch.setattr(workers, "_COMMAND", ENDLESS)
    for _ in range(20):
        process, found = workers._Process(worker_jobs.prepare, (), NO_LIMITS, {}), []
        reader = threading.Thread(target=read_until_it_fails, args=(process, found))
        reader.start()
        time.sleep(0.05)
        process.end()
        reader.join(PATIENCE)
        assert found in ([EOFError], [pickle.UnpicklingError])
        with pytest.raises(EOFError):
            process.receive()
        with pytest.raises(OSError):
            process.send("a message")


def read_until_it_fails(process, found):
    try:
        while True:
            process.receive()
    except Exception as error:
        found.append(type(error))


PARENT = """
import sys
sys.path.insert(0, {folder!r})
import worker_jobs
from zeropipe.core.workers import Worker
worker = Worker(worker_jobs.prepare)
print(worker.call(worker_jobs.process), flush=True)
worker.call(worker_jobs.sleep, {begun!r})
"""


def test_a_worker_does_not_outlive_its_parent(tmp_path):
    """After kill -9 of the parent, the worker ends without a message and removes its temporary files."""
    begun = tmp_path / "begun"
    code = PARENT.format(folder=str(Path(worker_jobs.__file__).parent), begun=str(begun))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    until(lambda: begun.exists() and begun.read_text(), "the call begins")
    assert alive(worker)
    parent.kill()
    assert parent.communicate()[1] == ""
    until(lambda: not alive(worker), "the worker ends")
    assert not Path(begun.read_text()).parent.exists()
