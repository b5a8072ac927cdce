"""Processes of torchrun meet those that run now, never those that are gone."""

from __future__ import annotations

import re
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

pytest.importorskip("torch", reason="needs torch")
import torch
import torch.distributed as dist

from zeropipe.engine.run import meeting
from zeropipe.engine.run.job import device_of
from zeropipe.engine.run.meeting import KEY, meet
from zeropipe.errors import ConfigError, EngineError

TOLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def started(people: ThreadPoolExecutor, store: dist.Store, *ranks: int) -> list[Future[str]]:
    return [people.submit(meet, store, rank, 3, 20.0, 0.001) for rank in ranks]


def names(*all_ranks: list[Future[str]]) -> set[str]:
    return {one.result() for some in all_ranks for one in some}


def test_who_comes_after_a_restart_does_not_meet_those_before():
    store = dist.HashStore()
    with ThreadPoolExecutor(9) as people:
        first = names(started(people, store, 0, 1, 2))
        keys = [f"{KEY}/{min(first)}/{rank}" for rank in (1, 2)]
        before = [store.get(key) for key in keys]
        early = started(people, store, 1, 2)
        while any(store.get(key) == old for key, old in zip(keys, before)):
            time.sleep(0.001)  # until they have found the words of the first start
        second = names(early, started(people, store, 0))
    assert len(first) == len(second) == 1
    assert first != second


def test_a_first_rank_that_starts_again_is_met_by_those_who_wait():
    store = dist.HashStore()
    with ThreadPoolExecutor(9) as people:
        waiting = started(people, store, 1)
        with pytest.raises(EngineError, match="rank 0 waited"):
            meet(store, 0, 3, 0.05, 0.001)
        assert len(names(waiting, started(people, store, 2, 0))) == 1


def test_who_does_not_come_is_named(monkeypatch):
    store = dist.HashStore()
    with pytest.raises(
        EngineError, match=r"rank 2 waited 0.01 s for rank 0 to start: torchrun must start all machines"
    ):
        meet(store, 2, 4, 0.01, 0.001)
    monkeypatch.setattr(meeting, "token_hex", lambda size: "now")
    store.set(f"{KEY}/now/2", "it came")
    with pytest.raises(EngineError, match=r"rank 0 waited 0.01 s for ranks 1, 3 to start"):
        meet(store, 0, 4, 0.01, 0.001)


def test_a_line_about_who_does_not_come_says_it_once(monkeypatch):
    for key, value in {**TOLD, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(meeting.dist, "TCPStore", lambda *where, **options: dist.HashStore())
    with pytest.raises(EngineError, match=r"^rank 0 waited 0.01 s for rank 1 to start: .*look there for what ended$"):
        meeting.join_torchrun("gloo", patience=0.01)


@pytest.mark.parametrize("agent", ["True", "False"])
def test_who_has_met_and_then_died_is_not_waited_for_longer_than_asked(monkeypatch, agent):
    """torch itself would wait for half an hour."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = host.port if agent == "True" else unused_port()
    settings = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for key, value in {**settings, "TORCHELASTIC_USE_AGENT_STORE": agent}.items():
        monkeypatch.setenv(key, value)
    with ThreadPoolExecutor(1) as people:
        if agent == "True":
            people.submit(meet, dist.TCPStore("127.0.0.1", port), 1, 2, 20.0)  # and never connects
        begin = time.monotonic()
        with pytest.raises(EngineError, match=rf"rank 0 cannot join the others over torchrun's store, .*:{port}"):
            meeting.join_torchrun("gloo", patience=2.0)
    assert time.monotonic() - begin < 60


def test_collectives_of_objects_use_the_gpu_of_a_process(monkeypatch):
    """Without it all processes of a machine would use the first GPU, which NCCL refuses."""
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "6")
    assert device_of("cuda") == torch.device("cuda", 2)
    assert taken == [torch.device("cuda", 2)]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("WORLD_SIZE", "", "RANK=0 is set and WORLD_SIZE is not: start with torchrun, which sets both, or unset RANK"),
        ("MASTER_ADDR", "", "RANK=0 is set and MASTER_ADDR is not: start with torchrun"),
        ("RANK", "a", "RANK='a' in the environment: a number is needed"),
        ("MASTER_PORT", "ssh", "MASTER_PORT='ssh' in the environment: a number is needed"),
        ("RANK", "2", "RANK=2 with WORLD_SIZE=2: ranks are counted from 0, so give 1 at most"),
    ],
)
def test_an_environment_that_makes_no_sense_is_a_line(monkeypatch, name, text, line):
    for key, value in {**TOLD, name: text}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}"):
        meeting.join_torchrun("gloo", patience=0.1)
