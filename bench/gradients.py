"""Peak memory of whole gradients, and the time of a step, with whole and rolling gradients in the same processes.

    python3 bench/gradients.py                  # 4 processes, gloo
    python3 bench/gradients.py --device cuda    # 4 processes on one GPU, over NCCL

Two pipeline ranks of two processes each that share their stages. Gradients of both ways are compared first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zeropipe import build
from zeropipe.engine import CausalLMLoss, Engine, LocalRanks, fsdp_private, hf_stages, parallelize

NUM_MICROBATCHES, STEPS = 8, 5
SCHEDULES = (("1f1b", "rolling"), ("zb-h1", "rolling"), ("interleaved", "rolling"), ("interleaved", "rolling:1"))


def measure(name: str, gradients: str, device: str, width: int, layers: int) -> dict[str, Any]:
    """One process: the largest bytes of whole gradients at a reduce, the time of a step, gradients."""
    from transformers import LlamaConfig

    if device == "cuda":
        os.environ.update(NCCL_HOSTID=f"host-{dist.get_rank()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.zeros(1, device="cuda:0")
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "dp_shard"))
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=1024, dtype=torch.float32,
    )  # fmt: skip
    schedule = build(name, ranks=2, microbatches=NUM_MICROBATCHES)
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank(), device=device)
    parallelize(stages, mesh)
    generator = torch.Generator().manual_seed(mesh["dp_shard"].get_local_rank())
    tokens = torch.randint(1024, (NUM_MICROBATCHES, 1, 128), generator=generator).to(device)
    data = [{"input_ids": ids, "labels": ids} for ids in tokens]
    with Engine(schedule, stages, mesh=mesh, gradients=gradients, direct_gradients=True) as engine:
        units = [unit for sharded in engine._shards.values() for unit in sharded.units]
        engine.train_step(data, CausalLMLoss())
        found = [p.grad.to_local().cpu() for p in engine.parameters()]
        times = []
        for _ in range(STEPS):
            _wait(device)
            begin = time.perf_counter()
            engine.train_step(data, CausalLMLoss())
            _wait(device)
            times.append(time.perf_counter() - begin)
        peak = _measure_peak(units, lambda: engine.train_step(data, CausalLMLoss()))
    return {"peak": peak, "step": statistics.median(times), "gradients": found}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _measure_peak(units: list[Any], step: Any) -> int:
    """The largest number of bytes of whole gradients, before and after each reduce."""
    peak, real = 0, fsdp_private.reduce

    def count() -> None:
        nonlocal peak
        storages = [storage for unit in units for storage in fsdp_private.gradient_storages(unit)]
        peak = max(peak, sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))

    def reduce(unit: Any) -> None:
        count()
        real(unit)
        count()

    fsdp_private.reduce = reduce
    try:
        step()
    finally:
        fsdp_private.reduce = real
    return peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, help="default: 256, on a GPU 1024")
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    args.width = args.width or (256 if args.device == "cpu" else 1024)
    print("schedule     gradients   whole MB  rolling MB  ratio  step whole s  rolling s  ratio  difference")
    with LocalRanks(4, backend="nccl" if args.device == "cuda" else "gloo") as ranks:
        for name, policy in SCHEDULES:
            whole, rolling = (
                ranks.run(measure, name, one, args.device, args.width, args.layers, timeout=300)
                for one in ("whole", policy)
            )
            errors = [
                float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
                for mine, theirs in zip(rolling, whole)
                for a, b in zip(mine["gradients"], theirs["gradients"])
                if b.numel()
            ]
            assert max(errors) < 1e-3, f"{name} {policy}: gradients differ by {max(errors):.1e}"
            sizes = [max(one["peak"] for one in found) / 1e6 for found in (whole, rolling)]
            steps = [max(one["step"] for one in found) for found in (whole, rolling)]
            print(
                f"{name:12} {policy:10} {sizes[0]:9.1f} {sizes[1]:11.1f} {sizes[1] / sizes[0]:6.2f} {steps[0]:13.3f} "
                f"{steps[1]:10.3f} {steps[1] / steps[0]:6.2f} {max(errors):11.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
