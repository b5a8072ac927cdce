"""`zeropipe run`: real processes, a real model, one command."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import script_runner

import zeropipe as zp
from zeropipe.core.timeline import Origin

torch = pytest.importorskip("torch", reason="needs torch")
from zeropipe.cli import main  # noqa: E402
from zeropipe.core.mesh import parse_mesh  # noqa: E402

SMALL = ["--microbatches", "4", "--steps", "1", "--sequence", "16"]


def call(capfd, *args):
    status = 0
    try:
        main(list(args))
    except SystemExit as stop:
        status = stop.code
    out, err = capfd.readouterr()
    return status, out, err


def test_two_schedules_for_real_with_report_and_json(capfd, tmp_path):
    report = tmp_path / "r.html"
    status, out, err = call(
        capfd, "run", "zbv", "1f1b", "--ranks", "2", *SMALL, "--report", str(report), "--json"
    )  # fmt: skip
    assert status == 0, err
    zbv, plain = json.loads(out)
    assert zbv["losses"] == pytest.approx(plain["losses"], rel=1e-5)  # one model, one answer
    assert zbv["num_parameters"] == plain["num_parameters"]
    assert {r["kind"] for r in zbv["residuals"]} == {"F", "I", "W"}
    assert {r["kind"] for r in plain["residuals"]} == {"F", "B"}
    assert zbv["measured"]["makespan"] > 0
    assert max(zbv["measured"]["peak_memory"]) == pytest.approx(max(zbv["simulated"]["peak_memory"]), rel=0.05)
    assert "<html" in report.read_text()[:200].lower()


def test_a_model_directory_and_a_file_of_a_schedule(capfd, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    status, out, err = call(
        capfd, "run", str(tmp_path / "mine.csv"), "--model", str(tmp_path / "model"), "--layers", "1,2",
        "--steps", "1", "--sequence", "16", "--timeline", str(tmp_path / "t.json"),
    )  # fmt: skip
    assert status == 0, err
    assert "mine: 2 ranks, 2 stages" in out
    timeline = zp.from_json((tmp_path / "t.json").read_text())
    assert timeline.measured
    assert timeline.origin == Origin((1, 2), sequence=16)
    assert timeline.schedule.num_actions == 8


def test_a_damaged_model_directory_ends_in_one_line(capfd, tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    from zeropipe.engine.run import launch

    monkeypatch.setattr(launch, "LocalRanks", partial(launch.LocalRanks, grace=1.0))
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    capfd.readouterr()  # its progress bar
    facts, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    command = ["run", "1f1b", "--ranks", "2", *SMALL, "--model", str(tmp_path)]

    def refused(words):
        status, out, err = call(capfd, *command)
        assert status == 2
        assert words in err
        assert err.count("\n") == 1, err
        assert out == ""

    facts.write_text(facts.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    refused("has no tensor model.layers.1.")  # the second rank only: the first waits for it, and is stopped
    weights.write_bytes(b"123")
    refused(f"cannot read {weights}")
    facts.write_text("[1]")
    refused(f"{facts} is not a model's configuration")


def tiny(folder, tied):
    """A model so small that processes have little to compute."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return {"model": str(folder), "steps": 1, "sequence": 16, "dtype": "float64"}


def test_on_a_mesh_with_gradients_proven(tmp_path):
    """Every pipeline has microbatches of its own; gradients are those of all of them in one process."""
    from engine_helpers import ranks

    from zeropipe.cli import run_output
    from zeropipe.engine.run.job import run_all
    from zeropipe.engine.run.spec import Job

    job = Job(mesh=parse_mesh("dp_shard=2,pp=2"), verify=True, **tiny(tmp_path, tied=False))
    found = ranks(4).run(run_all, [zp.build("zbv", ranks=2, microbatches=4)], job)
    ((first,), *others) = found
    assert 0 < first.gradient_error < 1e-12
    assert all(other.measured.losses == first.measured.losses for (other,) in others)
    predicted = run_output.predict(first.measured.timeline, job)
    data = run_output.run_data(first, predicted, job)
    assert data["mesh"] == {"pp": 2, "dp_shard": 2}
    assert data["measured"]["peak_memory"] == pytest.approx(data["simulated"]["peak_memory"], rel=0.05)
    assert predicted.label == "zbv on pp=2,dp_shard=2, simulated"


