"""A plan's training file trains with the user's model and data; plans are within the model's positions."""

import json
from pathlib import Path

import numpy as np
import pytest
from train_runs import model_directory
from train_samples import save_tokenizer

from zeropipe.errors import ConfigError
from zeropipe.train.config.read import read_run
from zeropipe.train.config.rules import check_run

CHAT = {"messages": [{"role": "user", "content": "is it so?"}, {"role": "assistant", "content": "it is"}]}


def test_a_plans_file_trains_with_the_users_data(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    model_directory(tmp_path / "start", vocab_size=400)
    save_tokenizer(tmp_path / "start")
    Path("chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 8)
    plan = [
        "plan",
        "start/config.json",
        "--gpus",
        "2",
        "--batch",
        "4",
        "--sequence",
        "64",
        "--pp",
        "2",
        "--schedules",
        "1f1b",
    ]
    assert run(*plan, "--search-seconds", "0", "-o", "run.toml")[0] == 0
    fields = ["--model.path", "start", "--data.path", "chats.jsonl", "--train.steps", "2", "--engine.device", "cpu"]
    status, out, err = run("train", "run.toml", *fields)
    assert status == 0, err
    assert out.startswith("2 steps, ")
    assert 'kind = "chat"' in Path("out/run.toml").read_text()


SLICES = ("--sequence", "256", "--batch", "4", "--ac", "full", "--slices", "1,4", "--memory", "2MB")
OFFLOAD = ("--sequence", "128", "--batch", "8", "--ac", "none", "--schedules", "gpipe", "--memory", "5MB")


@pytest.mark.parametrize(
    "wish, lines",
    [
        (SLICES, ["slices = 4", "slice_sizes = ["]),
        pytest.param(OFFLOAD, ['name = "run.schedule.json"'], marks=pytest.mark.full),
    ],
)
def test_a_plans_file_for_little_memory_trains_as_planned(wish, lines, tmp_path, monkeypatch, run):
    """Memory is so small that nothing fits without slices, or without copies to the host."""
    monkeypatch.chdir(tmp_path)
    model_directory(tmp_path / "start", vocab_size=400)
    plan = ["plan", "start", "--gpus", "2", "--ranks", "2", "--dtype", "float32", "--reserve", "0", *wish]
    status, out, err = run(*plan, "--microbatch", "1", "--search-seconds", "0", "-o", "run.toml", "--json")
    assert status == 0, err
    made, text = json.loads(out), Path("run.toml").read_text()
    assert all(row["offload"] or row["slices"] > 1 for row in made["rows"])
    assert all(line in text for line in lines), text
    if wish is OFFLOAD:
        assert "OFFLOAD" in Path("run.schedule.json").read_text()
    status, out, err = run("train", "run.toml", "--dry-run", "--json")
    assert status == 0, err
    shown, best = json.loads(out), made["rows"][0]
    assert shown["prediction"]["step"] == pytest.approx(best["step_seconds"])
    assert max(sum(rank["memory"].values()) for rank in shown["ranks"]) == pytest.approx(best["peak_memory"], rel=1e-3)
    status, out, err = run("train", "run.toml", "--train.steps", "2", "--engine.device", "cpu")
    assert status == 0, err
    assert out.startswith("2 steps, ")


def test_a_plans_file_with_lora_trains_an_adapter_as_planned(tmp_path, monkeypatch, run):
    """The dry run of the written file has the plan's numbers, also with the user's data; the run trains adapters."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    model_directory(tmp_path / "start", vocab_size=400)
    save_tokenizer(tmp_path / "start")
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("it is so. " * 200)
    sizes = ["--gpus", "2", "--batch", "4", "--sequence", "64", "--pp", "2", "--dtype", "float32"]
    plan = ["plan", "start", *sizes, "--schedules", "1f1b", "--search-seconds", "0", "--lora", "2"]
    made = json.loads(run(*plan, "-o", "texts/run.toml", "--json")[1])
    text = Path("texts/run.toml").read_text()
    assert "# to train: --data.path FILES, or random tokens are used\n" in text, "the directory has weights"
    assert "[lora]\nrank = 2\n" in text
    fields = ["--data.path", "texts/a.txt", "--train.steps", "2", "--engine.device", "cpu", "--train.output", "out"]
    # packed rows on a CPU would have a dense mask besides
    status, out, err = run("train", "texts/run.toml", "--dry-run", "--json", *fields, "--data.packing", "false")
    assert status == 0, err
    shown, best = json.loads(out), made["rows"][0]
    assert shown["prediction"]["step"] == pytest.approx(best["step_seconds"])
    assert shown["prediction"]["mfu"] == pytest.approx(best["mfu"])
    fullest = max(shown["ranks"], key=lambda rank: sum(rank["memory"].values()))["memory"]
    assert {**fullest, "masters": 0} == pytest.approx({**best["memory"], "masters": 0})
    status, out, err = run("train", "texts/run.toml", *fields)
    assert status == 0, err
    assert out.startswith("2 steps, ")
    assert list(Path("out").rglob("adapter_config.json"))


@pytest.mark.parametrize("costs", ["plan", "file"])
def test_sharded_adapters_are_planned_as_a_dry_run_shows_them(tmp_path, monkeypatch, run, costs):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    wish = ["--gpus", "8", "--batch", "16", "--pp", "2", "--schedules", "zbv", "--ac", "none", "--search-seconds", "0"]
    source = ["qwen3-8b", "--lora", "8"]
    if costs == "file":
        assert run("estimate", *source, "-o", "costs.json")[0] == 0
        source = ["costs.json"]
    status, out, err = run("plan", *source, *wish, "--microbatch", "1", "-o", "run.toml", "--json")
    assert status == 0, err
    best = json.loads(out)["rows"][0]
    assert (best["dp_shard"], best["tp"]) == (4, 1)
    status, out, err = run("train", "run.toml", "--dry-run", "--json")
    assert status == 0, err
    shown = json.loads(out)
    assert shown["prediction"]["step"] == pytest.approx(best["step_seconds"])
    assert max(sum(rank["memory"].values()) for rank in shown["ranks"]) == pytest.approx(best["peak_memory"])
    other = json.loads(run("train", "run.toml", "--dry-run", "--json", "--lora.rank", "16")[1])
    assert (other["prediction"] is None) == (costs == "file")
    if costs == "file":
        assert other["notes"][0] == "no prediction: the run has lora.rank 16, the costs are for rank 8"
    unlike = json.loads(run("train", "run.toml", "--dry-run", "--json", "--lora.dropout", "0.1")[1])
    assert unlike["prediction"] is None
    assert unlike["notes"][0].startswith("no prediction: ")


def test_costs_with_another_adapter_are_refused(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    assert run("estimate", "qwen3-0.6b", "-o", "all.json")[0] == 0
    plan = ["--gpus", "2", "--batch", "4", "--lora", "8"]
    assert run("plan", "all.json", *plan)[2].startswith("zeropipe: lora=8: the costs train all weights; create costs")
    assert run("estimate", "qwen3-0.6b", "--lora", "4", "-o", "four.json")[0] == 0
    assert run("plan", "four.json", *plan)[2].startswith("zeropipe: lora=8: the costs have rank 4; create costs")
    assert run("plan", "qwen3-0.6b", *plan, "--tp", "2")[2].startswith(
        "zeropipe: tp=2: costs of adapters (lora) are not known with tp"
    )


RANDOM = ("--model.path", "tiny-qwen3", "--model.weights", "random")


def kind_of(*paths, **more):
    flags = [word for name, value in more.items() for word in (f"--data.{name}", value)]
    return read_run(None, ["--model.path", "tiny-qwen3", "--data.path", ",".join(paths), *flags]).data.kind


def test_the_kind_of_files_is_recognised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    Path("a.jsonl").write_text('{"text": "a"}\n')
    Path("chats.jsonl").write_text(json.dumps(CHAT))
    Path("both.jsonl").write_text(json.dumps({**CHAT, "text": "a"}))
    Path("alpaca.json").write_text('[{"instruction": "a", "output": "b"}]')
    np.save("a.npy", np.arange(5))
    Path("a.bin").write_bytes(b"1234")
    Path("a.bin.json").write_text('{"dtype": "uint16"}')
    Path("folder").mkdir()
    assert kind_of("a.txt") == kind_of("a.jsonl") == kind_of("both.jsonl") == kind_of("a.txt", "a.jsonl") == "text"
    assert kind_of("chats.jsonl") == kind_of("alpaca.json") == kind_of("*s.jsonl") == "chat"
    assert kind_of("a.npy") == kind_of("a.bin") == "tokens"
    assert kind_of("folder") == "datasets"
    assert kind_of("chats.jsonl", kind="text") == "text"
    assert read_run(None, ["--model.path", "tiny-qwen3"]).data.kind == "synthetic"
    with pytest.raises(ConfigError, match=r"data.path has files of several kinds: a.txt is text, chats.jsonl is chat"):
        kind_of("a.txt", "chats.jsonl")
    with pytest.raises(ConfigError, match=r"data.path='nowhere': no such file"):
        check_run(read_run(None, [*RANDOM, "--train.steps", "1", "--data.path", "nowhere"]))


@pytest.mark.parametrize("field", ["max_position_embeddings", "n_positions"])
def test_a_plan_is_within_the_models_positions(field, tmp_path, run):
    model_directory(tmp_path / "start")
    config = json.loads((tmp_path / "start" / "config.json").read_text())
    config.pop("max_position_embeddings")
    (tmp_path / "start" / "config.json").write_text(json.dumps({**config, field: 512}))
    plan = [
        "plan",
        tmp_path / "start",
        "--gpus",
        "2",
        "--batch",
        "4",
        "--pp",
        "2",
        "--schedules",
        "1f1b",
        "--search-seconds",
        "0",
    ]
    status, _, err = run(*plan, "--sequence", "513")
    assert (status, err.splitlines()[-1]) == (
        2,
        f"zeropipe: sequence=513: the model's {field} is 512; use shorter sequences, or change its config.json",
    )
    assert run(*plan, "--sequence", "512")[0] == 0
