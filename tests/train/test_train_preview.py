"""`zeropipe train --dry-run`: what a training file comes to, and one file for all commands."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from training_files import GOOD

import zeropipe as zp
from zeropipe.cli.app import page_query
from zeropipe.cli.request import create_request
from zeropipe.core.model.configs import CONFIGS_BY_SHAPE
from zeropipe.engine.run.spec import Job, num_layers_of
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import num_parameters
from zeropipe.planning.write import write_run
from zeropipe.sim.layer_file import to_layer_json
from zeropipe.train.config.read import read_run
from zeropipe.train.preview import preview
from zeropipe.train.stage_costs import state_bytes

WHOLE = ("--model.path", "qwen3-8b", "--model.weights", "random", "--train.steps", "1")
LARGE = (*WHOLE, "--mesh.pp", "4")
SIZES = {"gpus": 8, "batch": 32, "gpu": "h100", "sequence": 1024, "search_seconds": 0, "workers": 1}


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A plan and its file: two pipelines of sharded weights, with layers that are not even."""
    monkeypatch.chdir(tmp_path)
    made = zp.plan("qwen3-8b", pp=[4], tp=[1], schedules=["zbv"], microbatch_sizes=[1], ac=["none"], **SIZES)
    write_run(made, made.best, "run.toml", "qwen3-8b", "h100")
    return made


def test_a_plans_file_has_the_plans_numbers(planned, run):
    """The plan is the oracle: the dry run reads everything from the file again."""
    row = planned.best
    status, out, _ = run("train", "run.toml", "--dry-run", "--json", "--model.weights", "random")
    shown = json.loads(out)
    assert status == 0
    assert shown["prediction"]["step"] == pytest.approx(row.step)
    assert shown["prediction"]["idle_fraction"] == pytest.approx(row.idle_fraction)
    assert shown["prediction"]["mfu"] == pytest.approx(planned.mfu(row))
    assert shown["prediction"]["tokens_per_second"] == pytest.approx(8 * planned.speed(row))
    assert max(sum(one["memory"].values()) for one in shown["ranks"]) == pytest.approx(row.memory.peak)
    assert tuple(shown["layers_per_stage"]) == row.counts
    assert (shown["num_processes"], shown["mesh"]["dp_shard"], shown["num_microbatches"]) == (8, 2, 16)
    assert (shown["num_parameters"], shown["notes"]) == (8_190_735_360, [])
    assert [one["stages"] for one in shown["ranks"]] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_logits_are_whole_only_where_the_run_makes_them_whole(schedule, run):
    """Of 4,096 tokens of 151,936 logits: chunks need less on the last rank, and are faster."""
    args = ("train", *LARGE, "--schedule.name", schedule, "--schedule.costs", "h100", "--data.sequence", "4096",
            "--data.batch", "8", "--model.dtype", "bfloat16", "--engine.compile", "true")  # fmt: skip
    found = [run(*args, "--engine.fused_head", fused, "--dry-run", "--json") for fused in ("true", "false")]
    chunks, whole = (json.loads(out) for _, out, _ in found)
    assert chunks["prediction"]["step"] < whole["prediction"]["step"]
    peaks = [[sum(rank["memory"].values()) for rank in shown["ranks"]] for shown in (chunks, whole)]
    assert peaks[0][:3] == pytest.approx(peaks[1][:3])
    assert peaks[1][3] - peaks[0][3] > 2e9
    assert not chunks["notes"]


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-14b", "qwen3-0.6b", "shapes", "shapes/config.json"])
def test_a_plans_file_is_shown_as_it_is(model, tmp_path, monkeypatch, run):
    """Names and configs have shapes and no weights: enough for a dry run, with the plan's own numbers, not to train."""
    monkeypatch.chdir(tmp_path)
    Path("shapes").mkdir()
    Path("shapes/config.json").write_text(json.dumps(CONFIGS_BY_SHAPE["qwen3-1.7b"]))
    made = zp.plan(model, pp=[2], tp=[1], schedules=["1f1b"], microbatch_sizes=[1], ac=["full"], **SIZES)
    write_run(made, made.best, "run.toml", model, "h100")
    status, out, _ = run("train", "run.toml", "--dry-run", "--json")
    assert status == 0
    shown = json.loads(out)
    assert shown["num_parameters"] == num_parameters(model)[0]
    assert shown["prediction"]["step"] == pytest.approx(made.best.step)
    assert max(sum(one["memory"].values()) for one in shown["ranks"]) == pytest.approx(made.best.memory.peak)
    assert shown["notes"][-1].startswith(f"{model} has no weights; to train, set --model.path to their directory")
    status, _, err = run("train", "run.toml")
    assert status == 2
    assert f"model.path='{model}' {'has no weights' if model == 'shapes' else 'is'}" in err


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_layer": 3}, {"model_type": "mpt", "n_layers": 3},
        {"model_type": "gpt_neo", "num_layers": 3, "attention_types": [[["global"], 3]]},
        {"model_type": "bart", "decoder_layers": 3},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_layers_may_have_the_names_of_older_families(config, tmp_path, run):
    """All commands take them, as the table of models says."""
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 8}))
    fields = ["--model.path", str(tmp_path), "--model.weights", "random", "--train.steps", "1", "--mesh.pp", "3"]
    status, out, _ = run("train", *fields, "--dry-run", "--json")
    assert status == 0
    assert json.loads(out)["layers_per_stage"] == [1, 1, 1]
    assert num_layers_of(Job(str(tmp_path))) == 3


