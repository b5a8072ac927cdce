"""What ranks do for the tests of profiles."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine import CausalLMLoss, Engine, hf_stages

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 2], "tie_word_embeddings": False,
}  # fmt: skip
SEQUENCE = 16


def recorded(schedule: Schedule, layers: tuple[int, ...], ac: str) -> Timeline:
    """The whole model of the config, run: the second step, when gradients are there."""
    from transformers import AutoConfig

    stages = hf_stages(AutoConfig.for_model(**CONFIG), schedule, dist.get_rank(), layers=layers)
    tokens = torch.randint(0, 64, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))
    batch = [{"input_ids": tokens, "labels": tokens}] * schedule.num_microbatches
    with Engine(schedule, stages, record=True, ac=ac) as engine:
        for _ in range(2):
            engine.train_step(batch, CausalLMLoss())
        return engine.timeline()
