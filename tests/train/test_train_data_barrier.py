"""Ranks wait for the data that the first one makes ready, as long as that one lives."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch", reason="needs torch")
import torch.distributed as dist
from train_samples import run_of

from zeropipe.errors import ConfigError, EngineError
from zeropipe.train.data import cache, prepare
from zeropipe.train.loop.prepared import alive, looker, word_of
from zeropipe.train.loop.signals import StopSignals
from zeropipe.train.loop.sole import OutputLock


def test_a_first_rank_that_lives_is_waited_for():
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(word_of, store, "key", 10.0)
        with alive(store, "key", every=0.001):
            while not store.check(["key/beat"]) or int(store.get("key/beat")) < 20:
                time.sleep(0.001)
        assert not waiting.done()
        store.set("key", "a.jsonl, line 3: no text")
        assert waiting.result() == "a.jsonl, line 3: no text"
    beat = store.get("key/beat")
    time.sleep(0.01)
    assert store.get("key/beat") == beat  # the thread is gone


def test_a_first_rank_that_is_silent_is_given_up():
    store = dist.HashStore()
    store.set("key/beat", "5")
    with pytest.raises(
        EngineError, match=r"rank 0 was lost while it made the data ready: no sign of life within 0.05 s"
    ):
        word_of(store, "key", 0.05)


def test_a_signal_stops_the_making_of_data_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_CHECK_EVERY_S", -1.0)
    (tmp_path / "a.txt").write_text("some text to learn from")
    config = run_of(tmp_path, kind="text", path=str(tmp_path / "a.txt"), tokenizer="bytes", batch=1)
    signals = StopSignals()
    signals.received = "SIGTERM"
    with pytest.raises(EngineError, match="SIGTERM: stopped while the data was prepared"):
        prepare(config, print, looker(signals))
    assert list((tmp_path / "out" / "data").iterdir()) == []
    signals.received = ""
    prepare(config, print, looker(signals))
    signals.received = "SIGTERM"
    prepare(config, print, looker(signals))  # it is there, and the run itself sees the signal


def test_a_folder_is_for_one_run_at_a_time(tmp_path):
    folder = str(tmp_path / "out")
    with OutputLock() as first, OutputLock() as second:
        first.acquire(folder)
        with pytest.raises(ConfigError, match=r"train.output='.*out' is in use by another run; wait for its end, or"):
            second.acquire(folder, timeout=0)
    with OutputLock() as third:
        third.acquire(folder, timeout=0)
