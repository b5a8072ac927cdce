"""Names of models: one table for all commands, and the nearest name for one that is not in it."""

import json

import pytest
from train_runs import run_config, train_on
from transformers import AutoConfig

from zeropipe.core.model.configs import BUILT_IN, CONFIGS, find_built_in, suggest_model
from zeropipe.errors import ConfigError
from zeropipe.estimating.estimate import num_parameters
from zeropipe.train.inputs import load_model_config
from zeropipe.train.loop.setup import _model_source

UNKNOWN_TYPES = {"kimi-k2"}  # that transformers has no code for


@pytest.mark.parametrize("name", BUILT_IN)
def test_train_takes_every_name_of_the_planner(name, tmp_path, run):
    """A config of transformers is created from the name, with the layers and the vocabulary of the table."""
    config = run_config(tmp_path, name, model={"weights": "random"})
    if name in UNKNOWN_TYPES:
        with pytest.raises(
            ConfigError, match=f"model.path='{name}': transformers cannot create a model of model_type="
        ):
            _model_source(config)
        return
    found = _model_source(config)
    assert isinstance(found, type(AutoConfig.for_model(BUILT_IN[name]["model_type"])))
    for field, value in BUILT_IN[name].items():
        assert getattr(found, field, value) == value, field
    assert found.num_hidden_layers == BUILT_IN[name]["num_hidden_layers"]


def test_a_name_of_the_planner_is_trained(tmp_path):
    tables = {"model": {"weights": "random", "dtype": "float32", "num_layers": 2, "vocabulary": 64}}
    config = run_config(
        tmp_path, "Qwen3-0.6B", mesh={"pp": 2}, train={"steps": 1}, checkpoint={"export": False}, **tables
    )
    assert load_model_config(config)["model_type"] == "qwen3"
    assert train_on(config).steps == 1


def test_all_commands_have_the_same_names(run):
    for name in ("tiny-qwen3", "llama-8b", "Qwen3-32B"):
        status, out, _ = run("estimate", name, "--gpu", "h100", "--json")
        assert status == 0, name
    assert CONFIGS.items() <= BUILT_IN.items()
    assert num_parameters("llama-8b") == num_parameters("llama-3-8b")
    status, out, _ = run(
        "train", "--model.path", "glm-4.5-air", "--model.weights", "random", "--train.steps", "1", "--mesh.pp", "2",
        "--dry-run", "--json",
    )  # fmt: skip
    assert status == 0
    assert json.loads(out)["num_parameters"] == num_parameters("glm-4.5-air")[0]


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("Qwen/Qwen3-32B", "qwen3-32b"), ("qwen3-33b", "qwen3-32b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"), ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"), ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
    ],
)  # fmt: skip
def test_an_unknown_name_gets_the_nearest(name, nearest, run):
    assert suggest_model(name) == f"did you mean {nearest!r}?"
    for command in (
        ["plan", name, "--gpus", "8", "--batch", "8"], ["estimate", name],
        ["run", "1f1b", "-p", "2", "-m", "2", "--model", name],
        ["profile", name], ["train", "--model.path", name, "--train.steps", "1"],
    ):  # fmt: skip
        status, _, err = run(*command)
        assert (status, f"did you mean {nearest!r}?" in err, len(err.splitlines())) == (2, True, 1), (command, err)


def test_a_folder_of_that_name_is_not_the_built_in_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_built_in("qwen3-8b") is not None
    (tmp_path / "qwen3-8b").mkdir()
    assert find_built_in("qwen3-8b") is None
    assert suggest_model("nothing like it") == "`zeropipe estimate --known` lists the built-in models"
