"""Wall time of one training step: zeropipe's schedules beside torch's own, same model, same data, CPU ranks.

    python bench/step.py                                # 8 ranks
    python bench/step.py --ranks 2 --microbatches 4 --repeats 2

One thread per rank. All contenders live in the same processes and take turns, so that a slow moment of the machine
hits all of them; a ratio is the median over the rounds of the two times of one round. CPU time is that of all ranks
together: what a runtime computes and does around it, without the bubbles. Peak memory is taken in a separate round, as
the growth of the resident set over the step plus the buffers a runtime keeps between steps. The simulated time uses the
costs of the contender's own recorded step, the shortest of five: the one the machine disturbed least.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropipe as zp
from zeropipe.engine import Engine
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.errors import EngineError

OURS = ("1f1b", "interleaved", "zbv", "dualpipev")
TORCH = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
SAME = {"1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "zbv": "ScheduleZBVZeroBubble"}
COLUMNS = {
    "seconds": "s", "over_fastest_torch": "/torch", "over_same": "/same", "best": "best", "cpu": "cpu s",
    "cpu_over_same": "/same", "simulated_over_recorded": "sim/rec",
}  # fmt: skip
RECORDINGS = 5
M_MMAP_THRESHOLD = -3


class Size(NamedTuple):
    """How big the benchmark is."""

    ranks: int
    microbatches: int
    blocks: int
    width: int
    tokens: int
    repeats: int


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def stage(size: Size, index: int, num_stages: int) -> nn.Module:
    """One of `num_stages` equal cuts of the model."""
    each = size.blocks // num_stages
    return nn.Sequential(*(Block(size.width, index * each + block) for block in range(each)))


def data(size: Size) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the whole batch: one sequence per microbatch."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(size.microbatches, size.tokens, size.width, generator=generator) for _ in range(2))
    return x, y


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class MeanSquare:
    """The same as zeropipe's engine wants it; a known count saves it from keeping older gradients apart."""

    def count(self, microbatch: dict[str, Tensor]) -> int:
        return 1

    def __call__(self, output: Tensor, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return mean_square(output, microbatch["target"]), 1


class Ours:
    """A zeropipe schedule."""

    def __init__(self, name: str, size: Size) -> None:
        self.schedule = zp.build(name, ranks=size.ranks, microbatches=size.microbatches)
        rank, number = dist.get_rank(), self.schedule.num_stages
        self.stages = {s: stage(size, s, number) for s in self.schedule.placement.stages_of(rank)}
        self.engine = Engine(self.schedule, self.stages, timeout=120, direct_gradients=True)
        x, y = data(size)
        self.batches = [{"inputs": a, "target": b} for a, b in zip(x.split(1), y.split(1))]

    def step(self) -> float:
        return self.engine.train_step(self.batches, MeanSquare()).loss

    def recorded(self) -> zp.Timeline:
        self.engine.record = True
        timelines = []
        for _ in range(RECORDINGS):
            self.step()
            timelines.append(self.engine.timeline())
        self.engine.record = False
        return min(timelines, key=lambda timeline: timeline.makespan)

    def zero(self) -> None:
        for parameter in self.engine.parameters():
            parameter.grad = None

    def kept(self) -> int:
        return 0


class Torchs:
    """One of torch's schedules, on its own runtime."""

    def __init__(self, name: str, size: Size) -> None:
        from torch.distributed import pipelining
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle

        make = getattr(pipelining, name, None) or getattr(pipelining.schedules, name)
        rank = dist.get_rank()
        if issubclass(make, PipelineScheduleSingle):
            mine, number = (rank,), size.ranks
        else:
            other = 2 * size.ranks - 1 - rank if "ZBV" in name else rank + size.ranks
            mine, number = (rank, other), 2 * size.ranks
        self.modules = [stage(size, index, number) for index in mine]
        stages = [
            pipelining.PipelineStage(module, index, number, torch.device("cpu"))
            for index, module in zip(mine, self.modules)
        ]
        self.pipeline_stages = stages
        single = issubclass(make, PipelineScheduleSingle)
        self.schedule = make(stages[0] if single else stages, size.microbatches, loss_fn=mean_square)
        self.first, self.last = 0 in mine, number - 1 in mine
        self.x, self.y = data(size)

    def step(self) -> float:
        losses: list[Tensor] = []
        given = {"target": self.y, "losses": losses} if self.last else {}
        if self.first:
            self.schedule.step(self.x, **given)
        else:
            self.schedule.step(**given)
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    def zero(self) -> None:
        for module in self.modules:
            module.zero_grad()

    def kept(self) -> int:
        """Receive buffers, which torch's stages hold from step to step."""
        infos = [
            info
            for stage in self.pipeline_stages
            for table in (stage.args_recv_info, stage.grad_recv_info)
            for group in table.values()
            for info in group
        ]
        return sum(info.buffer.nbytes for info in infos if getattr(info, "buffer", None) is not None)


def resident(field: str) -> int:
    """Bytes of this process now (VmRSS) or at most so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{field} is not in /proc/self/status")


def step_memory(contender: Ours | Torchs) -> int:
    """How much one step adds to the resident set at its worst moment; gradients are there already."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 16384)  # freed tensors go back to the system at once
    contender.step()
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    contender.step()
    return resident("VmHWM") - before + contender.kept()


def probe(name: str, size: Size) -> float:
    """Whether a torch schedule starts and runs at all."""
    contender = Torchs(name, size._replace(tokens=8, width=64))
    return contender.step()


def pin() -> set[int]:
    """Keep the ranks' computing threads on the fastest cores, one each, and all threads that are there by now off them.

    On a shared machine some cores are a third slower than others for minutes. New threads stay where the one that makes
    them is: whatever makes threads that feed sockets has to be set up before. Returns where this thread could be.
    """
    free = os.sched_getaffinity(0)
    cpus, size, rank = sorted(free), dist.get_world_size(), dist.get_rank()
    if len(cpus) < size:
        return free
    a, out = torch.randn(512, 512), torch.empty(512, 512)
    fastest = torch.full((len(cpus),), float("inf"))
    for turn in range(3 * len(cpus)):
        place = (rank + turn) % len(cpus)
        os.sched_setaffinity(0, {cpus[place]})
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(20):
            torch.mm(a, a, out=out)
        fastest[place] = min(float(fastest[place]), time.perf_counter() - begin)
    dist.all_reduce(fastest)
    chosen = [cpus[place] for place in sorted(fastest.argsort()[:size].tolist())]
    if left := set(cpus) - set(chosen):
        for thread in map(int, os.listdir("/proc/self/task")):
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread, left)
    os.sched_setaffinity(0, {chosen[rank]})
    return free


