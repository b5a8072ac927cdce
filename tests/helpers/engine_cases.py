"""What the local ranks run in test_engine.py: each function runs on every rank and returns what the test looks at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import (
    WIDTH,
    Block,
    SquareLoss,
    blocks,
    error_of,
    microbatches,
    own,
    plain_step,
    train,
    worst,
)
from torch import Tensor, nn
from torch_runtime import torch_runtime

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, module_stages
from zeropipe.engine.comm import channels

F64 = {"dtype": torch.float64}


def train_in_halves(schedule: Schedule, steps: int) -> dict[str, float]:
    """Two pipelines of half the ranks, side by side."""
    half = dist.get_world_size() // 2
    groups = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
    group = groups[dist.get_rank() // half]
    return train(schedule, steps, group=group)


def train_in_step(schedule: Schedule, steps: int, recv_ahead: int, timeout: float) -> dict[str, float]:
    """Every send waits until it is received, every receive until its message is here: nothing is ever under way."""
    acknowledged, word = 99, torch.zeros(1)
    post, send = channels.Receiver._post, channels.Sender.send

    def post_and_wait(self: channels.Receiver, spec: channels.Spec) -> None:
        post(self, spec)
        assert self._posted[-1] is not None
        _, tensors, works = self._posted[-1]
        self._channel.wait(works)
        self._posted[-1] = (spec, tensors, [])
        if works:
            self._channel.wait([self._channel.headers.send([word], self._channel.peer, acknowledged)])

    def send_and_wait(self: channels.Sender, tensors: Sequence[Tensor], on_sent: channels.OnSent | None = None) -> None:
        send(self, tensors, on_sent)
        if tensors:
            self._channel.wait([self._channel.headers.recv([word], self._channel.peer, acknowledged)])

    with (
        mock.patch.object(channels.Receiver, "_post", post_and_wait),
        mock.patch.object(channels.Sender, "send", send_and_wait),
    ):
        return train(schedule, steps, recv_ahead=recv_ahead, timeout=timeout)


def train_models(schedule: Schedule, make: Callable[[int], list[nn.Module]], **options: Any) -> dict[str, float]:
    """One step of any list of modules beside the same list in one piece."""
    plain, mine = make(schedule.num_stages), make(schedule.num_stages)
    stages, loss_fn = own(mine, schedule), SquareLoss()
    batches = microbatches(schedule.num_microbatches)

    class Whole(nn.Sequential):
        def forward(self, x: Any) -> Any:
            for module in self:
                x = module(*x) if isinstance(x, tuple) else module(x)
            return x

    wanted = plain_step(Whole(*plain), batches, loss_fn)
    with Engine(schedule, stages, **options) as engine:
        result = engine.train_step(batches, loss_fn)
    return {"loss": abs(result.loss - wanted) / abs(wanted), "grad": worst(stages, plain)}


def shared_modules(schedule: Schedule) -> dict[str, float]:
    """A list of modules in which a later stage uses an earlier one's block again."""

    def make() -> list[nn.Module]:
        modules = blocks(schedule.num_stages)
        return [*modules[:-1], modules[1]]

    plain, mine = make(), make()
    stages = module_stages(mine, schedule, dist.get_rank())
    batches = microbatches(schedule.num_microbatches)
    wanted = plain_step(nn.Sequential(*plain), batches, SquareLoss())
    with Engine(schedule, stages) as engine:
        result = engine.train_step(batches, SquareLoss())
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in nn.Sequential(*plain).parameters()]))
        norms = abs(engine.grad_norm() - norm) / norm
    inner = {stage: module.blocks[0] for stage, module in stages.items()}
    return {"loss": abs(result.loss - wanted) / abs(wanted), "grad": worst(inner, plain), "norm": norms}


class Views(nn.Module):
    """Its outputs are views: one is neither contiguous nor the whole of its memory, one is still to be conjugated."""

    def __init__(self, seed: int, last: bool) -> None:
        super().__init__()
        self.block, self.last = Block(seed), last

    def forward(self, x: Tensor, turned: Tensor | None = None) -> Any:
        y = self.block(x if turned is None else x + turned.conj().imag)
        wide = torch.cat([y, x], -1)[..., :WIDTH].transpose(0, 1).transpose(0, 1)
        return wide if self.last else (wide, torch.complex(y, torch.sin(y)).conj())


