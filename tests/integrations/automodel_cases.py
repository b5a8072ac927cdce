"""What the local ranks run in test_automodel.py: NeMo Automodel's own recipe, with and without us."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from nemo_automodel._transformers import auto_model
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from zeropipe.integrations import automodel as ours

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
FLOAT32 = {
    "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
    **dict.fromkeys(["param_dtype", "reduce_dtype", "output_dtype"], "float32"),
}
LOSSES = {
    "masked": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "fused": {
        "_target_": "nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy",
        "compile": False,
        "chunk_len": 8,
    },
}


class Case(NamedTuple):
    """What is trained, and how."""

    model: str  # a directory
    output: str
    schedule: str = "1f1b"
    csv: str | None = None
    shards: int = 1
    loss: str = "masked"
    steps: int = 3
    rows: int = 4  # of a batch
    lora: bool = False
    layers_per_stage: int | None = None
    initialized: bool = False  # by Automodel, not loaded
    resume: str | None = None  # "": save checkpoints; else the one to start from
    rows_of_data: int = 24


class Seen(NamedTuple):
    """The results of a run: logs of all steps, and the weights."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]


def write_model(folder: str, tied: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, tie_word_embeddings=tied))
    model.save_pretrained(folder)


def config_of(case: Case, pp: int) -> ConfigNode:
    """Automodel's YAML; a step has two batches of every pipeline."""
    raw: dict[str, Any] = {
        "seed": 1,
        "step_scheduler": {
            "global_batch_size": 2 * case.rows * case.shards,
            "local_batch_size": case.rows,
            "max_steps": case.steps,
            "num_epochs": 1,
            "ckpt_every_steps": 2,
        },
        "dist_env": {"backend": "gloo"},
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": case.model,
            "torch_dtype": "float32",
            "force_hf": True,
            "use_liger_kernel": False,
            "attn_implementation": "sdpa",
        },
        "checkpoint": {
            "enabled": case.resume is not None,
            "checkpoint_dir": case.output,
            "restore_from": case.resume or None,
            "model_save_format": "safetensors",
            "save_consolidated": False,
        },
        "clip_grad_norm": {"max_norm": 0.5},
        "distributed": {"strategy": "fsdp2", "pp_size": pp, "tp_size": 1, "cp_size": 1, "mp_policy": FLOAT32},
        "loss_fn": LOSSES[case.loss],
        "dataset": {
            "_target_": "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset",
            "num_sentences": case.rows_of_data,
            "mean_len": 14.0,
            "vocab_size": SIZES["vocab_size"],
            "max_sentence_len": 30,
        },
        "dataloader": {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
            "shuffle": False,
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2, "eps": 1e-3},
    }
    if case.initialized:
        raw["model"]["_target_"] = "nemo_automodel.NeMoAutoModelForCausalLM.from_config"
        raw["model"]["config"] = {
            "_target_": "transformers.AutoConfig.from_pretrained",
            "pretrained_model_name_or_path": raw["model"].pop("pretrained_model_name_or_path"),
        }
    if pp > 1:
        raw["distributed"]["pipeline"] = {
            "pp_schedule": case.schedule,
            "pp_schedule_csv": case.csv,
            "pp_microbatch_size": 1,
            "layers_per_stage": case.layers_per_stage,
        }
    if case.lora:
        raw["peft"] = {
            "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
            "target_modules": ["*_proj"],
            "dim": 4,
            "alpha": 8,
            "use_triton": False,
        }
    return ConfigNode(raw)


@contextmanager
def on_cpu() -> Iterator[None]:
    """The recipe asks for the current GPU; this gives it the CPU."""

    def move(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs | {"device": CPU})

    with ExitStack() as stack:
        for name in ("current_device", "max_memory_allocated", "reset_peak_memory_stats"):
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=0))
        for name in ("instantiate_infrastructure", "apply_model_infrastructure"):
            stack.enter_context(mock.patch.object(auto_model, name, move(getattr(auto_model, name))))
        yield


def run(case: Case, pp: int) -> Seen:
    with on_cpu():
        recipe = TrainFinetuneRecipeForNextTokenPrediction(config_of(case, pp))
        recipe.setup()
        draw_adapters(recipe.model_parts)
        logs = []
        log = recipe.log_train_metrics

        def keep(data: Any) -> None:
            logs.append({name: float(data.metrics[name]) for name in ("loss", "grad_norm", "lr", "num_label_tokens")})
            log(data)

        recipe.log_train_metrics = keep
        recipe.run_train_validation_loop()
    weights = {}
    for part in recipe.model_parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            weights[name] = (
                (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
            )
    return Seen(logs, weights)


@torch.no_grad()
def draw_adapters(parts: list[Any]) -> None:
    """Automodel draws them stage by stage: here by their names, so that any cut has the same."""
    for part in parts:
        for name, parameter in part.named_parameters():
            if "lora_A" in name:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.copy_(0.1 * drawn)


def pipelined(case: Case) -> Seen:
    ours.install()
    try:
        return run(case, dist.get_world_size() // case.shards)
    finally:
        ours.uninstall()


def alone(case: Case) -> Seen:
    """One process without a pipeline."""
    return run(case, 1)


def by_automodel(case: Case) -> Seen:
    """Automodel's own pipeline."""
    return run(case, dist.get_world_size() // case.shards)
