"""The page under load: lanes, worker processes that stop or are killed, and a light request beside fifty heavy ones."""

import asyncio
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import app_jobs
import httpx
import pytest
from app_client import told
from fastapi.testclient import TestClient

import zeropipe as zp
from zeropipe.app import desk as desk_module
from zeropipe.app import hands
from zeropipe.app.errors import Refusal
from zeropipe.app.hands import STOPPED, UNSURE, Failed, Outgrown, WorkerHand
from zeropipe.app.lanes import Busy, Here, Job, Lane, Stopped
from zeropipe.app.server import create_app
from zeropipe.app.worker import Worker

PATIENCE = 60  # seconds: on a busy machine all takes longer; what is waited for takes one at most


def until(true, what):
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def alive(pid):
    """Whether a process runs; one that ended and that nobody has asked for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid):
    """What the threads of a process have started."""
    found = set()
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found |= set(map(int, listed.read_text().split()))
    return found


# lanes


class Gate(Here):
    """Does jobs when it is told to."""

    def __init__(self):
        self.go = threading.Semaphore(0)

    def do(self, job):
        assert self.go.acquire(timeout=PATIENCE)
        return super().do(job)


def test_a_full_lane_turns_away_and_urgent_jobs_go_first():
    gate, done = Gate(), []
    lane = Lane(lambda: gate, 1, room=3)
    first = lane.add(Job(done.append, ("first",)))
    until(lambda: lane.load.running == 1, "the first job runs")
    later = [lane.add(Job(done.append, (name,)), urgent=name != "chart") for name in ("chart", "a", "b")]
    with pytest.raises(Busy):
        lane.add(Job(done.append, ("too many",)))
    lane.give_up(later[2])
    assert lane.load == (1, 2, 3)
    gate.go.release(3)
    first.future.result(PATIENCE)
    later[0].future.result(PATIENCE)
    assert done == ["first", "a", "chart"]
    assert later[2].future.cancelled()


def test_what_is_not_urgent_leaves_one_hand_free():
    gates = [Gate(), Gate()]
    lane = Lane(iter(gates).__next__, 2, room=9)
    charts = [lane.add(Job(int, ()), urgent=False) for _ in range(3)]
    until(lambda: lane.load.running == 1, "one chart runs")
    urgent = lane.add(Job(str, ()))
    for gate in gates:
        gate.go.release(9)
    assert urgent.future.result(PATIENCE) == ""
    assert [chart.future.result(PATIENCE) for chart in charts] == [0, 0, 0]


def test_a_closed_lane_gives_up_what_waits_and_begins_anew():
    gate = Gate()
    lane = Lane(lambda: gate, 1, room=9)
    running, waiting = (lane.add(Job(int, ())) for _ in range(2))
    until(lambda: lane.load.running == 1, "a job runs")
    lane.close()
    assert waiting.future.cancelled()
    gate.go.release(2)
    assert running.future.result(PATIENCE) == 0
    assert lane.add(Job(int, ())).future.result(PATIENCE) == 0


# worker processes


@pytest.fixture(scope="module")
def hand():
    made = WorkerHand()
    yield made
    made.close()


def test_a_worker_answers_refuses_and_fails_in_one_line(hand, capfd):
    assert hand.do(Job(app_jobs.add, (1, 2))) == 3
    with pytest.raises(Refusal) as refusal:
        hand.do(Job(app_jobs.refuse, ()))
    assert refusal.value.errors == (("ranks", "ranks=0: no"),)
    before = hand.do(Job(app_jobs.process, ()))
    with pytest.raises(Failed, match="ValueError: two"):
        hand.do(Job(app_jobs.fail, ()))
    assert "Traceback" in capfd.readouterr().err  # for whoever started the server
    assert hand.do(Job(app_jobs.process, ())) != before  # a process that failed is not trusted any more
    assert hand.do(Job(app_jobs.chatter, ())) == b""  # what a schedule prints or reads does not go into the pipes
    assert hand.do(Job(app_jobs.process, ())) not in (0, os.getpid())


def given_up(hand, job, begun):
    """Stop a job once it has begun; what `do` raised."""
    raised = []

    def do():
        try:
            hand.do(job)
        except BaseException as error:
            raised.append(type(error))

    thread = threading.Thread(target=do)
    thread.start()
    until(begun.exists, "the job begins")
    hand.stop()
    thread.join(PATIENCE)
    return raised


def test_a_worker_that_listens_is_stopped_and_kept(hand, tmp_path):
    before = hand.do(Job(app_jobs.process, ()))
    begun = tmp_path / "begun"
    assert given_up(hand, Job(app_jobs.spin, (str(begun),)), begun) == [Stopped]
    hand.stop()  # nothing runs: nothing happens
    assert hand.do(Job(app_jobs.process, ())) == before


def test_a_worker_that_does_not_listen_is_killed_and_replaced(hand, tmp_path):
    before = hand.do(Job(app_jobs.process, ()))
    begun = tmp_path / "begun"
    assert given_up(hand, Job(app_jobs.sleep_deaf, (str(begun),)), begun) == [Stopped]
    assert not alive(before)
    assert not Path(begun.read_text()).exists()  # its temporary files are gone
    assert hand.do(Job(app_jobs.process, ())) != before


def test_a_worker_that_dies_is_told_in_one_line_and_replaced(hand):
    with pytest.raises(Failed, match=r"ended with status 3.*use the command line"):
        hand.do(Job(app_jobs.die, ()))
    assert hand.do(Job(app_jobs.add, (1, 2))) == 3
    with pytest.raises(Outgrown, match="more than 4 GiB of memory, which is all the page gives"):
        hand.do(Job(app_jobs.grow, ()))


def stop_here():
    raise Stopped


def test_a_worker_that_was_stopped_within_torch_is_replaced(monkeypatch):
    """torch and transformers have switches that code sets for a while: who knows where it was stopped."""
    monkeypatch.setitem(sys.modules, "torch", object())
    outcome = Worker(None, None, "")._outcome(1, Job(stop_here, ()))
    assert outcome == (STOPPED, UNSURE)
    hand, forgotten = WorkerHand(), []
    monkeypatch.setattr(hand, "_forget", forgotten.append)
    hand._process = process = SimpleNamespace(send=lambda message: None, receive=lambda: outcome)
    with pytest.raises(Stopped):
        hand.do(Job(int, ()))
    assert forgotten == [process]


ENDLESS = """
import os, pickle
while True:
    os.write(1, pickle.dumps(["a message"] * 1000))
