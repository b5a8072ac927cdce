"""What Overlaps hide of the exchanges of experts on a GPU, and a training step of experts beside plain transformers.

    python bench/experts.py                              # one GPU with CUDA MPS: about two minutes
    python bench/experts.py --device cpu --width 64 --expert-width 64 --tokens 64 --layers 4    # whether all of it runs

Two, then four NCCL ranks share the GPU; each says it is a host of its own and has its part of the SMs. Their all-to-all
goes over loopback at 2 to 3 GB/s, so experts are wide enough that computation takes about as long. Ways of a step:

off        no link: rows are copied on the GPU instead, so gradients are wrong
apart      F and B of an Overlap one after the other
streams    overlap="streams": on two streams
turns      overlap="turns", but without weight gradients in waits
turns, W   the same with weight gradients in the next wait, never a later one
overlap    overlap="turns"

The link adds apart - off. A way hides (apart - way) / what can be hidden: that is what all Overlaps save if the phases
of their layers, as measured in `overlap`, are walked in the best of all orders with two lanes (zeropipe.core.overlap).
Gradients are compared with those of `apart`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

import zeropipe as zp
from zeropipe.core.action import Kind, Overlap, actions_of
from zeropipe.core.overlap import find_best_order, walk_pair
from zeropipe.core.phases import LayerPhases, PhaseTimes
from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, hf_model, hf_stages, parallelize
from zeropipe.engine.backward import splitters, turn_times, turns
from zeropipe.engine.run.launch import LocalRanks, launch
from zeropipe.engine.torch_private import comm as torch_comm

WAYS = ("off", "apart", "streams", "turns", "turns, W", "overlap")
WARM_UP, STEPS = 3, 3  # an engine measures its second step
MICROBATCHES = 16


def config_of(args: argparse.Namespace, **changes: Any) -> Any:
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "hidden_size": args.width, "moe_intermediate_size": args.expert_width, "num_hidden_layers": args.layers,
        "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": args.heads, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 4096, "mlp_only_layers": [],
    }  # fmt: skip
    return Qwen3MoeConfig(**sizes | changes)


def data_of(seed: int, tokens: int, number: int, device: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(4096, (number, 1, tokens), generator=generator).to(device)
    return [{"input_ids": row, "labels": row} for row in rows]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# Overlaps


def without_overlaps(schedule: Schedule) -> Schedule:
    """The same order of actions, each a step of its own."""
    rows = [actions_of(row) for row in schedule.rows]
    return Schedule.of(schedule.problem, schedule.placement, rows, schedule.name)


def copy_instead(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """What `start_exchange` returns, without a link: the rows of this process, as many as would arrive."""
    rows = x.new_zeros(sum(received), *x.shape[1:])
    number = min(len(x), len(rows))
    rows[:number] = x[:number]
    return rows


@contextmanager
def as_in(way: str) -> Iterator[None]:
    """Switch off what a way does without."""
    with ExitStack() as stack:
        if way == "off":
            stack.enter_context(mock.patch.object(torch_comm, "start_exchange", copy_instead))
            stack.enter_context(mock.patch.object(torch_comm, "finish", lambda pending: pending))
        if way == "turns":
            stack.enter_context(mock.patch.object(splitters, "accumulate_at_turns", splitters.accumulate_directly))
        if way == "turns, W":
            stack.enter_context(mock.patch.object(turn_times, "share_to_delay", return_value=0.0))
        yield


@contextmanager
def keep_times(found: dict[Any, float]) -> Iterator[None]:
    """Keep the times that an engine measures between messages."""
    decide = turn_times.share_to_delay

    def keep(seconds: dict[Any, float]) -> float:
        found.update(seconds)
        return decide(seconds)

    with mock.patch.object(turn_times, "share_to_delay", keep):
        yield


@contextmanager
def measure_waits(waits: dict[str, list[tuple[Any, Any]]]) -> Iterator[None]:
    """Record when the stream begins and ends to wait for each message, by message; on a GPU."""
    finish, resume = torch_comm.finish, turns.resume
    last: list[Any] = []

    def timed_finish(pending: Tensor) -> Tensor:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        result = finish(pending)
        events[1].record()
        last[:] = [events]
        if pending.dtype == torch.int32:
            waits.setdefault("counts", []).append(events)
        return result

    def timed_resume(message: str) -> None:
        side = {None: "alone", turns_first: "B"}.get(turns.running(), "F")
        waits.setdefault(f"{message} {side}", []).append(last[0])
        resume(message)

    turns_first = turn_times.BACKWARD
    with mock.patch.object(torch_comm, "finish", timed_finish), mock.patch.object(turns, "resume", timed_resume):
        yield


def walk(seconds: dict[Any, float], link: float, num_layers: int) -> tuple[float, str]:
    """What an Overlap of two stages saves in the best order, and its phases in words. `link`: seconds of a message."""
    forward, dispatch, combine = turn_times.FORWARD, turn_times.DISPATCH, turn_times.COMBINE
    attention = (forward, combine), (turn_times.BACKWARD, dispatch), (turn_times.WEIGHTS, combine)
    experts = (forward, dispatch), (turn_times.BACKWARD, combine), (turn_times.WEIGHTS, dispatch)
    sent = PhaseTimes(link, link)
    layer = LayerPhases(
        PhaseTimes(*(seconds.get(name, 0.0) for name in attention)), sent,
        PhaseTimes(*(seconds.get(name, 0.0) for name in experts)), sent,
    )  # fmt: skip
    pair = walk_pair(layer, layer, order=find_best_order(layer, layer))[-1].end
    times = ", ".join(f"{1e3 * time:.1f}" for phase in (layer.attention, layer.experts) for time in phase)
    text = f"ms of a layer: attention F, I, W, experts F, I, W {times}; a message {1e3 * link:.1f}"
    return num_layers * (layer.total(Kind.F) + layer.total(Kind.B) - pair), text


def measure_ways(args: argparse.Namespace) -> tuple[dict[str, tuple[float, float, float]], dict[Any, float]]:
    """For each way: seconds of a step, the norm of the gradient, its largest difference from `apart`.

    And the seconds that all Overlaps of a step compute between messages.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if args.device == "cuda":
        os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.zeros(1, device="cuda:0")  # a mesh would look for a GPU of its own for every rank
    mesh = init_device_mesh(args.device, (1, size), mesh_dim_names=("pp", "dp_replicate"))
    schedule = zp.build("dualpipev", ranks=1, microbatches=MICROBATCHES)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float64
    stages = hf_stages(config_of(args), schedule, 0, device=args.device, dtype=dtype)
    parallelize(stages, mesh, ep=size, dispatch=args.dispatch)
    data = data_of(rank, args.tokens, MICROBATCHES, args.device)
    found: dict[str, tuple[float, float, float]] = {}
    first: list[Tensor] = []
    between: dict[Any, float] = {}
    for way in args.ways:
        used = without_overlaps(schedule) if way in ("off", "apart") else schedule
        in_turns = way not in ("off", "apart", "streams")
        warm_up = WARM_UP if in_turns or args.compile else 1
        options: dict[str, Any] = {"overlap": "turns" if in_turns else "streams", "direct_gradients": True}
        options["compile"] = args.compile
        with keep_times(between), as_in(way), Engine(used, stages, mesh=mesh, **options) as engine:
            times = []
            for _ in range(warm_up + STEPS):
                for parameter in engine.parameters():
                    parameter.grad = None
                synchronize(args.device)
                dist.barrier()
                start = time.perf_counter()
                engine.train_step(data, CausalLMLoss())
                synchronize(args.device)
                times.append(time.perf_counter() - start)
            if way == "overlap" and args.device == "cuda":
                for parameter in engine.parameters():
                    parameter.grad = None
                waits: dict[str, list[tuple[Any, Any]]] = {}
                with measure_waits(waits):
                    engine.train_step(data, CausalLMLoss())
                synchronize(args.device)
                waited = {name: sum(a.elapsed_time(b) for a, b in events) for name, events in waits.items()}
                if rank == 0:
                    print("rank 0's stream waits, ms of a step:", {name: round(ms) for name, ms in waited.items()})
            norm = engine.grad_norm()
            gradients = [parameter.grad for parameter in engine.parameters() if parameter.grad is not None]
            first = [gradient.clone() for gradient in gradients] if way == "apart" else first
            difference = max((float((a - b).norm() / b.norm()) for a, b in zip(gradients, first)), default=0.0)
            found[way] = statistics.median(times[warm_up:]), norm, difference
    return found, between


