"""The same command again: a finished run has nothing to do, a resumed one lists the fields that changed."""

import json
from pathlib import Path

import pytest
from script_runner import ranks_print_into
from train_runs import model_directory

from zeropipe.errors import ConfigError
from zeropipe.train.config.read import read_run
from zeropipe.train.loop.checkpoints import describe_changes, dump_fields
from zeropipe.train.loop.output_lock import OutputLock


@pytest.fixture
def command(tmp_path, monkeypatch, run):
    """Runs `zeropipe train` on one rank; returns its status, results, and what it logs."""
    monkeypatch.chdir(tmp_path)
    model_directory(tmp_path / "start")
    logs = [tmp_path / "stdout", tmp_path / "stderr"]
    ranks_print_into(*logs, monkeypatch)
    fields = ["--model.path", "start", "--data.sequence", "8", "--data.batch", "2", "--engine.device", "cpu"]

    def call(*more):
        for log in logs:
            log.write_text("")
        status, out, err = run("train", *fields, "--train.record_every", "0", *more)
        return status, out, err + logs[1].read_text()

    return call


def test_a_finished_run_has_nothing_to_do_and_a_longer_one_lists_what_changed(command):
    status, out, _ = command("--train.steps", "2")
    assert (status, out.splitlines()[0].split(",")[0]) == (0, "2 steps")
    first = Path("out/run.toml").read_text()
    status, out, log = command("--train.steps", "2", "--optimizer.lr", "0.5")
    assert status == 0
    assert out == (
        "nothing to do: 2 of 2 steps are done, the model is in out/export; for more steps raise train.steps or "
        "train.epochs, for a new run use another train.output than out\n"
    )
    assert "changed since the checkpoint: optimizer.lr 0.0001 -> 0.5\n" in log
    assert Path("out/run.toml").read_text() == first
    status, out, log = command("--train.steps", "3", "--optimizer.lr", "0.5", "--rate.warmup", "1")
    assert (status, out.splitlines()[0].split(",")[0]) == (0, "3 steps")
    assert ("changed since the checkpoint: optimizer.lr 0.0001 -> 0.5, rate.warmup 0 -> 1, train.steps 2 -> 3\n") in log
    status, out, _ = command("--train.steps", "3", "--json")
    assert (json.loads(out)["steps"], json.loads(out)["losses"]) == (3, [])
    _, _, log = command("--train.steps", "4", "--optimizer.lr", "0.5", "--rate.warmup", "1")
    assert "changed since the checkpoint: train.steps 3 -> 4\n" in log


def test_changes_name_fields_that_came_and_went():
    def config(*fields):
        return read_run(None, ["--model.path", "tiny-qwen3", *fields])

    old = json.loads(json.dumps(dump_fields(config("--train.steps", "2", "--schedule.layers", "4,4"))))
    assert describe_changes(old, config("--train.steps", "2", "--schedule.layers", "4,4")) == ""
    assert describe_changes(old, config("--train.epochs", "1", "--lora.rank", "4", "--checkpoint.resume", "x")) == (
        "changed since the checkpoint: lora.rank none -> 4, lora.alpha none -> 32.0, lora.dropout none -> 0.0, "
        "lora.target_modules none -> 'all-linear', train.epochs none -> 1.0, schedule.layers [4, 4] -> none, "
        "train.steps 2 -> none"
    )


@pytest.mark.parametrize("folder", ["/proc/x", "/sys/kernel/x/y", "a\0b", "x" * 300])
def test_an_output_folder_that_cannot_be_created_is_one_line(folder):
    with pytest.raises(ConfigError, match=r"train.output='.*' cannot be created: .*; use another folder") as caught:
        OutputLock().acquire(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_the_command_refuses_such_a_folder(command):
    status, out, log = command("--train.steps", "2", "--train.output", "/proc/x")
    assert (status, out) == (2, "")
    assert (
        log.splitlines()[-1]
        == "zeropipe: train.output='/proc/x' cannot be created: No such file or directory; use another folder"
    )
