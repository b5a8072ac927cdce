"""Stored samples that a run does not use any more."""

import os

import pytest
from train_cases import train_logged
from train_runs import model_directory, pool, run_config
from train_samples import opened, run_of

from zeropipe.errors import EngineError
from zeropipe.train.data import prepare
from zeropipe.train.data.cache import remove_unused


def test_what_no_table_asks_for_is_removed_and_nothing_else(tmp_path):
    (tmp_path / "a.txt").write_text("some text to learn from")
    (tmp_path / "b.txt").write_text("and some to be asked about")
    given = {"kind": "text", "path": str(tmp_path / "a.txt"), "tokenizer": "bytes", "batch": 1}
    config = run_of(tmp_path, **given, sequence=8, evaluation={"path": str(tmp_path / "b.txt")})
    for sequence in (8, 9, 10):
        prepare(config.model_copy(update={"data": config.data.model_copy(update={"sequence": sequence})}), print)
    folder = tmp_path / "out" / "data"
    assert len(list(folder.iterdir())) == 6
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "facts.json").write_text("of somebody else")
    (folder / ("0" * 16)).symlink_to(elsewhere)
    (folder / ("1" * 16)).mkdir()  # no samples are in it
    (folder / "mine").mkdir()
    for name, age in {f".{'2' * 16}.part": 9999, f".{'3' * 16}.part": 0}.items():
        (folder / name).mkdir()
        (folder / name / "progress").write_text("")
        for path in (folder / name / "progress", folder / name):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    assert remove_unused(run_of(tmp_path, kind="synthetic")) == ""
    data = opened(config)
    line = remove_unused(config)
    assert line.startswith(f"removed 5 sets of samples of other files or settings from {folder} (")
    left = {path.name for path in folder.iterdir()}
    assert {"0" * 16, "1" * 16, "mine", f".{'3' * 16}.part"} < left
    assert len(left) == 6
    assert (elsewhere / "facts.json").exists()
    assert data.next().num_tokens > 0
    assert remove_unused(config) == ""


@pytest.mark.full
def test_samples_of_a_refused_resume_stay_beside_the_good_ones(tmp_path):
    (tmp_path / "a.txt").write_text("some text to learn from")
    start = model_directory(tmp_path / "start", vocab_size=257)
    data = {"kind": "text", "path": str(tmp_path / "a.txt"), "tokenizer": "bytes", "batch": 1, "sequence": 8}

    def config(**more):
        return run_config(
            tmp_path / "out", start, data=data | more, train={"steps": 1}, checkpoint={"export": False}, mesh={"pp": 2},
        )  # fmt: skip

    pool(2).run(train_logged, config())
    folder = tmp_path / "out" / "data"
    (good,) = folder.iterdir()
    with pytest.raises(EngineError, match=r"data.sequence=9 was 8 when the checkpoint was saved"):
        pool(2).run(train_logged, config(sequence=9))
    assert len(list(folder.iterdir())) == 2
    _, told = pool(2).run(train_logged, config())[0]
    assert any(line.startswith("removed 1 set of samples of other files or settings from") for line in told)
    assert list(folder.iterdir()) == [good]
