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
