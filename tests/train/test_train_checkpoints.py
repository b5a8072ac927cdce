"""Checkpoints of a run: when they are due, and what happens when they cannot be written."""

from __future__ import annotations

import errno
import os

import pytest
from train_cases import (
    train_by_clock,
    train_logged,
    train_on_read_only,
    train_signalled,
    train_with_a_tensor_twice,
    train_with_strange_state,
    train_without_export,
    train_without_room,
)
from train_runs import metrics_of, model_directory, pool, run_config, train_on

from zeropipe.errors import EngineError
from zeropipe.train.loop import checkpoints
from zeropipe.train.loop.checkpoints import list_steps, prune, read_pointer
from zeropipe.train.loop.metrics import AppendFile


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def config_of(output, start, schedule="1f1b", steps=4, **checkpoint):
    table = {"every": 1, "export": False, "keep": 9} | checkpoint
    return run_config(
        output, start, mesh={"pp": 2}, schedule={"name": schedule}, train={"steps": steps}, checkpoint=table
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, start):
    """A run in which nothing happens."""
    return train_on(config_of(tmp_path_factory.mktemp("whole"), start))


def test_a_full_disk_costs_a_checkpoint_and_no_more(tmp_path, start, whole):
    config = config_of(tmp_path / "out", start)
    outcome, told = pool(2).run(train_without_room, config, 1, (1, 3))[0]
    folder = tmp_path / "out" / "checkpoints"
    assert outcome.losses == whole.losses
    assert list(list_steps(folder)) == [4, 2]
    assert read_pointer(folder, "latest") == "step-000004"
    assert [line for line in told if "warning" in line] == [
        f"warning: the checkpoint {folder / f'step-{step:06d}'} was not saved: rank 1: No space left on device; "
        "training continues"
        for step in (1, 3)
    ]


@pytest.mark.full
def test_without_room_for_the_last_checkpoint_the_one_before_stays_and_is_named(tmp_path, start):
    config, folder = config_of(tmp_path / "out", start), tmp_path / "out" / "checkpoints"
    with pytest.raises(EngineError) as caught:
        pool(2).run(train_without_room, config, 1, (3, 4))
    assert str(caught.value) == (
        f"the checkpoint {folder / 'step-000004'} was not saved: rank 1: No space left on device; the newest "
        f"complete one is {folder / 'step-000002'}; fix that and start again"
    )
    outcome = train_on(config)
    assert (outcome.steps, len(outcome.losses)) == (4, 2)
    assert max(list_steps(folder)) == 4


@pytest.mark.full
def test_an_export_that_fails_says_what_to_do_with_the_checkpoint(tmp_path, start):
    config = config_of(tmp_path / "out", start, steps=2, export=True)
    with pytest.raises(
        EngineError, match=r"^\[Errno 28\] No space left on device; the checkpoint is complete: `zeropipe "
    ):
        pool(2).run(train_without_export, config)
    assert train_on(config).export == str(tmp_path / "out" / "export")


def test_what_can_never_be_saved_is_refused_before_the_first_step(tmp_path, start):
    with pytest.raises(EngineError, match=r"stages 0 and 1 both have a model\.stored: names must differ, or be tied"):
        pool(2).run(train_with_a_tensor_twice, config_of(tmp_path / "out", start))
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_first_checkpoint_that_no_later_one_can_better_ends_the_run(tmp_path, start):
    config = config_of(tmp_path / "out", start, every=2)
    with pytest.raises(EngineError, match=r"strange of .* in the optimizer is a object: must be a tensor or a number"):
        pool(2).run(train_with_strange_state, config)
    assert len(metrics_of(tmp_path / "out")) == 2


def test_a_folder_that_refuses_names_costs_no_step(tmp_path, start):
    outcome, told = pool(2).run(train_on_read_only, config_of(tmp_path / "out", start), 2)[0]
    folder = tmp_path / "out" / "checkpoints"
    assert (outcome.steps, list(list_steps(folder))) == (4, [4, 3, 1])
    assert [line for line in told if "warning" in line] == [
        f"warning: rank 0: cannot write into {folder / 'step-000002'}: Permission denied; training continues",
        f"warning: cannot write {folder / 'latest'}: Permission denied",
    ]


def test_minutes_are_those_of_the_first_rank(tmp_path, start):
    config = config_of(tmp_path / "out", start, steps=6, every=None, minutes=1.0)
    pool(2).run(train_by_clock, config, (25.0, 9999.0))
    assert list(list_steps(tmp_path / "out" / "checkpoints")) == [6, 5, 2]


def test_dropout_goes_on_with_its_own_random_numbers(tmp_path, whole):
    path = model_directory(tmp_path / "start", attention_dropout=0.3)
    dropping = train_on(config_of(tmp_path / "whole", path))
    assert dropping.losses[0] != pytest.approx(whole.losses[0], rel=1e-3)  # it is on
    pool(2).run(train_signalled, config_of(tmp_path / "out", path), 1, 1, 15)
    rest, told = pool(2).run(train_logged, config_of(tmp_path / "out", path))[0]
    assert rest.losses == dropping.losses[2:]
    assert not [line for line in told if "random" in line]


@pytest.mark.full
def test_dropout_says_that_it_draws_other_random_numbers_on_another_layout(tmp_path):
    path = model_directory(tmp_path / "start", attention_dropout=0.3)
    train_on(config_of(tmp_path / "out", path))
    _, told = pool(2).run(train_logged, config_of(tmp_path / "out", path, "zbv", steps=5))[0]
    assert "attention_dropout=0.3 draws other random numbers on this layout than on the checkpoint's" in told
    assert len(metrics_of(tmp_path / "out")) == 5


class Disk:
    """A file on a disk with room for some bytes."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def fileno(self):
        return self._file.fileno()

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[: self.room])
        self.room -= written
        return written


def test_lines_that_a_full_disk_did_not_take_are_written_once_there_is_room(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    log = AppendFile(path)
    disk = log._file = Disk(log._file, 12)
    for number in range(3):
        log.append(f'{{"step": {number}}}\n')
    assert path.read_text() == '{"step": 0}\n'
    assert capsys.readouterr().err == f"warning: cannot write {path}: No space left on device; training continues\n"
    disk.room = 99
    log.append('{"step": 3}\n')
    assert path.read_text() == "".join(f'{{"step": {number}}}\n' for number in range(4))


def test_lines_go_on_in_a_new_file_when_theirs_was_removed(tmp_path, capsys):
    path = tmp_path / "out" / "metrics.jsonl"
    path.parent.mkdir()
    log = AppendFile(path)
    log.append("1\n")
    path.unlink()
    path.parent.rmdir()
    log.append("2\n")
    log.close()
    assert path.read_text() == "2\n"
    assert capsys.readouterr().err == f"warning: {path} was deleted; a new file begins\n"


def test_only_what_is_older_or_was_never_whole_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "is_complete", lambda path: (path / "checkpoint.json").read_text() == "good")
    for step, text in {
        9: None,
        8: "damaged",
        7: "good",
        6: None,
        5: "good",
        4: "good",
        3: "damaged",
        2: "good",
    }.items():
        folder = tmp_path / f"step-{step:06d}"
        folder.mkdir()
        if text is not None:
            (folder / "checkpoint.json").write_text(text)
    prune(tmp_path, 2, "step-000003")
    assert list(list_steps(tmp_path)) == [8, 7, 5, 3]