@pytest.mark.full
def test_divided_experts_on_a_mesh_with_gradients_proven(tmp_path):
    from engine_helpers import ranks
    from train_runs import model_directory

    from zeropipe.engine.run.job import run_all
    from zeropipe.engine.run.spec import Job

    path = model_directory(tmp_path, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2)
    mesh = parse_mesh("pp=2,dp_replicate=2,ep=2")
    job = Job(mesh=mesh, verify=True, model=str(path), steps=1, sequence=16)
    found = ranks(4).run(run_all, [zp.build("zbv", ranks=2, microbatches=4)], job)
    assert 0 < found[0][0].gradient_error < 1e-4


@pytest.mark.parametrize("name", ["zbv", "1f1b"])
def test_a_tied_head_is_proven(name, tmp_path):
    """On a V both ends, which share a weight, are on one rank."""
    from engine_helpers import ranks

    from zeropipe.engine.run.job import run_all
    from zeropipe.engine.run.spec import Job

    job = Job(verify=True, **tiny(tmp_path, tied=True))
    ((first,), _) = ranks(2).run(run_all, [zp.build(name, ranks=2, microbatches=4)], job)
    assert 0 < first.gradient_error < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=2,dp_replicate=2", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2"])
def test_the_command_on_meshes(capfd, tmp_path, mesh):
    report = tmp_path / "r.svg"
    status, out, err = call(
        capfd, "run", "1f1b", "--mesh", mesh, *SMALL, "--num-layers", "4", "--vocabulary", "64", "--dtype", "float64",
        "--verify", "--json", "--report", str(report),
    )  # fmt: skip
    assert status == 0, err
    assert json.loads(out)[0]["gradient_error"] < 1e-12
    assert f"1f1b on {mesh}, measured" in report.read_text()


