"""Train a model of your own, given as a list of modules, and look at what the ranks really did.

torchrun --nproc-per-node 4 examples/train_modules.py
"""

import torch
import torch.distributed as dist
from torch import nn

import zeropipe as zp
from zeropipe.engine import Engine, module_stages

WIDTH, STEPS = 64, 5


def block(seed: int) -> nn.Module:
    """Built only where it is needed; the seed makes the model the same however it is cut."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def loss_fn(output: torch.Tensor, microbatch: dict) -> tuple[torch.Tensor, int]:
    """A sum and its count: microbatches of any size then weigh as in one big batch."""
    return (output - microbatch["target"]).square().sum(), output.numel()


dist.init_process_group("gloo")
schedule = zp.build("dualpipev", ranks=dist.get_world_size(), microbatches=16)
modules = [lambda seed=seed: block(seed) for seed in range(2 * schedule.num_stages)]
with Engine(schedule, module_stages(modules, schedule, dist.get_rank())) as engine:
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.001)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(4 + m % 3, WIDTH, generator=generator) for m in range(16)]
        engine.record = step == STEPS - 1
        result = engine.train_step([{"inputs": x, "target": x.roll(1, -1)} for x in inputs], loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {result.loss:.4f}")
    timeline = engine.timeline()  # on every rank
    if dist.get_rank() == 0:
        zp.draw(timeline, "train_modules.html")
        print(f"idle {timeline.idle_fraction:.1%}; the measured timeline is in train_modules.html")
dist.destroy_process_group()
