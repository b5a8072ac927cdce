"""Ranks wait for the data that the first one makes ready, as long as that one lives."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="needs torch")
from train_samples import run_of

from zeropipe.engine.comm.heartbeat import RankStatus
from zeropipe.errors import ConfigError, EngineError
from zeropipe.train.data import cache, prepare
from zeropipe.train.loop.data_barrier import make_check
from zeropipe.train.loop.output_lock import OutputLock
from zeropipe.train.loop.signals import StopSignals


def test_a_signal_stops_the_making_of_data_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_CHECK_EVERY_S", -1.0)
    (tmp_path / "a.txt").write_text("some text to learn from")
    config = run_of(tmp_path, kind="text", path=str(tmp_path / "a.txt"), tokenizer="bytes", batch=1)
    signals, ranks = StopSignals(), SimpleNamespace(status=RankStatus())
    signals.received = "SIGTERM"
    with pytest.raises(EngineError, match="SIGTERM: stopped while the data was prepared"):
        prepare(config, print, make_check(signals, ranks))
    assert list((tmp_path / "out" / "data").iterdir()) == []
    signals.received = ""
    before = ranks.status.progress
    prepare(config, print, make_check(signals, ranks))
    assert ranks.status.progress != before, "the others see progress"
    assert ranks.status.is_busy
    signals.received = "SIGTERM"
    prepare(config, print, make_check(signals, ranks))  # it is there, and the run itself sees the signal


def test_a_folder_is_for_one_run_at_a_time(tmp_path):
    folder = str(tmp_path / "out")
    with OutputLock() as first, OutputLock() as second:
        first.acquire(folder)
        with pytest.raises(ConfigError, match=r"train.output='.*out' is in use by another run; wait for its end, or"):
            second.acquire(folder, timeout=0)
    with OutputLock() as third:
        third.acquire(folder, timeout=0)