@pytest.mark.parametrize(
    "args, world, words",
    [
        (
            ["--mesh", "pp=2,sp=2"],
            None,
            "has the dimension 'sp': must be one of pp, dp_replicate, dp_shard, cp, tp, ep",
        ),
        (["--mesh", "pp=2", "--mesh.ep", "2"], None, "ep=2 divides experts over data-parallel processes; use dp_shard"),
        (["--mesh", "pp=2,pp=2"], None, "has pp twice"),
        (["--mesh", "pp"], None, "write a number of processes for pp, like pp=2"),
        (["--mesh", "tp=0"], None, "write a number of processes for tp, like tp=2"),
        (["--mesh", "pp=2,tp=99999"], None, "199998 ranks are too many processes"),
        (["--mesh", "pp=2", "--ranks", "4"], None, "--ranks 4 and --mesh with pp=2"),
        (["--mesh", "pp=2,tp=2"], "3", "--mesh pp=2,tp=2 has 4 processes, torchrun started 3: start 4"),
    ],
)
def test_a_wrong_mesh_is_one_line(capfd, monkeypatch, args, world, words):
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    status, out, err = call(capfd, "run", "1f1b", "--microbatches", "4", *args)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_dry_run_says_the_mesh_and_a_file_must_fit_it(capfd, tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    status, out, _ = call(capfd, "run", str(tmp_path / "mine.csv"), "--mesh", "pp=2,tp=4", "--dry-run", "--json")
    assert status == 0
    assert json.loads(out)[0]["mesh"] == {"pp": 2, "tp": 4}
    status, _, err = call(capfd, "run", str(tmp_path / "mine.csv"), "--mesh", "tp=2", "--dry-run")
    assert status == 2
    assert "mine is for 2 ranks, --mesh has pp=1: use pp=2" in err


def test_dry_run_starts_nothing(capfd):
    status, out, _ = call(capfd, "run", "zbv", "--ranks", "4", "--microbatches", "8", "--dry-run", "--json")
    assert status == 0
    (plan,) = json.loads(out)
    assert plan["layers_per_stage"] == [1] * 8
    assert [r["stages"] for r in plan["ranks"]] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [r["messages_sent"] for r in plan["ranks"]] == [16, 32, 32, 16]


@pytest.mark.parametrize(
    "args, stages, layers",
    [
        (["--layers-per-stage", "2", "--num-layers", "8"], 4, [2, 2, 2, 2]),
        (["--layers-per-stage", "1", "--num-layers", "8"], 8, [1] * 8),
        (["--layers-per-stage", "3", "--num-layers", "11", "--last-less", "1"], 4, [3, 3, 3, 2]),
        (["-v", "2", "--num-layers", "10", "--first-less", "1", "--last-less", "1"], 4, [2, 3, 3, 2]),
    ],
)
def test_how_layers_are_spread(capfd, args, stages, layers):
    base = ["run", "interleaved", "--ranks", "2", "--microbatches", "4", "--dry-run", "--json"]
    status, out, err = call(capfd, *base, *args)
    assert status == 0, err
    (plan,) = json.loads(out)
    assert plan["layers_per_stage"] == layers
    assert len(layers) == stages


@pytest.mark.parametrize(
    "args,words",
    [
        (["--layers-per-stage", "3", "--num-layers", "8"], "layers_per_stage=3 gives 3 stages, which 2 ranks cannot"),
        (["--layers-per-stage", "2", "--layers", "2,2,2,2"], "set the same: use one of them"),
        (["--layers-per-stage", "2", "-v", "2"], "set the same: use one of them"),
        (["--layers", "2,2,2,2", "--last-less", "1"], "--layers has each stage's layers already"),
        (["--first-less", "9"], "first_less=9: must be at most the"),
        (["--model", "nowhere"], "model 'nowhere': must be a directory with a config.json"),
        (["--layers", "1,2"], "layers=[1, 2] has 2 entries: the schedule has 4 stages"),
        (["--layers", "a"], "--layers 'a': must be one number per stage"),
        (["--report", "/no/such/dir/r.html"], "cannot write /no/such/dir/r.html"),
        (["--report", "r.doc"], "cannot draw 'r.doc': the name must end in .html"),
        (["--timeline", "x.svg"], "--timeline x.svg: its name must end in .json"),
        (
            ["--model", "tiny-qwen"],
            "model 'tiny-qwen': must be a directory with a config.json or a built-in model; did you mean 'tiny-qwen3'?",
        ),
        (["--layers=-1,3,1,1"], "layers=[-1, 3, 1, 1]: must be non-negative"),
        (["--ranks", "2000"], "2000 ranks are too many processes"),
        (["--timeout", "0"], "Invalid value for '--timeout'"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--ac", "some"], "activation checkpointing 'some': must be none, full, selective:N"),
        (["--split", "autograd"], "Invalid value for '--split': 'autograd' is not one of 'store', 'whole'"),
        (["--split", "whole", "--dynamic-weights"], "--dynamic-weights cannot run --split whole: use --split store"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(capfd, args, words):
    status, out, err = call(capfd, "run", "zbv", "--ranks", "2", "--microbatches", "4", *args)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_stuck_schedule_is_refused_before_anything_starts(capfd, tmp_path):
    file = tmp_path / "stuck.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    for more in ([], ["--dry-run"]):
        status, out, err = call(capfd, "run", str(file), *more)
        assert status == 2
        assert err.startswith("zeropipe: no rank can go on after 1 of 8 actions\n")
        assert out == ""


def torchs_own(number, words, folder, environment):
    """`script_runner.torchrun` with torch's: each process imports all of torch and transformers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=folder)


@pytest.mark.parametrize("torchrun", [script_runner.torchrun, pytest.param(torchs_own, marks=pytest.mark.full)])
def test_under_torchrun(tmp_path, torchrun):
    words = ["-m", "zeropipe", "run", "1f1b", *SMALL, "--json"]
    done = torchrun(2, words, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["measured"]["num_ranks"] == 2
    assert "1f1b: step 1/1" in done.stderr


@pytest.mark.parametrize(
    "device, gpus, ranks, backend", [("cuda", 4, 4, "nccl"), ("cuda", 1, 4, "gloo"), ("cpu", 4, 4, "gloo")]
)
def test_nccl_where_every_rank_has_a_gpu(monkeypatch, device, gpus, ranks, backend):
    from zeropipe.engine.run.job import choose_backend
    from zeropipe.engine.run.spec import Job

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_backend(Job(device=device), ranks) == backend


@pytest.mark.parametrize(
    "args, status, text",
    [
        (["--dry-run"], 0, "layers per stage 1 1 1 1"),
        ([], 2, "torch, which is not installed: pip install 'zeropipe[engine]'"),
    ],
)
def test_a_plan_needs_no_torch(args, status, text):
    script = "import sys; sys.modules['torch'] = None; from zeropipe.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", script, "run", "zbv", "--ranks", "2", "--model", "tiny-qwen3", "--num-layers", "4"]
    found = subprocess.run([*command, "-m", "4", *args], capture_output=True, text=True, timeout=60)
    assert (found.returncode, text in found.stdout + found.stderr) == (status, True), found
