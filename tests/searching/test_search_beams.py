"""Beam search: candidates are complete and fit, are the same every time, and reach what walks do not."""

from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
import pytest
from search_samples import PLACEMENTS, require_valid, sample_task, task_of

import zeropipe as zp
from zeropipe.searching.bounds.lower_bound import THOROUGH_EFFORT, lower_bound
from zeropipe.searching.candidates.beam_kernel import BeamSetting
from zeropipe.searching.candidates.beams import (
    FIRST_WIDTH,
    WIDE_FITS,
    beam_buffers,
    beam_tables,
    min_period,
    narrow_beams,
    run_beam,
    steady_activations,
    wide_beam,
)
from zeropipe.searching.candidates.registered import sequential_rows
from zeropipe.searching.candidates.rules import fitting_activations
from zeropipe.searching.evaluator import Evaluator

RUN_ON = np.zeros(1, np.int64)
by_placement = pytest.mark.parametrize("per_rank,rule", PLACEMENTS, ids=lambda x: getattr(x, "__name__", x))


@by_placement
def test_narrow_beams_are_complete_and_fit(per_rank, rule):
    random, met = Random(per_rank), 0
    for _ in range(4):
        task = sample_task(random, per_rank, rule)
        slow = Evaluator(task).best_fit(sequential_rows(task))
        for width, candidate in islice(narrow_beams(task, slow.value, seed=0), 3):
            assert width == FIRST_WIDTH
            if candidate is None:
                continue
            met += 1
            require_valid(task, candidate)
    assert met >= 8


@by_placement
def test_wide_beams_are_complete_and_fit(per_rank, rule):
    random, met = Random(per_rank), 0
    for number in range(4):
        task = sample_task(random, per_rank, rule)
        cap = 1.01 * Evaluator(task).best_fit(sequential_rows(task)).value
        candidate = wide_beam(task, cap, 64, WIDE_FITS[number % len(WIDE_FITS)], number, RUN_ON)
        if candidate is None:
            continue
        met += 1
        require_valid(task, candidate)
    assert met >= 3


def test_search_of_a_loop_with_little_memory_reaches_its_bound():
    """Walks from other candidates end at 88.9, however long they are."""
    costs = zp.Costs(f=0.5, i=0.56, w=0.62, p2p=0.17)
    options = {"ranks": 4, "microbatches": 20, "stages_per_rank": 2, "placement": zp.loop, "rank_limits": (6, 4, 4, 5)}
    found = zp.search(**options, costs=costs, steps=4000)
    assert found.value == pytest.approx(85.96, abs=1e-6)
    assert found.gap == 0


def test_search_of_a_v_with_little_memory_reaches_its_bound():
    costs = zp.Costs(f=1, i=1.2, w=0.7, p2p=0.05, memory_limit=6)  # three quarters of 1F1B's
    found = zp.search(ranks=4, microbatches=16, stages_per_rank=2, placement=zp.vee, costs=costs, steps=60_000)
    assert found.gap == 0


def test_wide_beam_of_three_stages_per_rank_reaches_its_bound():
    """Walks from other candidates end at 33.2."""
    costs = zp.Costs(f=0.33, i=0.3333, w=0.2112, p2p=0.26)
    task = task_of(5, 6, zp.loop, 3, costs, limits=(27, 10, 21, 29, 14))
    candidate = wide_beam(task, np.inf, 1000, 0.5, 0, RUN_ON)
    assert candidate.value == pytest.approx(lower_bound(task, THOROUGH_EFFORT), rel=1e-9)


def test_narrow_beams_are_the_same_for_any_number_of_workers():
    task = sample_task(Random(7), 2, zp.vee)
    value = Evaluator(task).best_fit(sequential_rows(task)).value
    one, two, five = (
        [(width, found and found.value) for width, found in islice(narrow_beams(task, value, 3, workers), 40)]
        for workers in (1, 2, 5)
    )
    assert one == two == five
    assert {width for width, found in one if found} == {0, FIRST_WIDTH, 2 * FIRST_WIDTH}


def test_wide_beams_are_the_same_every_time_and_can_be_stopped():
    costs = zp.Costs(f=[1, 1.2, 1, 0.9, 1, 1.1], i=1.2, w=0.7, p2p=0.1, memory_limit=5)
    task = task_of(3, 5, zp.vee, 2, costs)
    one, other = (wide_beam(task, np.inf, 200, 0.5, 3, RUN_ON) for _ in range(2))
    assert one.value == other.value
    assert np.array_equal(one.rows, other.rows)
    assert wide_beam(task, np.inf, 200, 0.5, 3, np.ones(1, np.int64)) is None


def test_groups_keep_schedules_that_start_fewer_microbatches():
    """One rank of a loop has little memory: without groups the beam starts too many microbatches."""
    costs = zp.Costs(f=0.5, i=0.7, w=0.29, p2p=0.16, stash=0.5)
    task = task_of(7, 10, zp.loop, 2, costs, limits=(24, 27, 23, 15, 7, 18, 16))
    tables = beam_tables(task)
    buffers = beam_buffers(tables, 250, RUN_ON)
    setting = BeamSetting(20.0, np.full(7, 0.5), fitting_activations(task), is_grouped=False)
    alike = run_beam(task, tables, buffers, setting, np.inf, 250)
    grouped = run_beam(task, tables, buffers, setting._replace(is_grouped=True), np.inf, 250)
    assert grouped.value < 0.96 * alike.value


@by_placement
def test_steady_activations_fit_on_each_rank(per_rank, rule):
    """And they fill the memory of the tightest rank, or keep it busy."""
    random = Random(per_rank)
    for _ in range(10):
        task = sample_task(random, per_rank, rule)
        live, half = steady_activations(task), task.num_stages
        level = np.bincount(task.tables.rank[:half], live * task.tables.memory[:half], task.num_ranks)
        assert (level <= task.tables.limit * (1 + 1e-9)).all()
        assert (live[:-1] >= live[1:]).all()  # the activations of a stage are live on the one before it, too
        unlimited = replace(task, costs=replace(task.costs, memory_limit=None), rank_limits=None)
        assert (live <= steady_activations(unlimited) * (1 + 1e-9)).all()


@pytest.mark.parametrize("ranks", [4, 6, 8])
@pytest.mark.parametrize("peak", ["half", "third"])
def test_period_of_published_v_schedules_is_their_work(ranks, peak):
    """V-Half and V-Min (arXiv 2405.15362): no idle time with about a half and a third of 1F1B's memory."""
    limit = 2 * ((ranks + 2) // 2 if peak == "half" else (ranks + 4) // 3)
    task = task_of(ranks, 3 * ranks, zp.vee, 2, zp.Costs(memory_limit=limit))
    assert min_period(task) == pytest.approx(6)
    assert min_period(replace(task, rank_limits=(2.0,) * ranks)) > 6  # one microbatch at a time


def test_narrow_beams_start_near_the_caps_of_one_tight_rank():
    """Narrow beams with parts of each rank's own memory as caps end at 71.2; the best known takes 67.1."""
    costs = zp.Costs(f=0.5, i=0.7, w=0.29, p2p=0.16, stash=0.5)
    task = task_of(7, 17, zp.loop, 2, costs, limits=(24.0, 27.0, 23.0, 15.0, 7.0, 18.0, 16.0))
    found = [
        candidate.value for width, candidate in islice(narrow_beams(task, 1e9, 0), 60) if candidate and width <= 16
    ]
    assert min(found) < 70
