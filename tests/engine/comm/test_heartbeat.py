"""Diagnosis of a long wait, the error board, and the end of a Communicator."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.comm.faults import AbortableStore, ErrorBoard, PeerLost, StoreLost, StoreThread
from zeropipe.engine.comm.heartbeat import EVERYONE, MAX_BUSY_S, Heartbeat, Observation, RankStatus, diagnose
from zeropipe.engine.comm.watchdog import Watchdog
from zeropipe.engine.layout import Layout

LONG = 100.0  # longer than the time-out of these tests


def observed(where="1F0", waits_for=(), stalled_for=LONG, num_exchanges=3, is_busy=False, age=0.0):
    return Observation(Heartbeat(1, where, stalled_for, tuple(waits_for), num_exchanges, is_busy), age)


def diagnose_rank_0(*ranks, timeout=60.0):
    return diagnose(0, dict(enumerate(ranks)), timeout)


def test_heartbeat_survives_json():
    heartbeat = Heartbeat(7, "2F3;5B1", 1.25, (1, 2), 3, True)
    assert Heartbeat.from_json(heartbeat.to_json()) == heartbeat


def test_the_end_of_a_chain_is_stuck_not_those_who_wait_for_it():
    assert diagnose_rank_0(observed("0B0", [1]), observed("1B0", [2]), observed("2F4")) == (
        "rank 2 is stuck at 2F4: no progress for 60 s, and rank 0 waits at 0B0; "
        "if this work takes that long, pass Engine a longer timeout"
    )


def test_a_stopped_rank_is_blamed_alone_whatever_it_waited_for():
    stopped = observed("2F4", [3], age=31)
    line = "rank 2 was lost: no heartbeat for 30 s, it is stopped or its machine is gone (last seen at 2F4)"
    assert diagnose_rank_0(observed("0B0", [1]), observed("1B0", [2]), stopped, observed("3F4", [2])) == line


def test_who_is_silent_for_a_moment_only_is_not_lost():
    assert diagnose_rank_0(observed("0B0", [1]), observed("1F0", stalled_for=0.1, age=29)) is None


def test_who_may_be_lost_is_not_called_stuck():
    """A short time-out is over before it is known."""
    assert diagnose_rank_0(observed("0B0", [1]), observed("1F0", stalled_for=4, age=2), timeout=2) is None
    assert diagnose_rank_0(observed("0B0", [1]), Observation(None, 2), timeout=2) is None
    assert "rank 1 was lost" in diagnose_rank_0(observed("0B0", [1]), observed("1F0", stalled_for=4, age=3), timeout=2)
    assert "rank 1 is stuck" in diagnose_rank_0(observed("0B0", [1]), observed("1F0", stalled_for=4, age=1), timeout=2)


def test_a_rank_that_gets_on_is_waited_for():
    assert diagnose_rank_0(observed("0B0", [1]), observed("1B0", [2]), observed("2F4", stalled_for=59)) is None


def test_a_rank_that_compiles_is_waited_for_but_not_for_ever():
    assert diagnose_rank_0(observed("0B0", [1]), observed("1F0", is_busy=True)) is None
    assert "rank 1 is stuck at 1F0" in diagnose_rank_0(
        observed("0B0", [1]), observed("1F0", is_busy=True, stalled_for=MAX_BUSY_S)
    )


def test_an_exchange_waits_for_those_who_have_not_come():
    here, between = observed("the sum of losses", EVERYONE), "a point between steps"
    late = observed("3F1", num_exchanges=2)
    assert "rank 3 is stuck at 3F1" in diagnose_rank_0(here, here, observed(between, num_exchanges=3), late)
    assert "rank 2 was lost" in diagnose_rank_0(here, here, observed(between, num_exchanges=2, age=40), late)
    assert diagnose_rank_0(here, here, here, observed("3F1", num_exchanges=2, stalled_for=1)) is None


def test_a_rank_that_stopped_inside_the_same_exchange_is_lost():
    here = observed("the sum of losses", EVERYONE)
    assert "rank 1 was lost" in diagnose_rank_0(here, observed("the sum of losses", EVERYONE, age=40), here)
    assert diagnose_rank_0(here, here, here) is None, "all are there: it is about to end"


def test_an_exchange_waits_through_others():
    here, waits = observed("the sum of losses", EVERYONE), observed("2F4", [3], num_exchanges=2)
    assert "rank 3 is stuck at 3F0" in diagnose_rank_0(here, here, waits, observed("3F0", num_exchanges=2))


def test_ranks_that_wait_for_each_other():
    assert (
        diagnose_rank_0(observed("0F1", [1]), observed("1F1", [0])) == "ranks wait for each other: 0 at 0F1, 1 at 1F1"
    )
    assert diagnose_rank_0(observed("0F1", [1]), observed("1F1", [0], stalled_for=2)) is None


def test_a_rank_that_was_lost_before_it_said_anything():
    assert diagnose_rank_0(observed("set-up", [1, 2]), observed("set-up", [0, 2]), Observation(None, 31)) == (
        "rank 2 was lost: no heartbeat for 30 s, it is stopped or its machine is gone"
    )


def test_status_is_an_action_while_an_executor_runs():
    class Executor:
        current_action = "2F3"

    status = RankStatus()
    signs = [status.progress]
    status.enter("the start of the step")
    signs.append(status.progress)
    status.executor = Executor()
    assert status.where == "2F3"
    signs.append(status.progress)
    status.waits_for = (1,)
    signs.append(status.progress)
    status.enter("the start of the step")
    assert status.where == "the start of the step"
    signs.append(status.progress)
    assert len(set(signs)) == 5, "every change shows"


class Deaf:
    """A store whose host is stopped, or gone."""

    def __init__(self, gone):
        self.gone, self.asked = gone, 0

    def __getattr__(self, name):
        def ask(*_):
            self.asked += 1
            if self.gone:
                raise RuntimeError("Broken pipe")
            threading.Event().wait(60)

        return ask


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "stopped"])
@pytest.mark.parametrize("host, hosts, line", [
    (True, (0,), "rank 0 was lost: the job's store, which it hosts, does not answer"),
    (False, (), "the job's store was lost, and rank 2 too: its connection closed"),
    (False, (2,), "rank 2 was lost: the job's store, on its machine, does not answer"),
    (False, (0, 2), "ranks 0, 2 were lost: the job's store, on their machine, does not answer"),
    (False, (0, 1, 2), "the job's store was lost, and rank 2 too: its connection closed"),
], ids=["rank 0", "unknown", "another", "others", "here"])  # fmt: skip
def test_nobody_waits_for_a_store_that_does_not_answer(monkeypatch, gone, host, hosts, line):
    monkeypatch.setattr("zeropipe.engine.torch_private.comm.store_is_on_rank_0", lambda: host)
    store = Deaf(gone)
    board = ErrorBoard(StoreThread(lambda: store, 0.2, 0.05), "job", 1, 3, hosts)
    with pytest.raises(StoreLost):
        board.read_error()
    assert board.post_error("an error of our own") == "an error of our own"
    board.mark_closed()
    text = str(board.explain(PeerLost([2], "its connection closed"), "1F0"))
    assert text == f"{line} (rank 1 was at 1F0)"
    assert store.asked == 1, "it is not asked again"


def board_of(store, rank):
    return ErrorBoard(StoreThread(lambda: store, 5.0, 5.0), "job", rank, 3)


def test_the_first_error_stands():
    store = dist.HashStore()
    boards = [board_of(store, rank) for rank in range(3)]
    assert boards[0].read_error() is None
    assert str(boards[1].explain(ValueError("no"), "1F3")) == "rank 1 failed at 1F3: ValueError: no"
    assert str(boards[0].explain(KeyError("x"), "0F4")) == "rank 1 failed at 1F3: ValueError: no"
    assert str(boards[2].explain(PeerLost([1], "its connection closed"), "2F0")) == boards[0].read_error()


def test_who_left_in_good_order_is_not_lost():
    store = dist.HashStore()
    boards = [board_of(store, rank) for rank in range(3)]
    boards[1].publish(Heartbeat(1, "1B7", 0.0, (), 5, False))
    boards[1].mark_closed()
    assert "rank 1 has closed its Engine while rank 0 waits for it at 0F0" in boards[0]._describe_lost(
        PeerLost([1], "x"), "0F0"
    )
    boards[2].publish(Heartbeat(1, "2B7", 0.0, (), 5, False))
    lost = boards[0]._describe_lost(PeerLost([1, 2], "its connection closed"), "0F0")
    assert lost == "rank 2 was lost: its connection closed (last seen at 2B7)"


def test_waits_in_the_store_end_with_an_error():
    store = dist.HashStore()
    here, there = (AbortableStore(board_of(store, rank), "edge/0-1") for rank in range(2))
    there.set("1", b"address")
    assert here.get("1") == b"address"
    board_of(store, 2).post_error("rank 2 failed")
    with pytest.raises(PeerLost, match="another rank failed"):
        here.get("2")


class FailingHost:
    """A store in which a value and then an error are set right after somebody has asked for the value."""

    def __init__(self):
        self.keys = {}

    def check(self, keys):
        found = all(key in self.keys for key in keys)
        self.keys |= {"job/exchange": b"values", "job/error": b"rank 0 failed"}
        return found

    def get(self, key):
        return self.keys[key]


def test_a_value_that_was_set_before_an_error_is_found():
    store = FailingHost()
    board = board_of(store, 1)
    board.wait("exchange")
    with pytest.raises(PeerLost, match="another rank failed"):
        board.wait("a value that nobody sets")


class Fake:
    """The parts of a Communicator that its end needs."""

    def __init__(self, monkeypatch):
        self.broken, self.began, self.go_on = [], threading.Event(), threading.Event()
        monkeypatch.setattr("zeropipe.engine.torch_private.comm.abort", self.abort)
        self.comm = object.__new__(Communicator)
        vars(self.comm).update(
            rank=0, size=1, is_nccl=False, closed=False, control="control", _pipeline_control=None, status=RankStatus(),
            _groups={"a": "a", "b": "b"}, _gloo_devices=[], _lock=threading.Lock(), _running_calls=[],
            _store=StoreThread(dist.HashStore, 5.0, 5.0), _watchdog=Watchdog(60.0), _receive_threads=[],
            layout=Layout((0,), 0, (0,), {"pp": 1}, {"pp": 0}),
        )  # fmt: skip
        self.comm.board = ErrorBoard(self.comm._store, "job", 0, 1)

    def abort(self, groups, patience):
        for group in groups:
            self.broken.append(group)
            self.began.set()
            assert self.go_on.wait(10)
            assert self.comm.control == "control", "nothing is dropped while it is broken"


def test_one_thread_breaks_the_connections_and_nobody_drops_them_meanwhile(monkeypatch):
    fake = Fake(monkeypatch)
    calls = [fake.comm.abort, fake.comm.abort, fake.comm.close, fake.comm.close]
    threads = [threading.Thread(target=call) for call in calls]
    threads[0].start()
    assert fake.began.wait(10)
    for thread in threads[1:]:
        thread.start()
    fake.go_on.set()
    for thread in threads:
        thread.join(10)
    assert fake.broken == ["control", "a", "b"], "each once"
    assert fake.comm.control is None
