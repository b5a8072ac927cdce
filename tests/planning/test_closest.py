"""Plans where nothing fits, and what a plan does not try."""

import json
from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.cli import main
from zeropipe.errors import ConfigError
from zeropipe.planning.closest import find_closest
from zeropipe.planning.task import PlanTask

LARGE = {"gpus": 8, "batch": 64, "search_seconds": 0, "workers": 1}


@pytest.fixture(scope="module")
def nothing():
    return zp.plan("llama-3-70b", **LARGE)


def test_the_closest_candidate_has_its_memory_by_item(nothing):
    row = nothing.closest.row
    assert nothing.rows == ()
    assert sum(vars(row.memory).values()) == pytest.approx(row.memory.peak)
    assert row.excess == pytest.approx(row.memory.peak - 76e9)
    assert row.excess > 0
    assert row.candidate.layout.num_gpus == 8
    with pytest.raises(ConfigError, match=r"nothing fits into 76\.0 GB: pp\d .* needs \d+\.\d GB, \d+\.\d GB over it"):
        _ = nothing.best


def test_every_way_out_is_a_plan_that_fits(nothing):
    ways = {tuple(way.change): way for way in nothing.closest.ways_out}
    assert {("gpus",), ("lora",), ("gpu",)} <= set(ways)
    for way in ways.values():
        row = way.row
        wish = {**LARGE, **way.change}
        made = zp.plan(
            "llama-3-70b", **wish, pp=row.candidate.layout.pp, tp=None if "lora" in wish else row.candidate.layout.tp,
            ac=row.candidate.ac, microbatch_sizes=row.candidate.microbatch_size, schedules=row.candidate.title,
        )  # fmt: skip
        assert made.rows, way.change
        assert row.memory.peak <= made.context.memory_limit
    fewer = zp.plan("llama-3-70b", **{**LARGE, "gpus": ways[("gpus",)].change["gpus"] // 2})
    assert fewer.rows == (), "the smallest number of GPUs, in powers of two"


@pytest.mark.parametrize(
    "wish,change",
    [({"ac": "none"}, "ac"), ({"microbatch_sizes": [16]}, "microbatch_sizes"), ({"pp": 1}, "pp"),
     ({"schedules": "gpipe"}, "schedules"), ({"dtype": "float32"}, "dtype")],
)  # fmt: skip
def test_a_wish_that_keeps_a_plan_from_fitting_is_named(wish, change):
    sizes = {**LARGE, "gpus": 4, "memory": 34e9 if change == "dtype" else 24e9}
    if change == "schedules":
        sizes |= {"ac": "full", "memory": 30e9, "pp": 4}
    closest = zp.plan("qwen3-4b", **sizes, **wish).closest
    assert closest is not None
    assert change in {name for way in closest.ways_out for name in way.change}
