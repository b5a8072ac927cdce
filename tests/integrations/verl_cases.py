"""What the local ranks run in test_verl.py: verl's FSDP engine and ours on the same batches."""

from __future__ import annotations

import verl_on_cpu  # noqa: F401  # isort: skip

from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss, sft_loss

from zeropipe.integrations.verl import ZeropipeEngine, ZeropipeEngineConfig

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
PROMPT, RESPONSE = 6, 10  # the longest


class Case(NamedTuple):
    """What is trained, and how."""

    model: str  # a directory
    schedule: str = "1f1b"
    mesh: tuple[tuple[str, int], ...] = (("pp", 2),)
    loss: str = "sft"
    packed: bool = True
    dynamic: bool = False  # microbatches by their number of tokens
    checkpoint: str | None = None
    resume: bool = False
    steps: int = 3


class Seen(NamedTuple):
    """The results of a run; without outputs where the last stage is not."""

    metrics: list[dict[str, Any]]
    log_probs: list[Tensor]
    entropy: list[Tensor]
    weights: dict[str, Tensor]
    rate: float


def write_model(folder: str, tied: bool = True) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, tie_word_embeddings=tied)).save_pretrained(folder)


def engine_of(case: Case | None, model: str) -> Any:
    """Ours for a case, verl's FSDP engine for None."""
    common = {
        "model_dtype": "fp32",
        "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        "use_torch_compile": False,
    }
    packed = case is not None and case.packed
    parts = (
        HFModelConfig(
            path=model,
            load_tokenizer=False,
            use_remove_padding=packed,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        FSDPEngineConfig(strategy="fsdp2", **common)
        if case is None
        else ZeropipeEngineConfig(schedule=case.schedule, mesh=dict(case.mesh), **common),
        FSDPOptimizerConfig(
            lr=1e-2, lr_warmup_steps=2, total_training_steps=10, clip_grad=0.5, override_optimizer_config={"eps": 1e-4}
        ),
        CheckpointConfig(),
    )
    engine = FSDPEngineWithLMHead(*parts) if case is None else EngineRegistry.new("language_model", "zeropipe", *parts)
    assert case is None or isinstance(engine, ZeropipeEngine)
    engine.initialize()
    return engine


def batch(step: int, rows: range, packed: bool, dynamic: bool) -> TensorDict:
    """Some rows of a step's batch: prompts and responses of their own lengths, with a reward for each."""
    lists: dict[str, list[Tensor]] = {}
    for row in rows:
        draw = torch.Generator().manual_seed(100 * step + row)
        prompt, response = (int(torch.randint(2, most + 1, (), generator=draw)) for most in (PROMPT, RESPONSE))
        length = prompt + response
        answer = torch.arange(length) >= prompt
        found = {
            "input_ids": torch.randint(1, VOCABULARY, (length,), generator=draw),
            "position_ids": torch.arange(length),
            "loss_mask": answer.long(),
            "prompts": torch.zeros(prompt, dtype=torch.long),
            "responses": torch.zeros(response, dtype=torch.long),
            "response_mask": torch.ones(response, dtype=torch.long),
            "old_log_probs": torch.log(0.02 * torch.rand(response, generator=draw) + 1e-3),
            "advantages": torch.randn((), generator=draw).expand(response).contiguous(),
        }
        for name, value in found.items():
            lists.setdefault(name, []).append(value)
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in lists.items()}
    data = TensorDict(nested, batch_size=[len(rows)])
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=dynamic,
        max_token_len_per_gpu=32,
        micro_batch_size_per_gpu=2,
        use_remove_padding=packed,
        pad_mode=DatasetPadMode.NO_PADDING,
        temperature=0.7,
        calculate_entropy=True,
        global_batch_size=ROWS,
    )
    return data


ROWS = 8
LOSSES = {
    "sft": partial(sft_loss, None),
    "grpo": partial(ppo_loss, ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01, use_kl_loss=False
    )),
}  # fmt: skip


def run(case: Case, ours: bool) -> Seen:
    """Log-probabilities, some steps, and the weights."""
    engine = engine_of(case if ours else None, case.model)
    packed, group, rank = case.packed and ours, engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    rows = range(rank * ROWS // group, (rank + 1) * ROWS // group)
    loss, metrics = LOSSES[case.loss], []
    first = 0
    if case.resume:
        engine.load_checkpoint(case.checkpoint)
        first = 1
    with engine.eval_mode():
        inferred = engine.infer_batch(batch(0, rows, packed, case.dynamic))["model_output"]
    for step in range(first, case.steps):
        with engine.train_mode():
            out = engine.train_batch(batch(step, rows, packed, case.dynamic), loss)
            rate = engine.lr_scheduler_step()
        metrics.append({name: numbers(value) for name, value in {**out["metrics"], "loss": out["loss"]}.items()})
        if case.checkpoint and not case.resume and step == 0:
            engine.save_checkpoint(case.checkpoint, global_step=step + 1)
    found = engine.get_per_tensor_param()[0]
    weights = {name: tensor.detach().clone() for name, tensor in found}
    has = engine.is_mp_src_rank_with_outputs()
    assert bool(inferred) == has or "tp" in dict(case.mesh)  # where each process of tp has them
    values = {
        name: [row.clone() for row in inferred[name].unbind()] if has else [] for name in ("log_probs", "entropy")
    }
    return Seen(metrics if has else [], values["log_probs"], values["entropy"], weights, rate)


def numbers(value: Any) -> list[float]:
    """The numbers of a metric, microbatch by microbatch."""
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [float(number) for number in value.values] if hasattr(value, "values") else [float(value)]


def by_verl(case: Case) -> Seen:
    return run(case, ours=False)


def pipelined(case: Case) -> Seen:
    return run(case, ours=True)
