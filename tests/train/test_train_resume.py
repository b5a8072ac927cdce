"""A run that ends early, by whatever, goes on where it was, on any other layout."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from paths import HELPERS
from train_cases import train_killed, train_not_finite, train_signalled
from train_runs import metrics_of, model_directory, pool, run_config, train_on

from zeropipe.engine.run.rank import Failed
from zeropipe.errors import EngineError
from zeropipe.train.loop.checkpoints import compare_configs, list_steps, read_pointer

STEPS = 6


def same_run(output, whole):
    """The curve and the samples of two runs; no step is there twice."""
    ours, theirs = metrics_of(output), metrics_of(whole)
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    assert [line["samples"] for line in ours] == [line["samples"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-9)
    assert [line["lr"] for line in ours] == [line["lr"] for line in theirs]
    assert ours[-1]["tokens"] == theirs[-1]["tokens"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("start"), tied=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, start):
    """The folder of a run that nothing ends early."""
    folder = tmp_path_factory.mktemp("whole")
    train_on(config_of(folder, start, {"pp": 2}, "1f1b"))
    return folder


def config_of(output, start, mesh, schedule, **tables):
    tables = {"checkpoint": {"every": 2}, "data": {"shuffle": True}} | tables
    return run_config(output, start, mesh=mesh, schedule={"name": schedule}, train={"steps": STEPS}, **tables)


def killed_and_resumed(out, start, whole, before, after, rank, step, where):
    first = config_of(out, start, *before)
    outcomes = pool(first.mesh.num_processes).outcomes(train_killed, first, rank, step, where)
    assert isinstance(outcomes[rank], Failed)
    assert outcomes[rank].kind == "Died"
    others = [one for number, one in enumerate(outcomes) if number != rank]
    assert all(f"rank {rank} was lost" in one.text for one in others if one.kind != "TimedOut")
    assert any(one.kind == "EngineError" for one in others)
    outcome = train_on(config_of(out, start, *after))
    assert outcome.steps == STEPS
    assert len(outcome.losses) >= STEPS - step - 2
    assert len(outcome.losses) < STEPS or step < 2
    same_run(out, whole)


def test_a_killed_rank_and_another_layout(tmp_path, start, whole):
    killed_and_resumed(tmp_path, start, whole, ({"pp": 2}, "1f1b"), ({"pp": 2, "dp_shard": 2}, "zbv"), 1, 3, "step")


LAYOUTS = [
    ({"pp": 2}, "1f1b"), ({"pp": 4}, "1f1b"), ({"pp": 2}, "zbv"), ({"pp": 2, "dp_shard": 2}, "interleaved"),
    ({"pp": 2, "tp": 2}, "1f1b"), ({"pp": 2, "dp_replicate": 2}, "zbv"), ({"pp": 1}, "gpipe"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_any_rank_killed_at_any_moment(tmp_path, start, whole, seed):
    draw = random.Random(seed)
    before, after = draw.sample(LAYOUTS[:-1], 1)[0], draw.choice(LAYOUTS)
    processes = run_config(tmp_path, "x", mesh=before[0]).mesh.num_processes
    where = ("step", "norm", "save")[seed % 3]
    rank, step = draw.randrange(processes), draw.randrange(1, STEPS - 2)
    killed_and_resumed(tmp_path, start, whole, before, after, rank, step, where)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path, start, whole, number):
    config = config_of(tmp_path, start, {"pp": 2}, "zbv", checkpoint={"every": 100})
    outcomes = pool(2).run(train_signalled, config, 1, 3, number)
    assert [(one.stopped_by, one.steps, one.export) for one in outcomes] == [(number.name, 4, None)] * 2
    assert outcomes[0].checkpoint.endswith("step-000004")
    outcome = train_on(config)
    assert (outcome.stopped_by, outcome.steps, len(outcome.losses)) == ("", STEPS, STEPS - 4)
    same_run(tmp_path, whole)


def test_the_last_checkpoints_are_kept(tmp_path, start):
    config = config_of(tmp_path, start, {"pp": 2}, "1f1b", checkpoint={"every": 1, "keep": 2, "export": False})
    outcome = train_on(config)
    folder = tmp_path / "checkpoints"
    assert list(list_steps(folder)) == [6, 5]
    assert read_pointer(folder, "latest") == "step-000006"
    assert outcome.checkpoint == str(folder / "step-000006")
    again = train_on(config)  # nothing is left to do
    assert (again.steps, again.losses) == (6, ())
    with pytest.raises(EngineError, match=r"checkpoints up to step 6, this run begins at step 0; use another"):
        train_on(config_of(tmp_path, start, {"pp": 2}, "1f1b", checkpoint={"resume": "never"}))


@pytest.mark.full
def test_too_many_steps_that_are_not_finite_end_the_run(tmp_path, start):
    config = config_of(tmp_path, start, {"pp": 2}, "1f1b")
    config = config.model_copy(update={"train": config.train.model_copy(update={"max_skipped": 2})})
    with pytest.raises(EngineError, match=r"step 6: loss or gradients were not finite in 3 steps in a row"):
        pool(2).run(train_not_finite, config, 1, (3, 4, 5))
    outcome = train_on(config)
    assert (outcome.steps, len(outcome.losses)) == (STEPS, STEPS - 4)


@pytest.mark.full
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_way_out(tmp_path, start):
    train_on(config_of(tmp_path / "out", start, {"pp": 2}, "1f1b", checkpoint={"export": False}))
    other = model_directory(tmp_path / "other", tied=True, rms_norm_eps=0.5)
    for model, name, line in (
        (
            other,
            "adamw",
            r"is of a model with rms_norm_eps=1e-06, model.path='.*other' has 0.5: give the model that it ",
        ),
        (start, "sgd", r"is of AdamW, the optimizer is SGD: use the same kind; train.output="),
    ):
        tables = {"train": {"steps": STEPS + 1}, "data": {"shuffle": True}, "optimizer": {"name": name}}
        with pytest.raises(EngineError, match=line) as caught:
            train_on(run_config(tmp_path / "out", model, mesh={"pp": 2}, **tables))
        assert len(str(caught.value).splitlines()) == 1


def test_a_model_of_another_type_is_told_by_its_type():
    two = [{"architectures": [name], "hidden_size": size, "model_type": name} for name, size in (("a", 1), ("b", 2))]
    assert next(compare_configs(*two)) == ("model_type", "a", "b")


def torchrun(tmp_path, config, *args, restarts=0):
    """A job of torchrun's, started."""
    (tmp_path / "config.json").write_text(config.model_dump_json())
    script = HELPERS / "train_under_torchrun.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), str(script), str(tmp_path / "config.json"), *map(str, args)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.full
def test_torchrun_starts_a_killed_job_again_and_it_goes_on(tmp_path, start, whole):
    job = torchrun(tmp_path, config_of(tmp_path / "out", start, {"pp": 2}, "zbv"), 5, restarts=1)
    _, said = job.communicate(timeout=300)
    assert job.returncode == 0, said
    assert "rank 1 was lost" in said
    assert re.search(r"resumed after step [24] from", said)
    same_run(tmp_path / "out", whole)


@pytest.mark.full
def test_sigterm_to_torchrun_saves(tmp_path, start):
    config = config_of(tmp_path / "out", start, {"pp": 2}, "1f1b", checkpoint={"every": 10**6})
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 10**6})})
    job = torchrun(tmp_path, config)
    while job.poll() is None and not (tmp_path / "out" / "metrics.jsonl").exists():
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=120)
    found = re.search(r"stopped by a signal after step (\d+) of 1000000, saved", said)
    assert found, said
    assert list(list_steps(tmp_path / "out" / "checkpoints")) == [int(found[1])]
