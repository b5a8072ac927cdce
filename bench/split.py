"""Time and memory of a split backward: whole, torch's way, the store; eager and compiled; every AC mode.

    python bench/split.py                          # CUDA, about 5 minutes
    python bench/split.py --device cpu --small     # a tiny run that only shows that it works
    python bench/split.py --device cpu --launch --reps 400    # next to nothing to compute: what launching costs

One stage from the middle of a Qwen3 (layers only) takes a hidden state and a gradient. Per way: milliseconds of F, of I
(or B) and of W, MiB alive after I, and peak MiB, both beyond weights, gradients and input. Ways are measured in turn,
again and again, and the median is printed; ratios of times are medians of paired rounds. Each row is printed and
written to the JSON file when it is known.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zeropipe as zp
from zeropipe.engine.backward.linear import defer
from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.blocks.compiling import prepare_blocks
from zeropipe.engine.stages.build import hf_stages

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from autograd_split import AutogradSplit

SIZES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8},
    "none": {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
}
WAYS = [("whole", False), ("torch", False), ("store", False), ("whole", True), ("store", True)]


@dataclass(frozen=True)
class Case:
    """What one group of rows has in common."""

    size: str
    layers: int
    tokens: int
    ac: str = "none"


def cases(small: bool, launch: bool) -> list[Case]:
    """In order of importance: a run that is cut short has shown the most."""
    if launch:
        return [Case("none", 4, 8)]
    if small:
        return [Case("tiny", 2, 64), Case("tiny", 2, 64, "full")]
    modes = ["full", "selective:op", "memory_budget:0.5", "selective:2"]
    return [
        Case("8B", 4, 4096),
        *(Case("8B", 4, 4096, ac) for ac in modes),
        Case("8B", 2, 4096),
        Case("8B", 8, 4096),
        Case("0.6B", 4, 2048),
        *(Case("8B", layers, tokens) for tokens in (2048, 8192) for layers in (2, 4, 8)),
    ]


class Way:
    """One way to run F and its backward, on weights of its own."""

    def __init__(self, case: Case, kind: str, compile: bool, device: torch.device) -> None:
        from transformers import Qwen3Config

        head_dim = 128 if case.size != "tiny" else 16
        config = Qwen3Config(**SIZES[case.size], head_dim=head_dim, num_hidden_layers=case.layers, vocab_size=32)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        schedule = zp.build("1f1b", ranks=3, microbatches=3)
        stages = hf_stages(config, schedule, 1, layers=[0, case.layers, 0], dtype=dtype, device=device)
        self.stage, self.kind, self.compiled, self.device = stages[1], kind, compile, device
        if kind == "store":
            defer(self.stage)
        prepare_blocks(self.stage, compile=compile, ac=case.ac)
        shape = (1, case.tokens, config.hidden_size)
        self.x = torch.randn(shape, dtype=dtype, device=device)
        tokens = torch.zeros(1, case.tokens, dtype=torch.int64, device=device)
        self.picked = self.stage.pick({"input_ids": tokens})
        self.dy = torch.randn(shape, dtype=dtype, device=device) / 100
        self.store, self.torch_split = WeightStore(), AutogradSplit()

    def forward(self) -> tuple[Tensor, Tensor]:
        x = self.x.detach().requires_grad_()
        return x, self.stage(x, **self.picked)

    def backward(self, x: Tensor, y: Tensor) -> None:
        if self.kind == "whole":
            y.backward(self.dy)
        elif self.kind == "torch":
            self.torch_split.backward_input(0, 0, self.stage, [y], [self.dy], [x])
        else:
            with self.store.collect(0, 0, copy_shared=False):
                y.backward(self.dy)

    def copy_shared(self) -> None:
        if self.kind == "store":
            self.store.copy_shared(0, 0)

    def weights(self) -> None:
        if self.kind == "torch":
            self.torch_split.flush(0, 0)
        elif self.kind == "store":
            self.store.flush(0, 0)

    def step(self, mark: Callable[[], None], after_i: Callable[[], None] = lambda: None) -> None:
        mark()
        x, y = self.forward()
        mark()
        self.backward(x, y)
        del x, y
        self.copy_shared()
        mark()
        after_i()
        self.weights()
        mark()


class Clock:
    """Marks on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Milliseconds between marks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]
        return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]


def timed(way: Way) -> list[float]:
    clock = Clock(way.device)
    way.step(clock.mark)
    return clock.gaps()


def memory(way: Way) -> tuple[float, float]:
    """MiB alive after I and peak MiB, beyond what is always there; zeros on the CPU."""
    if way.device.type != "cuda":
        return 0.0, 0.0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base, alive = torch.cuda.memory_allocated(), []
    way.step(lambda: None, lambda: alive.append(torch.cuda.memory_allocated() - base))
    torch.cuda.synchronize()
    return alive[0] / 2**20, (torch.cuda.max_memory_allocated() - base) / 2**20


def prepared(case: Case, device: torch.device) -> tuple[list[Way], dict[str, str]]:
    """The ways of a case, warm; and the reasons of those that cannot run."""
    ways, failed = [], {}
    for kind, compile in WAYS:
        if case.ac.startswith("memory_budget") and not compile:
            continue  # the budget is kept by the compiler's partitioner
        try:
            way = Way(case, kind, compile, device)
            for _ in range(2):
                way.step(lambda: None)
            ways.append(way)
        except Exception as error:
            failed[name(kind, compile)] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ways, failed


