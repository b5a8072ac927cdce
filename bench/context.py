"""Peak memory and time of a training step against the tokens of its sequence, with cp of 1, 2 and 4 processes.

    python bench/context.py                                  # NCCL ranks that share one GPU, Qwen3-8B's layers
    python bench/context.py --device cpu --lengths 64,128 --width 64 --heads 4 --key-heads 2 --check 64

Peak memory is the largest of a process, as on a GPU of its own. Processes that share a GPU share its cores too and send
through loopback sockets, so `s` is not the time of several GPUs: its ratio to one process is what cp computes and sends
more. The check is loss and gradient norm against one process, in the same precision.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, Engine, hf_stages, parallelize
from zeropipe.engine.run.launch import LocalRanks

VOCABULARY = 8192
STEPS = 2  # measured, after one that makes what stays


class Measured(NamedTuple):
    """A step on one process."""

    seconds: float
    peak: int  # bytes
    loss: float
    norm: float


def steps(length: int, exchange: str, args: argparse.Namespace) -> Measured:
    """Training steps of one row."""
    gc.collect()  # of earlier engines
    size = dist.get_world_size()
    if args.device == "cuda":  # NCCL refuses two ranks of one host on one GPU: so each says it is a host of its own
        os.environ.update(NCCL_HOSTID=f"host-{dist.get_rank()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.zeros(1, device="cuda:0")  # a mesh would look for a GPU of its own for every rank
    mesh = init_device_mesh(args.device, (1, size), mesh_dim_names=("pp", "cp"))
    config = Qwen3Config(
        hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        head_dim=args.width // args.heads, num_attention_heads=args.heads, num_key_value_heads=args.key_heads,
        vocab_size=VOCABULARY, max_position_embeddings=length, tie_word_embeddings=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    schedule = zp.build("1f1b", ranks=1, microbatches=1)
    stages = parallelize(hf_stages(config, schedule, 0, device=args.device, dtype=dtype), mesh, cp_exchange=exchange)
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    batch = [{"input_ids": ids, "labels": ids}]
    seconds = []
    with Engine(schedule, stages, mesh=mesh, ac=args.ac, fused_head=False) as engine:  # as with cp
        for _ in range(1 + STEPS):
            for parameter in engine.parameters():
                parameter.grad = None
            if args.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            start = time.perf_counter()
            result = engine.train_step(batch, CausalLMLoss())
            norm = engine.grad_norm()
            if args.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    return Measured(min(seconds[1:]), peak, result.loss, norm)


@contextmanager
def shared_gpu() -> Iterator[None]:
    """NVIDIA's MPS, which lets several processes compute on a GPU at once; nothing where it is not installed."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        subprocess.run([control, "-d"], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            subprocess.run([control], input="quit\n", text=True, check=False, stdout=subprocess.DEVNULL)
            for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
                del os.environ[name]


def measure(ranks: LocalRanks, length: int, exchange: str, args: argparse.Namespace) -> list[Measured]:
    found: list[Measured] = ranks.run(steps, length, exchange, args, timeout=120)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--lengths", default="16384,32768,65536,131072")
    parser.add_argument("--sizes", default="1,2,4", help="of cp")
    parser.add_argument("--exchanges", default="heads,gather")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--ac", default="none")
    parser.add_argument("--check", type=int, default=16384, help="tokens of the row that is checked")
    args = parser.parse_args()
    lengths = sorted({int(length) for length in args.lengths.split(",")})
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"torch {torch.__version__}, {name}, {args.layers} layers of width {args.width}, ac={args.ac}")
    print(f"{'tokens':>7} {'cp':>3} {'exchange':9} {'peak GB':>8} {'of cp=1':>8} {'s':>8} {'of cp=1':>8}", flush=True)
    alone: dict[int, Measured] = {}
    for size in map(int, args.sizes.split(",")):
        with shared_gpu(), LocalRanks(size, backend="nccl" if args.device == "cuda" else "gloo") as ranks:
            for exchange in args.exchanges.split(",") if size > 1 else ["heads"]:
                for length in lengths:
                    _print(length, size, exchange, measure(ranks, length, exchange, args), alone, args)


def _print(length: int, size: int, exchange: str, found: list[Measured], alone: dict[int, Measured], args: Any) -> None:
    """A row of the table; AssertionError where loss or gradients are not those of one process."""
    peak, seconds = max(one.peak for one in found), max(one.seconds for one in found)
    first = alone.setdefault(length, found[0]) if size == 1 else alone.get(length)
    ratios = ["", ""] if first is None else [f"{peak / max(first.peak, 1):.3f}", f"{seconds / first.seconds:.3f}"]
    print(
        f"{length:7} {size:3} {exchange if size > 1 else '-':9} {peak / 1e9:8.2f} {ratios[0]:>8} {seconds:8.3f} "
        f"{ratios[1]:>8}", flush=True,
    )  # fmt: skip
    if first is not None and length == args.check and size > 1:
        loss, norm = (abs(a - b) / b for a, b in ((found[0].loss, first.loss), (found[0].norm, first.norm)))
        print(f"        check: loss differs by {loss:.1e}, gradient norm by {norm:.1e}", flush=True)
        assert loss < 2e-3, (found[0].loss, first.loss)
        assert norm < 2e-2, (found[0].norm, first.norm)


if __name__ == "__main__":
    main()
