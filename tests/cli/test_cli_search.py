"""`zeropipe search` as a person and as a program meets it."""

import json
import os
import signal

import pytest

import zeropipe as zp
from zeropipe.searching import driver
from zeropipe.searching.warm_kernels import warm_kernels

SIZE = ("search", "--ranks", "4", "--microbatches", "6")


def test_a_search_is_told_in_four_lines_and_written(run, tmp_path):
    file = tmp_path / "found.json"
    status, out, err = run(*SIZE, "--i", "1.2", "--memory-limit", "2", "--search-steps", "100", "-o", str(file))
    assert (status, err) == (0, "")
    head, times, proof, named, spent, written = out.splitlines()
    assert head == "searched: 4 ranks, 4 stages (linear), 6 microbatches"
    assert "peak memory 2 (limit 2)" in times
    assert proof.startswith("proven: none of the schedules with 1 stage per rank and one copy of the model is faster")
    assert named == "no built-in one of these fits"
    assert spent.endswith("costs per rank, divided among its stages")
    assert written.startswith(f"wrote {file}")
    timeline = zp.from_json(file.read_text())
    zp.check(timeline.schedule)
    assert max(timeline.peak_memory) == 2
    assert run("simulate", str(file))[0] == 0


def test_what_takes_no_time_is_told_like_all_else(run):
    status, out, err = run(*SIZE, "--f", "0", "--i", "0", "--w", "0", "--search-steps", "0")
    assert (status, err) == (0, "")
    assert "makespan 0 " in out
    assert "the best built-in one of these that fits: 1f1b, 0 (0.0% more)" in out


def test_machines_get_json(run):
    status, out, _ = run(
        *SIZE, "-v", "2", "--placement", "vee", "--memory-limit", "4", "--search-steps", "50", "--json"
    )
    facts = json.loads(out)
    assert status == 0
    assert facts["placement"] == "vee"
    assert facts["bound"] <= facts["value"] == facts["makespan"]
    assert facts["gap"] == pytest.approx(facts["value"] / facts["bound"] - 1, abs=1e-9)
    assert facts["named"] == "zbv"
    assert facts["interrupted"] is False


def test_costs_are_per_rank_unless_told_otherwise(run):
    limits = ("--memory-limit", "4", "--search-steps", "0", "-v", "2", "--json")
    values = [json.loads(run(*SIZE, *limits, "--per", per)[1])["makespan"] for per in ("rank", "stage")]
    assert values[1] > 1.9 * values[0]


@pytest.mark.parametrize(
    "args,message",
    [
        (("search", "--ranks", "4"), "microbatches is missing: pass --microbatches N"),
        ((*SIZE, "--memory-limit", "0.5"), "memory_limit=0.5: rank 0 needs 1 for its weights and one microbatch"),
        (
            (*SIZE, "--rank-limits", "4,4,2GB,4"),
            "--rank-limits is in bytes, but memory of these costs is in activations",
        ),
        ((*SIZE, "--memory-limit", "4QB"), "memory_limit='4QB': must be a number, or a number of bytes like 40GB"),
        ((*SIZE, "-v", "2", "--placement", "linear"), "placement linear has one stage per rank, not 2"),
        ((*SIZE, "--search-seconds", "nan"), "seconds=nan: must be a non-negative number"),
        ((*SIZE, "--search-steps", "-3"), "steps=-3: must be a non-negative integer"),
        ((*SIZE, "-o", "found.xyz"), "found.xyz"),
        ((*SIZE, "-o", "no/such/folder/found.json"), "there is no folder"),
    ],
)
def test_mistakes_are_told_in_one_line(run, args, message):
    status, out, err = run(*args)
    assert status == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "text,size", [("40GB", 40e9), ("32GiB", 32 * 2**30), ("1.5 MB", 1.5e6), ("7", 7), ("2e3KB", 2e6)]
)
def test_memory_may_have_a_unit(text, size):
    from zeropipe.cli.param_types import Size

    assert Size().convert(text, None, None) == size


@pytest.fixture
def ctrl_c():
    """SIGINT as in a terminal: a background job starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_takes_the_best_so_far(run, tmp_path, monkeypatch):
    warm_kernels(10**6)  # else Ctrl-C comes while kernels are loaded, and there is nothing yet
    local_search, pressed = driver.local_search, []

    def search_until_ctrl_c(*args):
        if not pressed:  # once: a second one might come when the search is over
            pressed.append(os.kill(os.getpid(), signal.SIGINT))
        return local_search(*args)

    monkeypatch.setattr(driver, "local_search", search_until_ctrl_c)
    file = tmp_path / "found.csv"
    status, out, _ = run(
        *SIZE, "-p", "8", "-m", "20", "--i", "1.1", "--memory-limit", "3", "--search-seconds", "200", "-o", str(file)
    )
    assert status == 0
    assert "interrupted" in out
    zp.check(zp.from_csv(file.read_text()))
