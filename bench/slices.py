"""Peak memory and time of a step against tokens, with and without slices: `python bench/slices.py` on one GPU.

Few layers with the shapes of Qwen3-8B, full checkpointing, one sequence per step: whole, and in slices (seq1f1b). Loss
and gradient norm must be those of the whole. Beside the measured peak of a step, without weights, is that of `train
--dry-run` for the same run: gradients, activations and workspace. `--lora` freezes all weights but an adapter's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, Engine, hf_stages
from zeropipe.engine.stages.adapters import compute_adapters_in
from zeropipe.errors import EngineError
from zeropipe.train.config.read import validate
from zeropipe.train.preview import preview

RANK = 16  # of an adapter
GPU = torch.cuda.is_available()
SHAPES = (
    {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
     "head_dim": 128, "vocab_size": 151936}
    if GPU else
    {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2,
     "head_dim": 32, "vocab_size": 512}
)  # fmt: skip


def run(tokens: int, slices: int, layers: int, ac: str, steps: int, lora: bool) -> dict[str, Any]:
    """Seconds and peak bytes of a step on this device, with its loss and gradient norm."""
    gc.collect()  # of earlier engines
    device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    config = Qwen3Config(**SHAPES, num_hidden_layers=layers, tie_word_embeddings=False, dtype=dtype)
    schedule = zp.build("seq1f1b", ranks=1, microbatches=1, slices=slices)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = [{"input_ids": ids, "labels": ids}]
    stages = hf_stages(config, schedule, 0, device=device, dtype=dtype, adapter=adapter_config() if lora else None)
    if lora:
        compute_adapters_in(stages[0], dtype)
    with Engine(schedule, stages, device=device, ac=ac) as engine:
        for _ in range(1 + steps):
            for parameter in engine.parameters():
                parameter.grad = None
            if GPU:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                resident = torch.cuda.memory_allocated()
            begin = perf_counter()
            result = engine.train_step(batch, CausalLMLoss())
            if GPU:
                torch.cuda.synchronize()
            seconds = perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() - resident if GPU else 0
        return {"seconds": seconds, "peak": peak, "loss": result.loss, "norm": engine.grad_norm()}


def adapter_config() -> Any:
    import peft

    return peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")


def predict(tokens: int, slices: int, layers: int, ac: str, lora: bool) -> float:
    """The bytes of gradients, activations and workspace of such a step by `train --dry-run`."""
    with tempfile.TemporaryDirectory() as folder:
        length = {"max_position_embeddings": tokens}
        shapes = {"model_type": "qwen3", **SHAPES, **length, "num_hidden_layers": layers, "tie_word_embeddings": False}
        Path(folder, "config.json").write_text(json.dumps(shapes))
        config = {
            "model": {"path": folder, "dtype": "bfloat16" if GPU else "float32"},
            "schedule": {"name": "seq1f1b", "slices": slices, "costs": "h200"},
            "engine": {"ac": ac, "compile": False},
            "data": {"kind": "synthetic", "sequence": tokens, "batch": 1, "microbatch": 1},
            "optimizer": {"master_weights": False},
            "train": {"steps": 1},
        }
        adapter = {"lora": {"rank": RANK}} if lora else {}
        memory = preview(validate(config | adapter, {}, "this benchmark")).ranks[0].memory
    return float(memory["gradients"] + memory["activations"] + memory["workspace"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="16384,32768,65536,131072" if GPU else "512,1024")
    parser.add_argument("--slices", default="4,8" if GPU else "4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ac", default="full")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--lora", action="store_true", help="train an adapter only")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    dist.init_process_group("nccl" if GPU else "gloo", rank=0, world_size=1)
    print(
        f"{'tokens':>8} {'slices':>6} {'seconds':>8} {'ratio':>6} {'peak GB':>8} {'ratio':>6} {'predicted':>9} "
        f"{'off by':>7}  checks"
    )
    for tokens in map(int, args.tokens.split(",")):
        whole = None
        for slices in (1, *map(int, args.slices.split(","))):
            try:
                found = run(tokens, slices, args.layers, args.ac, args.steps, args.lora)
            except (torch.cuda.OutOfMemoryError, EngineError) as error:
                if "out of memory" not in str(error):
                    raise
                print(f"{tokens:>8} {slices:>6}  out of memory")
                continue
            whole = found if slices == 1 else whole
            of = whole or found
            norm = abs(found["norm"] / of["norm"] - 1)
            is_equal = abs(found["loss"] / of["loss"] - 1) < 1e-3 and norm < 1e-2
            predicted = predict(tokens, slices, args.layers, args.ac, args.lora)
            print(
                f"{tokens:>8} {slices:>6} {found['seconds']:>8.3f} {found['seconds'] / of['seconds']:>6.2f} "
                f"{found['peak'] / 1e9:>8.2f} {found['peak'] / max(1, of['peak']):>6.2f} {predicted / 1e9:>9.2f} "
                f"{predicted / max(1, found['peak']) - 1:>+7.1%}  "
                f"{'loss and norm equal' if is_equal else 'DIFFERENT'}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
