"""Training an adapter: peft's own training, checkpoints without the model, an export that peft loads; 16 bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from train_cases import train_signalled
from train_runs import difference, model_directory, plain_training, pool, run_config, train_on
from transformers import AutoModelForCausalLM

from zeropipe.engine.checkpoint.convert import convert
from zeropipe.engine.checkpoint.manifest import read_manifest
from zeropipe.errors import EngineError


def adapter_directory(start: Path, path: Path) -> Path:
    """An adapter as peft makes and saves it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, lora, autocast_adapter_dtype=False).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [
        pytest.param(({"pp": 2}, "1f1b"), ({"pp": 2, "dp_shard": 2}, "zbv"), True, id="pp2-tied"),
        pytest.param(({"pp": 2, "dp_shard": 2}, "1f1b"), ({"pp": 4}, "1f1b"), False, marks=pytest.mark.full),
        pytest.param(({"pp": 2}, "zbv"), ({"pp": 1}, "gpipe"), False, marks=pytest.mark.full),
    ],
)
def test_an_adapter_is_trained_as_peft_does_also_over_a_resume(tmp_path, before, after, tied):
    start = model_directory(tmp_path / "start", tied=tied)
    adapter = adapter_directory(start, tmp_path / "adapter")

    def config_of(layout):
        tables = {"mesh": layout[0], "schedule": {"name": layout[1]}, "lora": {"adapter": str(adapter)}}
        return run_config(tmp_path / "out", start, **tables)

    config = config_of(before)
    first = pool(config.mesh.num_processes).run(train_signalled, config, 1, 2, signal.SIGTERM)[0]
    assert first.steps == 3
    assert all("lora" in name for name in read_manifest(Path(first.checkpoint)).select("model"))
    outcome = train_on(config_of(after))

    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    plain = PeftModel.from_pretrained(base, adapter, is_trainable=True, autocast_adapter_dtype=False)
    assert [*first.losses, *outcome.losses] == pytest.approx(plain_training(config, plain), rel=1e-10)
    again = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    ours = PeftModel.from_pretrained(again, outcome.export, autocast_adapter_dtype=False)
    assert difference(ours, plain) < 1e-9
    assert convert(outcome.checkpoint, tmp_path / "other") == "adapter"

    other = model_directory(tmp_path / "model", tied=tied, seed=5)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(other)})})
    with pytest.raises(EngineError, match="has other frozen weights than the model; load it into the model that"):
        train_on(config)


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"),
    [({"pp": 2}, {"pp": 2, "dp_shard": 2}), ({"pp": 2, "dp_shard": 2}, {"pp": 2}), ({"pp": 2, "tp": 2}, {"pp": 2})],
    ids=["to-shards", "from-shards", "from-tp"],
)
def test_16_bits_are_learned_in_float32_on_every_layout(tmp_path, before, after):
    start = model_directory(tmp_path / "start")

    def config_of(output, mesh):
        return run_config(tmp_path / output, start, mesh=mesh, model={"dtype": "bfloat16"}, optimizer={"lr": 1e-3})

    whole = train_on(config_of("whole", {"pp": 2}))
    config = config_of("out", before)
    first = pool(config.mesh.num_processes).run(train_signalled, config, 0, 2, signal.SIGTERM)[0]
    outcome = train_on(config_of("out", after))
    assert [*first.losses, *outcome.losses] == pytest.approx(whole.losses, rel=5e-3)
    one, other = (AutoModelForCausalLM.from_pretrained(end.export, dtype="auto") for end in (whole, outcome))
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    assert difference(one.float(), other.float()) < 0.02


@pytest.mark.full
def test_an_adapter_beside_a_model_of_16_bits(tmp_path):
    start = model_directory(tmp_path / "start")
    losses = []
    for number, mesh in enumerate([{"pp": 2}, {"pp": 2, "dp_shard": 2}]):
        tables = {"mesh": mesh, "model": {"dtype": "bfloat16"}, "lora": {"rank": 4}}
        losses.append(train_on(run_config(tmp_path / f"out{number}", start, **tables)).losses)
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
