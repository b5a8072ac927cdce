"""Training in float8 beside bfloat16 on one GPU: time, memory and the loss, in the same run.

    python bench/float8.py                        # all parts, 150 seconds at most
    python bench/float8.py --parts steps --trace out/float8
    python bench/float8.py --small --device cpu   # only whether all of it runs

`steps`: training steps of 4 layers of Qwen3-8B's size with a small vocabulary, compiled, 8 microbatches of 4,096
tokens: weights in bfloat16, gradients and AdamW's weights and state in float32. "whole" has full backwards, "split" I
and W. Each mode is a process of its own; they compile at the same time, then take turns. `curves`: 150 steps of 4
layers of Qwen3-0.6B's size from the same weights over the same data, a random Markov chain of 1,024 tokens with entropy
1.386; `bfloat16-b` has other data, for what a difference means. `products`: the products of one layer alone.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODES = {"bfloat16": "none", "float8-tensor": "tensor", "float8-row": "row"}
CURVES = {**MODES, "bfloat16-b": "none"}
BACKWARDS = {"whole": "1f1b", "split": "zb-h1"}  # by name of the schedule
WARM_UP, STEPS, ROUNDS = 3, 4, 2
SUCCESSORS, CURVE_VOCABULARY = 4, 1024
PRODUCTS = {"q, o": (4096, 4096), "k, v": (4096, 1024), "gate, up": (4096, 12288), "down": (12288, 4096)}  # in, out


class Sizes:
    """What a run trains."""

    def __init__(self, is_small: bool) -> None:
        self.model, self.layers, self.vocabulary = "qwen3-8b", 4, 8192
        self.tokens, self.microbatches = 4096, 8
        self.curve_model, self.curve_steps, self.curve_rows = "qwen3-0.6b", 150, (4, 4, 512)
        self.changes: dict[str, Any] = {}
        if is_small:
            self.tokens, self.microbatches, self.curve_steps, self.curve_rows = 48, 2, 8, (2, 2, 32)
            self.changes = {
                "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16,
            }  # fmt: skip

    def config(self, name: str, vocabulary: int) -> Any:
        from transformers import AutoConfig

        from zeropipe.core.model.configs import find_built_in

        data: dict[str, Any] = {**(find_built_in(name) or {}), **self.changes}
        return AutoConfig.for_model(**data | {"num_hidden_layers": self.layers, "vocab_size": vocabulary})


class Run:
    """An engine with an optimizer on one process."""

    def __init__(self, args: argparse.Namespace, config: Any, mode: str, schedule: Any, compile: bool) -> None:
        from zeropipe.engine import CausalLMLoss, Engine, MasterWeights, hf_stages, main_gradients

        self.device, self.loss = args.device, CausalLMLoss()
        self.stages: dict[int, Any] = hf_stages(config, schedule, 0, dtype=torch.bfloat16, device=args.device)
        for stage in self.stages.values():
            main_gradients(stage, torch.float32)
        self.options = {"compile": compile, "direct_gradients": True, "float8": MODES.get(mode, "none")}
        self.engine = Engine(schedule, self.stages, **self.options)
        self.optimizer = MasterWeights(
            torch.optim.AdamW, self.engine.parameters(), lr=1e-3, low_bits=True, fused=args.device == "cuda",
            betas=(0.9, 0.95),
        )  # fmt: skip

    def use(self, schedule: Any) -> None:
        """Go on with another schedule."""
        from zeropipe.engine import Engine

        self.engine.close()
        self.engine = Engine(schedule, self.stages, **self.options)

    def step(self, data: list[dict[str, Tensor]]) -> float:
        loss = self.engine.train_step(data, self.loss).loss
        self.engine.clip_grad_norm(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def build(name: str, microbatches: int) -> Any:
    import zeropipe as zp

    return zp.build(name, ranks=1, microbatches=microbatches)


def say(**values: Any) -> None:
    """A line for the process that started this one."""
    print("RESULT " + json.dumps(values), flush=True)


def start_group(device: str) -> None:
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# the processes


def measure_steps(args: argparse.Namespace, sizes: Sizes) -> None:
    """Compile, say that this is done, and measure each time that a line comes."""
    start_group(args.device)
    begin = time.perf_counter()
    config = sizes.config(sizes.model, sizes.vocabulary)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(sizes.vocabulary, (sizes.microbatches, 1, sizes.tokens), generator=generator).to(args.device)
    data = [{"input_ids": row, "labels": row} for row in rows]
    run = None
    for backward, name in BACKWARDS.items():
        schedule = build(name, sizes.microbatches)
        if run is None:
            run = Run(args, config, args.mode, schedule, compile=True)
        else:
            run.use(schedule)
        for _ in range(WARM_UP):
            run.step(data)
        synchronize(args.device)
        say(backward=backward, ready=time.perf_counter() - begin)
    assert run is not None
    say(ready="all")
    for line in sys.stdin:
        backward = line.strip()
        run.use(build(BACKWARDS[backward], sizes.microbatches))
        run.step(data)
        synchronize(args.device)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times, loss = [], 0.0
        for _ in range(STEPS):
            start = time.perf_counter()
            loss = run.step(data)
            synchronize(args.device)
            times.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
        say(times=times, peak=peak, loss=loss)
        if args.trace and backward == "split" and args.device == "cuda":
            try:
                write_trace(Path(f"{args.trace}.{args.mode}.txt"), lambda: run.step(data))
            except Exception:
                traceback.print_exc()
            args.trace = None
        say(done=backward)


def write_trace(path: Path, step: Callable[[], object]) -> None:
    """The kernels of a step, by time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    kernels = sorted(
        (event for event in found.key_averages() if event.self_device_time_total),
        key=lambda event: -event.self_device_time_total,
    )
    lines = [f"{sum(event.self_device_time_total for event in kernels) / 1e3:9.2f} ms all kernels"]
    lines += [f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:6} {event.key[:140]}" for event in kernels]
    path.write_text("\n".join(lines[:60]) + "\n")


