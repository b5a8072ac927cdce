"""Dynamic W: what it gives where stages are uneven and times vary, against the schedule's own order.

    python bench/dynamic.py                            # 4 CPU ranks that sleep instead of computing
    python bench/dynamic.py --ranks 8                  # the same with more ranks: they need no cores
    python bench/dynamic.py --work real --ranks 8      # matrix products, one thread per rank: needs a core for each

Both orders live in the same processes and take turns, with the same delays at the same actions, so a ratio is that of
two steps with the same bad luck; the figure is the median over the rounds. The last stage takes longer than the others
by --uneven. With jitter, an F or an I is late with the probability --chance, by --late units on average (exponential);
a unit is what an F takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropipe as zp
from zeropipe.engine import Engine
from zeropipe.engine.backward.products import Product
from zeropipe.engine.backward.store import store_or_run
from zeropipe.engine.run.launch import LocalRanks

WIDTH = 512  # of real blocks
UNITS = {"I": 1.1, "W": 0.9}  # what they take, in sleeps, where an F takes 1


class Jitter:
    """Delays drawn anew in every step, the same ones in both orders."""

    def __init__(self, stage: int, chance: float, late: float) -> None:
        self._stage, self._chance, self._late, self._random = stage, chance, late, random.Random()

    def begin(self, step: int) -> None:
        """Every F and I of a stage comes in the order of the schedule, so a seed is enough."""
        self._random.seed(1000 * step + self._stage)

    def __call__(self, *_: Any) -> None:
        if self._random.random() < self._chance:
            time.sleep(self._late * self._random.expovariate(1.0))


class Nap(Product):
    """A weight gradient that takes time and no core."""

    __slots__ = ("seconds",)

    def run(self) -> None:
        time.sleep(self.seconds)


class Sleep(torch.autograd.Function):
    """Takes the time of F, I and W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: Sleeper) -> Tensor:
        ctx.stage = stage
        time.sleep(stage.unit)
        return x + 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        stage = ctx.stage
        time.sleep(UNITS["I"] * stage.unit)
        for _ in range(stage.products):
            nap = Nap(stage.weight, dy, dy)
            nap.seconds = UNITS["W"] * stage.unit / stage.products
            store_or_run(nap)
        return dy, None, None


class Sleeper(nn.Module):
    """A stage that sleeps; its W is as many products as that of a transformer block."""

    def __init__(self, unit: float, products: int, jitter: Jitter) -> None:
        super().__init__()
        self.unit, self.products, self.jitter = unit, products, jitter
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.jitter()
        y = Sleep.apply(x, self.weight, self)
        y.register_hook(self.jitter)
        return y


class Computer(nn.Module):
    """A stage of real blocks."""

    def __init__(self, blocks: int, jitter: Jitter) -> None:
        super().__init__()
        self.jitter = jitter
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.jitter()
        for layer in self.layers:
            x = x + layer(x)
        x.register_hook(self.jitter)
        return x


def stages_of(schedule: zp.Schedule, args: argparse.Namespace, chance: float, unit: float) -> dict[int, nn.Module]:
    """This rank's stages; with `args.work` "real" `unit` is only that of the delays."""
    torch.manual_seed(0)
    made: dict[int, nn.Module] = {}
    for stage in schedule.placement.stages_of(dist.get_rank()):
        longer = args.uneven if stage == schedule.num_stages - 1 else 1.0
        jitter = Jitter(stage, chance, args.late * unit)
        if args.work == "sleep":
            made[stage] = Sleeper(longer * unit, args.products, jitter)
        else:
            made[stage] = Computer(round(longer * args.blocks), jitter)
    return made


