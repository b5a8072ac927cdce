"""The training file: what is read, and forty wrong ones, each with its line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import DOCS
from training_files import GOOD

import zeropipe as zp
from zeropipe.errors import ConfigError
from zeropipe.estimating.gpus import GPUS
from zeropipe.sim.layer_file import to_layer_json
from zeropipe.train.config.fields import field_names
from zeropipe.train.config.read import read_run
from zeropipe.train.config.write import to_toml

CHECKPOINTING = "must be none, full, selective:N, selective:op or memory_budget:X with X from 0 to 1"

# what is changed in GOOD, by arguments or by another text of the file -> the line
WRONG = {
    # the file itself
    "no file": ("", None, "cannot read the training file none.toml: No such file or directory"),
    "no toml": ("", "model = [", "run.toml is not TOML: Invalid value (at end of document)"),
    "no model": ("", "[train]\nsteps = 1",
                 "run.toml: model is missing; set it in the file, or use --model.path ..."),
    "no path": ("", "[model]\n[train]\nsteps = 1",
                "run.toml: model.path is missing; set it in the file, or use --model.path ..."),
    "unknown table": ("", GOOD + "[shedule]\nname = 'zbv'", "run.toml: unknown field shedule: did you mean schedule?"),
    "unknown field": ("", GOOD + "[schedule]\nnam = 'zbv'",
                      "run.toml: unknown field schedule.nam: did you mean schedule.name?"),
    "no table": ("", "model = 3", "run.toml: model=3: must be a table, written as [model] and its fields"),
    "text for a number": ("", GOOD + "[optimizer]\nlr = '1e-4'",
                          "run.toml: optimizer.lr='1e-4': must be a positive number"),
    "true for a number": ("", GOOD + "[optimizer]\nclip = true",
                          "run.toml: optimizer.clip=True: must be a non-negative number"),
    "number for a flag": ("", GOOD + "[engine]\ncompile = 1",
                          "run.toml: engine.compile=1: must be true, false or auto"),
    "word for a flag": ("--engine.compile=maybe", GOOD, "--engine.compile maybe: must be true, false or auto"),
    # fields of the command line
    "unknown flag": ("--mesh.dp-shards 2", GOOD, "unknown field --mesh.dp-shards: did you mean --mesh.dp_shard?"),
    "part of a name": ("--lr 2", GOOD, "unknown field --lr: did you mean --optimizer.lr?"),
    "no value": ("--mesh.pp --engine.compile", GOOD, "--mesh.pp has no value; use it like --mesh.pp 4"),
    "twice": ("--mesh.pp 2 --mesh.pp=4", GOOD, "--mesh.pp appears twice; leave out one of them"),
    "none": ("--mesh.pp 0", GOOD, "--mesh.pp 0: must be a positive integer"),
    "huge": ("--mesh.pp 5000000000", GOOD, "--mesh.pp 5000000000: must be at most 1,000,000,000"),
    "no number": ("--optimizer.lr fast", GOOD, "--optimizer.lr fast: must be a positive number"),
    "not finite": ("--optimizer.lr inf", GOOD, "--optimizer.lr inf: must be a positive number"),
    "no such choice": ("--model.dtype fp8", GOOD, "--model.dtype fp8: must be one of float32, bfloat16, float64"),
    "no list": ("--schedule.layers 2,x", GOOD,
                "--schedule.layers 2,x: must be a list of non-negative integers, like [2, 3, 3, 2]"),
    "betas": ("--optimizer.betas 0.9,1.5", GOOD,
              "--optimizer.betas 0.9,1.5: must be 2 numbers of at least 0 and below 1"),
    "two files": ("other.toml", GOOD,
                  "other.toml: run.toml is the training file already; write fields like --mesh.pp 4"),
    # the model
    "no such model": ("--model.path nowhere", GOOD, "model.path='nowhere' does not exist; use a directory with a "
                      "config.json, or a built-in model: `zeropipe estimate --known` lists the built-in models"),
    "nearest model": ("--model.path qwen3-33b", GOOD, "model.path='qwen3-33b' does not exist; use a directory with a "
                      "config.json, or a built-in model: did you mean 'qwen3-32b'?"),
    "name of the hub": ("--model.path Qwen/Qwen3-0.6B", GOOD, "model.path='Qwen/Qwen3-0.6B' does not exist; use a "
                        "directory with a config.json (`hf download Qwen/Qwen3-0.6B --local-dir ...`), or "
                        "a built-in model: did you mean 'qwen3-0.6b'?"),
    "nothing to load": ("--model.weights load", GOOD, "model.path='tiny-qwen3' is built in and has no weights; "
                        "use model.weights='random', or a model directory"),
    "name for planning": ("--model.path qwen3-32b --model.weights load", GOOD, "model.path='qwen3-32b' is built in and "
                          "has no weights; use model.weights='random', or a model directory"),
    "no weights": ("--model.path bare --model.weights load", GOOD,
                   "model.path='bare' has no weights (*.safetensors); use model.weights='random', or save them there"),
    "only a config": ("--model.path bare/config.json --model.weights load", GOOD, "model.path='bare/config.json' "
                      "is a config without weights; use model.weights='random', or a model directory"),
    "own layers": ("--model.path bare --model.num_layers 3", GOOD,
                   "model.num_layers=3 is for built-in models; leave it out"),
    "adapter as a model": ("--model.path adapter", GOOD, "model.path='adapter' is an adapter; use it as "
                           "lora.adapter, and its base model as model.path"),
    "no adapter": ("--lora.adapter bare", GOOD,
                   "lora.adapter='bare' has no adapter_config.json; use a directory that peft saved"),
    "rank of a saved adapter": ("--lora.adapter adapter --lora.rank 4", GOOD,
                                "lora.rank=4 is set by the saved adapter adapter; leave it out"),
    "long sequences": ("--model.path bare --data.sequence 5000", GOOD, "data.sequence=5000: the model's "
                       "max_position_embeddings is 4096; use shorter sequences, or change its config.json"),
    # mesh and batch
    "batch": ("--data.batch 10 --mesh.dp_replicate 2 --data.microbatch 2", GOOD, "data.batch=10 cannot be divided "
              "over 2 pipelines in microbatches of 2: must be a multiple of 4, like 8 or 12"),
    "heads": ("--mesh.tp 4", GOOD, "mesh.tp=4: must divide num_key_value_heads=2 of tiny-qwen3"),
    "sequences without tp": ("--mesh.sequence_parallel", GOOD, "mesh.sequence_parallel=true shards sequences over "
                             "tp; use mesh.tp of at least 2, or leave it out"),
    "length for tp": ("--mesh.sequence_parallel --mesh.tp 2 --data.sequence 63", GOOD,
                      "data.sequence=63: must be a multiple of mesh.tp=2 (mesh.sequence_parallel); use 62"),
    "offload": ("--engine.offload", GOOD,
                "engine.offload=true is for sharded weights; use mesh.dp_shard of at least 2, or leave it out"),
    "regather": ("--engine.shards regather", GOOD,
                 "engine.shards='regather' is for sharded weights; use mesh.dp_shard of at least 2, or leave it out"),
    "dropout and tp": ("--lora.dropout 0.1 --mesh.tp 2", GOOD, "lora.dropout=0.1 with mesh.tp=2: processes of tp would "
                       "draw different random numbers for the same tokens; leave out one of them"),
    "experts without data parallelism": ("--mesh.ep 2", GOOD, "mesh.ep=2 divides experts over data-parallel "
                                         "processes; use dp_shard of at least 2, or leave out ep"),
    "experts that do not divide": ("--mesh.ep 2 --mesh.dp_shard 3 --data.batch 12", GOOD,
                                   "mesh.ep=2: must divide dp_shard=3"),
    "experts and offload": ("--engine.offload --mesh.ep 2 --mesh.dp_shard 2", GOOD, "engine.offload=true with "
                            "mesh.ep=2=mesh.dp_shard: experts are not sharded; use less mesh.ep"),
    # the schedule
    "no such schedule": ("--schedule.name zvb", GOOD, "schedule: unknown schedule 'zvb': did you mean zbv or zb-h1?"),
    "stages per rank": ("--schedule.stages_per_rank 3", GOOD,
                        "schedule: 1f1b needs 1 stage per rank, got stages_per_rank=3"),
    "option": ("--schedule.options.group_size 3", GOOD, "schedule: 1f1b has no option 'group_size': it has none"),
    "size as an option": ("--schedule.options.ranks 3", GOOD,
                          "schedule.options.ranks is not an option of schedules; use mesh.pp"),
    "sum of layers": ("--schedule.layers 3,4", GOOD,
                      "schedule.layers=[3, 4] adds up to 7: the model has 8 layers"),
    "number of layers": ("--schedule.layers 4,2,2", GOOD,
                         "schedule.layers=[4, 2, 2] has 3 entries: the schedule has 2 stages"),
    "layers twice": ("--schedule.layers 4,4 --schedule.first_less 1", GOOD,
                     "schedule.layers and schedule.first_less exclude each other; leave out schedule.first_less"),
    "less than nothing": ("--schedule.first_less 20", GOOD,
                          "schedule.first_less=20: must be at most the 14 layers of that stage"),
    "schedule of others": ("--schedule.name four.json", GOOD, "schedule.name='four.json' is for 4 ranks, mesh.pp=2; "
                           "set mesh.pp=4, or use another schedule"),
    "balance": ("--schedule.balance time", GOOD,
                "schedule.balance='time' needs costs; set schedule.costs to a costs file or the name of a GPU"),
    "no such gpu": ("--schedule.costs h1000", GOOD, "schedule.costs='h1000' must be a costs file (.json, .toml) or "
                    f"one of the GPUs {', '.join(GPUS)}"),
    "costs of others": ("--schedule.costs costs.json", GOOD, "schedule.costs='costs.json' is for qwen3-8b with 36 "
                        "layers, the model has 8; create it for this model"),
    # the engine, the optimizer
    "checkpointing": ("--engine.ac some", GOOD, f"engine: activation checkpointing 'some': {CHECKPOINTING}"),
    "split and dynamic weights": ("--engine.split whole --engine.dynamic_weights", GOOD, "engine.dynamic_weights=True "
                                  "cannot run split='whole', whose W cannot run in parts; use split='store'"),
    "momentum": ("--optimizer.momentum 0.9", GOOD,
                 "optimizer.momentum=0.9 is for optimizer.name=sgd, not adamw; leave it out"),
    "decay": ("--rate.decay 0.5", GOOD, "rate.decay=0.5 is for rate.shape=wsd, not cosine; leave it out"),
    "adafactor": ("--optimizer.name adafactor --mesh.dp_shard 2", GOOD, "optimizer.name='adafactor' keeps sums "
                  "over rows and columns, which shards of a weight do not have; use adamw, or mesh.dp_shard=1 and "
                  "mesh.tp=1"),
    # the run
    "no length": ("--train.steps none", GOOD,
                  "train.steps is missing; set train.steps or train.epochs"),
    "two lengths": ("--train.epochs 2 --data.kind text --data.path a.txt --data.tokenizer bytes", GOOD,
                    "train.steps=10 and train.epochs=2 exclude each other; leave out one of them"),
    "epochs without end": ("--train.steps none --train.epochs 2", GOOD,
                           "train.epochs=2: data.kind='synthetic' has no end; use train.steps"),
    "warm-up": ("--rate.warmup 11", GOOD, "rate.warmup=11: must be at most train.steps=10"),
    "output is a file": ("--train.output a.txt/out", GOOD,
                         "train.output='a.txt/out': a.txt is a file; use a folder"),
    "nothing to resume": ("--checkpoint.resume gone", GOOD,
                          "checkpoint.resume='gone' does not exist; use the folder of a checkpoint, auto or never"),
    # data
    "no data": ("--data.kind text --data.tokenizer bytes", GOOD,
                "data.path is missing: data.kind='text' needs files"),
    "no match": ("--data.kind text --data.tokenizer bytes --data.path *.jsonl", GOOD,
                 "data.path='*.jsonl': no such file"),
    "no tokenizer": ("--data.kind text --data.path a.txt", GOOD, "data.tokenizer is missing, and "
                     "model.path='tiny-qwen3' is not a folder with a tokenizer; set data.tokenizer to one, or to "
                     "'bytes' (one token per byte)"),
    "folder without a tokenizer": ("--data.kind text --data.path a.txt --data.tokenizer bare", GOOD, ""
                                   "data.tokenizer: bare has no tokenizer.json or other tokenizer; save one "
                                   "there, or use another"),
    "files of nothing": ("--data.kind synthetic --data.path a.txt", GOOD, "data.path='a.txt': data.kind='synthetic' "
                         "reads no files; set data.kind, or leave out the path"),
    "evaluation of nothing": ("--evaluation.path a.txt", GOOD,
                              "evaluation: data.kind='synthetic' has no files to evaluate on; leave out the table"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with what the wrong files name."""
    from zeropipe.engine.run.spec import Job, built_in_config

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("bare", "adapter"):
        Path(name).mkdir()
    Path("bare/config.json").write_text(json.dumps(built_in_config(Job())))
    Path("adapter/adapter_config.json").write_text("{}")
    Path("a.txt").write_text("text")
    Path("four.json").write_text(zp.to_json(zp.build("1f1b", ranks=4, microbatches=4)))
    Path("costs.json").write_text(to_layer_json(zp.estimate("qwen3-8b")))
    return tmp_path


