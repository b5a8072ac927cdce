"""Train on a mesh: pipelines, sharded weights and spread layers together.

torchrun --nproc-per-node 2 examples/train_mesh.py                        # every layer on two processes
torchrun --nproc-per-node 8 examples/train_mesh.py pp=2,dp_shard=2,tp=2   # any of pp, dp_replicate, dp_shard, tp
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, Engine, LogProbabilities, hf_stages, parallelize

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 128}  # fmt: skip

cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo")
text = sys.argv[1] if len(sys.argv) > 1 else f"pp={dist.get_world_size() // 2},tp=2"
sizes = {name: int(size) for name, size in (entry.split("=") for entry in text.split(","))}
mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
place = dict(zip(sizes, mesh.get_coordinate()))

schedule = zp.build("zbv", ranks=sizes.get("pp", 1), microbatches=4)
stages = hf_stages(Qwen3Config(**TINY), schedule, place.get("pp", 0), device=device)
parallelize(stages, mesh, sequence_parallel=sizes.get("tp", 1) > 1)

pipeline = place.get("dp_replicate", 0) * sizes.get("dp_shard", 1) + place.get("dp_shard", 0)
generator = torch.Generator().manual_seed(pipeline)  # every pipeline has data of its own; its processes have the same
data = [{"input_ids": t, "labels": t} for t in torch.randint(TINY["vocab_size"], (4, 2, 16), generator=generator)]
with Engine(schedule, stages, mesh=mesh) as engine:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    for step in range(5):
        result = engine.train_step(data, CausalLMLoss())
        norm = engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {result.loss:.4f} over {result.count:.0f} tokens, gradient norm {norm:.3f}")
    likely = engine.forward(data, post=LogProbabilities(), broadcast=True)  # logits stay where they are
    if dist.get_rank() == 0:
        print(f"on {text}: the tokens of this pipeline have log-probability {torch.cat(likely).mean():.3f}")
dist.destroy_process_group()
