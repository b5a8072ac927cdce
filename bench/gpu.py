"""Training steps on one GPU, ours beside plain transformers and Liger, in the same run.

    python bench/gpu.py                                        # all rows
    python bench/gpu.py --rows 1.7b,1.7b-packed --peers ours,plain
    python bench/gpu.py --rows qwen3-4b@8192:packed --peers ours --set engine.attention=flex --trace out/step

Every peer has the same weights' precision: computation in bfloat16, gradients and AdamW's weights and state in float32
(adapters: bfloat16 base, float32 adapter). `plain` is transformers with each layer compiled, head and loss compiled
together; packed rows have flex attention. `liger` is transformers with Liger's kernels, whose head and loss are one.
`ours` is `zeropipe train`. FLOPs are those that must be computed: attention of packed rows counts pairs of tokens
within a sample, frozen weights have no gradient. Each peer of a row is a process of its own. A row is one of ROWS, or
MODEL@TOKENS with `:packed` for packed rows; `pipeline` runs schedules on 4 processes that share the GPU under MPS.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from experts import mps_server
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU only to see whether all of it runs
WARM_UP, STEPS = 4, 8
ROWS = {  # by name: model@setting
    "0.6b": "qwen3-0.6b@4096",
    "1.7b": "qwen3-1.7b@4096",
    "1.7b-packed": "qwen3-1.7b@4096:packed",
    "1.7b-packed-16k": "qwen3-1.7b@16384:packed",
    "8b-lora": "qwen3-8b:lora@4096",
    "30b-a3b": "qwen3-30b-a3b:4@4096",  # 4 layers
}
PIPELINE = (
    "--device cuda --ranks 4 --model qwen3-8b --num-layers 8 --vocabulary 8192 --sequence 2048 --microbatches 12 "
    "--dtype bfloat16 --compile --schedules 1f1b,zbv,dualpipev"
)
SHORTEST, LONGEST = 64, 1024  # tokens of a packed sample
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


class Measured(Exception):
    """All steps of a setting are measured."""


class Setting(NamedTuple):
    """Rows of a step."""

    sequence: int
    is_packed: bool

    @staticmethod
    def parse(text: str) -> Setting:
        sequence, _, word = text.partition(":")
        return Setting(int(sequence), word == "packed")

    @property
    def num_rows(self) -> int:
        return max(2, min(8, 8 * 4096 // self.sequence))

    def __str__(self) -> str:
        return f"{self.sequence}{':packed' * self.is_packed}"


class Result(NamedTuple):
    """Measurements of one peer in one setting."""

    model: str
    setting: str
    peer: str
    tokens_per_second: float
    tflops: float  # per second, of those that must be computed
    peak: float  # GiB allocated
    reserved: float  # GiB
    first_steps: float  # seconds of the warm-up, with compilation
    loss: float


def split_model(model: str) -> tuple[str, int | None, bool]:
    """Name, number of layers, whether an adapter is trained."""
    name, _, word = model.partition(":")
    return name, int(word) if word.isdigit() else None, word == "lora"


def sample_lengths(setting: Setting, num_samples: int) -> list[int]:
    if not setting.is_packed:
        return [setting.sequence] * num_samples
    return np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, num_samples).tolist()


def flops_per_token(model: str, setting: Setting) -> float:
    """FLOPs that a token needs on average, from those of two lengths: all but attention are linear in the length."""
    from zeropipe.estimating.model import open_model
    from zeropipe.train.loop.metrics import count_flops

    name, layers, is_lora = split_model(model)
    shapes: Any = open_model(config_of(name, layers).to_dict())
    short, long = (count_flops(shapes, n, is_frozen=is_lora) for n in (1024, 2048))
    quadratic = (long - 2 * short) / (2 * 1024**2)
    linear = short / 1024 - quadratic * 1024
    lengths = np.array(sample_lengths(setting, 4096), dtype=float)
    return linear + quadratic * float((lengths**2).sum() / lengths.sum())


def config_of(name: str, layers: int | None) -> Any:
    from transformers import AutoConfig

    from zeropipe.core.model.configs import find_built_in

    data: dict[str, Any] = dict(find_built_in(name) or {})
    return AutoConfig.for_model(**data | ({"num_hidden_layers": layers} if layers else {}))


# peers


def run_ours(model: str, setting: Setting, overrides: list[str], trace: str | None) -> Result:
    from zeropipe.train.config.tables import RunConfig
    from zeropipe.train.loop.trainer import train
    from zeropipe.train.start import use_expandable_segments

    use_expandable_segments()
    name, layers, is_lora = split_model(model)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        data: dict[str, Any] = {"sequence": setting.sequence, "batch": setting.num_rows, "microbatch": 1}
        if setting.is_packed:
            data |= {"kind": "tokens", "path": write_tokens(Path(folder), setting)}
        config: dict[str, Any] = {
            "model": {"path": name, "weights": "random", "dtype": "bfloat16", "num_layers": layers},
            "engine": {"device": DEVICE, "compile": True},
            "data": data,
            "optimizer": {"lr": 1e-5, "clip": 1.0},
            "train": {"output": f"{folder}/out", "steps": WARM_UP + STEPS + 1, "record_every": 0},
            "checkpoint": {"export": False, "resume": "never"},
            "log": {"every": 1000},
        }  # fmt: skip
        if is_lora:
            config["lora"] = {"rank": LORA["r"], "alpha": float(LORA["lora_alpha"])}
        for text in overrides:
            key, _, value = text.partition("=")
            table, _, field = key.partition(".")
            config.setdefault(table, {})[field] = json.loads(value) if value[:1] in "0123456789tf{[" else value
        with tracing(trace) as on_step, suppress(Measured):

            def after_step(record: Any) -> None:
                on_step()
                clock.tick(record.loss)
                if record.step == WARM_UP + STEPS:
                    raise Measured  # before the last checkpoint is written

            train(RunConfig.model_validate(config), after_step)
    return clock.result(model, setting, "ours")


def write_tokens(folder: Path, setting: Setting) -> str:
    """A file of random tokens in documents of random lengths."""
    lengths = sample_lengths(setting, 12 * (WARM_UP + STEPS + 4) * setting.num_rows * setting.sequence // 4096)
    rng = np.random.default_rng(1)
    np.save(folder / "tokens.npy", rng.integers(0, 150_000, sum(lengths), dtype=np.uint32))
    np.save(folder / "documents.npy", np.cumsum([0, *lengths[:-1]]))
    (folder / "tokens.npy.json").write_text('{"offsets": "documents.npy"}')
    return str(folder / "tokens.npy")


def run_transformers(model: str, setting: Setting, peer: str, trace: str | None) -> Result:
    import transformers

    name, layers, is_lora = split_model(model)
    config = config_of(name, layers)
    config._attn_implementation = "flex_attention" if setting.is_packed and peer == "plain" else "sdpa"
    if "moe" in config.model_type:
        config._experts_implementation = "grouped_mm"
    if peer == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3, apply_liger_kernel_to_qwen3_moe

        (apply_liger_kernel_to_qwen3_moe if "moe" in config.model_type else apply_liger_kernel_to_qwen3)()
    transformers.set_seed(0)
    torch.set_default_device(DEVICE)
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.set_default_device(None)
    if is_lora:
        import peft

        peft.get_peft_model(lm, peft.LoraConfig(**LORA, task_type="CAUSAL_LM"))
        for parameter in lm.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    update = make_update([p for p in lm.parameters() if p.requires_grad])
    if peer == "plain":
        for layer in lm.model.layers:
            layer.compile(dynamic=False)
    head = lm.lm_head
    loss_of = torch.compile(token_loss, dynamic=False) if peer == "plain" else None
    clock = Clock()
    with tracing(trace) as on_step:
        for step in range(WARM_UP + STEPS):
            rows = list(make_rows(setting, step))
            count = sum(int((labels != -100).sum()) for _, labels, _ in rows)
            total = torch.zeros((), device=DEVICE)
            for ids, labels, positions in rows:
                with torch.autocast(DEVICE, torch.bfloat16, enabled=is_lora):
                    if loss_of is None:
                        loss = lm(
                            input_ids=ids, position_ids=positions, use_cache=False, shift_labels=labels, labels=labels,
                            num_items_in_batch=torch.tensor(count, device=DEVICE),
                        ).loss  # fmt: skip
                    else:
                        hidden = lm.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
                        loss = loss_of(hidden, head.weight, labels) / count
                loss.backward()
                total += loss.detach()
            update()
            on_step()
            clock.tick(float(total))
    return clock.result(model, setting, peer)


def token_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross entropy of shifted labels."""
    logits = (hidden @ weight.T).float()
    return nn.functional.cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum")