class Same(nn.Module):
    """Returns its own input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Twice(nn.Module):
    """One weight used two times, one frozen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)
        self.block.down.weight.requires_grad_(seed % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class Several(nn.Module):
    """A tuple: a hidden state, an integer mask, a second stream that only every other stage uses."""

    def __init__(self, seed: int, last: bool) -> None:
        super().__init__()
        self.block, self.seed, self.last = Block(seed), seed, last

    def forward(self, x: Tensor, mask: Tensor | None = None, extra: Tensor | None = None) -> Any:
        if mask is None:
            mask = torch.ones(x.shape[:-1], dtype=torch.int32)
        y = self.block(x) * mask[..., None]
        if extra is not None and self.seed % 2:
            y = y + 0.1 * extra
        return y if self.last else (y, mask, torch.sin(x) if self.seed % 2 == 0 else y * 0.5)


class FrozenFirst(nn.Module):
    """The stages before `seed` 2 learn nothing, so no gradient goes back to them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)
        self.requires_grad_(seed >= 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def views(number: int) -> list[nn.Module]:
    return [Views(seed, seed == number - 1) for seed in range(number)]


def some_identities(number: int) -> list[nn.Module]:
    return [Same() if seed in (1, 2) else Block(seed) for seed in range(number)]


def twice(number: int) -> list[nn.Module]:
    return [Twice(seed) for seed in range(number)]


def several(number: int) -> list[nn.Module]:
    return [Several(seed, seed == number - 1) for seed in range(number)]


def frozen_first(number: int) -> list[nn.Module]:
    return [FrozenFirst(seed) for seed in range(number)]


def inputs_with_gradients_now_and_then(schedule: Schedule) -> float:
    """Steps of which every other one asks for the gradients of the inputs of a frozen first stage."""
    plain, mine = blocks(schedule.num_stages), blocks(schedule.num_stages)
    for first in (plain[0], mine[0]):
        first.requires_grad_(False)
    stages, loss_fn, value = own(mine, schedule), SquareLoss(), 0.0
    with Engine(schedule, stages) as engine:
        for step in range(4):
            ours, theirs = (microbatches(schedule.num_microbatches, lengths=(3,)) for _ in range(2))
            for batch in (*ours, *theirs):
                batch["inputs"].requires_grad_(step % 2 == 1)
            plain_step(nn.Sequential(*plain), theirs, loss_fn)
            engine.train_step(ours, loss_fn)
            value = max(value, worst(stages, plain))
            if dist.get_rank() == 0:
                pairs = zip(ours, theirs, strict=True)
                value = max(value, *(error_of(one["inputs"].grad, other["inputs"].grad) for one, other in pairs))
            for module in (*plain, *mine):
                module.zero_grad()
    return value


def on_torchs_runtime(schedule: Schedule) -> float:
    """The same schedule on torch's executor and on ours; the largest difference of a gradient."""
    rank, number = dist.get_rank(), schedule.num_stages
    ours, theirs = own(blocks(number), schedule), own(blocks(number), schedule)
    batches = microbatches(schedule.num_microbatches, lengths=(3,))
    total = sum(SquareLoss().count(batch) for batch in batches)
    runtime = torch_runtime(schedule, theirs, lambda out, target: (out - target).square().sum() / total)
    x, target = (torch.cat([batch[key] for batch in batches]) for key in ("inputs", "target"))
    placement, given = schedule.placement, {}
    if rank == placement.rank_of(number - 1):
        given = {"target": target, "losses": []}
    runtime.step(*([x] if rank == placement.rank_of(0) else []), **given)
    with Engine(schedule, ours) as engine:
        engine.train_step(batches, SquareLoss())
    return max(
        error_of(dict(ours[s].named_parameters())[name].grad, parameter.grad)
        for s in ours
        for name, parameter in theirs[s].named_parameters()
    )


def evaluate(schedule: Schedule) -> dict[str, Any]:
    """eval_step and forward between two training steps, with dropout that must be off."""
    number = schedule.num_stages

    def with_dropout() -> list[nn.Module]:
        return [nn.Sequential(Block(seed), nn.Dropout(0.5)) for seed in range(number)]

    plain, stages = nn.Sequential(*with_dropout()).eval(), own(with_dropout(), schedule)
    batches, others = microbatches(schedule.num_microbatches), microbatches(schedule.num_microbatches, seed=1)
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, SquareLoss())
        before = {(s, n): p.grad.clone() for s, m in stages.items() for n, p in m.named_parameters()}
        result = engine.eval_step(others, SquareLoss())
        here = engine.forward(others)
        sums = engine.forward(others, post=lambda out, batch: out.sum().item(), broadcast=True)
        outputs = engine.forward(others, broadcast=True)
        untouched = all(torch.equal(p.grad, before[s, n]) for s, m in stages.items() for n, p in m.named_parameters())
        training = all(module.training for stage in stages.values() for module in stage.modules())
    wanted = [plain(batch["inputs"]).detach() for batch in others]
    total = sum(SquareLoss().count(batch) for batch in others)
    loss = sum(float((o - b["target"]).square().sum()) for o, b in zip(wanted, others)) / total
    rank, last = dist.get_rank(), number - 1
    holds = [schedule.placement.rank_of(last, index) == rank for index in range(len(others))]
    return {
        "loss": abs(result.loss - loss) / loss,
        "outputs": max(error_of(got, want) for got, want in zip(outputs, wanted)),
        "post": max(abs(got - float(want.sum())) for got, want in zip(sums, wanted)),
        "where": [output is not None for output in here] == holds,
        "untouched": untouched and training,
    }


