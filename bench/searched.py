"""Wall time of a searched schedule with balanced layers, beside the named ones with even layers: an uneven model.

    python bench/searched.py                            # 8 CPU ranks, at most three minutes
    python bench/searched.py --quick                    # a small model, one minute
    python bench/searched.py --ranks 2 --microbatches 6 --seconds 5

The model is a row of equal blocks and a head that costs as much as several of them, as a large vocabulary does. What a
block and the head cost is taken from a recorded step; layers are then balanced and a schedule is searched for, within
the memory that zbv takes with the same layers. All contenders live in the same processes and take turns; a ratio is the
median over the rounds of two times of one round. One thread per rank. Each round is printed when it is over, and no
new one begins after `--limit` seconds.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from step import Block, MeanSquare, pin
from torch import Tensor, nn

import zeropipe as zp
from zeropipe.core.model.layers import layer_counts
from zeropipe.engine import Engine
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.sim.costs import Link
from zeropipe.sim.fit import fit
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting

NAMED = ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
PROBE = "zb-h1"  # has F, I and W of every stage
RECORDINGS = 3
LEAST = 2  # rounds, however long they take


class Size(NamedTuple):
    """How big the benchmark is."""

    ranks: int
    microbatches: int
    blocks: int
    width: int
    tokens: int
    head: int  # blocks that the head costs as much as


class Head(nn.Module):
    """As much work as some blocks, in one piece."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(99)
        self.up, self.down = nn.Linear(width, 6 * blocks * width), nn.Linear(6 * blocks * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Contender:
    """A schedule with so many blocks in each stage."""

    def __init__(self, schedule: zp.Schedule, counts: tuple[int, ...], size: Size) -> None:
        self.schedule, stages = schedule, {}
        for stage in schedule.placement.stages_of(dist.get_rank()):
            first = sum(counts[:stage])
            layers: list[nn.Module] = [Block(size.width, first + place) for place in range(counts[stage])]
            if stage == schedule.num_stages - 1:
                layers.append(Head(size.width, size.head))
            stages[stage] = nn.Sequential(*layers)
        self.engine = Engine(schedule, stages, timeout=120, direct_gradients=True)
        generator = torch.Generator().manual_seed(7)
        shape = (size.microbatches, 1, size.tokens, size.width)
        x, y = (torch.randn(shape, generator=generator) for _ in range(2))
        self.batches = [{"inputs": a, "target": b} for a, b in zip(x, y)]

    def step(self) -> float:
        return self.engine.train_step(self.batches, MeanSquare()).loss

    def zero(self) -> None:
        for parameter in self.engine.parameters():
            parameter.grad = None


def named(name: str, size: Size) -> tuple[zp.Schedule, tuple[int, ...]]:
    """A schedule by name, with the even cut."""
    schedule = zp.build(name, ranks=size.ranks, microbatches=size.microbatches)
    return schedule, layer_counts(size.blocks, schedule.num_stages)


def measure(size: Size) -> LayerCosts:
    """What a block and the head cost, from the shortest of some recorded steps."""
    schedule, counts = named(PROBE, size)
    contender = Contender(schedule, counts, size)
    cores = pin()
    contender.engine.record = True
    timelines = []
    for _ in range(RECORDINGS + 1):
        contender.step()
        timelines.append(contender.engine.timeline())
    contender.engine.close()
    os.sched_setaffinity(0, cores)
    costs = fit(min(timelines[1:], key=lambda timeline: timeline.makespan))

    def parts(values: Any) -> tuple[float, float]:
        per_stage = [values] * len(counts) if isinstance(values, float | int) else list(values)
        block = statistics.median(value / count for value, count in zip(per_stage[:-1], counts))
        return block, max(per_stage[-1] - counts[-1] * block, 0.0)

    kinds = {}
    columns = {name: parts(getattr(costs, name)) for name in ("f", "i", "w", "activation", "stash")}
    for place, kind in enumerate(("block", "head")):
        kinds[kind] = LayerCost(**{name: value[place] for name, value in columns.items()})
    return LayerCosts(
        "bench", "profile", ("block",) * size.blocks, (Setting(kinds),), before=(), after=("head",),
        link=Link(costs.p2p),
    )  # fmt: skip


def contest(
    size: Size, contenders: dict[str, tuple[zp.Schedule, tuple[int, ...]]], repeats: int, until: float
) -> dict[str, Any]:
    """Seconds of every round and the loss, on this rank. `until` is wall time, which all ranks share."""
    made = {name: Contender(*given, size) for name, given in contenders.items()}
    pin()
    seconds: dict[str, list[float]] = {name: [] for name in made}
    losses: dict[str, float] = {}
    goes_on = torch.ones(1)
    for repeat in range(repeats + 1):
        for name, contender in made.items():
            contender.zero()
            gc.collect()
            dist.barrier()
            begin = time.perf_counter()
            losses[name] = contender.step()
            dist.barrier()
            if repeat > 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - begin)
        if dist.get_rank() == 0 and repeat > 0:
            latest = ", ".join(f"{name} {times[-1]:.3f}" for name, times in seconds.items())
            print(f"round {repeat}, seconds: {latest}", flush=True)
        goes_on[0] = time.time() < until or repeat < LEAST
        dist.broadcast(goes_on, 0)
        if not goes_on[0]:
            break
    return {"seconds": seconds, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=None, help="default: 4 per rank")
    parser.add_argument("--head", type=int, default=6, help="the head costs as much as so many blocks")
    parser.add_argument("--width", type=int, default=None, help="default: 320, with --quick 192")
    parser.add_argument("--tokens", type=int, default=None, help="default: 128, with --quick 64")
    parser.add_argument("--repeats", type=int, default=8, help="rounds, if there is time for them")
    parser.add_argument("--seconds", type=float, default=None, help="of search; default: 15, with --quick 5")
    parser.add_argument("--limit", type=float, default=None, help="seconds in all; default: 150, with --quick 45")
    parser.add_argument("--quick", action="store_true", help="a small model and little time")
    given = parser.parse_args()
    begun, quick = time.time(), given.quick
    width, tokens = given.width or (192 if quick else 320), given.tokens or (64 if quick else 128)
    size = Size(given.ranks, given.microbatches, given.blocks or 4 * given.ranks, width, tokens, given.head)
    until = begun + (given.limit or (45 if quick else 150))

    def tell(text: str) -> None:
        print(f"{time.time() - begun:5.1f} s: {text}", flush=True)

    with LocalRanks(size.ranks) as ranks:
        tell("ranks are there; a block and the head are measured")
        layers = ranks.run(measure, size, timeout=600)[0]
        tell(f"measured: F of a block {1e3 * layers.settings[0].kinds['block'].f:.2f} ms; a schedule is searched for")
        contenders, predicted, found = entrants(size, layers, given.seconds or (5.0 if quick else 15.0))
        tell(f"searched: gap to the bound {found.gap:.2%}; the contest begins")
        parts = ranks.run(contest, size, contenders, given.repeats, until, timeout=1200)
    report(size, parts, predicted, found)
    tell("done")


