"""Supervised fine-tuning of chats, as TRL's SFTTrainer does it: only the answers have a loss.

torchrun --nproc-per-node 4 examples/train_sft.py                    # a tiny Qwen3 that reads bytes, on CPU

A step takes microbatches of any lengths and weighs them by their tokens, so nothing is padded to the longest chat, and
the loss is that of the whole batch. What a trainer does around a step is ordinary torch: clipping, a
learning-rate schedule, an evaluation, saving.
"""

import torch
import torch.distributed as dist
from transformers import Qwen3Config

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, Engine, hf_stages, save_stages

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 256}  # fmt: skip
STEPS, IGNORED = 5, -100
CHATS = [(f"How much is {a} + {b}?\n", f"{a} + {b} is {a + b}.\n") for a in range(6) for b in range(6)]


def example(prompt: str, answer: str) -> dict[str, torch.Tensor]:
    """One chat as a microbatch: bytes are the tokens, and those of the prompt have no loss."""
    tokens = torch.tensor([list((prompt + answer).encode())])
    labels = tokens.clone()
    labels[:, : len(prompt.encode())] = IGNORED
    return {"input_ids": tokens, "labels": labels}


dist.init_process_group("gloo")
schedule = zp.build("zbv", ranks=dist.get_world_size(), microbatches=8)
stages = hf_stages(Qwen3Config(**TINY), schedule, dist.get_rank(), seed=0)
loss_fn = CausalLMLoss(ignore=IGNORED)
*train, held_out = [[example(*chat) for chat in CHATS[start : start + 8]] for start in range(0, len(CHATS), 8)]

with Engine(schedule, stages) as engine:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        result = engine.train_step(train[step % len(train)], loss_fn)  # the same microbatches on every rank
        norm = engine.clip_grad_norm(1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {result.loss:.4f} over {result.count:.0f} tokens, gradient norm {norm:.3f}")
    result = engine.eval_step(held_out, loss_fn)  # half a batch: any number of microbatches runs
    if dist.get_rank() == 0:
        print(f"evaluation: loss {result.loss:.4f} over {result.count:.0f} tokens")
    save_stages(stages, schedule.placement, dist.get_rank(), "sft-model")  # a directory that transformers loads
dist.destroy_process_group()
