"""`engine.compile = "auto"`: where a run compiles its blocks, what it says, and what of it is stored."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from training_files import GOOD

import zeropipe as zp
from zeropipe.cli.run import _with_device
from zeropipe.cli.training_file import from_training_file
from zeropipe.engine.run.spec import Job
from zeropipe.sim.layer_file import to_layer_json
from zeropipe.train.compiling import explain_uncompiled, is_compiled, predicted_device
from zeropipe.train.config.read import read_run
from zeropipe.train.inputs import load_layer_costs
from zeropipe.train.preview import preview

HALF = ("--model.dtype", "bfloat16")


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(GOOD)
    return lambda *fields: read_run("run.toml", fields)


@pytest.mark.parametrize(
    "fields, on_gpu, on_cpu",
    [
        (HALF, True, False),
        ((), False, False),
        ((*HALF, "--engine.compile", "auto"), True, False),
        ((*HALF, "--engine.compile", "false"), False, False),
        (("--engine.compile",), True, True),
        ((*HALF, "--data.packing", "false"), True, False),  # random tokens have one length
    ],
    ids=str,
)
def test_blocks_are_compiled_on_a_gpu_in_16_bits_unless_the_file_says_otherwise(read, fields, on_gpu, on_cpu):
    config = read(*fields)
    assert (is_compiled(config, "cuda"), is_compiled(config, "cpu")) == (on_gpu, on_cpu)
    assert not explain_uncompiled(config, "cuda")


@pytest.mark.parametrize(
    "fields, reason",
    [
        (("--data.kind", "text", "--data.path", "x.txt", "--data.packing", "false"), "rows of many lengths"),
        (("--mesh.cp", "2", "--mesh.cp_exchange", "ring"), "around attention only (mesh.cp_exchange='ring')"),
        (
            ("--schedule.name", "seq1f1b", "--schedule.slices", "2"),
            "around attention only (schedule.slices=2)",
        ),
        (("--mesh.dp_shard", "2", "--mesh.ep", "2", "--engine.ac", "memory_budget:0.5"), "exchanges of experts"),
    ],
    ids=lambda it: it[-1] if isinstance(it, tuple) else "",
)
def test_what_is_not_compiled_is_said_in_one_line(read, fields, reason):
    config = read(*HALF, *fields)
    assert not is_compiled(config, "cuda")
    line = explain_uncompiled(config, "cuda")
    assert line.startswith("engine.compile='auto' compiles no blocks: ")
    assert reason in line
    assert not explain_uncompiled(config, "cpu")
    assert not explain_uncompiled(read(*HALF, *fields, "--engine.compile", "false"), "cuda")


def test_a_dry_run_predicts_and_says_what_the_run_does(read):
    fields = (*HALF, "--model.path", "qwen3-0.6b", "--schedule.costs", "h100", "--data.sequence", "1024")
    fields = (*fields, "--schedule.name", "seq1f1b", "--engine.ac", "full")
    times = {
        word: preview(read(*fields, "--engine.compile", word)).prediction.step for word in ("auto", "true", "false")
    }
    assert times["auto"] == times["true"] < times["false"]
    shown = preview(read(*fields, "--schedule.slices", "2"))
    assert any("around attention only (schedule.slices=2)" in note for note in shown.notes)
    assert not load_layer_costs(read(*fields, "--schedule.slices", "2")).settings[0].compile


@pytest.mark.parametrize(
    "fields, reason",
    [
        (("--schedule.name", "seq1f1b", "--schedule.slices", "2"), "estimated for dense text models without windows"),
        (("--mesh.cp", "2", "--mesh.cp_exchange", "ring"), "a ring is estimated in blocks that are not compiled"),
    ],
    ids=str,
)
def test_blocks_compiled_around_attention_have_no_prediction(read, fields, reason):
    common = (
        "--model.path",
        "qwen3-0.6b",
        "--schedule.costs",
        "h100",
        "--data.sequence",
        "1024",
        "--engine.ac",
        "full",
    )
    shown = preview(read(*HALF, *common, *fields, "--engine.compile", "true"))
    assert shown.prediction is None
    assert any(reason in note for note in shown.notes)


def test_measured_costs_of_a_cpu_are_for_a_run_that_compiles_nothing(read):
    costs = zp.estimate("tiny-qwen3", dtype="bf16", sequence=64, compile=False)
    Path("costs.json").write_text(to_layer_json(replace(costs, source="profile", machine={"cpu": "x86_64"})))
    config = read(*HALF, "--schedule.costs", "costs.json")
    assert predicted_device(config, load_layer_costs(config)) == "cpu"
    assert preview(config).prediction is not None
    Path("costs.json").write_text(to_layer_json(replace(costs, source="profile", machine={"gpu": "NVIDIA H100"})))
    (note,) = preview(config).notes
    assert note == (
        "no prediction: the run's blocks are compiled, those of the costs are not compiled; create costs with "
        "--compile, or set engine.compile=false"
    )


def test_run_measures_a_training_file_as_it_is_trained(read):
    Path("half.toml").write_text(GOOD.replace("weights =", 'dtype = "bfloat16"\nweights ='))
    assert from_training_file("half.toml")["run"]["compile"] == "auto"
    assert from_training_file("run.toml")["run"]["compile"] is False
    job = _with_device(Job(device="cpu", dtype="bfloat16", compile=None))
    assert (job.device, job.compile) == ("cpu", False)


def test_the_first_step_says_how_long_it_took_with_compilation(tmp_path):
    pytest.importorskip("transformers")
    import train_cases
    from train_runs import metrics_of, model_directory, pool, run_config

    def config(**train):
        return run_config(
            tmp_path / "run", start, engine={"device": "cpu", "fused_head": False, "timeout": 60.0}, train=train
        )

    start = model_directory(tmp_path / "model")
    output = {"output": str(tmp_path / "run"), "record_every": 2}
    (first, lines), *_ = pool(1).run(train_cases.train_as_on_a_gpu, config(**output, steps=2))
    (line,) = [line for line in lines if "compilation" in line]
    assert re.fullmatch(r"step 1 took [\d.e+]+ s with the compilation of blocks \(engine\.compile\)", line)
    assert 'compile = "auto"' in (tmp_path / "run" / "run.toml").read_text()
    assert "compiled" in (tmp_path / "run" / "report.html").read_text()
    # what a file says is one thing, what the run did another: that is what changes
    (_, lines), *_ = pool(1).run(train_cases.train_logged, config(**output, steps=3))
    (changes,) = [line for line in lines if line.startswith("changed since")]
    assert "engine.compile True -> False" in changes
    assert not [line for line in lines if "compilation" in line]
    assert [one["step"] for one in metrics_of(tmp_path / "run")] == [1, 2, 3]
    assert first.losses[1] < first.losses[0]
