"""The page under load: queues, and a light request beside fifty heavy ones."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from app_client import told
from fastapi.testclient import TestClient
from process_tools import PATIENCE, alive, children, until

import zeropipe as zp
from zeropipe.app import queues as queues_module
from zeropipe.app.job_queue import Job, JobQueue, QueueFull, ThreadRunner
from zeropipe.app.server import create_app
from zeropipe.core.workers import WorkerMemoryError

# queues


class Gate(ThreadRunner):
    """Runs a job for each release of `go`."""

    def __init__(self):
        self.go = threading.Semaphore(0)

    def call(self, function, *args):
        assert self.go.acquire(timeout=PATIENCE)
        return super().call(function, *args)


def test_a_full_queue_refuses_and_urgent_jobs_run_first():
    gate, done = Gate(), []
    queue = JobQueue(lambda: gate, 1, max_waiting=3)
    first = queue.put(Job(done.append, ("first",)))
    until(lambda: queue.load.running == 1, "the first job runs")
    later = [queue.put(Job(done.append, (name,)), urgent=name != "chart") for name in ("chart", "a", "b")]
    with pytest.raises(QueueFull):
        queue.put(Job(done.append, ("too many",)))
    queue.cancel(later[2])
    assert queue.load == (1, 2, 3)
    gate.go.release(3)
    first.future.result(PATIENCE)
    later[0].future.result(PATIENCE)
    assert done == ["first", "a", "chart"]
    assert later[2].future.cancelled()


def test_jobs_that_are_not_urgent_leave_one_runner_free():
    gates = [Gate(), Gate()]
    queue = JobQueue(iter(gates).__next__, 2, max_waiting=9)
    charts = [queue.put(Job(int, ()), urgent=False) for _ in range(3)]
    until(lambda: queue.load.running == 1, "one chart runs")
    urgent = queue.put(Job(str, ()))
    for gate in gates:
        gate.go.release(9)
    assert urgent.future.result(PATIENCE) == ""
    assert [chart.future.result(PATIENCE) for chart in charts] == [0, 0, 0]


def test_a_closed_queue_cancels_waiting_jobs_and_can_be_used_again():
    gate = Gate()
    queue = JobQueue(lambda: gate, 1, max_waiting=9)
    running, waiting = (queue.put(Job(int, ())) for _ in range(2))
    until(lambda: queue.load.running == 1, "a job runs")
    queue.close()
    assert waiting.future.cancelled()
    gate.go.release(2)
    assert running.future.result(PATIENCE) == 0
    assert queue.put(Job(int, ())).future.result(PATIENCE) == 0


# the server

HEAVY = {"ranks": 64, "microbatches": 2600, "schedules": [{"name": "zbv"}]}  # a million actions, seconds of work
LIGHT = {"schedules": [{"name": "1f1b"}, {"name": "zbv"}]}
MINE = """
import zeropipe as zp