def entrants(size: Size, layers: LayerCosts, seconds: float) -> tuple[dict[str, Any], dict[str, zp.Timeline], Any]:
    """The named schedules with even layers, zbv and a searched one with balanced layers; their predictions."""
    contenders = {name: named(name, size) for name in NAMED}
    predicted = {}
    for name, (schedule, counts) in contenders.items():
        predicted[name] = zp.simulate(schedule, layers.costs(counts, placement=schedule.placement))
    like = zp.build("zbv", ranks=size.ranks, microbatches=size.microbatches)
    counts = zp.balance(layers, like).counts
    costs = layers.costs(counts, placement=like.placement)
    predicted["zbv, balanced"] = zp.simulate(like, costs)
    costs = replace(costs, memory_limit=max(predicted["zbv, balanced"].peak_memory))
    found = zp.search(
        ranks=size.ranks, microbatches=size.microbatches, costs=costs, stages_per_rank=2, placement="vee",
        seconds=seconds,
    )  # fmt: skip
    contenders["zbv, balanced"] = (like, counts)
    contenders["searched, balanced"] = (found.schedule, counts)
    predicted["searched, balanced"] = found.timeline
    return contenders, predicted, found


def report(size: Size, parts: list[dict[str, Any]], predicted: dict[str, zp.Timeline], found: Any) -> None:
    """The table: every contender over the fastest named one with even layers."""
    seconds: dict[str, list[float]] = parts[0]["seconds"]
    fastest = min(NAMED, key=lambda name: statistics.median(seconds[name]))
    losses = {name: max(part["losses"][name] for part in parts) for name in seconds}
    print(f"torch {torch.__version__}, {size}; the fastest named schedule with even layers is {fastest}")
    print(f"search: gap to the bound {found.gap:.2%} after {found.seconds:.1f} s")
    print(f"{'':24}{'s':>8}{'/fastest':>10}{'predicted':>11}{'loss':>10}")
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds[fastest]))
        print(f"{name:24}{statistics.median(times):8.3f}{ratio:10.3f}{predicted[name].makespan:11.3f}"
              f"{losses[name]:10.6f}")  # fmt: skip


if __name__ == "__main__":
    main()
