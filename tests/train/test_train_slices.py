"""`zeropipe train` with slices of sequences: the losses of a run without them."""

from __future__ import annotations

import json

import pytest
from train_runs import TINY, run_config, train_on
from transformers import Qwen3Config

from zeropipe.errors import ConfigError
from zeropipe.train.config.rules import check_run

IN_SLICES = {"name": "seq1f1b", "slices": 2, "slice_sizes": (3, 2)}


def config_of(tmp_path, output, schedule, **tables):
    lines = [json.dumps({"text": f"{n} is followed by {n + 1}."}) for n in range(60)]
    (tmp_path / "learn.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "config.json").write_text(Qwen3Config(**TINY | {"vocab_size": 320}).to_json_string())
    given = {
        "model": {"weights": "random"},
        "data": {"kind": "text", "path": str(tmp_path / "learn.jsonl"), "tokenizer": "bytes", "sequence": 64,
                 "packing": True, "batch": 4},
        "train": {"steps": 3}, "mesh": {"pp": 2}, "schedule": schedule,
    }  # fmt: skip
    return run_config(tmp_path / output, tmp_path / "config.json", **given | tables)


def test_losses_are_those_without_slices(tmp_path):
    """Packed rows, in slices of unequal length."""
    whole, sliced = (
        train_on(config_of(tmp_path, name, schedule)).losses
        for name, schedule in (("whole", {"name": "1f1b"}), ("sliced", IN_SLICES))
    )
    assert sliced == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"schedule": {"name": "1f1b", "slices": 2}}, "slices=2: 1f1b has no slices"),
        ({"schedule": IN_SLICES | {"slices": 3}}, "slice_sizes has 2 numbers: must be schedule.slices=3"),
        ({"mesh": {"pp": 1, "cp": 2}}, "slices do not run with mesh.cp=2"),
        ({"schedule": {"name": "seq1f1b", "options": {"slices": 2}}}, "use schedule.slices"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, tables, message):
    with pytest.raises(ConfigError, match=message):
        check_run(config_of(tmp_path, "out", **{"schedule": IN_SLICES} | tables))