def measure_curve(args: argparse.Namespace, sizes: Sizes) -> None:
    """Train a small model, not compiled."""
    start_group(args.device)
    config = sizes.config(sizes.curve_model, CURVE_VOCABULARY)
    microbatches, _, _ = sizes.curve_rows
    run = Run(args, config, args.mode, build("zb-h1", microbatches), compile=False)
    losses = []
    for data in markov(sizes, seed=1 if args.mode == "bfloat16-b" else 0, device=args.device):
        losses.append(run.step(data))
    say(losses=losses)


def markov(sizes: Sizes, seed: int, device: str) -> Iterator[list[dict[str, Tensor]]]:
    """Steps of a chain in which each token is followed by one of four."""
    chain = torch.Generator().manual_seed(7)
    following = torch.randint(CURVE_VOCABULARY, (CURVE_VOCABULARY, SUCCESSORS), generator=chain)
    generator = torch.Generator().manual_seed(seed)
    microbatches, rows, length = sizes.curve_rows
    for _ in range(sizes.curve_steps):
        tokens = [torch.randint(CURVE_VOCABULARY, (microbatches * rows,), generator=generator)]
        for _ in range(length - 1):
            choice = torch.randint(SUCCESSORS, (microbatches * rows,), generator=generator)
            tokens.append(following[tokens[-1], choice])
        whole = torch.stack(tokens, 1).to(device)
        yield [{"input_ids": part, "labels": part} for part in whole.split(rows)]


def measure_products(args: argparse.Namespace, sizes: Sizes) -> None:
    """Milliseconds of the parts of a layer in float8."""
    say(checks=list(check_numbers(args.device)))
    for name, (inputs, outputs) in PRODUCTS.items():
        found: dict[str, float | str] = {}
        for call_name, call in list_calls(sizes.tokens, inputs, outputs, args.device).items():
            try:
                found[call_name] = time_call(call, args.device)
            except Exception as error:
                found[call_name] = f"{type(error).__name__}: {error}"[:200]
        say(product=name, shape=[sizes.tokens, inputs, outputs], ms=found)


