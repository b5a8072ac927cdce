"""What the local ranks run in test_gradients.py: gradients and weights that must come out right, or be refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine_cases import Embedding
from engine_helpers import WIDTH, Block, SquareLoss, blocks, error_of, microbatches, own, plain_step, worst
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, MasterWeights, main_gradients, module_stages
from zeropipe.errors import ConfigError

F64 = {"dtype": torch.float64}


class WeighedLoss(nn.Module):
    """A loss with a parameter of its own; it tells its count with its value, not before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, **F64))

    def forward(self, output: Tensor, microbatch: dict[str, Any]) -> tuple[Tensor, int]:
        return ((output - microbatch["target"]) * self.scale).square().sum(), microbatch["target"].numel()


def outside_gradients(schedule: Schedule) -> dict[str, float]:
    """Two steps with a loss that has parameters, and inputs that need a gradient: all equal the plain model's."""
    number = schedule.num_stages
    plain, stages = blocks(number), own(blocks(number), schedule)
    theirs, ours = WeighedLoss(), WeighedLoss()
    batches, same = (microbatches(schedule.num_microbatches) for _ in range(2))
    for batch in (*batches, *same):
        batch["inputs"].requires_grad_()
    total = sum(batch["target"].numel() for batch in batches)
    with Engine(schedule, stages) as engine:
        for _ in range(2):
            for batch in batches:
                (theirs(nn.Sequential(*plain)(batch["inputs"]), batch)[0] / total).backward()
            engine.train_step(same, ours)
    seen = {"grad": worst(stages, plain)}
    if number - 1 in stages:
        seen["loss"] = error_of(ours.scale.grad, theirs.scale.grad)
    if 0 in stages:
        seen["inputs"] = max(error_of(a["inputs"].grad, b["inputs"].grad) for a, b in zip(same, batches))
    return seen


def computed_inputs(schedule: Schedule) -> None:
    """Inputs that come out of a graph of the caller's cannot be divided afterwards."""
    weight = nn.Parameter(torch.ones(WIDTH, **F64))
    batches = [{**batch, "inputs": batch["inputs"] * weight} for batch in microbatches(schedule.num_microbatches)]
    with Engine(schedule, own(blocks(schedule.num_stages), schedule)) as engine:
        engine.train_step(batches, WeighedLoss())


class LightLoss:
    """Token weights that add up to less than 1."""

    def __call__(self, output: Tensor, microbatch: dict[str, Any]) -> tuple[Tensor, float]:
        return 0.001 * (output - microbatch["target"]).square().sum(), 0.001 * microbatch["target"].numel()


class CountedLightLoss(LightLoss):
    def count(self, microbatch: dict[str, Any]) -> float:
        return 0.001 * microbatch["target"].numel()


def light_counts(schedule: Schedule) -> float:
    """A total count below 1 is divided by, not taken for 1."""
    number, worst_seen = schedule.num_stages, 0.0
    batches = microbatches(schedule.num_microbatches)
    plain = blocks(number)
    wanted = plain_step(nn.Sequential(*plain), batches, SquareLoss())
    for loss_fn in (LightLoss(), CountedLightLoss()):
        stages = own(blocks(number), schedule)
        with Engine(schedule, stages) as engine:
            result = engine.train_step(batches, loss_fn)
            evaluated = engine.eval_step(batches, loss_fn)
        assert 0 < result.count < 1
        losses = max(abs(result.loss - wanted), abs(evaluated.loss - wanted)) / wanted
        worst_seen = max(worst_seen, losses, worst(stages, plain))
    return worst_seen


def late_hooks(schedule: Schedule) -> float:
    """Hooks that come after the engine was made change the gradients that autograd would add."""
    plain, stages = blocks(schedule.num_stages), own(blocks(schedule.num_stages), schedule)
    batches = microbatches(schedule.num_microbatches)
    with Engine(schedule, stages, timeout=120.0) as engine:
        engine.train_step(batches, SquareLoss())
        for module in (*plain, *stages.values()):
            module.zero_grad()
            module.down.weight.register_hook(lambda gradient: gradient * 3)
        engine.train_step(batches, SquareLoss())
    plain_step(nn.Sequential(*plain), batches, SquareLoss())
    return worst(stages, plain)


def replaced_parameters(schedule: Schedule) -> tuple[str, bool]:
    """One rank loads weights by assignment; with the old ones the engine goes on."""
    stages = own(blocks(schedule.num_stages), schedule)
    batches, stage = microbatches(schedule.num_microbatches), stages[dist.get_rank()]
    before = dict(stage.named_parameters())
    with Engine(schedule, stages, timeout=120.0) as engine:
        loss = engine.train_step(batches, SquareLoss()).loss
        if dist.get_rank() == 1:
            stage.load_state_dict({name: tensor.clone() for name, tensor in before.items()}, assign=True)
        line = ""
        try:
            engine.train_step(batches, SquareLoss())
        except ConfigError as error:
            line = str(error)
        stage.load_state_dict(before, assign=True)
        return line, engine.train_step(batches, SquareLoss()).loss == loss