class Late:
    """(sum, count, metrics), with no way to know the count before."""

    def __call__(self, output: Tensor, microbatch: dict[str, Any]) -> Any:
        loss, count = SquareLoss()(output, microbatch)
        return loss, torch.tensor(count), {"largest": float(output.detach().abs().max()), "seen": 1}


def losses(schedule: Schedule) -> dict[str, Any]:
    """Three kinds of loss functions; two steps without zero_grad between them."""
    number, seen = schedule.num_stages, {}
    batches, others = microbatches(schedule.num_microbatches), microbatches(schedule.num_microbatches, seed=1)
    for name, loss_fn in (("count", SquareLoss()), ("late", Late())):
        plain, stages = blocks(number), own(blocks(number), schedule)
        model = nn.Sequential(*plain)
        with Engine(schedule, stages) as engine:
            for some in (batches, others):
                wanted = plain_step(model, some, SquareLoss())
                result = engine.train_step(some, loss_fn)
        seen[name] = max(abs(result.loss - wanted), worst(stages, plain))
        if name == "late":
            seen["metrics"] = (result.metrics["seen"], result.count == sum(SquareLoss().count(b) for b in others))
    plain, stages = blocks(number), own(blocks(number), schedule)
    for batch in batches:
        out = nn.Sequential(*plain)(batch["inputs"])
        ((out - batch["target"]).square().mean() / len(batches)).backward()
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, lambda out, batch: (out - batch["target"]).square().mean())
        norm = engine.clip_grad_norm(0.01)
        clipped = engine.grad_norm()
    reference = float(torch.nn.utils.clip_grad_norm_([p for m in plain for p in m.parameters()], 0.01))
    return seen | {
        "mean": worst(stages, plain),
        "norm": abs(norm - reference) / reference,
        "clipped": abs(clipped - 0.01) / 0.01,
    }


class Embedding(nn.Module):
    """A first or last stage around one tied weight."""

    def __init__(self, weight: nn.Parameter, first: bool, partner: int) -> None:
        super().__init__()
        self.weight, self.first = weight, first
        self.tied_pairs = (("weight", partner, "weight"),)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) if self.first else x @ self.weight.t()


