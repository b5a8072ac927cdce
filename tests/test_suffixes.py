"""File names may end in capitals: RUN.JSON is read and written as run.json is."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from train_samples import all_samples, opened, run_of

import zeropipe as zp
from zeropipe.cli import main
from zeropipe.errors import ConfigError
from zeropipe.schedules.user import load
from zeropipe.sim.costs_file import read_costs_file
from zeropipe.train.config.read import is_path

SOURCES = Path(zp.__file__).parent
MINE = """
import zeropipe as zp

@zp.register("capital", placement=zp.linear)
def capital(lanes, p):
    '''All forwards, then all backwards.'''
    for lane in lanes:
        lane.f(lane.rank, times=p.num_microbatches)
        lane.b(lane.rank, times=p.num_microbatches)
"""


@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL", ".NdJson"])
def test_each_line_of_jsonl_is_a_document(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    file.write_text('{"text": "one"}\n{"text": "three"}\n')
    data = opened(run_of(tmp_path, kind="text", path=str(file), tokenizer="bytes", train={"epochs": 1.0}))
    assert [bytes(ids[:-1]) for ids, _ in all_samples(data)] == [b"one", b"three"]


@pytest.mark.parametrize("suffix", [".JSON", ".CSV", ".Tsv"])
def test_tables_are_no_text(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    file.write_text("text\none\n")
    with pytest.raises(ConfigError, match="must be JSONL, one JSON object per line"):
        opened(run_of(tmp_path, kind="text", path=str(file), tokenizer="bytes"))


def test_token_files(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(9))
    file = (tmp_path / "a.npy").rename(tmp_path / "a.NPY")
    data = opened(run_of(tmp_path, kind="tokens", path=str(file), train={"epochs": 1.0}))
    assert [ids for ids, _ in all_samples(data)] == [list(range(9))]


def test_schedules_and_their_costs(tmp_path):
    schedule = zp.build("zbv", ranks=2, microbatches=3)
    (tmp_path / "A.CSV").write_text(zp.to_csv(schedule))
    (tmp_path / "A.JSON").write_text(zp.to_json(schedule))
    (tmp_path / "A.PY").write_text(MINE)
    for name in ("A.CSV", "A.JSON"):
        assert load(str(tmp_path / name)).rows == schedule.rows
        assert is_path(name, "schedule.name")
    assert load(f"{tmp_path / 'A.PY'}:capital", ranks=2, microbatches=3).name == "capital"
    (tmp_path / "C.JSON").write_text('{"f": 2.0}')
    (tmp_path / "C.TOML").write_text("f = 2.0")
    assert read_costs_file(str(tmp_path / "C.JSON")) == read_costs_file(str(tmp_path / "C.TOML")) == {"f": 2.0}
    (tmp_path / "R.TOML").write_text('schedule = "A.JSON"\n[costs]\nf = 2.0')
    main(["simulate", str(tmp_path / "R.TOML"), "--json"])


@pytest.mark.parametrize("suffix", [".HTML", ".SVG", ".PNG", ".PDF", ".JSON", ".CSV"])
def test_pictures(tmp_path, suffix):
    for name in (f"a{suffix}", f"a{suffix.lower()}"):
        main(["draw", "1f1b", "-p", "2", "-m", "2", "-o", str(tmp_path / name)])
    written = [(tmp_path / f"a{one}").read_bytes()[:4] for one in (suffix, suffix.lower())]
    assert written[0] == written[1]


def test_found_schedules(tmp_path):
    for name in ("A.JSON", "A.CSV"):
        found = ["search", "-p", "2", "-m", "2", "--seconds", "0.1", "-o", str(tmp_path / name)]
        main(found)
        assert load(str(tmp_path / name)).num_ranks == 2
    json.loads((tmp_path / "A.JSON").read_text())


def test_the_project_compares_suffixes_in_one_way():
    suffix = r"json|jsonl|csv|toml|npy|py|svg|png|html|pdf"
    bare = re.compile(rf"""endswith\(\(?["']\.({suffix})\b|endswith\([A-Z]|\.suffix\b""")
    allowed = {"core/files.py": 2, "app/uploads.py": 1, "viz/__init__.py": 1}
    found = {}
    for path in SOURCES.rglob("*.py"):
        number = len(bare.findall(path.read_text()))
        if number:
            found[str(path.relative_to(SOURCES))] = number
    assert found == allowed