def flat_buffer(schedule: Schedule, tie: bool) -> float:
    """Gradients that live in one flat tensor of the caller's are added to there, step after step."""
    last = schedule.num_stages - 1
    start = torch.eye(WIDTH, **F64) + 0.1

    def make() -> list[nn.Module]:
        if not tie:
            return blocks(last + 1)
        ends = [Embedding(nn.Parameter(start.clone()), first, last if first else 0) for first in (True, False)]
        return [ends[0], *blocks(last + 1)[1:-1], ends[1]]

    plain, stages = make(), own(make(), schedule)
    if tie:
        plain[-1].weight = plain[0].weight
    parameters = list({id(p): p for stage in stages.values() for p in stage.parameters()}.values())
    flat = torch.zeros(sum(p.numel() for p in parameters), **F64)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.grad = piece.view_as(parameter)
    late = SquareLoss().__call__  # without a count: every gradient is divided at the end of the step
    with Engine(schedule, stages) as engine:
        for step, loss_fn in enumerate((SquareLoss(), late, SquareLoss())):
            batches = microbatches(schedule.num_microbatches, seed=step)
            plain_step(nn.Sequential(*plain), batches, SquareLoss())
            engine.train_step(batches, loss_fn)
    seen = worst(stages, plain)
    for parameter, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
        assert parameter.grad is not None
        seen = max(seen, error_of(piece.view_as(parameter), parameter.grad))
    return seen


def unequal(schedule: Schedule, what: str) -> None:
    """Copies or ties that start unequal, or that only one end wants to train; ranks that disagree."""
    rank, last = dist.get_rank(), schedule.num_stages - 1
    options: dict[str, Any] = {"timeout": 120.0}
    modules = blocks(last + 1)
    batches = microbatches(schedule.num_microbatches)
    if what.startswith("tie"):
        ends = [
            Embedding(nn.Parameter(torch.eye(WIDTH, **F64)), first, last if first else 0) for first in (True, False)
        ]
        modules = [ends[0], *modules[1:-1], ends[1]]
    if what == "tie":
        modules[last].weight.data[0, 0] += 1e-6
    if what == "tie one-sided":
        modules[last].tied_pairs = ()
    if what == "copies" and rank == 1:
        modules[0].up.weight.data[0, 0] += 1e-6
    if what == "option" and rank == 1:
        options["shapes"] = "dynamic"
    if what == "microbatch":
        options["check_equal"] = True
        if rank == 1:
            batches[2]["target"][0, 0] += 1
    with Engine(schedule, own(modules, schedule), **options) as engine:
        if what in ("tie frozen", "copies frozen"):
            engine.train_step(batches, SquareLoss())
            for parameter in own(modules, schedule)[rank].parameters():
                parameter.requires_grad_(rank == 0)
        engine.train_step(batches, SquareLoss())


class Reducing(nn.Module):
    """A block whose last operation is a collective that is still running when forward returns."""

    def __init__(self, seed: int, group: Any) -> None:
        super().__init__()
        self.block, self.group = Block(seed), group

    def forward(self, x: Tensor) -> Tensor:
        return Sum.apply(self.block(x), self.group)


class Sum(torch.autograd.Function):
    """A sum over one rank, which is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = collectives.all_reduce(x.clone(), "sum", group)
        assert type(total) is not Tensor
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def collective_outputs(schedule: Schedule) -> float:
    """A stage that ends in a collective hands over what the collective gives."""
    number = schedule.num_stages
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    plain, stages = blocks(number), own([Reducing(seed, alone) for seed in range(number)], schedule)
    batches = microbatches(schedule.num_microbatches)
    plain_step(nn.Sequential(*plain), batches, SquareLoss())
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, SquareLoss())
    return worst({stage: module.block for stage, module in stages.items()}, plain)


def master_weights(schedule: Schedule) -> float:
    """Parameters in bf16, gradients and learning in float32: after ten small steps as a float32 model would."""
    modules = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(schedule.num_stages)]
    generator = torch.Generator().manual_seed(0)
    for module in modules:
        module.weight.data = torch.randn(WIDTH, WIDTH, generator=generator).bfloat16()
    stages = module_stages(modules, schedule, dist.get_rank())
    batch = [{"inputs": torch.randn(4, WIDTH, generator=generator).bfloat16()} for _ in range(4)]
    start = [module.weight.detach().float().clone() for module in modules]
    with Engine(schedule, stages) as engine:
        for stage in stages.values():
            main_gradients(stage, torch.float32)
        optimizer = MasterWeights(torch.optim.SGD, engine.parameters(), lr=1e-8)
        for _ in range(10):
            engine.train_step(batch, lambda output, _: output.float().square().sum())
            sums = [p.grad.clone() for p in engine.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    # steps this small are lost in bf16; the masters have moved by about ten of them
    moved = max(
        error_of(master.detach() - start[stage], -1e-7 * gradient)
        for stage, master, gradient in zip(stages, optimizer.param_groups[0]["params"], sums)
    )
    again = MasterWeights(torch.optim.SGD, engine.parameters(), lr=1e-8)
    again.load_state_dict(optimizer.state_dict())
    same = [torch.equal(a, b) for a, b in zip(again.param_groups[0]["params"], optimizer.param_groups[0]["params"])]
    assert all(same)
    return moved
