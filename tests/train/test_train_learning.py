"""A model that learns: held-out data as plain transformers sees it, the best model kept, one curve for all layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from train_runs import TINY, metrics_of, run_config, train_on
from transformers import AutoModelForCausalLM, Qwen3Config

from zeropipe.train.loop.checkpoints import list_steps, read_pointer

COLOURS, ANIMALS = ("red", "green", "blue", "black"), ("cat", "dog", "hen", "owl", "fox")


def sentences(start: int, number: int) -> list[str]:
    """A little grammar: who is what follows from its number."""
    made = []
    for index in range(start, start + number):
        colour, animal = COLOURS[index % 4], ANIMALS[index % 5]
        made.append(f"the {colour} {animal} sees the {COLOURS[(index + 1) % 4]} {animal}.")
    return made


def files(tmp_path: Path) -> tuple[str, str]:
    """Sentences to learn from, and some to be asked about."""
    for name, start, number in (("learn", 0, 120), ("held", 120, 12)):
        lines = [json.dumps({"text": text}) for text in sentences(start, number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "learn.jsonl"), str(tmp_path / "held.jsonl")


def curve_config(tmp_path, output, mesh, schedule, steps, **tables):
    learn, held = files(tmp_path)
    (tmp_path / "config.json").write_text(Qwen3Config(**TINY | {"vocab_size": 320}).to_json_string())
    given = {
        "model": {"weights": "random"},
        "data": {"kind": "text", "path": learn, "tokenizer": "bytes", "sequence": 96, "packing": True, "batch": 4},
        "evaluation": {"path": held, "every": 2},
        "train": {"steps": steps},
        "checkpoint": {"keep": 1},
    }
    for name, table in tables.items():
        given[name] = {**given.get(name, {}), **table}
    return run_config(tmp_path / output, tmp_path / "config.json", mesh=mesh, schedule={"name": schedule}, **given)


def tokens_of(text: str) -> list[int]:
    """Bytes, and the end of a document."""
    return [*text.encode(), 256]


def held_out_loss(directory: str, texts: list[str]) -> float:
    """The mean over all tokens of some texts, each alone, as transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    total = count = 0
    for text in texts:
        ids = torch.tensor([tokens_of(text)])
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


def test_held_out_data_has_the_loss_of_plain_transformers_and_the_best_is_kept(tmp_path):
    config = curve_config(tmp_path, "out", {"pp": 2}, "zbv", 4)
    outcome = train_on(config)
    assert outcome.evaluation_loss == pytest.approx(held_out_loss(outcome.export, sentences(120, 12)), rel=1e-10)
    evaluations = [
        (line["step"], line["evaluation_loss"])
        for line in map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
        if "evaluation_loss" in line
    ]
    assert [step for step, _ in evaluations] == [2, 4]
    best = min(evaluations, key=lambda pair: pair[1])
    assert outcome.best == {"step": best[0], "loss": best[1]}
    folder = tmp_path / "out" / "checkpoints"
    assert read_pointer(folder, "best") == f"step-{best[0]:06d}"
    assert set(list_steps(folder)) == {best[0], 4}


@pytest.mark.full
def test_a_small_model_learns_the_same_with_every_schedule(tmp_path):
    curves = []
    for number, (mesh, schedule) in enumerate([({"pp": 2}, "1f1b"), ({"pp": 2}, "zbv"), ({"pp": 1}, "gpipe")]):
        config = curve_config(
            tmp_path, f"out{number}", mesh, schedule, 60, evaluation={"every": 30}, rate={"warmup": 4}
        )
        outcome = train_on(config)
        assert outcome.evaluation_loss < 0.25, (
            "a sentence has two words that can be guessed only: about 3 of 30 letters"
        )
        curves.append(outcome.losses)
    assert curves[0][0] > 4
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)
    assert curves[2] == pytest.approx(curves[0], rel=1e-6)


@pytest.mark.full
def test_deterministic_runs_are_equal_to_the_bit(tmp_path):
    tables = {"train": {"deterministic": True, "steps": 4}, "model": {"dtype": "float32"}}
    runs = [curve_config(tmp_path, f"out{n}", {"pp": 2}, "1f1b", 4, **tables) for n in range(2)]
    assert train_on(runs[0]).losses == train_on(runs[1]).losses
    assert [line["grad_norm"] for line in metrics_of(tmp_path / "out0")] == [
        line["grad_norm"] for line in metrics_of(tmp_path / "out1")
    ]


@pytest.mark.full
def test_every_sample_is_seen_once_per_epoch(tmp_path):
    config = curve_config(tmp_path, "out", {"pp": 2}, "1f1b", None, train={"steps": None, "epochs": 1.0})
    outcome = train_on(config)
    lines = metrics_of(tmp_path / "out")
    assert lines[-1]["epoch"] == 1.0
    assert outcome.tokens == sum(len(tokens_of(text)) - 1 for text in sentences(0, 120))