def test_one_stage_per_rank_of_a_schedule_that_has_two_is_in_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = zp.plan("qwen3-0.6b", pp=2, tp=1, schedules="interleaved:v=1", microbatch_sizes=1, ac="none", **SIZES)
    assert "interleaved:v=1" in str(made.best.candidate)
    write_run(made, made.best, "run.toml", "qwen3-0.6b", "h100")
    shown = preview(read_run("run.toml", ["--model.weights", "random"]))
    assert (shown.layers_per_stage, shown.prediction.step) == (made.best.counts, pytest.approx(made.best.step))


def test_machines_of_another_size_are_in_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wish = {"pp": [2], "tp": [1], "schedules": ["1f1b"], "microbatch_sizes": [1], "ac": ["full"], **SIZES}
    steps = []
    for number in (8, 2):
        made = zp.plan("qwen3-8b", gpus_per_node=number, **wish)
        write_run(made, made.best, "run.toml", "qwen3-8b", "h100")
        steps.append(preview(read_run("run.toml", [])).prediction.step)
        assert steps[-1] == pytest.approx(made.best.step)
    assert steps[0] < steps[1]


def test_one_file_for_all_commands(planned, run):
    shown = json.loads(run("run", "run.toml", "--dry-run", "--json")[1])[0]
    assert shown["layers_per_stage"] == list(planned.best.counts)
    assert (shown["mesh"], shown["num_microbatches"]) == ({"pp": 4, "dp_shard": 2}, 16)
    simulated = json.loads(run("simulate", "run.toml", "--json")[1])
    assert (simulated["num_stages"], simulated["costs_per"]) == (8, "training file")
    assert simulated["makespan"] == pytest.approx(planned.best.makespan)
    assert max(simulated["peak_memory"]) == pytest.approx(planned.best.memory.peak)
    compared = json.loads(run("compare", "run.toml", "1f1b", "--json")[1])["compared"]
    even = planned.context.costs.costs(
        [9] * 4, shards=2, gather="keep", shard_link=planned.context.costs.link, node_size=4
    )
    assert compared[0]["makespan"] == pytest.approx(planned.best.makespan)
    assert compared[1]["makespan"] == pytest.approx(
        zp.simulate(zp.build("1f1b", ranks=4, microbatches=16), even).makespan
    )
    assert run("simulate", "run.toml", "--per", "stage")[2].startswith(
        "zeropipe: --per stage: these costs are per layer"
    )
    Path("costs.json").write_text(to_layer_json(planned.context.costs))
    Path("other.toml").write_text(
        Path("run.toml").read_text().replace('"h100"', '"costs.json"').replace("sequence = 1024", "sequence = 512")
    )
    assert run("simulate", "other.toml")[2] == (
        "zeropipe: other.toml: no prediction: the run has sequences of 512 tokens, the costs are for 1,024 tokens; "
        "create costs with --sequence 512; or pass --costs\n"
    )
    assert run("run", "other.toml", "--dry-run")[0] == 0  # a schedule runs without a prediction
    start = page_query(
        create_request(["run.toml"], dict.fromkeys(("ranks", "microbatches", "stages_per_rank")) | {"pairs": ()})
    )
    assert start.startswith("?ranks=4&microbatches=16&stages_per_rank=2&schedules=zbv&f=")
    assert start.count("&unit=s&memory_unit=B") == 1
    Path("bare.toml").write_text(  # more stages than layers: the ends have none
        "[model]\npath = 'tiny-qwen3'\nnum_layers = 2\n[mesh]\npp = 4\n"
        "[schedule]\nlayers = [0, 1, 1, 0]\ncosts = 'h100'\n[train]\nsteps = 1\n"
    )
    assert run("simulate", "bare.toml")[0] == 0
    fewer = Path("run.toml").read_text().replace(str(list(planned.best.counts)), "[4, 4]")
    Path("fewer.toml").write_text(fewer)
    assert run("simulate", "fewer.toml")[2] == "zeropipe: layers=[4, 4] adds up to 8: the model has 36 layers\n"
    assert run("train", "run.toml", "--model.path", "qwen3-32b")[2] == (
        "zeropipe: model.path='qwen3-32b' is built in and has no weights; use model.weights='random', or a model "
        "directory\n"
    )
    Path("only.toml").write_text(Path("run.toml").read_text() + "[lora]\nrank = 4\n")
    assert run("run", "only.toml", "--dry-run")[2] == (
        "zeropipe: only.toml: [lora] is only for `zeropipe train`: leave it out\n"
    )
    Path("offload.toml").write_text(Path("run.toml").read_text().replace("[engine]", "[engine]\noffload = true"))
    assert run("run", "offload.toml", "--dry-run")[2] == (
        "zeropipe: offload.toml: engine.offload=True is only for `zeropipe train`: leave it out\n"
    )
    Path("odd.toml").write_text(Path("run.toml").read_text().replace("batch = 32", "batch = 33"))
    assert run("run", "odd.toml", "--dry-run")[2].startswith("zeropipe: odd.toml: data.batch=33 cannot be divided")