def make_update(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Sum gradients in float32; the update clips them and steps AdamW over float32 weights."""
    mains = [p if p.dtype == torch.float32 else p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(mains, lr=1e-5, fused=DEVICE == "cuda")

    def accumulate(parameter: Tensor, main: Tensor) -> None:
        assert parameter.grad is not None
        if main.grad is None:
            main.grad = parameter.grad.float()
        else:
            main.grad.add_(parameter.grad)
        parameter.grad = None

    for parameter, main in zip(parameters, mains):
        if main is not parameter:
            parameter.register_post_accumulate_grad_hook(lambda p, main=main: accumulate(p, main))

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(mains, 1.0)
        optimizer.step()
        torch._foreach_copy_([p.data for p in parameters], [m.data for m in mains])
        optimizer.zero_grad()

    return update


def make_rows(setting: Setting, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(Token ids, shifted labels, position ids) of the rows of a step."""
    rng = np.random.default_rng(seed)
    for _ in range(setting.num_rows):
        ids = torch.from_numpy(rng.integers(0, 150_000, setting.sequence))[None].to(DEVICE)
        lengths = [setting.sequence]
        if setting.is_packed:
            lengths = []
            while sum(lengths) < setting.sequence:
                lengths.append(min(int(rng.integers(SHORTEST, LONGEST + 1)), setting.sequence - sum(lengths)))
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        labels = torch.cat([ids[0, 1:], ids.new_full((1,), -100)])[None]
        labels[0, torch.tensor(lengths).cumsum(0) - 1] = -100
        yield ids, labels, positions.to(DEVICE)


# measuring


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Clock:
    """Times steps between their ends."""

    def __init__(self) -> None:
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._ends, self._losses = [time.perf_counter()], list[float]()

    def tick(self, loss: float) -> None:
        synchronize()
        self._ends.append(time.perf_counter())
        self._losses.append(loss)
        if len(self._losses) == WARM_UP and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def result(self, model: str, setting: Setting, peer: str) -> Result:
        steps = np.diff(self._ends)[WARM_UP:]
        rate = setting.num_rows * setting.sequence / statistics.median(steps)
        return Result(
            model, str(setting), peer, rate, rate * flops_per_token(model, setting) / 1e12,
            torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30,
            self._ends[WARM_UP] - self._ends[0], self._losses[-1],
        )  # fmt: skip


class tracing:
    """A context whose value is called after each step; writes a profile of the last step's kernels to a file."""

    def __init__(self, path: str | None) -> None:
        self._path, self._step, self._profile = path, 0, None

    def __enter__(self) -> Callable[[], None]:
        return self._on_step

    def _on_step(self) -> None:
        self._step += 1
        if self._path is not None and self._step == WARM_UP + STEPS - 1:
            from torch.profiler import ProfilerActivity, profile

            synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._profile is not None and self._path is not None:
            synchronize()
            self._profile.__exit__(None, None, None)
            events = self._profile.key_averages()
            kernels = sorted(
                (e for e in events if e.device_type.name == "CUDA"), key=lambda e: -e.self_device_time_total
            )
            busy = sum(e.self_device_time_total for e in kernels) / 1e3
            lines = [f"kernels {busy:.1f} ms", *find_gaps(self._profile)]
            lines += [f"{e.self_device_time_total / 1e3:9.2f} ms {e.count:6} {e.key[:130]}" for e in kernels[:45]]
            Path(self._path).write_text("\n".join(lines) + "\n")


def find_gaps(profile: Any) -> list[str]:
    """The time between kernels, and the kernels before and after the longest gaps."""
    kernels = sorted(
        (e for e in profile.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start
    )  # fmt: skip
    total, gaps, end = 0.0, dict[tuple[str, str], list[float]](), kernels[0].time_range.start
    for before, after in pairwise(kernels):
        end = max(end, before.time_range.end)
        gap = after.time_range.start - end
        if gap > 0:
            total += gap
            gaps.setdefault((before.name[:60], after.name[:60]), []).append(gap)
    longest = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:12]
    return [f"gaps {total / 1e3:.1f} ms"] + [
        f"{sum(found) / 1e3:9.2f} ms {len(found):6} longest {max(found):.0f} us: {before} | {after}"
        for (before, after), found in longest
    ]


def run_inside(model: str, setting: Setting, peer: str, overrides: list[str], trace: str | None) -> None:
    """Run one row of one peer in this process."""
    path = trace and f"{trace}.{model}.{setting}.{peer}.txt".replace(":", "-")
    if peer == "ours":
        result = run_ours(model, setting, overrides, path)
    else:
        result = run_transformers(model, setting, peer, path)
    print("RESULT " + json.dumps(result), flush=True)


def run_apart(row: str, peer: str, overrides: list[str], trace: str | None) -> Result | None:
    """Run one row of one peer in a process of its own."""
    command = [sys.executable, __file__, "--inside", "--rows", row, "--peers", peer]
    command += [word for text in overrides for word in ("--set", text)]
    command += ["--trace", trace] if trace else []
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"} if peer != "ours" else None
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode:
        print(f"{row} {peer}: ended with {done.returncode}", flush=True)
    return Result(*json.loads(lines[-1][7:])) if lines else None


def print_result(one: Result, plain: Result | None) -> None:
    ratios = ("", "") if plain is None else (
        f"{one.tokens_per_second / plain.tokens_per_second:.3f}", f"{one.peak / plain.peak:.3f}",
    )  # fmt: skip
    print(f"{one.model:16} {one.setting:13} {one.peer:6} {one.tokens_per_second:9,.0f} {one.tflops:8.1f} "
          f"{one.peak:10.1f} {one.reserved:9.1f} {one.first_steps:15.1f} {one.loss:8.4f} {ratios[0]:>14} "
          f"{ratios[1]:>9}", flush=True)  # fmt: skip


def run_pipeline() -> None:
    """Schedules on 4 processes, each with a quarter of the multiprocessors."""
    script = str(Path(__file__).with_name("pipeline.py"))
    with mps_server() as place:
        environment = {**os.environ, **place, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
        subprocess.run([sys.executable, script, *PIPELINE.split()], env=environment, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join([*ROWS, "pipeline"]))
    parser.add_argument("--peers", default="ours,plain,liger")
    parser.add_argument(
        "--set", action="append", default=[], help="a field of our training file, like engine.compile=false"
    )
    parser.add_argument("--trace", help="the start of the names of files with the kernels of one step")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the process of one row and peer
    args = parser.parse_args()
    rows = [ROWS.get(name, name) for name in args.rows.split(",")]
    if args.inside:
        model, _, setting = rows[0].partition("@")
        run_inside(model, Setting.parse(setting), args.peers, args.set, args.trace)
        return
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}", flush=True)
    print(f"{'model':16} {'setting':13} {'peer':6} {'tokens/s':>9} {'TFLOP/s':>8} {'peak, GiB':>10} {'reserved':>9} "
          f"{'first steps, s':>15} {'loss':>8} {'against plain':>14} {'its peak':>9}", flush=True)  # fmt: skip
    for row in rows:
        if row == "pipeline":
            run_pipeline()
            continue
        found = [run_apart(row, peer, args.set, args.trace) for peer in args.peers.split(",")]
        plain = next((one for one in found if one is not None and one.peer == "plain"), None)
        for one in found:
            if one is not None:
                print_result(one, plain)


if __name__ == "__main__":
    main()
