"""Plans with slices of sequences, and with activations copied to the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.core.check import check
from zeropipe.errors import ConfigError
from zeropipe.planning.candidates import lower_bounds
from zeropipe.planning.slicing import default_slices, sliced_variants
from zeropipe.planning.write import write_run
from zeropipe.train.config.read import read_run
from zeropipe.train.preview import preview

LONG = {
    "gpus": 8, "batch": 8, "sequence": 65536, "gpu": "h200", "compile": False, "microbatch_sizes": 1, "ac": "full",
    "cp": 1, "tp": 1, "pp": 4, "search_seconds": 0, "workers": 1,
}  # fmt: skip
SHORT = {
    "gpus": 8, "batch": 32, "sequence": 16384, "gpu": "h100", "memory": 62e9, "microbatch_sizes": 1, "pp": 8, "tp": 1,
    "ac": "selective:op", "schedules": ["1f1b"], "search_seconds": 0, "workers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def sliced():
    return zp.plan("llama-3-8b", slices=[2, 8], schedules=["1f1b", "seq1f1b", "slimpipe"], **LONG)


@pytest.fixture(scope="module")
def copied():
    return zp.plan("llama-3-8b", **SHORT)


def test_slices_fill_the_pipeline(sliced):
    """Four ranks with four microbatches each: slices are the only way to less idle time."""
    best = sliced.rows[0]
    assert best.candidate.slices == 8
    lever = next(lever for lever in sliced.levers if lever.name == "slices=8")
    assert lever.row.candidate.slices < 8
    assert lever.slower > 0
    assert f":slices={best.candidate.slices}" in best.candidate.title


def test_no_bound_with_slices_is_above_what_was_found(sliced):
    rows = [row for row in (*sliced.rows, *sliced.misfits) if row.candidate.slices > 1]
    assert {row.candidate.slices for row in rows} == {2, 8}
    assert {row.candidate.schedule for row in rows} == {"seq1f1b", "slimpipe"}
    for row in rows:
        rolling = row.candidate.gradients != "whole"
        seconds, needs = lower_bounds(sliced.context, row.candidate.run, rolling, row.candidate.slices)
        assert seconds <= row.makespan * (1 + 1e-9), row.candidate
        assert needs <= row.memory.peak * (1 + 1e-9) or row.candidate.shards != "keep", row.candidate
        assert row.gap is None or row.gap >= 0
    assert any(row.gap is not None and 0 < row.gap < 0.2 for row in rows)


def test_slices_need_less_memory_and_the_same_work(sliced):
    for row in sliced.rows:
        if row.candidate.slices != 8 or row.candidate.schedule != "seq1f1b" or row.candidate.layout.pp == 1:
            continue
        few = replace(row.candidate, slices=2)
        other = next((one for one in (*sliced.rows, *sliced.misfits) if one.candidate == few), None)
        if other is not None and other.counts == row.counts:
            assert row.memory.activations < other.memory.activations
            assert row.seconds.work + row.seconds.recompute == pytest.approx(
                other.seconds.work + other.seconds.recompute
            )
            return
    pytest.fail("no pair of rows that differ in slices only")


def test_the_dry_run_of_a_plans_file_has_its_numbers(sliced, tmp_path):
    row = next(row for row in sliced.rows if row.candidate.slices == 8)
    (path,) = write_run(sliced, row, str(tmp_path / "run.toml"), "llama-3-8b", "h200")
    config = read_run(path)
    assert config.schedule.slices == len(config.schedule.slice_sizes) == 8
    assert sum(config.schedule.slice_sizes) == 65536
    assert list(config.schedule.slice_sizes) == sorted(config.schedule.slice_sizes, reverse=True)
    shown = preview(config)
    assert shown.prediction.step == pytest.approx(row.step, rel=1e-9)
    fullest = max(rank.peak for rank in shown.ranks)
    assert fullest == pytest.approx(row.memory.peak, rel=0.01)


def test_what_the_engine_does_not_run_in_slices_is_not_offered():
    kept = {**LONG, "pp": 4, "schedules": ["1f1b", "seq1f1b"]}
    for model, change in (
        ("llama-3-8b", {"compile": True}), ("llama-3-8b", {"ac": "none"}), ("llama-3-8b", {"cp": 2}),
        ("llama-3-8b", {"tp": 2, "sequence_parallel": True}), ("qwen3-30b-a3b", {}), ("llama-3-8b", {"sample": 4096}),
    ):  # fmt: skip
        plan = zp.plan(model, memory=400e9, **{**kept, **change})
        assert {row.candidate.slices for row in (*plan.rows, *plan.misfits)} == {1}, change
    with pytest.raises(ConfigError, match="slices=4: llama-3-8b has no costs of slices"):
        zp.plan("llama-3-8b", slices=4, **{**kept, "compile": True})


def test_the_numbers_of_slices_that_are_tried():
    assert default_slices(4096, 32768) == [1]
    assert default_slices(32768, 32768) == [1, 2, 4, 8]
    assert default_slices(2**20, 32768) == [1, 2, 4, 8, 16]
    assert ("seq1f1b", 1) in sliced_variants(None)
    assert sliced_variants(["slimpipe:v=2", "gpipe"]) == [("slimpipe", 2)]


def test_activations_are_copied_to_the_host_where_they_do_not_fit(copied, tmp_path):
    """Balanced layers fit with copies only; they are much faster than those that fit without."""
    best = copied.rows[0]
    assert best.candidate.offload
    assert best.host_memory > 1e9
    assert best.memory.peak <= copied.context.memory_limit
    assert best.gap >= 0
    lever = next(lever for lever in copied.levers if lever.name == "offload")
    assert not lever.row.candidate.offload
    assert lever.slower > 0.1
    files = write_run(copied, best, str(tmp_path / "run.toml"), "llama-3-8b", "h100")
    assert files[1].endswith("run.schedule.json")
    schedule = zp.from_json((tmp_path / "run.schedule.json").read_text())
    check(schedule)
    assert schedule.offloading is not None
    shown = preview(read_run(files[0]))
    assert shown.prediction.step == pytest.approx(best.step, rel=1e-9)
    assert max(rank.peak for rank in shown.ranks) == pytest.approx(best.memory.peak, rel=0.01)


def test_no_bound_with_offload_is_above_what_was_found(copied):
    rows = [row for row in copied.rows if row.candidate.offload]
    for row in rows:
        seconds, needs = lower_bounds(copied.context, row.candidate.run, offload=True)
        assert seconds <= row.step
        assert needs <= row.memory.peak


def test_without_offload_none_is_tried(copied):
    plan = zp.plan("llama-3-8b", offload=False, **SHORT)
    assert not any(row.candidate.offload for row in plan.rows)
    assert plan.rows[0].step > copied.rows[0].step