def test_what_is_known_without_costs(tmp_path, monkeypatch, run):
    """Bytes of a parameter by hand: AdamW has two moments, 16-bit weights are learned in float32."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(GOOD)
    shown = json.loads(run("train", "run.toml", "--dry-run", "--json")[1])
    assert shown["prediction"] is None
    assert "--schedule.costs h100" in shown["notes"][0]
    for one in shown["ranks"]:
        size = 4 * one["parameters"]
        expected = {"weights": size, "gradients": size, "masters": 0, "optimizer": 2 * size}
        assert one["memory"] == pytest.approx(expected)
    assert sum(one["parameters"] for one in shown["ranks"]) == shown["num_parameters"]
    states = {
        "--model.dtype bfloat16": (2, 4, 12), "--model.dtype bfloat16 --optimizer.master_weights false": (2, 2, 4),
        "--model.dtype float64": (8, 8, 16), "--optimizer.name sgd": (4, 4, 0), "--lora.rank 4": (4, 4, 8),
        "--optimizer.name sgd --optimizer.momentum 0.9": (4, 4, 4), "--optimizer.name adafactor": (4, 4, 0),
    }  # fmt: skip
    for given, (weights, gradients, optimizer) in states.items():
        state = state_bytes(read_run("run.toml", given.split()))
        assert (state.weights, state.gradients, state.optimizer) == (weights, gradients, optimizer), given


def test_the_state_of_adapters_on_some_layers_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(GOOD)
    given = ["--lora.rank", "4", "--lora.dropout", "0.1", "--lora.target_modules"]
    all_linear, some, unknown = (
        preview(read_run("run.toml", [*given, names])) for names in ("all-linear", '["q_proj", "down_proj"]', ".*proj")
    )
    for one, other, least in zip(all_linear.ranks, some.ranks, unknown.ranks, strict=True):
        assert one.memory["optimizer"] > other.memory["optimizer"] > least.memory["optimizer"] == 0
        assert other.memory["optimizer"] == 2 * other.memory["gradients"] == 8 * (other.parameters - least.parameters)


def test_balance_by_time_is_zp_balance(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    costs = zp.estimate("qwen3-8b", gpu="h100", sequence=1024, dtype="float32", compile=False)
    Path("costs.json").write_text(to_layer_json(costs))
    given = [*LARGE, "--schedule.balance", "time"]
    for source in ("costs.json", "h100"):
        made = preview(read_run(None, [*given, "--schedule.costs", source]))
        schedule = zp.build("1f1b", ranks=4, microbatches=8)
        assert made.layers_per_stage == zp.balance(costs, schedule).counts != (9, 9, 9, 9)
        assert made.prediction is not None


@pytest.mark.parametrize("given, note", [
    ("--data.sequence 512", "no prediction: the run has sequences of 512 tokens, the costs are for 1,024 tokens; "),
    ("--model.dtype float64", "no prediction: the run has dtype float64, the costs float32; "),
    ("--lora.rank 4", "no prediction: the run trains an adapter (LoRA), costs are for training all weights; "),
    ("--data.microbatch 2", "no prediction: the costs of qwen3-8b have no setting with "),
    ("--engine.fused_head false", "no prediction: the run has engine.fused_head=false, which makes logits whole, "),
    ("--engine.float8 row", "no prediction: the run has engine.float8='row', the costs are for products in 16 or "),
    ("--mesh.ep 2 --mesh.dp_shard 2", "no prediction: the costs of qwen3-8b have no setting with ep=2: "),
    ("--mesh.pp 1", "rank 0 needs "),
])  # fmt: skip
def test_a_prediction_that_would_be_wrong_is_not_made(tmp_path, monkeypatch, given, note):
    monkeypatch.chdir(tmp_path)
    costs = zp.estimate("qwen3-8b", gpu="h100", sequence=1024, dtype="float32", compile=False)
    Path("costs.json").write_text(to_layer_json(costs))
    fields = WHOLE if "mesh.pp" in given else LARGE
    made = preview(read_run(None, [*fields, "--schedule.costs", "costs.json", *given.split()]))
    assert made.notes[0].startswith(note)
    assert (made.prediction is None) == note.startswith("no ")


def test_costs_in_float64_predict_a_run_in_float64(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    costs = zp.estimate("qwen3-8b", gpu="h100", sequence=1024, dtype="float32", compile=False)
    Path("costs.json").write_text(to_layer_json(replace(costs, dtype="float64")))
    fields = [*LARGE, "--schedule.costs", "costs.json", "--model.dtype", "float64"]
    assert preview(read_run(None, fields)).prediction is not None


def test_copies_take_time_for_their_sums():
    """A ring over two copies sends every byte of a rank's gradients once, through the link of the data sheet."""
    given = [*LARGE, "--schedule.costs", "h100"]
    one, two = (preview(read_run(None, [*given, *more.split()])) for more in (
        "--data.batch 8", "--data.batch 16 --mesh.dp_replicate 2"))  # fmt: skip
    largest = max(rank.parameters for rank in one.ranks)
    assert two.prediction.step - one.prediction.step == pytest.approx(largest * 4 / (450e9 * 0.8))


