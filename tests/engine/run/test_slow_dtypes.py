"""A CPU that is slow with 16 bits: told once, by who starts the ranks."""

import warnings

import pytest

pytest.importorskip("torch")

import torch

from zeropipe.engine.run import slow_dtypes
from zeropipe.engine.run.launch import LocalRanks


def told(dtype, device, times, monkeypatch, capsys):
    monkeypatch.setattr(slow_dtypes, "time_matmul", lambda one: times if one is torch.bfloat16 else 1.0)
    slow_dtypes.warn_if_slow(dtype, device)
    return capsys.readouterr().err


def test_a_slow_dtype_is_told_in_one_line(monkeypatch, capsys):
    line = told("bfloat16", "cpu", 130.0, monkeypatch, capsys)
    assert line.startswith("warning: this CPU multiplies bfloat16 130 times slower than float32")
    assert line.count("\n") == 1
    assert told("bfloat16", "cpu", 3.0, monkeypatch, capsys) == ""
    assert told("bfloat16", "cuda", 130.0, monkeypatch, capsys) == ""
    assert told("float32", "cpu", 130.0, monkeypatch, capsys) == ""


def test_a_product_is_measured():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert 0 < slow_dtypes.time_matmul(torch.bfloat16) < 60
    assert not seen


def num_warnings(*texts):
    with warnings.catch_warnings(record=True) as seen:
        for text in texts:
            warnings.warn(text, stacklevel=1)
    return len(seen)


def test_ranks_do_not_repeat_it():
    with LocalRanks(1) as ranks:
        assert ranks.run(num_warnings, f"{slow_dtypes.TORCH_WARNING}: a C++ stack", "something else", timeout=60) == [1]
