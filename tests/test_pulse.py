"""Who is to blame for a long wait: decided from what ranks say about themselves."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from zeropipe.engine.comm.fabric import Fabric
from zeropipe.engine.comm.faults import AbortableStore, Board, PeerLost, StoreLost, StoreThread
from zeropipe.engine.comm.pulse import EVERYONE, LONG_WORK, Place, Pulse, Seen, verdict
from zeropipe.engine.comm.watchdog import Watchdog
from zeropipe.engine.layout import Layout

LONG = 100.0  # longer than the time-out of these tests


def seen(place="1F0", waits=(), stayed=LONG, round=3, busy=False, silent=0.0):
    return Seen(Pulse(1, place, stayed, tuple(waits), round, busy), silent)


def blame(*ranks, timeout=60.0):
    return verdict(0, dict(enumerate(ranks)), timeout)


def test_a_pulse_survives_the_store():
    pulse = Pulse(7, "2F3;5B1", 1.25, (1, 2), 3, True)
    assert Pulse.read(pulse.text()) == pulse


def test_the_end_of_a_chain_is_stuck_not_those_who_wait_for_it():
    assert blame(seen("0B0", [1]), seen("1B0", [2]), seen("2F4")) == (
        "rank 2 is stuck at 2F4: no progress for 60 s, and rank 0 waits at 0B0; "
        "if that is no fault, give Engine a longer timeout"
    )


def test_a_stopped_rank_is_blamed_alone_whatever_it_waited_for():
    stopped = seen("2F4", [3], silent=31)
    line = "rank 2 was lost: no sign of life for 30 s, it is stopped or its machine is gone (last seen at 2F4)"
    assert blame(seen("0B0", [1]), seen("1B0", [2]), stopped, seen("3F4", [2])) == line


def test_who_is_silent_for_a_moment_only_is_not_lost():
    assert blame(seen("0B0", [1]), seen("1F0", stayed=0.1, silent=29)) is None


def test_who_may_be_lost_is_not_called_stuck():
    """A short time-out is over before it is known."""
    assert blame(seen("0B0", [1]), seen("1F0", stayed=4, silent=2), timeout=2) is None
    assert blame(seen("0B0", [1]), Seen(None, 2), timeout=2) is None
    assert "rank 1 was lost" in blame(seen("0B0", [1]), seen("1F0", stayed=4, silent=3), timeout=2)
    assert "rank 1 is stuck" in blame(seen("0B0", [1]), seen("1F0", stayed=4, silent=1), timeout=2)


def test_a_rank_that_gets_on_is_waited_for():
    assert blame(seen("0B0", [1]), seen("1B0", [2]), seen("2F4", stayed=59)) is None


def test_a_rank_that_compiles_is_waited_for_but_not_for_ever():
    assert blame(seen("0B0", [1]), seen("1F0", busy=True)) is None
    assert "rank 1 is stuck at 1F0" in blame(seen("0B0", [1]), seen("1F0", busy=True, stayed=LONG_WORK))


def test_an_exchange_waits_for_those_who_have_not_come():
    here, between = seen("the sum of losses", EVERYONE), "a place between steps"
    late = seen("3F1", round=2)
    assert "rank 3 is stuck at 3F1" in blame(here, here, seen(between, round=3), late)
    assert "rank 2 was lost" in blame(here, here, seen(between, round=2, silent=40), late)
    assert blame(here, here, here, seen("3F1", round=2, stayed=1)) is None


def test_a_rank_that_stopped_inside_the_same_exchange_is_lost():
    here = seen("the sum of losses", EVERYONE)
    assert "rank 1 was lost" in blame(here, seen("the sum of losses", EVERYONE, silent=40), here)
    assert blame(here, here, here) is None, "all are there: it is about to end"


def test_an_exchange_waits_through_others():
    here, waits = seen("the sum of losses", EVERYONE), seen("2F4", [3], round=2)
    assert "rank 3 is stuck at 3F0" in blame(here, here, waits, seen("3F0", round=2))


def test_ranks_that_wait_for_each_other():
    assert blame(seen("0F1", [1]), seen("1F1", [0])) == "ranks wait for each other: 0 at 0F1, 1 at 1F1"
    assert blame(seen("0F1", [1]), seen("1F1", [0], stayed=2)) is None


def test_a_rank_that_was_lost_before_it_said_anything():
    assert blame(seen("set-up", [1, 2]), seen("set-up", [0, 2]), Seen(None, 31)) == (
        "rank 2 was lost: no sign of life for 30 s, it is stopped or its machine is gone"
    )


def test_a_place_is_an_action_while_it_walks():
    class Walker:
        where = "2F3"

    place = Place()
    signs = [place.sign]
    place.enter("the start of the step")
    signs.append(place.sign)
    place.walker = Walker()
    assert place.where == "2F3"
    signs.append(place.sign)
    place.waits = (1,)
    signs.append(place.sign)
    place.enter("the start of the step")
    assert place.where == "the start of the step"
    signs.append(place.sign)
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
    board = Board(StoreThread(lambda: store, 0.2, 0.05), "job", 1, 3, hosts)
    with pytest.raises(StoreLost):
        board.read()
    assert board.post("an error of our own") == "an error of our own"
    board.leave()
    text = str(board.explain(PeerLost([2], "its connection closed"), "1F0"))
    assert text == f"{line} (rank 1 was at 1F0)"
    assert store.asked == 1, "it is not asked again"


def board_of(store, rank):
    return Board(StoreThread(lambda: store, 5.0, 5.0), "job", rank, 3)


def test_the_first_error_stands():
    store = dist.HashStore()
    boards = [board_of(store, rank) for rank in range(3)]
    assert boards[0].read() is None
    assert str(boards[1].explain(ValueError("no"), "1F3")) == "rank 1 failed at 1F3: ValueError: no"
    assert str(boards[0].explain(KeyError("x"), "0F4")) == "rank 1 failed at 1F3: ValueError: no"
    assert str(boards[2].explain(PeerLost([1], "its connection closed"), "2F0")) == boards[0].read()


def test_who_left_in_good_order_is_not_lost():
    store = dist.HashStore()
    boards = [board_of(store, rank) for rank in range(3)]
    boards[1].beat(Pulse(1, "1B7", 0.0, (), 5, False))
    boards[1].leave()
    assert "rank 1 has closed its Engine while rank 0 waits for it at 0F0" in boards[0]._missed(
        PeerLost([1], "x"), "0F0"
    )
    boards[2].beat(Pulse(1, "2B7", 0.0, (), 5, False))
    lost = boards[0]._missed(PeerLost([1, 2], "its connection closed"), "0F0")
    assert lost == "rank 2 was lost: its connection closed (last seen at 2B7)"


def test_a_meeting_ends_with_an_error():
    store = dist.HashStore()
    here, there = (AbortableStore(board_of(store, rank), "edge/0-1") for rank in range(2))
    there.set("1", b"address")
    assert here.get("1") == b"address"
    board_of(store, 2).post("rank 2 failed")
    with pytest.raises(PeerLost, match="another rank failed"):
        here.get("2")


class Fake:
    """Enough of a fabric for its end."""

    def __init__(self, monkeypatch):
        self.broken, self.began, self.go_on = [], threading.Event(), threading.Event()
        monkeypatch.setattr("zeropipe.engine.torch_private.comm.abort", self.abort)
        self.fabric = object.__new__(Fabric)
        vars(self.fabric).update(
            rank=0, size=1, nccl=False, closed=False, control="control", _words=None, place=Place(),
            _groups={"a": "a", "b": "b"}, _devices=[], _lock=threading.Lock(), _calls=[],
            _store=StoreThread(dist.HashStore, 5.0, 5.0), _watchdog=Watchdog(60.0), _listeners=[],
            layout=Layout((0,), 0, (0,), {"pp": 1}, {"pp": 0}),
        )  # fmt: skip
        self.fabric.board = Board(self.fabric._store, "job", 0, 1)

    def abort(self, groups, patience):
        for group in groups:
            self.broken.append(group)
            self.began.set()
            assert self.go_on.wait(10)
            assert self.fabric.control == "control", "nothing is dropped while it is broken"


def test_one_thread_breaks_the_connections_and_nobody_drops_them_meanwhile(monkeypatch):
    fake = Fake(monkeypatch)
    calls = [fake.fabric.abort, fake.fabric.abort, fake.fabric.close, fake.fabric.close]
    threads = [threading.Thread(target=call) for call in calls]
    threads[0].start()
    assert fake.began.wait(10)
    for thread in threads[1:]:
        thread.start()
    fake.go_on.set()
    for thread in threads:
        thread.join(10)
    assert fake.broken == ["control", "a", "b"], "each once"
    assert fake.fabric.control is None