@zp.register("my-own", placement=zp.linear)
def mine(lane, rank, p):
    lane.f(rank, times=p.num_microbatches)
    lane.b(rank, times=p.num_microbatches)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`zeropipe app` in a process of its own; killed with -9 at the end, which must leave nothing."""
    mine = tmp_path_factory.mktemp("mine") / "mine.py"
    mine.write_text(MINE)
    command = [sys.executable, "-c", "from zeropipe.cli import main; main()", "app", "--no-browser", "--port", "0"]
    process = subprocess.Popen([*command, f"{mine}:mine"], stdout=subprocess.PIPE, text=True)
    address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]
    yield address, process
    workers = children(process.pid)
    process.kill()
    process.communicate()
    assert workers
    until(lambda: not any(map(alive, workers)), "the workers end with their server")


async def load_of(client):
    return (await client.get("/api/load")).json()["large"]


def test_a_light_request_is_answered_beside_fifty_heavy_ones_which_stop_when_nobody_waits(served):
    address, _ = served

    async def visit():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as light:
            async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as heavy:
                open_ = [asyncio.create_task(heavy.post("/api/simulate", json=HEAVY)) for _ in range(50)]
                while (load := await load_of(light))["waiting"] + load["running"] < 50 - sum(t.done() for t in open_):
                    await asyncio.sleep(0.05)
                begun = time.monotonic()
                answers = [await light.post(f"/api/{path}", json=LIGHT) for path in ("simulate", "files/svg")]
                waited = time.monotonic() - begun
                left = sum(not task.done() for task in open_)
                for task in open_:
                    task.cancel()
                await asyncio.gather(*open_, return_exceptions=True)
            begun = time.monotonic()
            while (load := await load_of(light))["waiting"] + load["running"]:
                await asyncio.sleep(0.05)
                assert time.monotonic() < begun + PATIENCE, load
            stopped = time.monotonic() - begun
            again = await light.post("/api/simulate", json={**HEAVY, "microbatches": 200})
            return [a.status_code for a in answers], left, waited, stopped, again.status_code

    statuses, left, waited, stopped, again = asyncio.run(visit())
    assert statuses == [200, 200]
    assert left >= 40, "the heavy ones were still open"
    # fifty heavy ones take minutes; alone, the light ones take a tenth of a second
    assert waited < 15
    assert stopped < 15
    assert again == 200


def test_workers_know_the_schedules_of_the_users_file(served):
    address, process = served
    body = {"ranks": 8, "microbatches": 4000, "schedules": [{"name": "my-own"}]}
    answer = httpx.post(f"{address}api/simulate", json=body, timeout=PATIENCE).json()
    schedule = zp.build("gpipe", ranks=8, microbatches=4000)
    assert answer["results"][0]["makespan"] == zp.simulate(schedule).makespan
    assert children(process.pid)


def test_a_schedule_of_this_process_alone_is_computed_here():
    @zp.register("only-here", placement=zp.linear)
    def only_here(lane, rank, p):
        lane.f(rank, times=p.num_microbatches)
        lane.b(rank, times=p.num_microbatches)

    with TestClient(create_app(), base_url="http://localhost") as client:
        body = {"ranks": 8, "microbatches": 4000, "schedules": [{"name": "only-here"}]}
        assert client.post("/api/simulate", json=body).json()["results"][0]["num_actions"] == 64_000


def test_a_full_server_says_when_to_come_again(monkeypatch):
    monkeypatch.setattr(queues_module, "MAX_WAITING_LARGE", 0)
    with TestClient(create_app(), base_url="http://localhost") as client:
        response = client.post("/api/simulate", json=HEAVY)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert told(response.json(), "") == ["0 requests wait already: try again in 5 seconds"]
        assert client.post("/api/simulate", json=LIGHT).status_code == 200


def test_a_failure_of_ours_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr("zeropipe.app.calls.compare_figures", lambda shown, per: 1 / 0)
    client = TestClient(create_app(), base_url="http://localhost", raise_server_exceptions=False)
    response = client.post("/api/simulate", json=LIGHT)
    assert response.status_code == 500
    assert told(response.json(), "")[0].startswith("the server failed: ZeroDivisionError: division by zero. ")
    assert "Traceback" not in response.text

    def run_out_of_memory(shown, per):
        raise WorkerMemoryError("this is too large")

    monkeypatch.setattr("zeropipe.app.calls.compare_figures", run_out_of_memory)
    response = client.post("/api/simulate", json=LIGHT)
    message = "this is too large, which is the page's limit: use a smaller problem or the command line"
    assert (response.status_code, told(response.json(), "")) == (422, [message])


def test_closing_the_server_ends_its_workers():
    before = children(os.getpid())
    with TestClient(create_app(), base_url="http://localhost") as client:
        assert client.post("/api/simulate", json={**HEAVY, "microbatches": 200}).status_code == 200
        assert children(os.getpid()) - before
    assert children(os.getpid()) - before == set()


def test_the_server_ends_at_once_while_it_computes():
    """Ctrl-C beside open heavy requests: those who wait are told, the terminal shows nothing."""
    command = [sys.executable, "-c", "from zeropipe.cli import main; main()", "app", "--no-browser", "--port", "0"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    address = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())[0]
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(httpx.post, f"{address}api/simulate", json=HEAVY, timeout=None) for _ in range(5)]
        load = lambda: httpx.get(f"{address}api/load", timeout=PATIENCE).json()["large"]  # noqa: E731
        until(lambda: load()["running"] + load()["waiting"] == 5, "it computes")
        workers = children(server.pid)
        server.send_signal(signal.SIGINT)
        _, complaints = server.communicate(timeout=PATIENCE)
        answers = [one.result(PATIENCE) for one in asked]
    assert (server.returncode, complaints.strip()) == (130, "")
    assert {answer.status_code for answer in answers} == {503}
    assert told(answers[0].json(), "") == ["the server is shutting down: start it again"]
    assert workers
    assert not any(map(alive, workers))
