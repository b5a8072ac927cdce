"""A schedule for another number of microbatches: complete, placed as before, never stuck."""

from __future__ import annotations

import pickle

import pytest

import zeropipe as zp
from zeropipe.core.resize import repeat, resize, trim
from zeropipe.errors import ConfigError
from zeropipe.schedules.registry import entries

NAMES = [entry.name for entry in entries()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [1, 3, 7, 8, 16, 29])
def test_every_schedule_serves_every_number(name, number):
    schedule = zp.build(name, ranks=4, microbatches=8)
    other = resize(schedule, number)
    assert other.num_microbatches == number
    assert other.placement.copies == schedule.placement.copies
    zp.check(other)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [1, 5, 8, 19])
def test_a_file_serves_every_number(name, number):
    schedule = zp.from_csv(zp.to_csv(zp.build(name, ranks=4, microbatches=8)))
    assert schedule.rebuild is None
    other = resize(schedule, number)
    assert (other.num_microbatches, other.placement.copies) == (number, schedule.placement.copies)
    zp.check(other)


def test_built_again_where_the_algorithm_can():
    schedule = zp.build("interleaved", ranks=4, microbatches=8, stages_per_rank=3)
    assert resize(schedule, 12) == zp.build("interleaved", ranks=4, microbatches=12, stages_per_rank=3)
    assert resize(resize(schedule, 12), 8) == schedule


def test_the_rule_travels_between_processes():
    schedule = pickle.loads(pickle.dumps(zp.build("zbv", ranks=2, microbatches=4)))
    assert resize(schedule, 6) == zp.build("zbv", ranks=2, microbatches=6)


def test_two_copies_lose_and_win_microbatches_alike():
    schedule = zp.build("dualpipe", ranks=4, microbatches=8)
    assert trim(schedule, 5).placement.second_from == 3
    assert repeat(schedule, 2).placement.second_from == 8


def test_no_microbatches_are_refused():
    with pytest.raises(ConfigError, match="num_microbatches=0: must be a positive integer"):
        resize(zp.build("1f1b", ranks=2, microbatches=2), 0)


def test_parts_of_w_end_with_the_last_w():
    schedule = zp.from_csv("0F0,0B0,0F1,0I1,0W1,0W1\n")
    assert schedule.problem.num_weight_parts == 2
    assert str(resize(schedule, 1)) == "0F0 0B0"
    zp.check(resize(schedule, 1))
    assert resize(schedule, 3).problem.num_weight_parts == 2
