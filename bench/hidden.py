"""How much of gathering weights and reducing gradients hides behind computation: a recorded step of sharded stages.

    python bench/hidden.py                               # 4 NCCL ranks that share one GPU, pp=2 x dp_shard=2
    python bench/hidden.py --device cpu --width 64       # gloo

Ranks on one GPU share the bandwidth of its memory, so messages do not take what they take on a link. What counts is
when they run: `behind work` is the part of a lane's time in which the same rank computes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, Engine, hf_stages, parallelize
from zeropipe.engine.run.launch import LocalRanks

RECORDINGS = 4


def step(schedule: zp.Schedule, args: argparse.Namespace) -> zp.Timeline:
    """The shortest of some recorded steps."""
    if args.device == "cuda":  # NCCL refuses two ranks of one host on one GPU: so each says it is a host of its own
        os.environ.update(NCCL_HOSTID=f"host-{dist.get_rank()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.zeros(1, device="cuda:0")  # a mesh would look for a GPU of its own for every rank
    mesh = init_device_mesh(args.device, (2, 2), mesh_dim_names=("pp", "dp_shard"))
    heads = max(1, args.width // 128)
    config = Qwen3Config(
        hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers, head_dim=64,
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=8192, tie_word_embeddings=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank(), device=args.device, dtype=torch.float32)
    parallelize(stages, mesh, dtype=dtype, reduce_dtype=torch.float32)
    torch.manual_seed(mesh["dp_shard"].get_local_rank())
    batches = [
        {"input_ids": tokens, "labels": tokens}
        for tokens in torch.randint(8192, (schedule.num_microbatches, 1, args.tokens), device=args.device)
    ]
    timelines = []
    with Engine(schedule, stages, mesh=mesh, record=True) as engine:
        for _ in range(RECORDINGS + 1):
            engine.train_step(batches, CausalLMLoss())
            timelines.append(engine.timeline())
            for parameter in engine.parameters():
                parameter.grad = None
    return min(timelines[1:], key=lambda timeline: timeline.makespan)


def covered(start: float, end: float, busy: list[tuple[float, float]]) -> float:
    """Time between start and end in which something runs; the spans of `busy` do not overlap."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="1f1b,zb-h1,zbv")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="a folder for a page with the timeline of each schedule")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.device}, pp=2 x dp_shard=2, {args.layers} layers of width {args.width}")
    print(f"{'schedule':10} {'rank':>4} {'':13} {'number':>6} {'ms':>8} {'behind work':>12} {'of the step':>12}")
    with LocalRanks(4, backend="nccl" if args.device == "cuda" else "gloo") as ranks:
        for name in args.schedules.split(","):
            schedule = zp.build(name, ranks=2, microbatches=args.microbatches)
            timeline = ranks.run(step, schedule, args, timeout=300)[0]
            assert timeline.sharding is not None
            for rank in range(2):
                busy = [(span.start, span.end) for span in timeline.spans(rank)]
                for kind in ("UNSHARD", "REDUCE_GRAD"):
                    lane = [(a, b) for action, a, b in timeline.sharding.events(rank) if action.kind.name == kind]
                    whole = sum(b - a for a, b in lane)
                    hidden = sum(covered(a, b, busy) for a, b in lane) / whole if whole else 0.0
                    print(f"{name:10} {rank:4} {kind:13} {len(lane):6} {1e3 * whole:8.2f} {hidden:12.1%} "
                          f"{whole / timeline.makespan:12.1%}", flush=True)  # fmt: skip
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                zp.draw(timeline, str(args.out / f"{name}.html"))


if __name__ == "__main__":
    main()