def tied(schedule: Schedule, one_tensor: bool) -> dict[str, float]:
    """Tied first and last stage, two optimizer steps, two backward passes each."""
    last, seen = schedule.num_stages - 1, {"grad": 0.0, "norm": 0.0, "weight": 0.0}
    start = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5), **F64)

    def make() -> list[nn.Module]:
        weight = nn.Parameter(start.clone())
        head = weight if one_tensor else nn.Parameter(start.clone())
        return [Embedding(weight, True, last), *blocks(last + 1)[1:-1], Embedding(head, False, 0)]

    plain, stages = make(), own(make(), schedule)
    plain[-1].weight = plain[0].weight
    model = nn.Sequential(*plain)
    with Engine(schedule, stages) as engine:
        ours, theirs = torch.optim.SGD(engine.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for part in range(2):
                batches = microbatches(schedule.num_microbatches, seed=2 * step + part)
                plain_step(model, batches, SquareLoss())
                engine.train_step(batches, SquareLoss())
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            seen["norm"] = max(seen["norm"], abs(engine.grad_norm() - norm) / norm)
            seen["grad"] = max(seen["grad"], worst(stages, plain))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            seen["weight"] = max(seen["weight"], worst(stages, plain, "weight"))
    return seen


class Shrinking(nn.Module):
    """How many rows leave depends on values, not on shapes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block = Block(seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x[: 1 + int(x.detach().sum() > 0)])


class SomeRows(SquareLoss):
    """A loss that does not care how many rows are left."""

    def __call__(self, output: Tensor, microbatch: dict[str, Any]) -> tuple[Tensor, int]:
        return output.square().sum(), self.count(microbatch)


def shrinking(schedule: Schedule, shapes: str) -> float:
    """Output shapes that depend on values."""
    number, loss_fn = schedule.num_stages, SomeRows()
    plain, stages = [Shrinking(seed) for seed in range(number)], own([Shrinking(s) for s in range(number)], schedule)
    with Engine(schedule, stages, shapes=shapes) as engine:
        for step in range(2):
            batches = microbatches(schedule.num_microbatches, seed=step, lengths=(3,))
            plain_step(nn.Sequential(*plain), batches, loss_fn)
            engine.train_step(batches, loss_fn)
    return worst(stages, plain)


class Witness(nn.Module):
    """Counts how many of its earlier outputs are alive when its first backward runs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.block, self.outputs, self.alive = Block(seed), [], []

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        self.outputs.append(weakref.ref(y.untyped_storage()))
        if y.requires_grad:
            y.register_hook(self.look)
        return y

    def look(self, gradient: Tensor) -> None:
        self.alive.append(sum(ref() is not None for ref in self.outputs))


def alive_outputs(schedule: Schedule) -> list[int]:
    """Outputs of this rank's stages alive at each backward; none should be: they were sent."""
    stages = own([Witness(seed) for seed in range(schedule.num_stages)], schedule)
    with Engine(schedule, stages) as engine:
        engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
    last = schedule.num_stages - 1
    return [number for stage, witness in stages.items() if stage != last for number in witness.alive]


def another_default_device(schedule: Schedule) -> float:
    """A program whose tensors are made on another device than that of messages, as by torch.set_default_device."""
    plain, stages = blocks(schedule.num_stages), own(blocks(schedule.num_stages), schedule)
    batches = microbatches(schedule.num_microbatches)
    plain_step(nn.Sequential(*plain), batches, SquareLoss())
    with torch.device("meta"), Engine(schedule, stages, record=True) as engine:
        engine.train_step(batches, SquareLoss())
        engine.timeline()
        engine.forward(batches, broadcast=True)
    return worst(stages, plain)


def record(schedule: Schedule) -> Any:
    """The measured timeline of a second step, and that recording can be switched off again."""
    stages = own(blocks(schedule.num_stages), schedule)
    batches = microbatches(schedule.num_microbatches)
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, SquareLoss())
        engine.record = True
        engine.train_step(batches, SquareLoss())
        first = engine.timeline()
        engine.record = False
        engine.train_step(batches, SquareLoss())
        assert engine.timeline() == first
    return first
