"""schedule.offload of a training file: the plan that --dry-run prints, and a run with copies to the host."""

import pytest

pytest.importorskip("torch")

from train_runs import metrics_of, model_directory, run_config, train_on

from zeropipe.errors import ConfigError
from zeropipe.train.config.read import read_run
from zeropipe.train.config.rules import check_run
from zeropipe.train.preview import preview
from zeropipe.train.schedule import build_run_schedule

LARGE = (
    "--model.path", "qwen3-8b", "--model.weights", "random", "--model.num_layers", "32", "--train.steps", "1",
    "--mesh.pp", "8", "--schedule.name", "interleaved", "--data.batch", "32", "--data.sequence", "4096",
    "--engine.ac", "selective:op", "--schedule.costs", "h200",
)  # fmt: skip


def made(*options):
    return preview(read_run(None, [*LARGE, *options]))


def test_auto_takes_memory_off_and_no_time():
    plain, auto, all_of_it = made(), made("--schedule.offload", "auto"), made("--schedule.offload", "1.0")
    assert auto.prediction.step == pytest.approx(plain.prediction.step)
    assert auto.ranks[0].memory["activations"] < 0.4 * plain.ranks[0].memory["activations"]
    assert all_of_it.prediction.step > auto.prediction.step
    assert auto.ranks[0].memory["weights"] == plain.ranks[0].memory["weights"]


def test_fit_copies_only_what_it_must():
    assert build_run_schedule(read_run(None, [*LARGE, "--schedule.offload", "fit"])).offloading is None
    long = ("--data.microbatch", "4", "--data.batch", "128"), ("--schedule.offload", "fit")
    given = [*LARGE, *long[0]]
    position = given.index("--data.batch")
    del given[position : position + 2]
    plain, fitting = preview(read_run(None, given)), preview(read_run(None, [*given, *long[1]]))
    limit = plain.prediction.memory_limit
    assert plain.ranks[0].peak > limit
    assert 0.8 * limit < fitting.ranks[0].peak <= limit


@pytest.mark.parametrize(
    "options, message",
    [
        (("--schedule.offload", "2"), r"schedule\.offload=2\.0: must be auto, fit, or a share"),
        (("--schedule.offload", "some"), r"schedule\.offload='some': must be auto, fit, or a share"),
    ],
)
def test_wrong_values(options, message):
    with pytest.raises(ConfigError, match=message):
        check_run(read_run(None, [*LARGE, *options]))


def test_auto_needs_times():
    with pytest.raises(ConfigError, match=r"schedule\.offload='auto' needs the times of layers"):
        check_run(read_run(None, [*LARGE[:-2], "--schedule.offload", "auto"]))


def test_a_run_has_the_same_losses(tmp_path):
    start = model_directory(tmp_path / "model")
    losses = {}
    for share in (None, 1.0):
        output = tmp_path / str(share)
        tables = {"mesh": {"pp": 2}, "schedule": {"name": "zb-h1", "offload": share}}
        train_on(run_config(output, start, **tables))
        losses[share] = [row["loss"] for row in metrics_of(output)]
    assert losses[None] == losses[1.0]
    assert len(losses[None]) > 1
