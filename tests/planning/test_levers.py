"""What each lever of a plan's best row bought, the default batch, and lengths like 128K."""

import json
from dataclasses import replace

import click
import pytest

import zeropipe as zp
from zeropipe.cli.main import main
from zeropipe.cli.param_types import Tokens
from zeropipe.planning.levers import list_levers
from zeropipe.planning.task import default_batch
from zeropipe.planning.write import write_run
from zeropipe.train.config.read import read_run
from zeropipe.train.preview import preview

ALONE = {"search_seconds": 0, "workers": 1, "compile": True, "microbatch_sizes": 1, "schedules": "1f1b"}


@pytest.fixture(scope="module")
def long():
    return zp.plan("llama-3-8b", gpus=8, batch=16, sequence=131072, **ALONE)


def test_a_lever_is_held_against_the_best_row_without_it(long):
    best = long.best.candidate
    levers = {lever.name: lever for lever in long.levers}
    sizes = {name: getattr(best.layout, name) for name in ("pp", "dp_shard", "cp", "tp")}
    wanted = {f"{name}={size}" for name, size in sizes.items() if size > 1}
    wanted |= {"sequence parallelism"} if best.layout.sequence_parallel else set()
    wanted |= {"regather"} if best.shards == "regather" else set()
    wanted |= {f"gradients {best.gradients}"} if best.gradients != "whole" else set()
    assert set(levers) == wanted | ({f"ac {best.ac}"} if best.ac != "none" else set())
    for name, size in sizes.items():
        if size == 1:
            continue
        lever = levers[f"{name}={size}"]
        without = [row for row in long.rows if getattr(row.candidate.layout, name) == 1]
        if without:
            assert lever.row is without[0]
            assert lever.slower == pytest.approx(without[0].step / long.best.step - 1)
        else:
            over = [row.excess for row in long.misfits if getattr(row.candidate.layout, name) == 1]
            over += [one.excess for one in long.too_large if getattr(one.run.layout, name) == 1]
            assert (lever.row, lever.over) == (None, min(over))
            assert lever.over > 0


def test_weights_are_gathered_again_where_they_do_not_fit_otherwise(tmp_path):
    """Long sequences only; the training file says so, and its dry run has the same memory."""
    made = zp.plan("llama-3-8b", gpus=8, batch=16, sequence=262144, pp=1, cp=4, tp=2, ac="full", **ALONE)
    again = next(row for row in made.rows if row.candidate.gradients == "whole")
    assert again.candidate.shards == "regather"
    kept = [row for row in made.misfits if row.candidate == replace(again.candidate, shards="keep")]
    assert kept[0].memory.weights > 4 * again.memory.weights
    lever = list_levers([again], made.misfits, made.too_large)[-1]
    assert (lever.name, lever.row) == ("regather", None)
    assert lever.over == min(row.excess for row in made.misfits if row.candidate.shards == "keep")
    for row in (again, made.best):
        write_run(made, row, str(tmp_path / "run.toml"), "llama-3-8b", "h100")
        shown = preview(read_run(str(tmp_path / "run.toml"), []))
        assert shown.ranks[0].peak == pytest.approx(row.memory.peak, rel=1e-3)
        assert shown.prediction.step == pytest.approx(row.step)
    short = zp.plan("llama-3-8b", gpus=8, batch=16, pp=1, tp=1, ac="full", memory=40e9, **ALONE)
    assert {row.candidate.shards for row in (*short.rows, *short.misfits)} <= {"keep"}


def test_without_a_lever_nothing_may_fit_or_be_tried(long):
    only = zp.plan("llama-3-8b", gpus=8, batch=16, sequence=131072, ac="full", tp=8, **ALONE)
    levers = {lever.name: lever for lever in only.levers}
    assert levers["tp=8"][1:] == (None, None, None)
    assert levers["ac full"][1:] == (None, None, None)


def test_the_command_prints_levers_and_the_batch_that_it_chose(capsys):
    args = ["plan", "llama-3-8b", "--gpus", "8", "--sequence", "128k", "--compile", "--microbatch", "1"]
    args += ["--schedules", "1f1b", "--workers", "1"]
    main(args)
    out = capsys.readouterr().out
    assert "32 sequences of 131,072 tokens" in out
    assert "what each lever buys: without " in out
    assert "--batch not set: 32 sequences" in out
    main([*args, "--batch", "16", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["batch"] == 16
    assert data["sequence"] == 131072
    assert all((lever["slower"] is None) == (lever["without"] is None) for lever in data["levers"])


@pytest.mark.parametrize(
    "gpus,sequence,batch", [(8, 4096, 1024), (64, 131072, 32), (256, 2**20, 16), (24, 4096, 1032), (7, 2**20, 21)]
)
def test_the_default_batch_is_about_4_million_tokens(gpus, sequence, batch):
    assert default_batch(gpus, sequence) == batch


@pytest.mark.parametrize("text,tokens", [("4096", 4096), ("128K", 131072), ("1M", 2**20), ("2m", 2**21), (7, 7)])
def test_lengths_may_be_written_in_powers_of_1024(text, tokens):
    assert Tokens().convert(text, None, None) == tokens


@pytest.mark.parametrize("text", ["1", "0K", "-5", "1.5M", "1G", "128KB", "", "9" * 20])
def test_other_lengths_are_refused(text):
    with pytest.raises(click.BadParameter, match="must be a number of at least 2 tokens, like 4096, 128K or 1M"):
        Tokens().convert(text, None, None)
