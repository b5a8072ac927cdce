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


def held_by_a_layer(number: int) -> int:
    """Bytes of a layer's input and of what products and attention make of it."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoConfig, AutoModelForCausalLM

    kept: dict[int, torch.Tensor] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            if any(word in str(func) for word in ("mm", "attention", "grouped")):
                for tensor in made if isinstance(made, tuple) else (made,):
                    if isinstance(tensor, torch.Tensor):
                        kept[tensor.untyped_storage().data_ptr()] = tensor
            return made

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).model
    x = torch.randn(1, SEQUENCE, CONFIG["hidden_size"])  # type: ignore[call-overload]
    kept[x.untyped_storage().data_ptr()] = x
    places = torch.arange(SEQUENCE)[None]
    with Watch():
        model.layers[number](x, position_embeddings=model.rotary_emb(x, places), position_ids=places)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
