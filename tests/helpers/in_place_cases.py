"""What the local ranks run in test_in_place.py: memory that is written later, beside the plain model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import WIDTH, Block, error_of
from pipelining_cases import draw, feed, mean_square, one_or_all, stages_for
from torch import Tensor, nn

import zeropipe as zp
import zeropipe.pipelining as ours
from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, module_stages, parallelize
from zeropipe.engine.blocks import compiling
from zeropipe.engine.blocks.checkpointing import add_checkpointing

TOKENS = 3
COPYING = [
    f"zeropipe.engine.{name}" for name in ("backward.store", "backward.gradients", "step.cell_runner", "step.in_place")
]


class Table(nn.Module):
    """A learned position table: with one sequence its gradient is a view of the output gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.table = nn.Parameter(torch.linspace(-1, 1, TOKENS * WIDTH, dtype=torch.float64).view(TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.linear(x) + self.table.unsqueeze(0)


class Bias(Table):
    """The same by a bias that is a view."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.bias = nn.Parameter(torch.ones(TOKENS * WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(x)) + self.bias.view(1, TOKENS, WIDTH)


class TwoViews(Bias):
    """Two parameters whose gradients are views of one tensor: autograd itself adds the second microbatch twice."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.bias.view(1, TOKENS, WIDTH) + self.table.unsqueeze(0)


class HandedBack(Table):
    """The gradient for the stage before shares memory with the table's."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).squeeze(0) + self.table.unsqueeze(0)


class OwnLoss(nn.Module):
    """Its table is no parameter of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(TOKENS, WIDTH, dtype=torch.float64))

    def forward(self, output: Tensor, microbatch: dict[str, Any]) -> Tensor:
        return (output + self.table.unsqueeze(0) - microbatch["target"]).square().mean()


class Reading(nn.Module):
    """A linear layer that reads a buffer which each forward modifies."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.ones(TOKENS, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9)
        return torch.tanh(x) + self.linear(self.seen)


class Through(Reading):
    """The buffer takes part in the graph, so that it is the layer's input and needs a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen.detach()
        self.seen.copy_(x[0])
        return torch.tanh(x) + self.linear(self.seen)


class Held(Reading):
    """Keeps the very tensor that its linear layer gets, which is part of the graph."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seen = self.seen[None]

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen.detach()
        self.seen.copy_(self.linear(x))
        return torch.tanh(x) + self.linear(self.seen)


class Returning(nn.Module):
    """Returns a tensor that it modifies later: a buffer, a view of one, an attribute, or one in a list."""

    def __init__(self, seed: int, what: str) -> None:
        super().__init__()
        self.block, self.what = Block(seed), what
        start = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
        if what in ("buffer", "view"):
            self.register_buffer("count", start)
        elif what == "attribute":
            self.count = start
        self.listed = [start]

    def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.block(x) if scale is None else self.block(x) * scale
        count = self.listed[0] if self.what == "list" else self.count
        count.add_(0.25)
        return y, count.view(2, -1).view(-1) if self.what == "view" else count


class Query(Reading):
    """A linear layer that reads a parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.query = nn.Parameter(torch.randn(TOKENS, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.linear(self.query)


class Modified(Reading):
    """Modifies a buffer, and reads it as a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1 * x.detach()[0])
        return torch.tanh(x) * self.seen.clone() + self.linear(x + self.seen)


class Direct(Reading):
    """Modifies a buffer, and reads the buffer itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9)
        return torch.tanh(x) + self.linear(x) * self.seen


class Norm(nn.Module):
    """Statistics that are modified without a new version."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block, self.norm = Block(seed), nn.BatchNorm1d(TOKENS, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.norm(x)


class Hooked(nn.Module):
    """A hook on the input."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 1.5 * gradient)
        return self.block(x)


class Given(Reading):
    """Gives a block a tensor that it modifies later; the stage is checkpointed block by block."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.inner = Block(seed)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9)
        run = add_checkpointing(lambda block, x, more: block(x + more["scale"]), "full")
        return run(self.inner, x, {"scale": self.seen})


class Sometimes(Reading):
    """Modifies its buffer in every other forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.number = getattr(self, "number", 0) + 1
        if self.number % 2 == 0:
            self.seen.mul_(0.9)
        return torch.tanh(x) + self.linear(x + self.seen.clone())


class Aliased(Reading):
    """Has its buffer in a list, too."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.listed = [self.seen]

    def forward(self, x: Tensor) -> Tensor:
        self.listed[0].mul_(0.9)
        return torch.tanh(x) + self.linear(x + self.seen.clone())


def compiled_by_torch() -> float:
    """What torch.compile itself makes of the gradients of Direct."""
    plain, module, batches = Direct(0), Direct(0), batches_of(1)
    _, wanted = sums([plain], batches)
    square(torch.compile(module, backend="aot_eager")(batches[0]["inputs"]), batches[0]).backward()
    return error_of(module.linear.weight.grad, wanted["0.linear.weight"])


def batches_of(number: int, sequences: int = 1) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)

    def one() -> Tensor:
        return torch.randn(sequences, TOKENS, WIDTH, generator=generator, dtype=torch.float64)

    return [{"inputs": one(), "target": one()} for _ in range(number)]


def square(output: Any, microbatch: dict[str, Any]) -> Tensor:
    y, *more = output if isinstance(output, tuple) else (output,)
    loss = (y - microbatch["target"]).square()
    return (loss * more[0]).mean() if more else loss.mean()


def sums(
    modules: list[nn.Module], batches: list[dict[str, Any]], loss_fn: Any = square
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the plain model, summed outside of autograd."""
    everything = nn.ModuleList(modules)
    everything.loss = loss_fn if isinstance(loss_fn, nn.Module) else nn.Identity()
    parameters, gradients, total = dict(everything.named_parameters()), dict[str, Tensor](), 0.0
    for batch in batches:
        output: Any = (batch["inputs"],)
        for module in modules:
            output = module(*output) if isinstance(output, tuple) else module(output)
        loss = loss_fn(output, batch) / len(batches)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        gradients = {name: gradients.get(name, 0) + gradient for name, gradient in zip(parameters, found)}
        total += float(loss.detach())
    return total, gradients


def train(schedule: Schedule, kind: type[nn.Module], args: tuple[Any, ...], options: dict[str, Any]) -> float:
    """Two steps, whose gradients add up: the largest difference of losses, gradients and buffers."""
    warnings.simplefilter("ignore")
    modules = [kind(seed, *args) for seed in range(schedule.num_stages)]
    stages = module_stages(modules, schedule, dist.get_rank())
    return compare(schedule, modules, stages, options, [kind(seed, *args) for seed in range(schedule.num_stages)])


@contextmanager
def compiled_by(backend: str = "", **options: Any) -> Iterator[dict[str, Any]]:
    """The options of an Engine whose blocks are compiled by this backend of torch, not by inductor."""
    if not backend:
        yield options
        return
    compiling._variant.cache_clear()
    with mock.patch.object(compiling, "inductor_backend", return_value=backend):
        yield options
    compiling._variant.cache_clear()


def compare(schedule: Schedule, modules: Any, stages: Any, options: dict[str, Any], plain: Any) -> float:
    batches, worst = batches_of(schedule.num_microbatches), 0.0
    wanted: dict[str, Tensor] = {}
    with compiled_by(**options) as options, Engine(schedule, stages, timeout=60.0, **options) as engine:
        for _ in range(2):
            loss, gradients = sums(plain, batches)
            wanted = {name: wanted.get(name, 0) + gradient for name, gradient in gradients.items()}
            worst = max(worst, abs(engine.train_step(batches, square).loss - loss) / loss)
    for place in (place for stage in stages.values() for place in stage.layers):
        for name, parameter in modules[place].named_parameters():
            if parameter.grad is not None or bool(wanted[f"{place}.{name}"].any()):
                worst = max(worst, error_of(parameter.grad, wanted[f"{place}.{name}"]))
        for mine, theirs in zip(modules[place].buffers(), plain[place].buffers()):
            worst = max(worst, error_of(mine, theirs))
    return worst


def train_sharded(schedule: Schedule, kinds: list[type[nn.Module]], options: dict[str, Any]) -> float:
    """A stage that is sharded over two processes, each with the same microbatches."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp_shard"))
    modules, plain = ([kind(seed) for seed, kind in enumerate(kinds)] for _ in range(2))
    stages = parallelize(module_stages(modules, schedule, 0), mesh)
    batches = batches_of(schedule.num_microbatches)
    _, wanted = sums(plain, batches)
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        engine.train_step(batches, square)
    worst = 0.0
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            full = stage.full_names()[name]
            if bool(wanted[full].any()):
                worst = max(worst, error_of(parameter.grad.full_tensor(), wanted[full]))
    return worst


def loss_with_a_table(schedule: Schedule) -> float:
    """A leaf that the engine does not know gets a view of the output gradient."""
    modules = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(schedule.num_stages)]
    for module in modules:
        module.weight.data, module.bias.data = 0.9 * torch.eye(WIDTH, dtype=torch.float64), torch.zeros(WIDTH).double()
    stages, batches, loss_fn = module_stages(modules, schedule, dist.get_rank()), batches_of(6), OwnLoss()
    _, wanted = sums(modules, batches, OwnLoss())
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, loss_fn)
    here = [place for stage in stages.values() for place in stage.layers]
    seen = [error_of(modules[place].weight.grad, wanted[f"{place}.weight"]) for place in here]
    if schedule.num_stages - 1 in stages:
        seen.append(error_of(loss_fn.table.grad, wanted["loss.table"]))
    return max(seen)


def drop_in() -> float:
    """The drop-in's InterleavedZeroBubble, one sequence in each microbatch."""
    ranks, rank, number = dist.get_world_size(), dist.get_rank(), 6
    kind = ours.ScheduleInterleavedZeroBubble
    numbers = kind.stages_of(rank, ranks, 2 * ranks)
    modules, plain = ([Table(seed) for seed in range(2 * ranks)] for _ in range(2))
    stages = stages_for(modules, numbers)
    schedule = kind(one_or_all(kind, stages), number, loss_fn=mean_square)
    x, y = draw(number, 0)
    feed(schedule, stages, x, y)
    _, wanted = sums(plain, [{"inputs": a[None], "target": b[None]} for a, b in zip(x, y)])
    return max(
        error_of(parameter.grad, wanted[f"{place}.{name}"])
        for place in numbers
        for name, parameter in modules[place].named_parameters()
    )


def outputs(schedule: Schedule, what: str) -> list[float]:
    """The buffer that forward() gives for each microbatch, where the last stage is."""
    modules = [Returning(seed, what) for seed in range(schedule.num_stages)]
    with Engine(schedule, module_stages(modules, schedule, dist.get_rank())) as engine:
        found = engine.forward(batches_of(schedule.num_microbatches))
    return [round(float(output[1][0]), 6) for output in found if output is not None]


class Counting:
    """A loss that returns running sums of its own, in place: as a count and as a metric."""

    def __init__(self) -> None:
        self.number, self.total = torch.zeros(()), torch.zeros((), dtype=torch.float64)

    def __call__(self, output: Tensor, microbatch: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        self.number.fill_(microbatch["inputs"].numel())
        self.total.add_(1.0)
        return (output - microbatch["target"]).square().sum(), self.number, {"total": self.total}


def metrics(schedule: Schedule) -> float:
    """The sum of 1, 2, 3, ..."""
    modules = [Block(seed) for seed in range(schedule.num_stages)]
    with Engine(schedule, module_stages(modules, schedule, dist.get_rank())) as engine:
        return engine.train_step(batches_of(schedule.num_microbatches), Counting()).metrics["total"]


def copies(name: str, family: str, options: dict[str, Any]) -> int:
    """How many tensors a step of a transformer copies so that nobody else writes to them."""
    from engine_hf_cases import token_batches
    from stage_models import CONFIGS

    from zeropipe.engine import CausalLMLoss, hf_stages

    schedule = zp.build(name, ranks=dist.get_world_size(), microbatches=4)
    config = CONFIGS[family](num_hidden_layers=max(4, schedule.num_stages))
    stages = hf_stages(config, schedule, dist.get_rank(), dtype=torch.float64)
    number, clone = 0, Tensor.clone

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal number
        number += sys._getframe(1).f_globals["__name__"] in COPYING
        return clone(*args, **kwargs)

    def batches() -> list[dict[str, Any]]:
        # another length may be another graph
        return [token_batches(1, 0)[0] for _ in range(4)] if "compile" in options else token_batches(4, 0)

    with compiled_by(**options) as options, Engine(schedule, stages, **options) as engine:
        engine.train_step(batches(), CausalLMLoss())
        Tensor.clone = counted
        try:
            engine.train_step(batches(), CausalLMLoss())
        finally:
            Tensor.clone = clone
    return number