class SumLoss:
    def count(self, microbatch: dict[str, Tensor]) -> int:
        return 1

    def __call__(self, output: Tensor, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return output.square().mean(), 1


def unit_of(schedule: zp.Schedule, args: argparse.Namespace) -> float:
    """Seconds of an F, the same on all ranks."""
    if args.work == "sleep":
        return args.unit / schedule.problem.stages_per_rank
    some = Computer(args.blocks, Jitter(0, 0.0, 0.0))
    x = torch.randn(args.tokens, WIDTH, requires_grad=True)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        some(x)
        times.append(time.perf_counter() - begin)
    unit = torch.tensor(statistics.median(times))
    dist.all_reduce(unit)
    return float(unit) / dist.get_world_size()


def contest(schedule: zp.Schedule, args: argparse.Namespace, chance: float) -> list[tuple[float, float]]:
    """Seconds of a step in the static and in the dynamic order, in every round."""
    torch.set_num_threads(1)
    unit = unit_of(schedule, args)
    shape = (1, 1) if args.work == "sleep" else (args.tokens, WIDTH)
    batches = [{"inputs": torch.randn(shape)} for _ in range(schedule.num_microbatches)]
    orders = [stages_of(schedule, args, chance, unit) for _ in range(2)]
    engines = [Engine(schedule, stages, dynamic_weights=bool(index)) for index, stages in enumerate(orders)]
    rounds = []
    for number in range(-2, args.rounds):  # two rounds to warm up
        seconds = [0.0, 0.0]
        for order in (0, 1) if number % 2 else (1, 0):
            for stage in orders[order].values():
                stage.jitter.begin(number)
                stage.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            engines[order].train_step(batches, SumLoss())
            dist.barrier()
            seconds[order] = time.perf_counter() - begin
        if number >= 0:
            rounds.append((seconds[0], seconds[1]))
            if dist.get_rank() == 0:
                print(f"{schedule.name}: static {seconds[0]:.3f} s, dynamic {seconds[1]:.3f} s", file=sys.stderr)
    for engine in engines:
        engine.close()
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=["sleep", "real"], default="sleep")
    parser.add_argument("--schedules", default="zb-h1,interleaved-zb,zbv")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, help="default: 3 per rank")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--uneven", type=float, default=1.3, help="of the last stage")
    parser.add_argument("--chance", type=float, default=0.15)
    parser.add_argument("--late", type=float, default=1.5)
    parser.add_argument("--unit", type=float, default=0.02, help="seconds of a rank's F, where it sleeps")
    parser.add_argument("--products", type=int, default=7, help="of a W, where it sleeps")
    parser.add_argument("--blocks", type=int, default=3, help="of a stage, where it computes")
    parser.add_argument("--tokens", type=int, default=64, help="of a microbatch, where it computes")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    microbatches = args.microbatches or 3 * args.ranks
    how = (
        f"ranks sleep {1e3 * args.unit:g} ms for an F instead of computing, W in {args.products} products"
        if args.work == "sleep"
        else f"ranks compute {args.blocks} blocks of width {WIDTH} per stage, {args.tokens} tokens"
    )
    print(
        f"torch {torch.__version__}, {args.ranks} ranks on {os.cpu_count()} cores, {microbatches} microbatches; {how};"
    )
    print(
        f"last stage {args.uneven:g} times the others; jitter: {args.chance:.0%} of F and I late by {args.late:g} F "
        f"on average; {args.rounds} paired rounds",
        flush=True,
    )
    print(f"{'schedule':16} {'jitter':>7} {'static s':>9} {'dynamic s':>10} {'dynamic/static':>15} {'quartiles':>13}")
    rows = []
    with LocalRanks(args.ranks) as ranks:
        for name in args.schedules.split(","):
            schedule = zp.build(name, ranks=args.ranks, microbatches=microbatches)
            for chance in (0.0, args.chance):
                rounds = ranks.run(contest, schedule, args, chance, timeout=500)[0]
                static, dynamic = (statistics.median(column) for column in zip(*rounds))
                low, middle, high = statistics.quantiles((b / a for a, b in rounds), n=4)
                rows.append({"schedule": name, "jitter": chance, "static": static, "dynamic": dynamic, "ratio": middle})
                print(f"{name:16} {'yes' if chance else 'no':>7} {static:9.3f} {dynamic:10.3f} {middle:15.3f} "
                      f"{low:6.3f} {high:6.3f}", flush=True)  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
