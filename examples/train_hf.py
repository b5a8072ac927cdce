"""Train a Hugging Face decoder model with pipeline parallelism.

torchrun --nproc-per-node 4 examples/train_hf.py                    # a tiny Qwen3, on CPU
torchrun --nproc-per-node 4 examples/train_hf.py /path/to/a/model   # a directory with config.json and safetensors
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoConfig, Qwen3Config

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, Engine, hf_stages

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip

cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo")

model = sys.argv[1] if len(sys.argv) > 1 else Qwen3Config(**TINY)
vocabulary = AutoConfig.from_pretrained(model).vocab_size if isinstance(model, str) else model.vocab_size
schedule = zp.build("zbv", ranks=dist.get_world_size(), microbatches=8)
stages = hf_stages(model, schedule, dist.get_rank(), device=device)  # only this rank's layers

with Engine(schedule, stages) as engine:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    for step in range(5):
        generator = torch.Generator().manual_seed(0)  # every rank passes the same microbatches
        tokens = [torch.randint(vocabulary, (2, 16 + 8 * (m % 3)), generator=generator) for m in range(8)]
        result = engine.train_step([{"input_ids": t, "labels": t} for t in tokens], CausalLMLoss())
        norm = engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {result.loss:.4f} over {result.count:.0f} tokens, gradient norm {norm:.3f}")
dist.destroy_process_group()