def gradient_error(way: Way, whole: Way) -> float:
    """Largest relative difference of a gradient to the whole eager backward's, same weights, input and gradient."""
    worst = 0.0
    for stage in (way.stage, whole.stage):
        stage.zero_grad()
    way.x.copy_(whole.x)
    way.dy.copy_(whole.dy)
    for one in (way, whole):
        one.step(lambda: None)
    for p, q in zip(way.stage.parameters(), whole.stage.parameters()):
        worst = max(worst, float((p.grad.float() - q.grad.float()).norm() / q.grad.float().norm()))
    return worst


def name(kind: str, compile: bool) -> str:
    return f"{kind} {'compiled' if compile else 'eager'}"


def run_case(case: Case, device: torch.device, reps: int) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    ways, failed = prepared(case, device)
    times: dict[int, list[list[float]]] = {i: [] for i in range(len(ways))}
    for _ in range(reps):
        for i, way in enumerate(ways):
            times[i].append(timed(way))
    rows = []
    for i, way in enumerate(ways):
        f, back, w = (statistics.median(column) for column in zip(*times[i]))
        total = statistics.median(sum(row) for row in times[i])
        alive, peak = memory(way)
        error = gradient_error(way, ways[0])
        rows.append(
            vars(case)
            | {"way": name(way.kind, way.compiled), "f": f, "i": back, "w": w, "total": total}
            | {"alive": alive, "peak": peak, "error": error}
        )
        rows[-1]["times"] = [sum(row) for row in times[i]]
    rows += [vars(case) | {"way": way, "failed": reason} for way, reason in failed.items()]
    del ways
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def line(row: dict[str, Any]) -> str:
    head = f"{row['size']:>5} {row['layers']:>2} {row['tokens']:>5}  {row['ac']:<18}{row['way']:<15}"
    if "failed" in row:
        return f"{head} {row['failed'][:60]}"
    numbers = "".join(f"{row[key]:>9.2f}" for key in ("f", "i", "w", "total"))
    return f"{head}{numbers}{row['alive']:>9.0f}{row['peak']:>9.0f}{row['error']:>10.1e}"


def ratio(ours: dict[str, Any], theirs: dict[str, Any], key: str) -> float:
    """Of two rows; of times, the median over the rounds, so that a slow moment hits both."""
    if key != "total":
        return float(ours[key] / theirs[key])
    return statistics.median(a / b for a, b in zip(ours["times"], theirs["times"]))


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """The ratios that were aimed at, worst case first."""
    by: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "failed" not in row:
            by.setdefault((row["size"], row["layers"], row["tokens"], row["ac"]), {})[row["way"]] = row
    aims = [
        ("time, store/whole, compiled", "store compiled", "whole compiled", "total", 1.01, None),
        ("peak, store/whole, compiled", "store compiled", "whole compiled", "peak", 1.06, None),
        ("time, store compiled/torch, no AC", "store compiled", "torch eager", "total", 0.97, "none"),
        ("time, store compiled/torch, full AC", "store compiled", "torch eager", "total", 0.5, "full"),
        ("peak, store compiled/torch, no AC", "store compiled", "torch eager", "peak", 0.6, "none"),
    ]
    found = []
    for title, ours, theirs, key, aim, ac in aims:
        ratios = {
            case: ratio(ways[ours], ways[theirs], key)
            for case, ways in by.items()
            if ours in ways and theirs in ways and ways[theirs][key] and ac in (None, case[3])
        }
        if ratios:
            worst = max(ratios, key=ratios.__getitem__)
            middle = statistics.median(ratios.values())
            found.append(f"{title:<38} aim {aim:<5} median {middle:.3f}  worst {ratios[worst]:.3f} at {worst}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, two cases")
    parser.add_argument("--launch", action="store_true", help="next to nothing to compute")
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=330, help="start no case after this long")
    parser.add_argument("--out", type=Path, default=Path("bench_split.json"))
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch._dynamo.config.automatic_dynamic_shapes = False  # a graph per length, so that each is at its best
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {hardware}; times in ms, memory in MiB", flush=True)
    columns = ("F", "I or B", "W", "total", "alive", "peak")
    print(f"{'size':>5} {'L':>2} {'tokens':>5}  {'AC':<18}{'way':<15}{''.join(f'{c:>9}' for c in columns)}     error")
    rows: list[dict[str, Any]] = []
    start = time.monotonic()
    for case in cases(args.small, args.launch):
        if time.monotonic() - start > args.seconds:
            print(f"out of time before {case}", flush=True)
            break
        for row in run_case(case, device, args.reps):
            rows.append(row)
            print(line(row), flush=True)
        facts = {"torch": torch.__version__, "hardware": hardware, "rows": rows}
        args.out.write_text(json.dumps(facts, indent=1))
    print(*verdicts(rows), f"{time.monotonic() - start:.0f} s", sep="\n", flush=True)


if __name__ == "__main__":
    main()
