"""Is a W faster when products of equal shape on the same input run as one?

    python bench/group.py                  # CUDA, bf16
    python bench/group.py --device cpu     # one core, float32

Weights that share an input x (k and v; gate and up) get their gradients one by one (`addmm` into each gradient), or by
one product on their joined output gradients: with a gradient of its own per weight (join, multiply, add the pieces),
or into one gradient that the weights' are views of (join, `addmm`). The ways take turns; medians of paired ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

CASES = {  # how many weights, inputs, outputs
    "8B k,v": (2, 4096, 1024),
    "8B gate,up": (2, 4096, 12288),
    "0.6B k,v": (2, 1024, 1024),
    "0.6B gate,up": (2, 1024, 3072),
}


def ways(number: int, inputs: int, outputs: int, tokens: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """The same gradients, added three ways."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, dys = make(tokens, inputs), [make(tokens, outputs) for _ in range(number)]
    grads, joined = [make(outputs, inputs) for _ in range(number)], make(number * outputs, inputs)

    def one_by_one() -> None:
        for grad, dy in zip(grads, dys):
            grad.addmm_(dy.t(), x)

    def pieces() -> None:
        product = torch.mm(torch.cat(dys, 1).t(), x)
        for grad, piece in zip(grads, product.split(outputs)):
            grad.add_(piece)

    def views() -> None:
        joined.addmm_(torch.cat(dys, 1).t(), x)

    return {"one by one": one_by_one, "joined, added": pieces, "joined gradient": views}


def seconds(run: Callable[[], None], device: torch.device, times: int) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begin) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    device = torch.device(given.device)
    lengths = (2048, 4096, 8192) if device.type == "cuda" else (256,)
    torch.set_num_threads(1)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU core"
    print(f"torch {torch.__version__}, {hardware}")
    print(f"{'case':14} {'tokens':>6} {'one by one, us':>15} {'joined, added':>15} {'joined gradient':>16}")
    for case, shape in CASES.items():
        for tokens in lengths:
            contenders = ways(*shape, tokens, device)
            times = 20 if device.type == "cuda" else 1
            for run in contenders.values():
                seconds(run, device, 3)
            rounds = [[seconds(run, device, times) for run in contenders.values()] for _ in range(given.rounds)]
            alone = statistics.median(row[0] for row in rounds)
            ratios = [statistics.median(row[i] / row[0] for row in rounds) for i in (1, 2)]
            print(f"{case:14} {tokens:6} {1e6 * alone:15.0f} {ratios[0]:15.3f} {ratios[1]:16.3f}", flush=True)


if __name__ == "__main__":
    main()
