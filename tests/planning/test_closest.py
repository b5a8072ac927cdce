"""Plans where nothing fits, and what a plan does not try."""

import json

import pytest

import zeropipe as zp
from zeropipe.cli import main
from zeropipe.errors import ConfigError
from zeropipe.planning.closest import find_closest
from zeropipe.planning.task import PlanTask

LARGE = {"gpus": 8, "batch": 64, "search_seconds": 0, "workers": 1}


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


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
    [
        ({"ac": "none"}, {"ac": "full"}), full({"microbatch_sizes": [16]}, {"microbatch_sizes": 1}),
        full({"pp": 4, "sequence": 16384}, {"pp": 1}), ({"tp": 1, "sequence": 16384}, {"tp": 4}),
        ({"pp": 4, "tp": 1, "schedules": "gpipe", "memory": 26.7e9, "offload": False}, {"schedules": "1f1b"}),
        ({"dtype": "float32", "sequence": 32768, "sequence_parallel": False, "memory": 35e9}, {"dtype": "bf16"}),
    ],
    ids=lambda value: next(iter(value)),
)  # fmt: skip
def test_a_wish_that_keeps_a_plan_from_fitting_is_named(wish, change):
    """The model needs 18.7 GB of four GPUs at least."""
    closest = zp.plan("qwen3-4b", **{**LARGE, "gpus": 4, "memory": 24e9, **wish}).closest
    assert change in [way.change for way in closest.ways_out]


def test_more_gpus_and_shorter_sequences_are_tried_at_once_if_neither_is_enough():
    closest = zp.plan("qwen3-32b", **LARGE, sequence=40960, memory=16e9, pp=1, tp=1).closest
    [way] = closest.ways_out
    assert way.change.keys() >= {"gpus", "sequence", "pp", "tp"}
    assert way.row.memory.peak <= 12e9


def test_costs_of_a_file_need_more_gpus_or_other_settings():
    costs = zp.estimate("qwen3-8b", ac=["none", "full"])
    closest = zp.plan(costs, **{**LARGE, "gpus": 2}, memory=70e9, ac="none").closest
    assert {tuple(way.change) for way in closest.ways_out} == {("gpus",)}


def test_a_size_that_no_schedule_takes_has_nothing_close():
    task = PlanTask.create("qwen3-0.6b", 1024, **WISH, schedules="dualpipev", pp=4, tp=1, batch=4)
    context, _ = task.open()
    assert find_closest(task, context, [], []) is None


WISH = {
    "gpus": 4, "gpus_per_node": 8, "memory": 80e9, "reserve": 4e9, "lora": None, "microbatch_sizes": None, "ac": None,
}  # fmt: skip


def names(made):
    return {item.name for item in made.untried}


def test_what_was_not_tried_depends_on_the_model_and_on_the_wishes():
    wish = {"memory": 1e15, "batch": 8, "search_seconds": 0, "workers": 1, "schedules": "1f1b", "gpus": 2}
    dense = names(zp.plan("qwen3-0.6b", **wish))
    assert {"LoRA", "fp8", "regather", "offload", "replicas"} <= dense
    assert not {"expert parallelism", "context parallelism", "searched schedules", "tensor parallelism"} & dense
    assert "expert parallelism" in names(zp.plan("qwen3-30b-a3b", **wish, tp=2))
    assert "expert parallelism" not in names(zp.plan("qwen3-30b-a3b", **wish))
    assert "context parallelism" in names(zp.plan("qwen3-0.6b", **wish, sequence=32768, cp=1))
    assert "context parallelism" not in names(zp.plan("qwen3-0.6b", **wish, sequence=32768))
    assert not {"regather", "offload", "replicas"} & names(zp.plan("qwen3-0.6b", **wish, pp=2))
    adapted = names(zp.plan("qwen3-0.6b", **wish, lora=8))
    assert ("LoRA" in adapted, "tensor parallelism" in adapted) == (False, True)
    assert "fp8" not in names(zp.plan("qwen3-0.6b", **wish, dtype="float32"))
    assert "ac selective:N and memory_budget:X" not in names(zp.plan("qwen3-0.6b", **wish, ac="full"))
    small = {**wish, "schedules": None, "pp": 1}
    assert {"searched schedules", "schedules with Overlaps"} <= names(zp.plan("qwen3-0.6b", **small))
    assert "searched schedules" not in names(zp.plan("qwen3-0.6b", **{**small, "search_seconds": 0.1}))
    assert "LoRA" in names(zp.plan(zp.estimate("qwen3-0.6b"), **wish))


ARGS = ["plan", "llama-3-70b", "--gpus", "8", "--batch", "64", "--search-seconds", "0", "--workers", "1"]


def test_the_command_says_why_nothing_fits_and_what_would(capsys, monkeypatch, nothing):
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as stop:
        main([*ARGS, "--compile", "-o", "never.toml"])
    out, err = capsys.readouterr()
    closest = nothing.closest
    lines = out.splitlines()
    assert stop.value.code == 2
    assert err.startswith("zeropipe: nothing fits into 76.0 GB: pp")
    assert "76.0 GB of each GPU (80.0 GB - 4.0 GB reserve)" in lines[0]
    assert lines[1] == f"closest: {closest.row.candidate}: {closest.row.memory.peak / 1e9:.1f} GB"
    items = ", ".join(f"{name} {value / 1e9:.1f} GB" for name, value in vars(closest.row.memory).items())
    assert lines[2] == f"   memory of the fullest rank: {items}"
    gpus = next(way for way in closest.ways_out if "gpus" in way.change)
    assert f"fits with --gpus {gpus.change['gpus']}: {gpus.row.candidate}: {gpus.row.memory.peak / 1e9:.1f} GB" in lines
    assert any(line.startswith("fits with --lora 16: ") for line in lines)
    assert lines[-1].startswith("not tried: replicas, ")
    assert lines[-1].endswith(": docs/plan.md#not-tried")


def test_json_has_the_same_in_one_document(capsys, nothing):
    with pytest.raises(SystemExit):
        main([*ARGS, "--compile", "--json"])
    found = json.loads(capsys.readouterr().out)
    closest = nothing.closest
    assert found["error"] == f"nothing fits into 76.0 GB: {nothing.describe_closest()}"
    assert found["closest"]["row"]["memory"] == pytest.approx(vars(closest.row.memory))
    assert [way["change"] for way in found["closest"]["ways_out"]] == [dict(way.change) for way in closest.ways_out]
    assert found["not_tried"] == [item._asdict() for item in nothing.untried]
    assert found["reserve"] == 4e9


def test_schedules_for_several_stages_are_tried_with_one_only_by_name():
    """interleaved with one stage per rank is 1f1b with a longer warm-up: rows of it beside 1f1b puzzle."""
    wish = {"gpus": 2, "batch": 8, "memory": 80e9, "pp": 2, "ac": "none", "search_seconds": 0, "workers": 1}
    rows = zp.plan("qwen3-0.6b", **wish).rows
    assert {row.candidate.stages_per_rank for row in rows if row.candidate.schedule == "interleaved"} <= {2, 3, 4}
    assert any(row.candidate.schedule == "interleaved" for row in rows)
    assert zp.plan("qwen3-0.6b", **wish, schedules="interleaved:v=1").best.candidate.stages_per_rank == 1