"""


def test_a_process_that_ends_in_the_middle_of_a_message_is_told_as_such(monkeypatch):
    """Whoever reads from it meanwhile finds its end, not a file closed under its hands."""
    monkeypatch.setattr(hands, "_START", ENDLESS)
    for _ in range(20):
        process, found = hands.Process(()), []
        reader = threading.Thread(target=read_until_it_fails, args=(process, found))
        reader.start()
        time.sleep(0.05)
        process.end()
        reader.join(PATIENCE)
        assert found in ([EOFError], [pickle.UnpicklingError])
        with pytest.raises(EOFError):
            process.receive()
        with pytest.raises(OSError):
            process.send("anybody?")


def read_until_it_fails(process, found):
    try:
        while True:
            process.receive()
    except Exception as error:
        found.append(type(error))


ALONE = """
import sys, threading
sys.path.insert(0, {tests!r})
import app_jobs
from zeropipe.app.hands import WorkerHand
from zeropipe.app.lanes import Job
hand = WorkerHand()
print(hand.do(Job(app_jobs.process, ())), flush=True)
hand.do(Job(app_jobs.sleep_deaf, ({begun!r},)))
"""


def test_a_worker_does_not_outlive_its_server(tmp_path):
    """kill -9 of the server: its worker ends, and takes its temporary files away."""
    begun = tmp_path / "begun"
    code = ALONE.format(tests=str(Path(__file__).parent), begun=str(begun))
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(server.stdout.readline())
    until(lambda: begun.exists() and begun.read_text(), "the job begins")
    assert alive(worker)
    server.kill()
    server.communicate()
    until(lambda: not alive(worker), "the worker ends")
    assert not Path(begun.read_text()).parent.exists()


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
    monkeypatch.setattr(desk_module, "LARGE_ROOM", 0)
    with TestClient(create_app(), base_url="http://localhost") as client:
        response = client.post("/api/simulate", json=HEAVY)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert told(response.json(), "") == [
            "0 requests wait already, which is all the page keeps: try again in 5 seconds"
        ]
        assert client.post("/api/simulate", json=LIGHT).status_code == 200


def test_a_failure_of_ours_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr("zeropipe.app.calls.results", lambda shown, per: 1 / 0)
    client = TestClient(create_app(), base_url="http://localhost", raise_server_exceptions=False)
    response = client.post("/api/simulate", json=LIGHT)
    assert response.status_code == 500
    assert told(response.json(), "")[0].startswith("the server failed: ZeroDivisionError: division by zero. ")
    assert "Traceback" not in response.text
    monkeypatch.setattr("zeropipe.app.calls.results", lambda shown, per: (_ for _ in ()).throw(Outgrown("too large")))
    response = client.post("/api/simulate", json=LIGHT)
    assert (response.status_code, told(response.json(), "")) == (422, ["too large"])


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
    assert told(answers[0].json(), "") == ["the server is ending: start it again"]
    assert workers
    assert not any(map(alive, workers))