@pytest.fixture
def nothing_starts(monkeypatch):
    """A mistake is found before any process is started."""
    monkeypatch.setitem(sys.modules, "zeropipe.train.start", None)  # an import of it fails


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("folder", "nothing_starts")
def test_a_wrong_file_has_one_line(name, run):
    arguments, text, line = WRONG[name]
    if text is not None:
        Path("run.toml").write_text(text)
    status, out, err = run("train", "none.toml" if text is None else "run.toml", *arguments.split())
    assert (status, out, err) == (2, "", f"zeropipe: {line}\n")


def test_there_are_forty_of_them():
    assert len({line for _, _, line in WRONG.values()}) >= 40


def test_no_mistake_needs_torch(folder):
    """One process meets them all. A GPU that is asked for is looked for by torch, which is another test."""
    code = """
import contextlib, io, json, sys
from zeropipe.cli import main
for arguments, text in json.load(sys.stdin):
    if text is not None:
        open("run.toml", "w").write(text)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            main(["train", "run.toml" if text is not None else "none.toml", *arguments.split()])
        except SystemExit as stop:
            assert stop.code == 2, told.getvalue()
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    cases = json.dumps([(arguments, text) for arguments, text, _ in WRONG.values()])
    done = subprocess.run([sys.executable, "-c", code], input=cases, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


@pytest.mark.usefixtures("folder", "nothing_starts")
def test_several_mistakes_are_told_at_once(run):
    Path("run.toml").write_text(GOOD)
    given = "--mesh.pp 0 --optimizer.lr x --model.dtype int8"
    status, _, err = run("train", "run.toml", *given.split())
    assert (status, len(err.splitlines())) == (2, 3)
    given = "--data.batch 9 --data.microbatch 2 --train.steps none --engine.offload --schedule.name nix"
    status, _, err = run("train", "run.toml", *given.split())
    assert [line.removeprefix("zeropipe: ").split("=")[0] for line in err.splitlines()] == [
        "engine.offload", "data.batch",
        "train.steps is missing; set train.steps or train.epochs",
    ]  # fmt: skip
    wrong = [
        "mesh.pp",
        "mesh.tp",
        "mesh.dp_shard",
        "data.batch",
        "data.sequence",
        "data.microbatch",
        "train.seed",
        "log.every",
    ]
    lines = run("train", "--model.path", "m", *(f"--{name}=x" for name in wrong))[2].splitlines()
    assert (len(lines), lines[-1]) == (7, "and 2 more")


@pytest.mark.usefixtures("folder", "nothing_starts")
def test_the_machine_and_torchrun_are_looked_at(run, monkeypatch):
    import torch

    Path("run.toml").write_text(GOOD)
    most = max(64, 4 * (os.cpu_count() or 1))
    err = run("train", "run.toml", "--mesh.dp_replicate", most, "--data.batch", most)[2]
    assert err.startswith(f"zeropipe: {2 * most} ranks are too many processes for the ")
    if not torch.cuda.is_available():
        err = run("train", "run.toml", "--engine.device", "cuda")[2]
        assert err == "zeropipe: engine.device='cuda': torch finds no GPU; use cpu or auto\n"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert run("train", "run.toml") == (2, "", (
        "zeropipe: mesh pp=2,dp_replicate=1,dp_shard=1,cp=1,tp=1 has 2 processes, torchrun started 3; start 2, or "
        "change the mesh\n"
    ))  # fmt: skip
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run("train", "run.toml") == (2, "", "")  # told once on each machine


@pytest.mark.parametrize("package, arguments", [
    ("peft", "--lora.rank 4"), ("tensorboard", "--log.tensorboard"), ("wandb", "--log.wandb project"),
    ("datasets", "--data.kind datasets --data.path bare --data.tokenizer bytes"),
])  # fmt: skip
@pytest.mark.usefixtures("folder", "nothing_starts")
def test_a_package_that_is_missing_is_named(run, monkeypatch, package, arguments):
    from importlib import util

    found = util.find_spec
    for module in ("rules", "file_rules"):
        monkeypatch.setattr(
            f"zeropipe.train.config.{module}.find_spec", lambda name: None if name == package else found(name)
        )
    Path("run.toml").write_text(GOOD)
    status, _, err = run("train", "run.toml", *arguments.split())
    assert status == 2
    assert err.endswith(f"this needs {package}, which is not installed: pip install 'zeropipe[{package}]'\n")


@pytest.mark.parametrize("value", ["", "-1", "1000000000", "a\x00b", "[[1]]", "none"])
@pytest.mark.usefixtures("folder")
def test_no_value_of_a_field_ends_in_a_traceback(run, value):
    """A dry run of all fields: it is done, or refused in a few lines."""
    Path("run.toml").write_text(GOOD + "[schedule]\ncosts = 'h100'")
    for name in (*field_names(), "schedule.options.x"):
        status, out, err = run("train", "run.toml", "--dry-run", f"--{name}={value}")
        assert (status, bool(out), len(err.splitlines()) in (1, 2)) in ((0, True, False), (2, False, True)), name


def test_fields_are_given_in_any_order_and_form(folder):
    Path("run.toml").write_text(GOOD)
    given = [
        "--engine.compile", "--mesh.pp=8", "--schedule.layers", "2,3,3,2", "--engine.offload", "false", "--data.path",
        "a/*.txt,b.txt", "--schedule.options.group_size", "4", "--optimizer.lr", "3e-4", "--train.steps", "none",
        "--train.epochs", "2", "--mesh.dp-shard", "2", "--optimizer.betas", "[0.8, 0.9]",
    ]  # fmt: skip
    config = read_run("run.toml", given)
    assert (config.engine.compile, config.engine.offload, config.mesh.pp, config.mesh.dp_shard) == (True, False, 8, 2)
    assert config.schedule.layers == (2, 3, 3, 2)
    assert config.schedule.options == {"group_size": 4}
    assert config.data.path == ("a/*.txt", "b.txt")
    assert (config.optimizer.lr, config.optimizer.betas) == (3e-4, (0.8, 0.9))
    assert (config.train.steps, config.train.epochs) == (None, 2)
    assert read_run("run.toml", ["--engine.compile", "auto", "--mesh.pp", "2"]).engine.compile == "auto"
    with pytest.raises(ConfigError, match=r"^'x': must be --table.field value"):
        read_run("run.toml", ["x"])


def test_files_are_meant_from_the_folder_of_the_file_that_names_them(folder):
    Path("sub").mkdir()
    Path("sub/run.toml").write_text(
        "[model]\npath = 'model'\n[schedule]\nname = 'mine.json'\ncosts = 'h100'\n[checkpoint]\nresume = 'never'\n"
        "[evaluation]\npath = ['a', '/b']\n[data]\npath = 'x.txt'"
    )
    config = read_run("sub/run.toml", ["--data.tokenizer", "here"])
    assert (config.model.path, config.data.path, config.train.output) == (
        "sub/model", "sub/x.txt", "sub/out",
    )  # fmt: skip
    assert (config.schedule.name, config.schedule.costs) == ("sub/mine.json", "h100")
    assert (config.checkpoint.resume, config.evaluation.path) == ("never", ("sub/a", "/b"))
    assert config.data.tokenizer == "here"
    Path("other").mkdir()
    Path("other/copy.toml").write_text(to_toml(config))
    again = read_run("other/copy.toml")
    assert again.data.path == str(folder / "sub/x.txt")
    assert to_toml(again) == to_toml(config)


@pytest.mark.usefixtures("folder")
def test_a_new_file_explains_itself_and_can_be_trained(run):
    status, out, _ = run("train", "--init", "new.toml", "--mesh.pp", "4", "--schedule.name", "zbv")
    assert (status, out.split(" (")[0]) == (0, "wrote new.toml")
    assert read_run("new.toml") == read_run(None, [
        "--model.path", "tiny-qwen3", "--model.weights", "random", "--mesh.pp", "4", "--schedule.name", "zbv",
        "--data.sequence", "128", "--train.steps", "20",
    ])  # fmt: skip
    text = Path("new.toml").read_text()
    assert all(line == line.rstrip() and len(line) <= 120 for line in text.splitlines())
    assert sum(" = " in line for line in text.splitlines()) >= len(field_names())
    assert (
        run("train", "--init", "new.toml")[2] == "zeropipe: new.toml exists already: use another name, or remove it\n"
    )
    assert run("train", "--init", "x.toml", "--mesh.pp", "0")[0] == 2
    assert not Path("x.toml").exists()


@pytest.mark.usefixtures("folder")
def test_all_fields_are_printed(run):
    Path("run.toml").write_text(GOOD)
    text = run("train", "run.toml", "--print", "--mesh.pp", "4")[1]
    Path("again.toml").write_text(text)
    assert run("train", "again.toml", "--print")[1] == text
    data = json.loads(run("train", "run.toml", "--print", "--json")[1])
    assert (data["mesh"]["pp"], data["lora"], data["optimizer"]["betas"]) == (2, None, [0.9, 0.95])


def test_the_reference_is_up_to_date(tmp_path):
    """`make configuration` writes it."""
    docs = DOCS
    subprocess.run([sys.executable, docs / "configuration.py", tmp_path / "page.md"], check=True)
    assert (tmp_path / "page.md").read_text() == (docs / "configuration.md").read_text()
    for name in field_names():
        assert f"| `{name.partition('.')[2]}` |" in (docs / "configuration.md").read_text()


def test_our_fields_beside_those_of_others_exist():
    """The first columns of docs/coming-from.md."""
    page = (DOCS / "coming-from.md").read_text()
    rows = [line.split(" | ")[0] for line in page.partition("## What zeropipe has no")[0].splitlines() if "| " in line]
    named = re.findall(r"`([a-z]+\.[a-z_]+)", "\n".join(rows))
    assert len(named) > 40
    assert [name for name in named if name not in (*field_names(), "schedule.options")] == []
