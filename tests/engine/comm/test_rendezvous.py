"""Processes of torchrun meet those that run now, never those that are gone."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

pytest.importorskip("torch", reason="needs torch")
import torch
import torch.distributed as dist

from zeropipe.engine.comm import ranks, rendezvous
from zeropipe.engine.comm.faults import StoreThread
from zeropipe.engine.run import torchrun
from zeropipe.engine.run.job import select_device
from zeropipe.errors import ConfigError, EngineError

KEY = "here"
TOLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def come(store, rank: int, size: int = 3, patience: float = 20.0, who: str = "") -> str:
    """What a rank of a meeting gets: its name."""
    thread = StoreThread(lambda: store, 5.0, 5.0)
    try:
        return rendezvous.rendezvous(
            thread, KEY, rank, size, patience, lambda away: f"{who or rank} misses {away}"
        ).name
    finally:
        thread.close()


def started(people: ThreadPoolExecutor, store: dist.Store, *ranks: int) -> list[Future[str]]:
    return [people.submit(come, store, rank) for rank in ranks]


def names(*all_ranks: list[Future[str]]) -> set[str]:
    return {one.result() for some in all_ranks for one in some}


@pytest.fixture
def _agents_store(monkeypatch):
    """What is in it outlives ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


@pytest.mark.usefixtures("_agents_store")
def test_who_comes_after_a_restart_does_not_meet_those_before():
    store = dist.HashStore()
    with ThreadPoolExecutor(9) as people:
        first = names(started(people, store, 0, 1, 2))
        keys = [f"{min(first)}/{rank}" for rank in (1, 2)]
        before = [store.get(key) for key in keys]
        early = started(people, store, 1, 2)
        while any(store.get(key) == old for key, old in zip(keys, before)):
            time.sleep(0.001)  # until they have found the words of the first start
        second = names(early, started(people, store, 0))
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.usefixtures("_agents_store")
def test_a_first_rank_that_starts_again_is_met_by_those_who_wait():
    store = dist.HashStore()
    with ThreadPoolExecutor(9) as people:
        waiting = started(people, store, 1)
        with pytest.raises(EngineError, match="0 misses"):
            come(store, 0, 3, 0.05)
        assert len(names(waiting, started(people, store, 2, 0))) == 1


def test_who_does_not_come_is_named(monkeypatch):
    store = dist.HashStore()
    with pytest.raises(EngineError, match=r"^2 misses \[0\]$"):  # nobody else can know who has come
        come(store, 2, 4, 0.01)
    monkeypatch.setattr(rendezvous, "token_hex", lambda size: "now")
    store.set(f"{KEY}/now/2", "it came")
    with pytest.raises(EngineError, match=r"^0 misses \[1, 3\]$"):
        come(store, 0, 4, 0.01)


@pytest.mark.parametrize("agent", ["True", "False"])
def test_all_that_came_say_the_same_about_one_that_did_not(monkeypatch, agent):
    """Also one that comes when the others have given up."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    store = dist.HashStore()
    with ThreadPoolExecutor(9) as people:
        early = [people.submit(come, store, rank, 3, patience) for rank, patience in ((0, 1.0), (2, 0.2))]
        lines = {str(one.exception()) for one in early}
        lines.add(str(people.submit(come, store, 1, 3, 0.2).exception()))
    assert len(lines) == 1
    assert lines <= {"2 misses [1]", "0 misses [1]"}


@pytest.mark.usefixtures("_agents_store")
def test_a_restart_whose_first_rank_does_not_come_misses_that_one():
    store = dist.HashStore()
    with ThreadPoolExecutor(9) as people:
        names(started(people, store, 0, 1, 2))
        late = [people.submit(come, store, rank, 3, 0.3) for rank in (1, 2)]
        assert {str(one.exception())[1:] for one in late} == {" misses [0]"}


def test_a_rank_that_does_not_start_is_named_once_with_the_way_out(monkeypatch):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = {**TOLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(host.port)}
    for key, value in {**settings, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(key, value)
    line = r"^rank 1 has not started: rank 0 waits for 1 s; torchrun must start all .*; look there for what ended$"
    with pytest.raises(EngineError, match=line):
        torchrun.join_torchrun("gloo", timeout=1.0)


@pytest.mark.parametrize("agent", ["True", "False"])
def test_a_store_that_is_not_there_is_named_with_who_hosts_it(monkeypatch, agent):
    settings = {**TOLD, "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    for key, value in {**settings, "TORCHELASTIC_USE_AGENT_STORE": agent}.items():
        monkeypatch.setenv(key, value)
    whose = {"True": "torchrun's store", "False": "the job's store, which rank 0 hosts"}[agent]
    with pytest.raises(EngineError, match=rf"^rank 1 cannot join the others over {whose}, 127.0.0.1:\d+: "):
        torchrun.join_torchrun("gloo", timeout=1.0)


@pytest.mark.parametrize("agent", ["True", "False"])
def test_who_has_met_and_then_died_is_named(monkeypatch, agent):
    """torch itself would wait for half an hour."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = host.port if agent == "True" else unused_port()
    settings = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for key, value in {**settings, "TORCHELASTIC_USE_AGENT_STORE": agent}.items():
        monkeypatch.setenv(key, value)

    def meet_only() -> None:
        """The first thing that a rank does."""
        key = f"zeropipe/{hashlib.sha256(repr((0, 1)).encode()).hexdigest()[:16]}/0"
        store = StoreThread(lambda: dist.TCPStore("127.0.0.1", port), 20.0, 5.0)
        rendezvous.rendezvous(store, key, 1, 2, 20.0, str)
        store.close()

    monkeypatch.setattr(ranks, "_num_created", Counter())
    with ThreadPoolExecutor(1) as people:
        other = people.submit(meet_only)
        begin = time.monotonic()
        with pytest.raises(EngineError, match=r"^rank 1 was lost: "):
            torchrun.join_torchrun("gloo", timeout=2.0)
        other.result()
    assert time.monotonic() - begin < 60


def test_collectives_of_objects_use_the_gpu_of_a_process(monkeypatch):
    """Without it all processes of a machine would use the first GPU, which NCCL refuses."""
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert select_device("cuda") == torch.device("cuda", 2)
    assert taken == [torch.device("cuda", 2)]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("WORLD_SIZE", "", "RANK=0 is set and WORLD_SIZE is not: start with torchrun, which sets both, or unset RANK"),
        ("MASTER_ADDR", "", "RANK=0 is set and MASTER_ADDR is not: start with torchrun"),
        ("RANK", "a", "RANK='a' in the environment: must be a non-negative integer"),
        ("MASTER_PORT", "ssh", "MASTER_PORT='ssh' in the environment: must be a non-negative integer"),
        ("RANK", "2", "RANK=2 with WORLD_SIZE=2: must be at most 1"),
    ],
)
def test_an_environment_that_makes_no_sense_is_a_line(monkeypatch, name, text, line):
    for key, value in {**TOLD, name: text}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        torchrun.join_torchrun("gloo", timeout=0.1)
