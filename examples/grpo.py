"""A GRPO-style loop: sample in groups, score, weigh by advantages, train, and hand the weights to the sampler.

torchrun --nproc-per-node 2 examples/grpo.py                         # a tiny Qwen3, on CPU

The sampler is a plain Hugging Face model on rank 0: it stands for an inference engine, which gets its weights from
`engine.named_weights()`, one tensor at a time. The policy is trained by the pipeline: log-probabilities of the samples
under the old weights come from `engine.forward(post=...)`, so that numbers travel between ranks and not logits.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import zeropipe as zp
from zeropipe.engine import Engine, hf_stages

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 32, "tie_word_embeddings": False}  # fmt: skip
STEPS, GROUPS, SAMPLES, PROMPT, LENGTH, CLIP = 6, 8, 8, 4, 8, 0.2


def sample(model: Qwen3ForCausalLM, generator: torch.Generator) -> Tensor:
    """Some continuations of each prompt: [groups, samples, tokens]."""
    prompts = torch.randint(TINY["vocab_size"], (GROUPS, 1, PROMPT), generator=generator)
    tokens = prompts.expand(-1, SAMPLES, -1).reshape(-1, PROMPT)
    with torch.no_grad():
        for _ in range(LENGTH):
            chances = model(tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    return tokens.view(GROUPS, SAMPLES, PROMPT + LENGTH)


def reward(tokens: Tensor) -> Tensor:
    """What is wanted: even tokens."""
    return (tokens[..., PROMPT:] % 2 == 0).float().mean(-1)


def log_probabilities(logits: Tensor, microbatch: dict[str, Tensor]) -> Tensor:
    """Of the sampled tokens."""
    chosen = microbatch["input_ids"][:, PROMPT:, None]
    return logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, chosen).squeeze(-1)


class PolicyLoss:
    """The clipped objective of PPO with GRPO's advantages: a sum over tokens, and their number."""

    def count(self, microbatch: dict[str, Tensor]) -> int:
        return microbatch["old"].numel()

    def __call__(self, logits: Tensor, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        ratio = (log_probabilities(logits, microbatch) - microbatch["old"]).exp()
        advantage = microbatch["advantages"][:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        return -gain.sum(), self.count(microbatch)


dist.init_process_group("gloo")
rank = dist.get_rank()
schedule = zp.build("zb-h1", ranks=dist.get_world_size(), microbatches=GROUPS)
config = Qwen3Config(**TINY)
sampler = Qwen3ForCausalLM(config).eval() if rank == 0 else None
generator = torch.Generator().manual_seed(0)

with Engine(schedule, hf_stages(config, schedule, rank, seed=0)) as engine:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3)
    for step in range(STEPS):
        weights = dict(engine.named_weights(ranks=[0]))  # every rank takes part, rank 0 gets them
        tokens = torch.empty(GROUPS, SAMPLES, PROMPT + LENGTH, dtype=torch.int64)
        if sampler is not None:
            sampler.load_state_dict(weights)
            tokens = sample(sampler, generator)
        dist.broadcast(tokens, 0)
        rewards = reward(tokens)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        groups = [{"input_ids": group} for group in tokens]
        old = engine.forward(groups, post=log_probabilities, broadcast=True)
        batch = [
            {**group, "old": log_probability, "advantages": advantage}
            for group, log_probability, advantage in zip(groups, old, advantages)
        ]
        for _ in range(2):  # the same samples twice: from the second time on the ratio is not 1
            result = engine.train_step(batch, PolicyLoss())
            engine.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: reward {rewards.mean():.4f}, loss {result.loss:.4f}")
dist.destroy_process_group()