def contest(size: Size, torchs: list[str]) -> dict[str, Any]:
    """All contenders on this rank: seconds and losses of every repeat, memory, timelines (on rank 0)."""
    contenders: dict[str, Ours | Torchs] = {name: Ours(name, size) for name in OURS}
    contenders |= {name: Torchs(name, size) for name in torchs}
    pin()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for repeat in range(size.repeats + 1):
        for name, contender in contenders.items():
            contender.zero()
            gc.collect()
            dist.barrier()
            begin, spent = time.perf_counter(), time.process_time()
            losses[name] = contender.step()
            spent = time.process_time() - spent
            dist.barrier()
            if repeat > 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - begin)
                cpu[name].append(spent)
            if dist.get_rank() == 0:
                print(f"{name:32} {time.perf_counter() - begin:.3f} s", file=sys.stderr, flush=True)
    predictions = {}
    for name in OURS:
        measured = contenders[name].recorded()  # type: ignore[union-attr]
        if dist.get_rank() == 0:
            from zeropipe.sim.fit import fit

            costs = fit(measured)
            predictions[name] = {
                "recorded": measured.makespan,
                "simulated": zp.simulate(measured.schedule, costs).makespan,
                "bubble": measured.bubble,
                "busy": measured.busy,
                "message": costs.p2p,
                "activations": max(measured.peak_memory),
            }
    memory = {}
    for name, contender in contenders.items():
        for other in contenders.values():
            other.zero()
        dist.barrier()
        memory[name] = step_memory(contender)
    return {"seconds": seconds, "cpu": cpu, "losses": losses, "memory": memory, "predictions": predictions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=None, help="default: 2 per rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument(
        "--without", nargs="*", default=[], help="contenders to leave out", choices=TORCH, metavar="NAME"
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    size = Size(
        given.ranks, given.microbatches, given.blocks or 2 * given.ranks, given.width, given.tokens, given.repeats
    )
    refused = {}
    torchs = [name for name in TORCH if name not in given.without]
    for name in torchs:
        if "ZBV" in name:  # torch 2.11 on gloo cannot start it: find out in processes of its own
            try:
                with LocalRanks(size.ranks) as ranks:
                    ranks.run(probe, name, size, timeout=25)
            except EngineError as error:
                refused[name] = str(error).splitlines()[0]
    with LocalRanks(size.ranks) as ranks:
        parts = ranks.run(contest, size, [name for name in torchs if name not in refused], timeout=1800)
    report(size, parts, refused, given.out)


def ratio(times: dict[str, list[float]], ours: str, other: str) -> float | None:
    """The median over the rounds of one contender's time over another's in the same round."""
    return statistics.median(a / b for a, b in zip(times[ours], times[other])) if other in times else None


def report(size: Size, parts: list[dict[str, Any]], refused: dict[str, str], out: Path | None) -> None:
    """The table, and the same as JSON."""
    seconds: dict[str, list[float]] = parts[0]["seconds"]
    cpu = {name: [sum(times) for times in zip(*(part["cpu"][name] for part in parts))] for name in seconds}
    fastest = min((name for name in seconds if name in TORCH), key=lambda name: statistics.median(seconds[name]))
    rows: dict[str, dict[str, Any]] = {}
    for name in seconds:
        same = SAME.get(name, "")
        rows[name] = {
            "seconds": statistics.median(seconds[name]), "best": min(seconds[name]),
            "cpu": statistics.median(cpu[name]),
            "over_fastest_torch": ratio(seconds, name, fastest), "over_same": ratio(seconds, name, same),
            "cpu_over_same": ratio(cpu, name, same),
            "memory": max(part["memory"][name] for part in parts),
            "loss": max(part["losses"][name] for part in parts), **parts[0]["predictions"].get(name, {}),
        }  # fmt: skip
    print(f"torch {torch.__version__}, {size.ranks} ranks, {size.microbatches} microbatches, {size.blocks} blocks of "
          f"width {size.width}, {size.tokens} tokens, {size.repeats} rounds; torch's fastest is {fastest}")  # fmt: skip
    print(f"{'schedule':32}" + "".join(f"{head:>9}" for head in (*COLUMNS.values(), "MiB", "loss")))
    for name, row in rows.items():
        row["simulated_over_recorded"] = row["simulated"] / row["recorded"] if "simulated" in row else None
        cells = [f"{row[key]:.3f}" if row[key] else "-" for key in COLUMNS]
        cells += [f"{row['memory'] / 2**20:.0f}", f"{row['loss']:.4f}"]
        print(f"{name:32}" + "".join(f"{cell:>9}" for cell in cells))
    for name, reason in refused.items():
        print(f"{name:32} does not run here: {reason}")
    figures = {"torch": torch.__version__, "size": size._asdict(), "rows": rows, "refused": refused}
    print(json.dumps(figures))
    if out is not None:
        out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