def list_calls(rows: int, inputs: int, outputs: int, device: str) -> dict[str, Callable[[], object]]:
    """The parts of a layer, by name."""
    from zeropipe.engine.torch_private.float8 import E4M3, E5M2, multiply, quantize, transpose

    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
    grad = torch.zeros(outputs, inputs, device=device)
    x8, w8, xr, wr = quantize(x, E4M3), quantize(weight, E4M3), quantize(x, E4M3, 1), quantize(weight, E4M3, 1)
    g8 = quantize(x, E5M2)
    bf16, f32 = torch.bfloat16, torch.float32
    return {
        "bfloat16": lambda: x @ weight.t(),
        "tensor fast": lambda: multiply(x8, w8, bf16, fast=True),
        "tensor": lambda: multiply(x8, w8, bf16, fast=False),
        "tensor E5M2": lambda: multiply(g8, w8, bf16, fast=False),
        "tensor E5M2 fast": lambda: multiply(g8, w8, bf16, fast=True),
        "tensor to float32": lambda: multiply(x8, w8, f32, fast=False),
        "row fast": lambda: multiply(xr, wr, bf16, fast=True),
        "row": lambda: multiply(xr, wr, bf16, fast=False),
        "convert tensor": lambda: quantize(x, E4M3),
        "convert rows": lambda: quantize(x, E4M3, 1),
        "convert columns": lambda: quantize(x, E4M3, 0),
        "transpose": lambda: transpose(x8.data),
        "transpose by copy": lambda: x8.data.t().contiguous(),
        "convert weight": lambda: quantize(weight, E4M3),
        "transpose weight": lambda: transpose(w8.data),
        "add bfloat16": lambda: grad.add_(weight),
        "add float32": lambda: grad.add_(grad),
    }  # fmt: skip


def check_numbers(device: str) -> Iterator[str]:
    """Compare numbers of the device with those of the CPU."""
    from zeropipe.engine.torch_private.float8 import E4M3, E5M2, Float8, multiply, quantize, transpose

    generator = torch.Generator().manual_seed(0)
    for dim in (None, 1):
        x, y = (torch.randn(rows, 192, generator=generator).bfloat16() * 3e-4 for rows in (100, 64))
        try:
            pairs = [(quantize(x, E5M2 if dim is None else E4M3, dim), quantize(y, E4M3, dim))]
            pairs.append(
                (quantize(x.to(device), E5M2 if dim is None else E4M3, dim), quantize(y.to(device), E4M3, dim))
            )
            same = [
                torch.equal(a.data.float(), b.data.float().cpu()) and torch.equal(a.power, b.power.cpu())
                for a, b in zip(*pairs)
            ]
            turned = torch.equal(transpose(pairs[0][0].data).float(), transpose(pairs[1][0].data).float().cpu())
            wanted = multiply(*pairs[0], torch.float32, fast=False)
            for fast in (False, True):
                found = multiply(*(Float8(*each) for each in pairs[1]), torch.float32, fast=fast).cpu()
                error = float((found - wanted).norm() / wanted.norm())
                yield f"dim {dim} fast {fast}: same numbers {same}, transposed {turned}, product differs {error:.2e}"
        except Exception:
            yield traceback.format_exc()


def time_call(call: Callable[[], object], device: str) -> float:
    for _ in range(3):
        call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / 10 * 1e3


# the process that starts them


