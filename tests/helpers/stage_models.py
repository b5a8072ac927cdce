"""Tiny models of every family, and a step over stages chained in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from zeropipe.engine.backward.store import WeightStore

_TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _eager_experts(config: Qwen3MoeConfig) -> Qwen3MoeConfig:
    config._experts_implementation = "eager"  # transformers' grouped product has no float64
    return config


CONFIGS = {
    "llama": lambda **k: LlamaConfig(**_TINY | k),
    "mistral": lambda **k: MistralConfig(**_TINY | {"head_dim": 8, "sliding_window": 5} | k),
    "qwen2": lambda **k: Qwen2Config(**_TINY | k),
    "qwen3": lambda **k: Qwen3Config(**_TINY | {"head_dim": 8} | k),
    "qwen3-mixed": lambda **k: Qwen3Config(
        **_TINY | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "layer_types": _MIXED} | k
    ),
    "qwen3-moe": lambda **k: _eager_experts(
        Qwen3MoeConfig(**_TINY | _MOE | {"head_dim": 8, "mlp_only_layers": [1]} | k)
    ),
    "gemma3": lambda **k: Gemma3TextConfig(
        **_TINY | {"head_dim": 8, "sliding_window": 4, "layer_types": _MIXED, "query_pre_attn_scalar": 8} | k
    ),
    "gpt-neox": lambda **k: GPTNeoXConfig(**_TINY | k),
    "phi": lambda **k: PhiConfig(**_TINY | k),
    "gpt2": lambda **k: GPT2Config(
        **{"vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        | k
    ),
}


def microbatches(lengths: tuple[int, ...] = (9, 12, 7), rows: int = 2, vocabulary: int = 61) -> list[dict[str, Tensor]]:
    """Random tokens, of different length per microbatch."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(vocabulary, (rows, length), generator=generator) for length in lengths]
    return [{"input_ids": t, "labels": t} for t in tokens]


def lm_loss(logits: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
    """Summed next-token loss."""
    labels = microbatch["labels"][:, 1:].reshape(-1)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")


def plain_step(model: nn.Module, batches: list[dict[str, Any]], loss_fn: Any = lm_loss) -> float:
    """The un-pipelined model over the same microbatches; gradients are left on the model."""
    total = 0.0
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        loss = loss_fn(model(**inputs, use_cache=False).logits, batch)
        loss.backward()
        total += float(loss.detach())
    return total


def staged_step(
    stages: list[nn.Module],
    batches: list[dict[str, Any]],
    store: WeightStore | None,
    loss_fn: Any = lm_loss,
    late: bool = True,
) -> float:
    """Stages chained in one process: F, then I of every stage, then (late) all W in another order; no store: B."""
    total = 0.0
    for m, batch in enumerate(batches):
        handed: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        inputs: tuple[Tensor, ...] = ()
        for stage in stages:
            output = stage(*inputs, **stage.pick(batch))
            outputs = output if isinstance(output, tuple) else (output,)
            handed.append((inputs, outputs))
            inputs = tuple(t.detach().requires_grad_(t.requires_grad) for t in outputs)
        loss = loss_fn(output, batch)
        handed[-1] = (handed[-1][0], (loss,))
        total += float(loss.detach())
        grads: tuple[Tensor | None, ...] = (None,)
        del loss, output, outputs, inputs
        for s in reversed(range(len(stages))):
            inputs, outputs = handed.pop()
            grads = tuple(g for t, g in zip(outputs, grads) if t.requires_grad)
            outputs = tuple(t for t in outputs if t.requires_grad)
            if store is None:
                torch.autograd.backward(outputs, grads)
            else:
                with store.collect(s, m):
                    torch.autograd.backward(outputs, grads)
            grads = tuple(t.grad for t in inputs)
            if store is not None and not late:
                store.flush(s, m)
    if store is not None and late:
        for m in reversed(range(len(batches))):
            for s in range(len(stages)):
                store.flush(s, m)
    return total


def full_gradients(stages: list[nn.Module]) -> dict[str, Tensor | None]:
    """Gradients by their name in the whole model; a tied pair on two ranks is summed, as the executor does."""
    grads: dict[str, Tensor | None] = {}
    for stage in stages:
        names = stage.full_names()
        for name, parameter in stage.named_parameters():
            grads[names[name]] = parameter.grad
    for stage in stages[:1]:
        for own_name, partner_stage, partner_name in stage.tied_pairs:
            other, own = stages[partner_stage], stage.get_parameter(own_name)
            if other.get_parameter(partner_name) is not own:
                name = next(name for name, parameter in stage.named_parameters() if parameter is own)
                grads[stage.full_names()[name]] = own.grad + other.get_parameter(partner_name).grad
            del grads[other.full_names()[partner_name]]
    return grads


def assert_same_gradients(stages: list[nn.Module], model: nn.Module, rtol: float = 1e-10) -> None:
    """Every gradient equals the plain model's, relative to its norm.

    A few are zero but for rounding errors (a bias of keys changes nothing): these are measured by the largest one.
    """
    found = full_gradients(stages)
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters = [named[name] for name in found]
    assert len(set(parameters)) == len(parameters)
    assert set(parameters) == set(model.parameters())
    largest = max(float(p.grad.norm()) for p in parameters if p.grad is not None)
    for name, grad in ((name, named[name].grad) for name in found):
        if grad is None:
            assert found[name] is None, name
            continue
        assert found[name] is not None, name
        error = float((found[name] - grad).norm())
        assert error < rtol * float(grad.norm()) + 1e-16 * largest, f"{name}: {error:.2e}"