def show_ways(args: argparse.Namespace) -> None:
    """The table for one number of ranks."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    row = zp.build("dualpipev", ranks=1, microbatches=MICROBATCHES).rows[0]
    overlaps = sum(isinstance(step, Overlap) for step in row)
    with LocalRanks(args.ranks, backend=backend) as ranks:
        results = ranks.run(measure_ways, args, timeout=140)
    worst = {way: tuple(max(result[way][i] for result, _ in results) for i in range(3)) for way in args.ways}
    off, apart = worst["off"][0], worst["apart"][0]
    link, pairs = apart - off, overlaps * args.layers // 2
    between = {name: statistics.median(times[name] for _, times in results) / pairs for name in results[0][1]}
    saved, phases = walk(between, link / (4 * MICROBATCHES * args.layers), args.layers // 2)
    can_hide = overlaps * saved
    print(
        f"\n{args.ranks} ranks, ep={args.ranks}, {args.layers} layers, width {args.width}, 4 experts of "
        f"{args.expert_width}, top 2, {args.heads} heads of 64, a row for each {args.dispatch}, {MICROBATCHES} "
        f"microbatches of {args.tokens} tokens{', compiled' * args.compile}; "
        f"{overlaps / (2 * MICROBATCHES):.0%} of F and B in Overlaps\n{phases}\n"
        f"the link adds {1e3 * link:,.0f} ms to {1e3 * off:,.0f} ms; {1e3 * can_hide:,.0f} ms can be hidden"
    )
    print(f"{'':10} {'ms':>8} {'hidden':>8} {'gradient':>10} {'difference':>12}")
    for way, (seconds, norm, difference) in worst.items():
        hidden = f"{(apart - seconds) / can_hide:8.0%}" if way != "off" else f"{'':8}"
        compared = f"{norm:10.5f} {difference:12.1e}" if way != "off" else ""
        print(f"{way:10} {1e3 * seconds:8,.0f} {hidden} {compared}", flush=True)


# beside plain transformers


def measure_plain(args: argparse.Namespace) -> str:
    """Steps of 4 microbatches, forward and backward, in one process: ours and transformers with grouped_mm."""
    cuda = args.device == "cuda"
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768} if cuda else {}
    config = config_of(args, num_hidden_layers=4, **sizes)
    dtype = torch.bfloat16 if cuda else torch.float32
    data = data_of(0, 4096 if cuda else args.tokens, 4, args.device)
    schedule = zp.build("1f1b", ranks=1, microbatches=4)
    stages = hf_stages(config, schedule, 0, device=args.device, dtype=dtype)
    model = hf_model(config, device=args.device, dtype=dtype)
    model.config._experts_implementation = "grouped_mm"
    num_tokens = sum(batch["labels"].numel() - 1 for batch in data)

    def plain_step() -> float:
        total = 0.0
        for batch in data:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum") / num_tokens
            loss.backward()
            total += float(loss.detach())
        return total

    with Engine(schedule, stages, direct_gradients=True) as engine:
        steps = {"ours": lambda: engine.train_step(data, CausalLMLoss()).loss, "plain": plain_step}
        parameters = {"ours": engine.parameters(), "plain": list(model.parameters())}
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        losses = {}
        for _ in range(2 + 5):
            for name, step in steps.items():
                for parameter in parameters[name]:
                    parameter.grad = None
                synchronize(args.device)
                start = time.perf_counter()
                losses[name] = step()
                synchronize(args.device)
                times[name].append(time.perf_counter() - start)
    ours, plain = (statistics.median(times[name][2:]) for name in ("ours", "plain"))
    return (
        f"one process, {config.num_experts} experts of {config.moe_intermediate_size}, top "
        f"{config.num_experts_per_tok}: ours {1e3 * ours:,.0f} ms, plain transformers with grouped_mm "
        f"{1e3 * plain:,.0f} ms, {plain / ours:.2f} times as fast; losses {losses['ours']:.4f}, {losses['plain']:.4f}"
    )


# the GPU's server for several processes


@contextmanager
def mps_server() -> Iterator[dict[str, str]]:
    """CUDA MPS with folders of its own; yields the environment of its clients."""
    folder = tempfile.mkdtemp(prefix="mps-")
    place = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for path in place.values():
        os.makedirs(path)
    environment = os.environ | place
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)
    try:
        yield place
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, timeout=30, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def run_part(part: str, arguments: list[str], environment: dict[str, str]) -> None:
    """This script for one part, in a process that has not used the GPU."""
    command = [sys.executable, __file__, "--part", part, *arguments]
    subprocess.run(command, env=os.environ | environment, timeout=170, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--part", choices=["plain", "overlaps"], help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help="only this number of ranks")
    parser.add_argument("--dispatch", choices=["expert", "process"], default="expert")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--expert-width", type=int, help="default: 32768 with 32 heads, then 16384 with 256")
    parser.add_argument("--heads", type=int, help="of 64")
    parser.add_argument("--tokens", type=int, default=2048, help="of a microbatch, with two ranks; with four a half")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=WAYS, help="`off` and `apart` are needed")
    args = parser.parse_args()
    if args.part == "plain":
        print(launch(measure_plain, 1, args)[0], flush=True)
        return
    if args.part == "overlaps":
        show_ways(args)
        return
    names = ("device", "dispatch", "layers", "width")
    own = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
    own += ["--ways", ",".join(args.ways), *["--compile"] * args.compile]
    shapes = [(32768, 32), (16384, 256)]  # mostly experts; attention and experts alike
    if args.expert_width or args.heads:
        shapes = [(args.expert_width or 32768, args.heads or 32)]
    print(f"torch {torch.__version__}, {args.device}", flush=True)
    if args.ranks is None:
        run_part("plain", [*own, "--heads", "32", "--tokens", str(args.tokens)], {})
    with ExitStack() as stack:
        clients = stack.enter_context(mps_server()) if args.device == "cuda" else {}
        for ranks in (args.ranks,) if args.ranks else (2, 4):
            sizes = ["--ranks", str(ranks), "--tokens", str(args.tokens * 2 // ranks)]
            share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks), "TORCH_NCCL_HIGH_PRIORITY": "1"}
            for width, heads in shapes:
                shape = ["--expert-width", str(width), "--heads", str(heads)]
                run_part("overlaps", [*own, *sizes, *shape], clients | share)


if __name__ == "__main__":
    main()
