"""Head and loss: time, peak memory and accuracy of the last layer of a language model, forward and backward.

    python bench/head.py                          # CUDA, under a minute
    python bench/head.py --device cpu --small     # a tiny run that only shows that it works

Ways: `eager` is transformers' (a linear layer, logits in float32, cross entropy), `compiled` the same in one
torch.compile, `liger` Liger-Kernel's fused linear cross entropy if it is installed. `ours` is the fused head as the
engine runs it: weight gradients in F, or products that wait for W. Ways are measured in turn; times are medians, and
the ratio is the median over rounds of the two times of one round. Peak memory is beyond weight and hidden states, and
includes their gradients: that of the weight is in float32 for ours, in the weight's dtype for the others. Errors are
those of the loss and of both gradients beside float32, relative to the largest value.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.head.cross_entropy import ChunkedCrossEntropy, HeadCall
from zeropipe.engine.head.logits import LogitsRule
from zeropipe.engine.head.passes import PLAIN, ChunkPasses, compiled_passes

Step = Callable[[], Tensor]  # forward and backward; returns the loss
MAX_ERROR = 2e-2  # of a gradient in 16 bits


class Size(NamedTuple):
    hidden: int
    vocabulary: int
    tokens: int


SIZES = [Size(2048, 151_936, 4096), Size(4096, 151_936, 8192)]
SMALL = [Size(64, 1000, 128)]


class Problem:
    """A weight, hidden states and labels; one token in eight has no loss."""

    def __init__(self, size: Size, device: str) -> None:
        self.size, dtype = size, torch.bfloat16 if device == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        make = lambda *shape: torch.randn(*shape, device=device, generator=generator)  # noqa: E731
        self.x = make(size.tokens, size.hidden).to(dtype).requires_grad_()
        self.weight = nn.Parameter((make(size.vocabulary, size.hidden) * 2 * size.hidden**-0.5).to(dtype))
        self.labels = torch.randint(size.vocabulary, (size.tokens,), device=device, generator=generator)
        self.labels[::8] = -1
        self.count = int((self.labels >= 0).sum())

    def clear(self) -> None:
        self.x.grad = self.weight.grad = None

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        logits = functional.linear(x, weight).float()
        return functional.cross_entropy(logits, self.labels, ignore_index=-1, reduction="sum") / self.count

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradients in float32, a block of tokens at a time."""
        weight = self.weight.detach().float()
        dw, dxs, total = torch.zeros_like(weight), [], 0.0
        for x, labels in zip(self.x.detach().split(512), self.labels.split(512)):
            logits = (x := x.float()) @ weight.t()
            counted = labels >= 0
            total = total + functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
            gradient = logits.softmax(-1)
            gradient[torch.arange(len(labels)), labels.clamp(min=0)] -= 1
            gradient *= counted[:, None] / self.count
            dxs.append(gradient @ weight)
            dw += gradient.t() @ x
        return total / self.count, torch.cat(dxs), dw


def ways_of(problem: Problem, device: str) -> dict[str, Step]:
    """Each way's step."""

    def step_of(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def step() -> Tensor:
            loss = loss_of(problem.x, problem.weight)
            loss.backward()
            return loss.detach()

        return step

    def ours(passes: ChunkPasses, in_forward: bool) -> Step:
        store = WeightStore()
        call = HeadCall(
            LogitsRule(), passes, (problem.weight,), factor=1 / problem.count, in_forward=in_forward
        )  # fmt: skip

        def step() -> Tensor:
            problem.weight.grad_dtype = torch.float32
            losses, _ = ChunkedCrossEntropy.apply(call, problem.labels, None, problem.x, problem.weight)
            loss = losses.sum() / problem.count
            with store.collect(0, 0):
                loss.backward()
            store.flush(0, 0)
            return loss.detach()

        return step

    ways = {
        "eager": step_of(problem.plain),
        "compiled": step_of(torch.compile(problem.plain)),
        "ours, eager": ours(PLAIN, True),
        "ours": ours(compiled_passes(), True),
        "ours, W": ours(compiled_passes(), False),
    }
    if (liger := find_liger()) is not None and device == "cuda":
        ways["liger"] = step_of(lambda x, weight: liger(weight, x, problem.labels) / problem.count)
    return ways


def find_liger() -> Any:
    """Liger-Kernel's function; None if it is not installed."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss(ignore_index=-1, reduction="sum")


def timed(step: Step, problem: Problem, device: str) -> float:
    """Milliseconds of one step."""
    problem.clear()
    if device == "cpu":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def peak_gib(step: Step, problem: Problem, device: str) -> float:
    """Peak memory of a step beyond what is there before it."""
    if device == "cpu":
        return 0.0
    problem.clear()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def errors(step: Step, problem: Problem, wanted: tuple[Tensor, Tensor, Tensor]) -> list[float]:
    """Of the loss and the gradients, relative to the largest value."""
    problem.clear()
    loss = step()
    found = (loss, problem.x.grad, problem.weight.grad)
    return [float((one.float() - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted)]


def measure(size: Size, device: str, rounds: int) -> list[dict[str, Any]]:
    problem = Problem(size, device)
    ways, wanted = ways_of(problem, device), problem.reference()
    found = {way: errors(step, problem, wanted) for way, step in ways.items()}  # also compiles
    del wanted
    memory = {way: peak_gib(step, problem, device) for way, step in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, step in ways.items():
            times[way].append(timed(step, problem, device))
    return [
        {
            "size": f"H {size.hidden}, V {size.vocabulary}, {size.tokens} tokens", "way": way,
            "ms": statistics.median(times[way]),
            "over_compiled": statistics.median(a / b for a, b in zip(times[way], times["compiled"])),
            "peak_gib": memory[way], "errors": found[way],
        }
        for way in ways
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for size in SMALL if args.small else SIZES:
        for row in measure(size, args.device, args.rounds):
            rows.append(row)
            loss, dx, dw = row["errors"]
            print(
                f"{row['size']:32} {row['way']:12} {row['ms']:8.2f} ms  {row['over_compiled']:5.2f} of compiled  "
                f"{row['peak_gib']:6.2f} GiB  loss {loss:.1e}  dx {dx:.1e}  dW {dw:.1e}",
                flush=True,
            )
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))
    wrong = [row for row in rows if max(row["errors"]) > MAX_ERROR]
    print(f"{len(wrong)} of {len(rows)} rows differ from float32 by more than {MAX_ERROR}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