def test_a_dry_run_builds_a_counted_model_once(tmp_path, monkeypatch):
    """For balanced layers, the prediction, and the number of parameters."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon", **sizes}))
    opened, create = [], CountedModel._create_counter
    monkeypatch.setattr(CountedModel, "_create_counter", lambda self, size: opened.append(size) or create(self, size))
    given = "--model.weights random --mesh.pp 2 --schedule.costs h100 --schedule.balance time --data.sequence 32"
    made = preview(read_run(None, ["--model.path", str(tmp_path), "--train.steps", "1", *given.split()]))
    assert made.prediction is not None
    assert made.num_parameters == 45_376
    assert opened == [4]


def test_a_dry_run_needs_no_torch_and_fits_a_terminal(tmp_path):
    (tmp_path / "run.toml").write_text(GOOD)
    code = "import sys; from zeropipe.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "train", "run.toml", "--dry-run", "--schedule.costs", "h100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny-qwen3: 8 layers, 7.3M parameters, float32"
    assert lines[1] == "2 processes (pp=2), 1 pipeline"
    assert any(line.startswith("predicted (an estimate for h100): ") for line in lines)
    assert max(map(len, lines[3:9])) <= 80
    assert not list(tmp_path.glob("out*"))


def test_with_regather_weights_are_those_gathered_at_a_time():
    """By hand, of qwen3-32b: embedding, head and last norm, a block, and the message of the next one."""
    arguments = (
        "--model.path", "qwen3-32b", "--model.weights", "random", "--model.dtype", "bfloat16", "--mesh.dp_shard", "16",
        "--engine.ac", "full", "--data.sequence", "4096", "--data.batch", "64", "--schedule.costs", "h100",
        "--train.steps", "1",
    )  # fmt: skip
    keep, regather = (
        preview(read_run(None, (*arguments, "--engine.shards", shards))).ranks[0] for shards in ("keep", "regather")
    )
    total = 32_762_123_264
    outside = 2 * 151_936 * 5120 + 5120
    block = (total - outside) // 64
    assert keep.memory["weights"] == pytest.approx(2 * total)
    assert regather.memory["weights"] == pytest.approx(2 * (outside + 2 * block))
    for rank in (keep, regather):
        assert rank.memory["gradients"] == pytest.approx(4 * total)
        assert rank.memory["masters"] + rank.memory["optimizer"] == pytest.approx(12 * total / 16)
    assert keep.peak - regather.peak == pytest.approx(keep.memory["weights"] - regather.memory["weights"])
