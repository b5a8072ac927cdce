"""Plans with rolling gradients: where whole ones do not fit and the messages are worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.planning.candidates import lower_bounds
from zeropipe.planning.write import format_run, schedule_table

ONE = {"gpus": 8, "batch": 64, "ac": "none", "microbatch_sizes": 1, "search_seconds": 0, "workers": 1}


@pytest.fixture(scope="module")
def plan():
    return zp.plan("qwen3-8b", pp=[1, 2], tp=1, schedules=["1f1b", "interleaved:v=2"], **ONE)


def test_the_fastest_row_may_have_rolling_gradients(plan):
    best = plan.rows[0]
    assert best.candidate.gradients.startswith("rolling")
    whole = [row for row in (*plan.rows, *plan.misfits) if row.candidate.gradients == "whole"]
    run = best.candidate.run
    assert run in [misfit.run for misfit in plan.too_large]
    assert best.memory.gradients < 0.5 * 8.19e9 * 4  # whole in float32
    assert lower_bounds(plan.context, run)[1] > plan.context.memory_limit >= best.memory.peak
    assert all(row.step > best.step for row in whole if row.fits)


def test_it_says_what_they_bought_and_writes_them(plan):
    best = plan.rows[0]
    lever = next(lever for lever in plan.levers if lever.name == f"gradients {best.candidate.gradients}")
    assert lever.row.candidate.gradients == "whole"
    text = format_run(plan, best, schedule_table(best), "qwen3-8b", "h100")
    assert f'gradients = "{best.candidate.gradients}"' in text
    assert f"gradients {best.candidate.gradients}" in str(best.candidate)
    assert lever.row is not None
    assert lever.slower > 0
    whole = next(row for row in (*plan.rows, *plan.misfits) if row.candidate.gradients == "whole")
    assert "gradients" not in format_run(plan, whole, schedule_table(whole), "qwen3-8b", "h100")


def test_a_simulated_misfit_is_tried_again():
    """Of the same candidate with both, rolling gradients need less memory and more time."""
    arguments = {**ONE, "pp": 2, "tp": 1, "schedules": ["interleaved:v=2"]}
    large, small = (zp.plan("qwen3-8b", memory=memory, **arguments) for memory in (80e9, 68e9))
    whole = large.rows[0]
    rolling = [row for row in small.rows if replace(row.candidate, gradients="whole") == whole.candidate]
    assert whole.memory.peak > small.context.memory_limit
    assert rolling
    for row in rolling:
        assert row.memory.gradients < whole.memory.gradients
        assert row.step >= whole.step * (1 - 1e-9)


def test_no_bound_is_above_what_was_found(plan):
    rolling = [row for row in (*plan.rows, *plan.misfits) if row.candidate.gradients != "whole"]
    assert rolling
    for row in rolling:
        seconds, needs = lower_bounds(plan.context, row.candidate.run, rolling=True)
        assert seconds <= row.step
        assert needs <= row.memory.peak
        assert row.gap is None or row.gap >= -1e-9


def test_what_fits_with_whole_gradients_keeps_them():
    plan = zp.plan("qwen3-0.6b", pp=[1, 2], tp=1, **ONE)
    assert plan.rows[0].candidate.gradients == "whole"
