"""Whether predictions name the faster of two layouts: random ones, each predicted by `train --dry-run`, and run.

    python bench/predict_layouts.py                      # 2 CPU ranks, 12 layouts
    python bench/predict_layouts.py --ranks 4 --layouts 40 --steps 9

Costs are profiled once, for all microbatch sizes and checkpointing modes, and know nothing of layouts. All layouts have
the same batch. They are run in turns, one step of each per round, so that a slow moment of the machine hits all alike.
A pair counts if the medians of its steps differ by more than 10%. Messages and gathers over gloo are part of the steps;
only with layers that work for longer than these take do the layouts differ as on GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.comm.ranks import job_ranks
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.train.config.read import validate
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.optimizer import make_optimizer
from zeropipe.train.loop.setup import build_stages, find_position, make_engine
from zeropipe.train.preview import preview

VOCABULARY = 1024
MODEL = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8,
    "vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved", "zbv")
MODES, SIZES, DIFFERENCE = ("none", "full", "selective:op"), (1, 2), 0.1


def profile(folder: Path, ranks: int, sequence: int) -> Path:
    """Write the profiled costs of the model."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    costs = folder / "costs.json"
    command = [
        sys.executable, "-m", "zeropipe", "profile", str(folder), "--ranks", str(ranks), "--ac", ",".join(MODES),
        "--microbatch", ",".join(map(str, SIZES)), "--sequence", str(sequence), "--device", "cpu", "-o", str(costs),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return costs


def draw(chance: random.Random, args: argparse.Namespace, folder: Path, costs: Path) -> RunConfig:
    """A random layout of all ranks."""
    dp_shard = chance.choice([n for n in range(1, args.ranks + 1) if args.ranks % n == 0])
    pp = args.ranks // dp_shard
    table = {
        "model": {"path": str(folder), "weights": "random", "dtype": "float32"},
        "mesh": {"pp": pp, "dp_shard": dp_shard},
        "schedule": {"name": chance.choice(SCHEDULES) if pp > 1 else "1f1b", "costs": str(costs)},
        "engine": {
            "ac": chance.choice(MODES), "shards": chance.choice(("keep", "regather")) if dp_shard > 1 else "keep",
            "device": "cpu",
        },
        "data": {"sequence": args.sequence, "microbatch": chance.choice(SIZES), "batch": args.batch},
        "train": {"steps": 1, "output": "out"},
    }  # fmt: skip
    return validate(table, {}, "layout")


def run_rounds(configs: list[RunConfig], steps: int) -> list[list[float]]:
    """Seconds of the steps of each layout, after a warm-up."""
    runners = [make_runner(config) for config in configs]
    times: list[list[float]] = [[] for _ in configs]
    for index in range(steps + 1):
        for runner, own in zip(runners, times, strict=True):
            torch.distributed.barrier()
            begin = time.perf_counter()
            runner()
            torch.distributed.barrier()
            if index:
                own.append(time.perf_counter() - begin)
    return times


def make_runner(config: RunConfig) -> Any:
    """A function that runs one training step."""
    with job_ranks(config.engine.timeout, "begun") as ranks:
        position = find_position(config, ranks)
        stages = build_stages(config, position, ranks)
    engine = make_engine(config, position, stages)
    optimizer = make_optimizer(config, engine, position.device)
    shape = (config.data.microbatch, config.data.sequence)
    data: list[dict[str, Tensor]] = []
    for _ in range(config.num_microbatches):
        tokens = torch.randint(0, VOCABULARY, shape)
        data.append({"input_ids": tokens, "labels": tokens})

    def step() -> None:
        engine.train_step(data, CausalLMLoss())
        optimizer.step()
        optimizer.zero_grad()

    return step


def describe(config: RunConfig) -> str:
    mesh, data = config.mesh, config.data
    return (
        f"pp{mesh.pp} dp{mesh.dp_shard} {config.schedule.name} {config.num_microbatches}x{data.microbatch} "
        f"ac {config.engine.ac} {config.engine.shards if mesh.dp_shard > 1 else ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layouts", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        costs = profile(Path(name), args.ranks, args.sequence)
        found: dict[str, RunConfig] = {}
        for _ in range(20 * args.layouts):
            config = draw(chance, args, Path(name), costs)
            if len(found) < args.layouts:
                found.setdefault(describe(config), config)
        predicted = [preview(config).prediction for config in found.values()]
        with LocalRanks(args.ranks) as ranks:
            measured = ranks.run(run_rounds, list(found.values()), args.steps, timeout=1200)[0]
    medians = [statistics.median(times) for times in measured]
    steps = [one.step if one is not None else 0.0 for one in predicted]
    for label, step, median in sorted(zip(found, steps, medians, strict=True), key=lambda row: row[2]):
        print(
            f"{label:60s} predicted {1000 * step:8.1f} ms  measured {1000 * median:8.1f} ms  {step / median - 1:+.0%}"
        )
    pairs = [(a, b) for a, b in itertools.combinations(range(len(medians)), 2) if is_different(medians[a], medians[b])]
    right = sum((steps[a] < steps[b]) == (medians[a] < medians[b]) for a, b in pairs)
    print(f"{right} of {len(pairs)} pairs whose steps differ by more than {DIFFERENCE:.0%} are in the right order")


def is_different(one: float, other: float) -> bool:
    return max(one, other) > (1 + DIFFERENCE) * min(one, other)


if __name__ == "__main__":
    main()
