"""Functions that the local ranks of the engine tests run, and the plain model they are held against."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropipe.core.formats.csv import from_csv
from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine

WIDTH = 6
TOLERANCE = 1e-10
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.pipelining",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)


class Block(nn.Module):
    """A linear layer inside, a norm and a residual outside."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        with torch.no_grad():
            for parameter in (self.up.weight, self.up.bias, self.down.weight):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.down(torch.tanh(self.up(x)))


def blocks(number: int) -> list[nn.Module]:
    return [Block(seed) for seed in range(number)]


def microbatches(number: int, seed: int = 0, lengths: tuple[int, ...] = (3, 5, 2)) -> list[dict[str, Any]]:
    """Microbatches of different lengths."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def draw(length: int) -> Tensor:
        return torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)

    return [
        {"inputs": draw(length), "target": draw(length)}
        for length in (lengths[(index + seed) % len(lengths)] for index in range(number))
    ]


class SquareLoss:
    """A sum, and its number of elements known from the microbatch."""

    def count(self, microbatch: dict[str, Any]) -> int:
        return microbatch["target"].numel()

    def __call__(self, output: Tensor, microbatch: dict[str, Any]) -> tuple[Tensor, int]:
        return (output - microbatch["target"]).square().sum(), self.count(microbatch)


def by_one(model: nn.Module, work: Callable[[], float]) -> float:
    """Let the first rank fill the gradients of a model that every rank has, and tell them to the others, and a loss.

    On few cores ranks that all do the same only wait for each other.
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return work()
    parameters = list(model.parameters())
    value = work() if dist.get_rank() == 0 else 0.0
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    known = [value, *(float(p.grad is not None) for p in parameters)]
    told = torch.cat([torch.tensor(known, dtype=torch.float64), *(grad.cpu().double().flatten() for grad in grads)])
    dist.broadcast(told, 0)
    known, rest = told[: len(known)].tolist(), told[len(known) :]
    for parameter, given, grad in zip(parameters, known[1:], rest.split([p.numel() for p in parameters])):
        parameter.grad = grad.view_as(parameter).to(parameter) if given else None
    return known[0]


def plain_step(model: nn.Module, batches: list[dict[str, Any]], loss_fn: Any) -> float:
    """The un-pipelined model over the same microbatches: gradients of the full batch's mean loss."""

    def work() -> float:
        total = sum(loss_fn.count(batch) for batch in batches)
        value = 0.0
        for batch in batches:
            loss, _ = loss_fn(model(batch["inputs"]), batch)
            (loss / total).backward()
            value += float(loss.detach()) / total
        return value

    return by_one(model, work)


def hf_plain_step(model: Any, batches: list[dict[str, Any]], loss_fn: Any) -> float:
    """As plain_step, for a model of Hugging Face, whose routers add to the loss."""

    def work() -> float:
        total, value = sum(map(loss_fn.count, batches)), 0.0
        for batch in batches:
            inputs = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
            output = model(input_ids=batch["input_ids"], use_cache=False, **inputs)
            routers = getattr(output, "aux_loss", None)
            parts = output.logits if routers is None else (output.logits, model.router_aux_loss_coef * routers)
            loss = loss_fn(parts, batch)[0] / total
            loss.backward()
            value += float(loss.detach())
        return value

    return by_one(model, work)


def error_of(got: Tensor | None, wanted: Tensor | None) -> float:
    """Relative to the largest entry."""
    if wanted is None:
        return 0.0 if got is None else float(got.abs().max())
    assert got is not None, "a gradient is missing"
    got = got.cpu()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-300))


def worst(stages: dict[int, nn.Module], plain: list[nn.Module], what: str = "grad") -> float:
    """The largest relative difference of any gradient (or weight) of this rank's stages from the plain model's."""
    value = 0.0
    for stage, module in stages.items():
        mine, theirs = dict(module.named_parameters()), dict(plain[stage].named_parameters())
        assert mine.keys() == theirs.keys()
        for name, parameter in mine.items():
            if what == "grad":
                value = max(value, error_of(parameter.grad, theirs[name].grad))
            else:
                value = max(value, error_of(parameter.detach(), theirs[name].detach()))
    return value


def own(modules: list[nn.Module], schedule: Schedule, group: Any = None) -> dict[int, nn.Module]:
    """This rank's part of a list with one module per stage."""
    return {stage: modules[stage] for stage in schedule.placement.stages_of(dist.get_rank(group))}


def train(csv_or_schedule: str | Schedule, steps: int = 1, **options: Any) -> dict[str, float]:
    """Some steps with an optimizer beside the plain model; the largest differences seen."""
    schedule = from_csv(csv_or_schedule) if isinstance(csv_or_schedule, str) else csv_or_schedule
    number = schedule.num_stages
    plain, stages = blocks(number), own(blocks(number), schedule, options.get("group"))
    for stage in stages.values():
        stage.to(options.get("device", "cpu"))
    model, loss_fn = nn.Sequential(*plain), SquareLoss()
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    ours, theirs = torch.optim.AdamW(parameters, lr=0.01), torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "weight": 0.0}
    with Engine(schedule, stages, **options) as engine:
        for step in range(steps):
            batches = microbatches(schedule.num_microbatches, seed=step)
            wanted = plain_step(model, batches, loss_fn)
            result = engine.train_step(batches, loss_fn)
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            seen["loss"] = max(seen["loss"], abs(result.loss - wanted) / abs(wanted))
            seen["grad"] = max(seen["grad"], worst(stages, plain))
            seen["norm"] = max(seen["norm"], abs(engine.grad_norm() - norm) / norm)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            seen["weight"] = max(seen["weight"], worst(stages, plain, "weight"))
    return seen


def train_on_cuda(schedule: Schedule, steps: int = 1) -> dict[str, float]:
    """`train` with all ranks on one GPU: tensors between ranks go through pinned memory and gloo."""
    return train(schedule, steps, device="cuda", record=True)


def nccl_on_one_gpu() -> None:
    """NCCL refuses two ranks of one host on one GPU: so each says it is a host of its own, and talks over loopback."""
    os.environ.update(NCCL_HOSTID=f"host-{dist.get_rank()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")


def train_on_nccl(schedule: Schedule, steps: int = 1) -> dict[str, float]:
    """`train` over NCCL."""
    nccl_on_one_gpu()
    return train(schedule, steps, device="cuda", record=True)


_pools: dict[Any, Any] = {}


def ranks(number: int = 4, preload: tuple[str, ...] = PRELOAD) -> Any:
    """A pool of local ranks for the tests of a file (a new one if a test broke it)."""
    from zeropipe.engine.run.launch import LocalRanks

    key = (number, preload)
    if key not in _pools or _pools[key].closed:
        _pools[key] = LocalRanks(number, preload=preload)
    return _pools[key]


@atexit.register
def close_pools() -> None:
    """End all ranks. A new pool starts in a moment; gloo's threads wake up a hundred times a second while they idle."""
    while _pools:
        _pools.popitem()[1].close()


def largest(results: list[dict[str, float]]) -> dict[str, float]:
    """The worst rank's differences."""
    return {key: max(result[key] for result in results) for key in results[0]}
