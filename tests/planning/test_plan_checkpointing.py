"""Plans that checkpoint some F: faster than ac full where ac none does not fit."""

import json

import pytest

import zeropipe as zp
from zeropipe.planning.partial_checkpointing import checkpointed_candidates
from zeropipe.planning.write import write_run
from zeropipe.train.config.read import read_run
from zeropipe.train.preview import preview

WISH = {
    "gpus": 8, "batch": 32, "memory": 30e9, "pp": 8, "tp": 1, "microbatch_sizes": 1, "schedules": "1f1b",
    "compile": True, "search_seconds": 0, "workers": 1, "offload": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def made():
    return zp.plan("qwen3-8b", **WISH)


def test_some_f_are_checkpointed_where_memory_is_short(made):
    best = made.best
    assert best.candidate.checkpointing
    assert best.candidate.ac == "none"
    assert 0.8 * best.limit < best.memory.peak <= best.limit * (1 + 1e-9)
    assert best.checkpointed == len(best.schedule.checkpointed) / (8 * 32)
    assert sum(vars(best.seconds).values()) == pytest.approx(best.step)
    assert best.seconds.recompute > 0
    assert best.gap >= 0
    others = [row for row in made.rows if not row.candidate.checkpointing]
    assert {row.candidate.ac for row in others} == {"full"}
    assert min(row.step for row in others) > best.step


def test_the_plan_says_what_it_bought(made):
    lever = next(lever for lever in made.levers if lever.name == "some F checkpointed")
    assert not lever.row.candidate.checkpointing
    assert lever.slower == pytest.approx(lever.row.step / made.best.step - 1)


@pytest.mark.parametrize("change", [{"ac": "full"}, {"ac": ("none", "selective:op"), "memory": 60e9}, {"pp": 1}])
def test_without_both_modes_and_a_pipeline_none_is_tried(change):
    rows = zp.plan("qwen3-8b", **{**WISH, **change}).rows
    assert not any(row.candidate.checkpointing for row in rows)


def test_only_those_that_may_be_the_fastest_are_tried(made):
    found = checkpointed_candidates([row for row in made.rows if not row.candidate.checkpointing] + [*made.misfits])
    assert made.best.candidate in found
    fast = [row for row in zp.plan("qwen3-8b", **{**WISH, "memory": 200e9}).rows if row.fits]
    assert checkpointed_candidates([*made.rows, *made.misfits, *fast]) == []


def test_the_training_file_is_that_of_the_plan(made, tmp_path):
    best = made.best
    files = write_run(made, best, str(tmp_path / "run.toml"), "qwen3-8b", "h100")
    assert zp.from_json((tmp_path / "run.schedule.json").read_text()) == best.schedule
    shown = preview(read_run(files[0]))
    assert shown.prediction.step == pytest.approx(best.step, rel=1e-9)
    assert vars(best.seconds) == pytest.approx(shown.prediction.parts)
    assert max(rank.peak for rank in shown.ranks) == pytest.approx(best.memory.peak, rel=1e-9)


def test_the_command_says_which_part_of_f(run):
    flags = ("--gpus", 8, "--batch", 32, "--memory", "30GB", "--ranks", 8, "--tp", 1, "--microbatch", 1, "--compile")
    status, out, err = run("plan", "qwen3-8b", *flags, "--schedules", "1f1b", "--search-seconds", 0)
    assert status == 0, err
    assert "% of F" in out
    assert "without some F checkpointed" in out
    found = run("plan", "qwen3-8b", *flags, "--schedules", "1f1b", "--search-seconds", 0, "--json")[1]
    row = json.loads(found)["rows"][0]
    assert row["checkpointing"]
    assert f"{row['checkpointed']:.0%} of F" in out