class Worker:
    """A process of this script, whose lines a thread reads."""

    def __init__(self, args: argparse.Namespace, role: str, mode: str) -> None:
        self.mode = mode
        command = [sys.executable, __file__, "--inside", role, "--mode", mode, "--device", args.device]
        command += ["--small"] * args.small + (["--trace", args.trace] if args.trace else [])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ},
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._others: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def result(self, deadline: float) -> dict[str, Any] | None:
        """Its next result; None, with what it printed last, if it ended or took too long."""
        while True:
            try:
                line = self._lines.get(timeout=max(0.1, deadline - time.perf_counter()))
            except queue.Empty:
                self._fail("took too long")
                return None
            if line is None:
                self._fail(f"ended with {self._process.wait()}")
                return None
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line[7:])
                return found
            self._others.append(line)

    def _fail(self, why: str) -> None:
        print(f"{self.mode}: {why}", *(f"  {line.rstrip()}" for line in self._others[-40:]), sep="\n", flush=True)
        self.end()

    def ask(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        self._process.kill()


def run_steps(args: argparse.Namespace, sizes: Sizes, workers: list[Worker], deadline: float) -> None:
    """Let the workers that are ready measure in turns, and print their medians."""
    ready = []
    for worker in workers:
        while (found := worker.result(deadline)) is not None and found["ready"] != "all":
            print(f"{worker.mode} {found['backward']}: ready after {found['ready']:.1f} s", flush=True)
        if found is not None:
            ready.append(worker)
    times: dict[tuple[str, str], list[float]] = {}
    peaks: dict[tuple[str, str], float] = {}
    for _ in range(ROUNDS):
        for backward in BACKWARDS:
            for worker in [*ready]:
                worker.ask(backward)
                found = worker.result(deadline)
                if found is not None:
                    times.setdefault((worker.mode, backward), []).extend(found["times"])
                    peaks[worker.mode, backward] = found["peak"]
                    found = worker.result(deadline)
                if found is None:
                    ready.remove(worker)
    for worker in ready:
        worker.end()
    from zeropipe.estimating.model import open_model
    from zeropipe.train.loop.metrics import count_flops

    shapes: Any = open_model(sizes.config(sizes.model, sizes.vocabulary).to_dict())
    flops = count_flops(shapes, sizes.tokens, is_frozen=False) * sizes.microbatches
    print(f"{'':14} {'backward':8} {'ms':>8} {'TFLOP/s':>8} {'peak GiB':>9} {'time':>7} {'peak':>7}  over bfloat16")
    for (mode, backward), each in sorted(times.items(), key=lambda item: [*BACKWARDS].index(item[0][1])):
        seconds, peak = statistics.median(each), peaks[mode, backward]
        plain = times.get(("bfloat16", backward))
        ratios = "" if plain is None else (
            f"{seconds / statistics.median(plain):7.3f} {peak / max(peaks['bfloat16', backward], 1e-9):7.3f}"
        )  # fmt: skip
        print(f"{mode:14} {backward:8} {seconds * 1e3:8.1f} {flops / seconds / 1e12:8.1f} {peak:9.2f} {ratios}")
    sys.stdout.flush()


def print_curves(workers: list[Worker], deadline: float) -> None:
    for worker in workers:
        found = worker.result(deadline)
        if found is not None:
            losses = found["losses"]
            points = " ".join(f"{loss:.3f}" for loss in losses[:: max(1, len(losses) // 10)])
            print(f"{worker.mode:14} {points}; last 10 steps {statistics.mean(losses[-10:]):.4f}", flush=True)
        worker.end()


def print_products(worker: Worker, deadline: float) -> None:
    while (found := worker.result(deadline)) is not None:
        if "checks" in found:
            print(*found["checks"], sep="\n", flush=True)
            continue
        print(f"{found['product']} {found['shape']}", flush=True)
        for name, value in found["ms"].items():
            print(f"  {name:20} {value if isinstance(value, str) else f'{value:8.3f} ms'}", flush=True)
        if found["product"] == [*PRODUCTS][-1]:
            return


def main() -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="steps,curves,products")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=145)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--trace", help="the start of the names of files with the kernels of one step")
    parser.add_argument("--inside", choices=["steps", "curves", "products"], help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="bfloat16", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes, deadline = Sizes(args.small), begin + args.seconds
    if args.inside is not None:
        roles = {"steps": measure_steps, "curves": measure_curve, "products": measure_products}
        roles[args.inside](args, sizes)
        return
    parts, modes = args.parts.split(","), args.modes.split(",")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    steps = [Worker(args, "steps", mode) for mode in modes if "steps" in parts]
    curves = [Worker(args, "curves", mode) for mode in CURVES if "curves" in parts]
    try:
        print_curves(curves, begin + 0.6 * args.seconds)  # they end before a step is measured
        if steps:
            run_steps(args, sizes, steps, begin + 0.9 * args.seconds)
        if "products" in parts:
            worker = Worker(args, "products", "bfloat16")
            try:
                print_products(worker, deadline)
            finally:
                worker.end()
    finally:
        for each in [*steps, *curves]:
            each.end()
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
