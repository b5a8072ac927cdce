"""What an Overlap hides: DualPipeV with the F and B of its Overlaps together, and one after the other.

    python bench/overlap.py                          # CUDA
    python bench/overlap.py --device cpu --small     # a tiny run that only shows that it works

One rank holds both stages of the V, so that nothing but the Overlap differs. Each block sends a share of its rows away
and gets them back, twice in F and twice in B, as experts on other ranks would make it: with no second GPU, by copies
to pinned memory and back on the stream of the computation. "exposed" is what the copies add to a step. Both ways live
in one process and take turns; medians, and the median of paired ratios.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import zeropipe as zp
from zeropipe.core.action import actions_of
from zeropipe.engine import Engine
from zeropipe.engine.run.launch import LocalRanks


def apart(schedule: zp.Schedule) -> zp.Schedule:
    """The same order, with the F and B of each Overlap one after the other."""
    rows = [actions_of(row) for row in schedule.rows]
    return zp.Schedule.of(schedule.problem, schedule.placement, rows, f"{schedule.name}-apart")


def there_and_back(x: Tensor, rows: int) -> Tensor:
    """A copy of x whose first rows went over the bus twice."""
    y = x.clone()
    if rows:
        host = torch.empty((rows, *x.shape[1:]), dtype=x.dtype, pin_memory=x.is_cuda)
        host.copy_(x[:rows], non_blocking=True)
        y[:rows].copy_(host, non_blocking=True)
    return y


class Exchange(torch.autograd.Function):
    """Dispatch or combine of tokens, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = rows
        return there_and_back(x, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return there_and_back(dy, ctx.rows), None


class Block(nn.Module):
    """A gated MLP between a dispatch and a combine."""

    def __init__(self, width: int, inner: int, rows: int) -> None:
        super().__init__()
        self.rows, self.norm = rows, nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sent = Exchange.apply(self.norm(x), self.rows)
        return x + Exchange.apply(self.down(nn.functional.silu(self.gate(sent)) * self.up(sent)), self.rows)


class MeanSquare:
    def count(self, microbatch: dict[str, Tensor]) -> int:
        return 1

    def __call__(self, output: Tensor, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return output.float().square().mean(), 1


def engine(schedule: zp.Schedule, args: argparse.Namespace, rows: int) -> Engine:
    torch.manual_seed(0)
    with torch.device(args.device):
        stages = {
            stage: nn.Sequential(*(Block(args.width, args.inner, rows) for _ in range(args.blocks))).to(args.dtype)
            for stage in range(2)
        }
    return Engine(schedule, stages, device=args.device)


def step(engine: Engine, batches: list[dict[str, Tensor]], device: str) -> float:
    """Milliseconds of one step."""
    for parameter in engine.parameters():
        parameter.grad = None
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    engine.train_step(batches, MeanSquare())
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def difference(one: Engine, other: Engine) -> float:
    """The largest relative difference of a gradient."""
    return max(
        float((p.grad - q.grad).float().norm() / q.grad.float().norm())
        for p, q in zip(one.parameters(), other.parameters())
    )


def contest(args: argparse.Namespace) -> None:
    """All shares, on the one rank there is."""
    together = zp.build("dualpipev", ranks=1, microbatches=args.microbatches)
    schedules = (apart(together), together)
    shape = (args.tokens, args.width)
    batches = [{"inputs": torch.randn(shape, dtype=args.dtype, device=args.device)} for _ in range(args.microbatches)]
    print(f"{'rows sent':>9} {'apart ms':>9} {'overlap ms':>10} {'overlap/apart':>13} {'exposed ms: apart':>17} "
          f"{'overlap':>8} {'hidden':>7} {'gradients differ':>16}", flush=True)  # fmt: skip
    without: list[float] = []
    for share in (0.0, 0.125, 0.25, 0.5):
        engines = [engine(schedule, args, int(share * args.tokens)) for schedule in schedules]
        for _ in range(2):
            for one in engines:
                step(one, batches, args.device)
        rounds = [[step(one, batches, args.device) for one in engines] for _ in range(args.rounds)]
        times = [statistics.median(column) for column in zip(*rounds)]
        without = without or times
        exposed = [time - base for time, base in zip(times, without)]
        hidden = f"{1 - exposed[1] / exposed[0]:7.0%}" if share else f"{'-':>7}"
        print(f"{share:9.1%} {times[0]:9.2f} {times[1]:10.2f} {statistics.median(b / a for a, b in rounds):13.3f} "
              f"{exposed[0]:17.2f} {exposed[1]:8.2f} {hidden} {difference(*engines):16.1e}", flush=True)  # fmt: skip
        del engines, one
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2, help="per stage")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=12288)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if args.small:
        args.tokens, args.width, args.inner, args.rounds = 32, 64, 128, 2
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {hardware}; {args.microbatches} microbatches of {args.tokens} tokens, "
          f"2 stages of {args.blocks} blocks of width {args.width} and {args.inner}", flush=True)  # fmt: skip
    with LocalRanks(1) as ranks:
        ranks.run(contest, args, timeout=500)


if __name__ == "__main__":
    main()
