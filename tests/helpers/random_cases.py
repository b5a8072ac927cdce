"""What the local ranks run in test_random_modules.py: random models through the engine, beside the plain model."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from random_modules import PRELUDE, TOKENS, WIDTH, Model, write_model
from torch import Tensor, nn

import zeropipe as zp
from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, module_stages
from zeropipe.errors import ZeropipeError

CLOSE = 1e-9  # relative to the largest entry, or to 1
SPLITTING = ("zb-h1", "zb-h2", "interleaved-zb", "zbv", "v-half", "v-min")
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"ac": "full"}, {"ac": "selective:op"}, {"dynamic_weights": True}, {"shapes": "dynamic"},
    {"direct_gradients": True}, {"split": "whole"}, {"ac": "selective:2", "dynamic_weights": True},
    {"recv_ahead": 0, "ac": "selective:op"},
)  # fmt: skip


class Run(NamedTuple):
    """How a model is run."""

    schedule: str
    microbatches: int
    options: dict[str, Any]


class Outcome(NamedTuple):
    """What came of it."""

    run: Run
    refusal: str | None = None
    difference: float = 0.0
    where: str = ""


def runs_of(seed: int, number: int, compile: bool = False) -> list[Run]:
    """Schedules and options for a model: every other one splits its backward."""
    dice, names = random.Random(-1 - seed), zp.names()
    runs = []
    for place in range(number):
        name = names[(seed * number + place) // 2 % len(names)] if place % 2 else dice.choice(SPLITTING)
        options = {"compile": True} if compile else dict(dice.choice(OPTIONS))
        runs.append(Run(name, dice.choice([4, 6]), options))
    return runs


def modules_of(model: Model) -> list[nn.Module]:
    """The model's modules, in float64."""
    space: dict[str, Any] = {"__name__": f"random_model_{model.seed}"}
    exec(PRELUDE + model.source, space)
    torch.manual_seed(model.seed)
    return [space[name]().double() for name in model.names]


def batches_of(model: Model, number: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(model.seed)
    batches = []
    for _ in range(number):
        x = torch.randn(model.sequences, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        ids = torch.randint(3, (model.sequences, TOKENS), generator=generator)
        target = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x.requires_grad_(model.inputs_need_grad)
        takes_ids = "def forward(self, h, e0" in model.source.split("class Module1")[0]
        batches.append({"inputs": (x, ids) if takes_ids else (x,), "target": target})
    return batches


def loss_of(output: Any, microbatch: dict[str, Any]) -> Tensor:
    h, *extras = output if isinstance(output, tuple) else (output,)
    loss = (h - microbatch["target"]).square().mean()
    for extra in extras:
        loss = loss + (extra.double() - 0.3).square().mean()
    return loss


def through(modules: Sequence[nn.Module], batch: dict[str, Any]) -> Any:
    output: Any = batch["inputs"]
    for module in modules:
        output = module(*(output if isinstance(output, tuple) else (output,)))
    return output


class Plain:
    """The plain model: every copy of a stage has a state of its own, and gradients are summed outside of autograd.

    (Autograd itself adds wrongly where two parameters' gradients are views of one tensor.)
    """

    def __init__(self, model: Model, schedule: Schedule) -> None:
        self._copies = [modules_of(model) for _ in schedule.placement.copies]
        self._first, self._placement = [table[0] for table in schedule.placement.copies], schedule.placement
        self.loss, self.gradients, self.outputs = 0.0, dict[str, Tensor](), list[Any]()

    def modules(self, index: int) -> list[nn.Module]:
        return self._copies[self._first.index(self._placement.rank_of(0, index))]

    def step(self, batches: list[dict[str, Any]]) -> None:
        """A training step; its gradients are added."""
        self.loss = 0.0
        for index, batch in enumerate(batches):
            modules = self.modules(index)
            loss = loss_of(through(modules, batch), batch) / len(batches)
            named = {
                f"{place}.{name}": p for place, module in enumerate(modules) for name, p in module.named_parameters()
            }
            named |= {"inputs": batch["inputs"][0]}
            named = {name: p for name, p in named.items() if p.requires_grad}
            for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True)):
                name = f"{name} {index}" if name == "inputs" else name
                if gradient is not None:
                    self.gradients[name] = self.gradients.get(name, 0) + gradient
            self.loss += float(loss.detach())

    def forward(self, batches: list[dict[str, Any]]) -> None:
        """The outputs."""
        with torch.no_grad():
            for index, batch in enumerate(batches):
                output = through(self.modules(index), batch)
                self.outputs.append([t.clone() for t in (output if isinstance(output, tuple) else (output,))])


def is_sound(model: Model) -> bool:
    """Whether the plain model runs at all, and neither overflows nor learns nothing."""
    plain = Plain(model, zp.build("1f1b", ranks=2, microbatches=4))
    try:
        for _ in range(2):
            plain.step(batches_of(model, 4))
    except RuntimeError:
        return False
    numbers = [plain.loss, *(float(gradient.abs().max()) for gradient in plain.gradients.values())]
    return len(numbers) > 1 and max(numbers) < 1e6 and any(name[0] == "3" for name in plain.gradients)


def run_models(first: int, number: int, runs: int, compile: bool = False) -> list[tuple[int, list[Outcome]]]:
    """The next sound models from a seed on."""
    seen, seed = [], first
    while len(seen) < number:
        model = write_model(seed)
        if is_sound(model):
            seen.append((seed, [one_run(model, run) for run in runs_of(seed, runs, compile)]))
        seed += 1
    return seen


def one_run(model: Model, run: Run) -> Outcome:
    """Two steps and a forward."""
    warnings.simplefilter("ignore")
    schedule = zp.build(run.schedule, ranks=dist.get_world_size(), microbatches=run.microbatches)
    plain, modules = Plain(model, schedule), modules_of(model)
    theirs, ours = (batches_of(model, run.microbatches) for _ in range(2))
    stages = module_stages(modules, schedule, dist.get_rank())
    try:
        with Engine(schedule, stages, timeout=60.0, **run.options) as engine:
            for _ in range(2):
                plain.step(theirs)
                loss = engine.train_step(ours, loss_of).loss
            plain.forward(theirs)
            outputs = engine.forward(ours)
    except ZeropipeError as error:
        return Outcome(run, refusal=str(error))
    differences = {"loss": abs(loss - plain.loss) / max(1.0, abs(plain.loss))}
    here = {place for stage in stages.values() for place in stage.layers}
    for place in sorted(here):
        for name, parameter in modules[place].named_parameters():
            differences[f"{place}.{name}"] = difference(parameter.grad, plain.gradients.get(f"{place}.{name}"))
    if 0 in stages:
        for index, batch in enumerate(ours):
            if schedule.placement.rank_of(0, index) == dist.get_rank():
                wanted = plain.gradients.get(f"inputs {index}")
                differences[f"inputs {index}"] = difference(batch["inputs"][0].grad, wanted)
    for index, output in enumerate(outputs):
        if output is not None:
            tensors = output if isinstance(output, tuple) else (output,)
            for got, wanted in zip(tensors, plain.outputs[index], strict=True):
                differences[f"output {index}"] = difference(got, wanted)
    where = max(differences, key=lambda name: differences[name])
    return Outcome(run, difference=differences[where], where=where)


def difference(got: Tensor | None, wanted: Tensor | None) -> float:
    """A gradient that is not there is zero."""
    if got is None or wanted is None:
        there = wanted if got is None else got
        return 0.0 if there is None else float(there.abs().max())
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1.0))
