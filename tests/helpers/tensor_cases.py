"""What the local ranks run in test_tensor.py: layers spread over `tp`, beside the same model in one process."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from engine_helpers import error_of, hf_plain_step
from mesh_cases import compare_update, hf_difference, mesh_of
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from zeropipe.core.mesh import DATA_DIMENSIONS
from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, LogProbabilities, hf_model, hf_stages, parallelize
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.stages.packed_attention import find_samples
from zeropipe.errors import ConfigError

VOCABULARY = 64
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip
_EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "starcoder2": {"use_bias": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "moe_layers": [0, 2, 3],
    },
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> Any:
    """A tiny model of a type, in float64."""
    from transformers import AutoConfig

    made = {**_SIZES, **_EXTRA.get(kind, {}), **changes}
    if kind == "deepseek_v3":
        del made["head_dim"]
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = AutoConfig.for_model(kind, dtype=torch.float64, **none, **made)
    config._experts_implementation = "eager"  # transformers' own kernels cannot do float64
    return config


def tokens(number: int, step: int, lengths: tuple[int, ...] = (6, 8)) -> list[dict[str, Any]]:
    """Microbatches of some lengths, with tokens that do not count."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for index in range(number):
        ids = torch.randint(VOCABULARY, (2, lengths[index % len(lengths)]), generator=generator)
        labels = ids.clone()
        labels[0, : 2 + index] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def packed_on_tp(schedule: Schedule, sizes: dict[str, int], kind: str) -> float:
    """The largest difference of loss and gradients between kernels and dense masks, of packed rows over `tp`."""
    layers = {"layer_types": ["full_attention", "sliding_attention"] * 2, "use_sliding_window": True}
    config, mesh, found = config_of(kind, sliding_window=3, **layers), mesh_of(sizes), []
    ends = torch.tensor([0, 5, 6, 8, 11, 16])
    data = [{**batch, "cu_seqlens": ends.clone()} for batch in tokens(schedule.num_microbatches, 0, (8,))]
    for batch in data:
        batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1], [0, 1, 2, 0, 1, 2, 3, 4]])
    for attention in ("sdpa", "flex"):
        own = hf_stages(config, schedule, mesh["pp"].get_local_rank(), attention=attention)
        stages = parallelize(own, mesh)
        with Engine(schedule, stages, mesh=mesh) as engine:
            loss = engine.train_step(data, CausalLMLoss()).loss
            parameters = [p for stage in stages.values() for p in stage.parameters() if p.grad is not None]
            found.append([torch.tensor(loss), *(to_local(p.grad).clone() for p in parameters)])
    assert all(find_samples(batch["cu_seqlens"], 2, 8).is_used for batch in data)
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))


class LargestTensors(TorchDispatchMode):
    """Sees every tensor that is made, and keeps the largest last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            is_plain = type(tensor) is torch.Tensor and not tensor.is_meta  # a DTensor is no data
            if is_plain and tensor.is_floating_point() and tensor.dim() > 1:
                self.last = max(self.last, tensor.shape[-1])
        return made


class Mean:
    """A loss that knows nothing of pieces."""

    def __call__(self, logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        assert logits.shape[-1] == VOCABULARY
        labels = batch["labels"][..., 1:].reshape(-1)
        return nn.functional.cross_entropy(logits[..., :-1, :].reshape(-1, VOCABULARY), labels)


def losses_on_tp(schedule: Schedule, sizes: dict[str, int], kind: str) -> dict[str, float]:
    """The largest last dimension of all tensors of a step, and differences from the plain model."""
    config, mesh = config_of(kind, hidden_size=16, intermediate_size=8, num_hidden_layers=2), mesh_of(sizes)
    plain, data = hf_model(config), tokens(schedule.num_microbatches, 0)
    stages = parallelize(hf_stages(config, schedule, mesh["pp"].get_local_rank()), mesh)
    with Engine(schedule, stages, mesh=mesh) as engine:
        with LargestTensors() as seen:
            engine.train_step(data, CausalLMLoss())
            found = engine.forward(data, post=LogProbabilities(), broadcast=True)
        with torch.no_grad():
            wanted = [plain(batch["input_ids"]).logits for batch in data]
            probabilities = [LogProbabilities()(logits, batch) for logits, batch in zip(wanted, data)]
            mean = sum(float(Mean()(logits, batch)) for logits, batch in zip(wanted, data)) / len(data)
        outputs = engine.forward(data, broadcast=True)
        return {
            "last": seen.last,
            "probabilities": max(map(error_of, found, probabilities)),
            "outputs": max(map(error_of, outputs, wanted)),
            "mean": abs(engine.train_step(data, Mean()).loss - mean),
        }


def odd_length(schedule: Schedule, sizes: dict[str, int]) -> tuple[str, float]:
    """A sequence that cannot be shared is refused, and the engine goes on."""
    config, mesh, loss_fn = config_of("llama", num_hidden_layers=2), mesh_of(sizes), CausalLMLoss()
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank())
    with Engine(schedule, parallelize(stages, mesh, sequence_parallel=True), mesh=mesh) as engine:
        try:
            engine.train_step(tokens(2, 0, (7,)), loss_fn)
        except ConfigError as error:
            return str(error), engine.train_step(tokens(2, 0), loss_fn).loss
    raise AssertionError("not refused")


def train_on_tp(
    schedule: Schedule, sizes: dict[str, int], kind: str, changes: dict[str, Any], spreading: dict[str, Any],
    options: dict[str, Any], steps: int = 2,
) -> dict[str, float]:  # fmt: skip
    """AdamW steps with clipping beside one process; the largest differences, and what was compiled for training.

    Compiled blocks get microbatches of one length: other lengths are other graphs, as they are without tp.
    """
    config, mesh, loss_fn = config_of(kind, **changes), mesh_of(sizes), CausalLMLoss()
    plain = hf_model(config)
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0)
    parallelize(stages, mesh, **spreading)
    pipelines = math.prod(size for name, size in sizes.items() if name in DATA_DIMENSIONS)
    mine = 0
    for name in DATA_DIMENSIONS:
        mine = mine * sizes.get(name, 1) + (mesh[name].get_local_rank() if name in sizes else 0)
    torch._dynamo.reset()
    counters.clear()
    seen = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "weight": 0.0}
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        ours, theirs = (
            torch.optim.AdamW(p, lr=0.01, foreach=False) for p in (engine.parameters(), list(plain.parameters()))
        )
        for step in range(steps):
            lengths = (6,) if options.get("compile") else (6, 8)
            everybodys = [tokens(schedule.num_microbatches, 10 * step + i, lengths) for i in range(pipelines)]
            data, every = everybodys[mine], [batch for some in everybodys for batch in some]
            wanted = hf_plain_step(plain, every, loss_fn)
            seen["loss"] = max(seen["loss"], abs(engine.train_step(data, loss_fn).loss - wanted) / wanted)
            if step == 0:
                seen["graphs"] = counters["stats"]["unique_graphs"]  # 0 if it is not compiled
                seen["breaks"] = sum(counters["graph_break"].values())
                seen["eval"] = abs(engine.eval_step(data, loss_fn).loss - wanted) / wanted
            compare_update(seen, engine, plain, (ours, theirs), partial(hf_difference, stages, plain))
    return seen
