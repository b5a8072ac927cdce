"""Warnings about schedules that are right but unwise."""

import pytest

import zeropipe as zp


@pytest.mark.parametrize("name,ranks,microbatches", [("1f1b", 4, 3), ("zbv", 2, 3), ("interleaved", 4, 7)])
def test_fewer_microbatches_than_stages_are_warned_of(name, ranks, microbatches):
    schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
    [line] = zp.advice(schedule)
    assert line.startswith(f"{microbatches} microbatches for {schedule.num_stages} stages")
    assert f"use {schedule.num_stages} or more" in line
    assert "\n" not in line


@pytest.mark.parametrize("name,ranks,microbatches", [("1f1b", 4, 4), ("zbv", 2, 4), ("gpipe", 1, 1), ("zbv", 1, 1)])
def test_enough_microbatches_are_not(name, ranks, microbatches):
    assert zp.advice(zp.build(name, ranks=ranks, microbatches=microbatches)) == ()
