"""What the local ranks run in test_pipelining.py: our schedule classes beside torch's, on stages with equal weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from engine_helpers import WIDTH, Block, blocks, error_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

import zeropipe.pipelining as ours

Make = Callable[[int], list[nn.Module]]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def draw(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch and its target."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def stages_for(modules: list[nn.Module], numbers: tuple[int, ...], group: Any = None, **more: Any) -> list[Any]:
    """torch's stages around this rank's part of a model."""
    cpu = torch.device("cpu")
    return [PipelineStage(modules[n], n, len(modules), cpu, group=group, **more) for n in numbers]


def one_or_all(kind: type, stages: list[Any]) -> Any:
    return stages[0] if issubclass(kind, torchs.PipelineScheduleSingle) else stages


def feed(schedule: Any, stages: list[Any], x: Tensor, y: Tensor, call: str = "step", **kwargs: Any) -> Any:
    """One step as users write it: the batch where the first stage is, the target where the last one is."""
    losses: list[Tensor] = []
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    args = (x,) if first else ()
    more = {"target": y, "losses": losses} if last else {}
    output = getattr(schedule, call)(*args, **more, **kwargs)
    assert (output is not None) == last
    return output, losses


def gap(mine: Any, theirs: Any) -> float:
    if theirs is None:
        assert mine is None
        return 0.0
    if isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs)
        return max((gap(a, b) for a, b in zip(mine, theirs)), default=0.0)
    return error_of(mine.detach(), theirs.detach())


def gradients(stages: list[Any]) -> list[Tensor | None]:
    return [p.grad for stage in stages for p in stage.submod.parameters()]


def beside_torch(name: str, microbatches: int, per_rank: int, steps: int = 2, scale_grads: bool = True) -> float:
    """Outputs, losses and gradients of some steps; the largest difference from torch's class of the same name."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kind, torch_kind = getattr(ours, name), getattr(torchs, name)
    numbers = kind.stages_of(rank, ranks, ranks * per_rank)
    mine, theirs = (stages_for(blocks(ranks * per_rank), numbers) for _ in range(2))
    schedules = [
        each(one_or_all(each, stages), microbatches, loss_fn=mean_square, scale_grads=scale_grads)
        for each, stages in ((kind, mine), (torch_kind, theirs))
    ]
    worst = 0.0
    for step in range(steps):
        x, y = draw(2 * microbatches, step)
        got, wanted = (feed(schedule, stages, x, y) for schedule, stages in zip(schedules, (mine, theirs)))
        worst = max(worst, gap(got, wanted), gap(gradients(mine), gradients(theirs)))
        assert all(stage.has_backward for stage in mine)
    return worst


def plain_step(modules: list[nn.Module], x: Tensor, y: Tensor, microbatches: int, scale: bool = True) -> Any:
    """The un-pipelined model: merged output, losses, and gradients left on the modules."""
    outputs, losses = [], []
    for rows, target in zip(x.tensor_split(microbatches), y.tensor_split(microbatches)):
        outputs.append(nn.Sequential(*modules)(rows))
        losses.append(mean_square(outputs[-1], target))
        (losses[-1] / microbatches if scale else losses[-1]).backward()
    return torch.cat(outputs), losses


def beside_plain(
    name: str, microbatches: int, per_rank: int, make: Make = blocks, rows: int | None = None, **options: Any
) -> float:
    """One step of any of our classes; the largest difference from the plain model."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kind = ours.get_schedule_class(name)
    stages = stages_for(make(ranks * per_rank), kind.stages_of(rank, ranks, ranks * per_rank))
    schedule = kind(one_or_all(kind, stages), microbatches, loss_fn=mean_square, **options)
    seeds, rows = (0, 1), rows or 2 * microbatches + 1
    return max(against_plain(schedule, stages, make, microbatches, rows, seed) for seed in seeds)


def against_plain(schedule: Any, stages: list[Any], make: Make, microbatches: int, rows: int, seed: int = 0) -> float:
    plain = make(stages[0].num_stages)
    x, y = draw(rows, seed)
    output, losses = plain_step(plain, x, y, microbatches)
    for stage in stages:
        stage.submod.zero_grad()
    got = feed(schedule, stages, x, y)
    wanted = [p.grad for stage in stages for p in plain[stage.stage_index].parameters()]
    worst = gap(gradients(stages), wanted)
    return max(worst, gap(got, (output, losses))) if stages[-1].is_last else worst


def half_frozen(number: int) -> list[nn.Module]:
    """The first stage has nothing to learn, the last one only a part."""
    modules = blocks(number)
    modules[0].requires_grad_(False)
    modules[-1].up.requires_grad_(False)
    return modules


def ties(name: str, per_rank: int, steps: int = 2) -> float:
    """The first and the last stage share a weight; gradients of several steps are added up."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kind, number = getattr(ours, name), ranks * per_rank
    modules, plain = blocks(number), blocks(number)
    modules[-1].up.load_state_dict(modules[0].up.state_dict())
    modules[0].tied_pairs = (("up.weight", number - 1, "up.weight"),)
    modules[-1].tied_pairs = (("up.weight", 0, "up.weight"),)
    plain[-1].up.load_state_dict(plain[0].up.state_dict())
    plain[-1].up.weight = plain[0].up.weight
    stages = stages_for(modules, kind.stages_of(rank, ranks, number))
    schedule = kind(one_or_all(kind, stages), 4, loss_fn=mean_square, scale_grads=False)
    worst = 0.0
    for step in range(steps):
        x, y = draw(8, step)
        wanted = plain_step(plain, x, y, 4, scale=False)
        got = feed(schedule, stages, x, y)
        worst = max(worst, gap(got, wanted) if stages[-1].is_last else 0.0)
        worst = max(worst, gap(gradients(stages), [p.grad for s in stages for p in plain[s.stage_index].parameters()]))
    return worst


def unequal_ties(both_trained: bool) -> None:
    """A tie that cannot stay one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    modules = blocks(ranks)
    modules[0].tied_pairs = (("up.weight", ranks - 1, "up.weight"),)
    modules[-1].tied_pairs = (("up.weight", 0, "up.weight"),)
    if not both_trained:
        modules[-1].up.load_state_dict(modules[0].up.state_dict())
        modules[-1].up.weight.requires_grad_(False)
    stages = stages_for(modules, (rank,))
    schedule = ours.Schedule1F1B(stages[0], 4, loss_fn=mean_square)
    feed(schedule, stages, *draw(8, 0))


def evaluates(name: str, per_rank: int) -> dict[str, Any]:
    """eval() between two steps: the outputs and losses, what it leaves alone."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kind, number = getattr(ours, name), ranks * per_rank
    stages = stages_for(blocks(number), kind.stages_of(rank, ranks, number))
    schedule = kind(one_or_all(kind, stages), 4, loss_fn=mean_square)
    x, y = draw(8, 0)
    feed(schedule, stages, x, y)
    before = [g.clone() for g in gradients(stages)]
    plain = nn.Sequential(*blocks(number))
    output, losses = feed(schedule, stages, x, y, "eval")
    same = gap(gradients(stages), before)
    seen = gap(output, plain(x)) if output is not None else 0.0
    if output is not None:
        wanted = [mean_square(plain(rows), target) for rows, target in zip(x.chunk(4), y.chunk(4))]
        seen = max(seen, gap(losses, wanted))
        assert [stage.has_backward for stage in stages] == [False] * per_rank
    with torch.no_grad():
        again, _ = feed(schedule, stages, x, y, "eval")
    forward_only = kind(one_or_all(kind, stages), 2)  # no loss: step() goes forward only
    args = (x,) if any(s.is_first for s in stages) else ()
    third = forward_only.step(*args)
    if any(s.is_last for s in stages):
        schedule.eval(*args, losses=losses)  # no target
        assert losses == []
    else:
        schedule.eval(*args)
    seen = max([seen, *(gap(each, plain(x)) for each in (again, third) if each is not None)])
    return {"seen": seen, "same": same, "training": all(s.submod.training for s in stages)}


class Scaled(nn.Module):
    """Wants a number per row beside the activations."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, scale: Tensor, shift: float = 0.0) -> Tensor:
        return self.block(x) * scale[:, None, None] + shift


def takes_keywords(name: str, per_rank: int) -> float:
    """Keyword arguments on every rank, cut by their own specs, beside torch's class."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    number, worst = ranks * per_rank, 0.0
    x, y = draw(8, 0)
    scale = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
    results = []
    for kind in (getattr(ours, name), getattr(torchs, name)):
        numbers = getattr(ours, name).stages_of(rank, ranks, number)
        stages = stages_for([Scaled(block) for block in blocks(number)], numbers)
        schedule = kind(one_or_all(kind, stages), 4, loss_fn=mean_square)
        results.append((feed(schedule, stages, x, y, scale=scale, shift=0.25), gradients(stages)))
    worst = gap(results[0], results[1])
    mine = stages_for([Scaled(block) for block in blocks(number)], numbers)
    kind = getattr(ours, name)
    lists = {"kwarg_mbs": [{"scale": part, "shift": 0.25} for part in scale.chunk(4)]}
    if any(s.is_first for s in mine):
        lists["arg_mbs"] = [(part,) for part in x.chunk(4)]
    losses: list[Tensor] = []
    if any(s.is_last for s in mine):
        lists["target_mbs"], lists["losses"] = list(y.chunk(4)), losses
    output = kind(one_or_all(kind, mine), 4, loss_fn=mean_square).step(**lists)
    return max(worst, gap(((output, losses), gradients(mine)), results[1]))


def cut_by_specs() -> float:
    """args_chunk_spec along another dimension, and outputs merged along it."""
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

    ranks, rank = dist.get_world_size(), dist.get_rank()
    stages = stages_for(blocks(ranks), (rank,))
    spec = TensorChunkSpec.from_tuple((1,))
    schedule = ours.Schedule1F1B(stages[0], 3, args_chunk_spec=spec, output_merge_spec=spec[0])
    x, _ = draw(2, 0)
    output = schedule.step(*((x,) if rank == 0 else ()))
    quiet = schedule.step(*((x,) if rank == 0 else ()), return_outputs=False)
    assert quiet is None
    assert stages[0].output_chunks == []
    return 0.0 if output is None else gap(output, nn.Sequential(*blocks(ranks))(x))


def traced(name: str) -> float:
    """Stages that torch's pipeline() cut, run by ours and held against the plain model."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = nn.Sequential(*blocks(ranks))
    x, y = draw(8, 0)
    pipe = pipeline(model, (x[:2],), split_spec={str(n): SplitPoint.BEGINNING for n in range(1, ranks)})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ours.get_schedule_class(name)(stage, 4, loss_fn=mean_square)
    got = feed(schedule, [stage], x, y)
    plain = blocks(ranks)
    wanted = plain_step(plain, x, y, 4)
    theirs = {n.replace(".", "_"): p.grad for n, p in nn.Sequential(*plain).named_parameters()}
    worst = gap(got, wanted) if stage.is_last else 0.0
    own = {n.replace(".", "_"): p.grad for n, p in stage.submod.named_parameters()}
    assert len(own) == 4
    return max(worst, *(gap(own[n], theirs[n]) for n in own))


def custom(csv: str, placement: list[tuple[int, ...]], microbatches: int, folder: str) -> float:
    """A CSV in our class, by its text, by a file and as torch's actions, beside torch's own runtime."""
    from pathlib import Path

    rank = dist.get_rank()
    number = 1 + max(max(stages) for stages in placement)
    path = Path(folder) / f"order-{rank}"
    path.write_text(csv)
    x, y = draw(2 * microbatches, 0)
    results = []
    for how in ("torch", "text", "file", "actions"):
        stages = stages_for(blocks(number), placement[rank])
        if how == "torch":
            schedule = torchs._PipelineScheduleRuntime(stages, microbatches, loss_fn=mean_square)
            schedule._load_csv(str(path))
        elif how == "text":
            schedule = ours.PipelineSchedule(stages, microbatches, loss_fn=mean_square, schedule=csv)
        else:
            schedule = ours.PipelineSchedule(stages, microbatches, mean_square)
            if how == "file":
                schedule._load_csv(str(path))
            else:
                schedule._prepare_schedule_with_comms(results[0][2])
        got = feed(schedule, stages, x, y)
        results.append((got, gradients(stages), schedule.pipeline_order))
        assert [str(a) for a in results[-1][2][rank] if a] == [str(a) for a in results[0][2][rank] if a]
    return max(gap(each[:2], results[0][:2]) for each in results[1:])


def inputs_that_need_gradients(name: str, per_rank: int) -> float:
    """A leaf as the batch gets its gradient; gradients of two steps add up, with torch's scaling of older ones."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    number, results = ranks * per_rank, []
    for kind in (getattr(ours, name), getattr(torchs, name)):
        stages = stages_for(blocks(number), getattr(ours, name).stages_of(rank, ranks, number))
        schedule = kind(one_or_all(kind, stages), 4, loss_fn=mean_square)
        x, y = draw(8, 0)
        x.requires_grad_(any(stage.is_first for stage in stages))
        for _ in range(2):
            feed(schedule, stages, x, y)
        results.append([x.grad, *gradients(stages)])
    return gap(results[0], results[1])


class Deferring(nn.Module):
    """A module that puts off its own weight gradient, as users of dw_builder write them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) * 0.4)
        self.waiting: list[Callable[[], None]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight.detach())
        if not y.requires_grad:
            y.requires_grad_()
        rows = x.detach()

        def keep(gradient: Tensor) -> None:
            inner = gradient * (1 - y.detach().square())
            self.waiting.append(lambda: self._add((rows.transpose(-1, -2) @ inner).sum(0)))

        y.register_hook(keep)
        return y

    def _add(self, gradient: Tensor) -> None:
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient

    def build(self) -> Callable[[], None]:
        waiting, self.waiting = self.waiting, []

        def run() -> None:
            for each in waiting:
                each()

        return run


def builders(name: str, per_rank: int) -> dict[str, Any]:
    """Stages with a dw_builder: gradients equal to those of the same products by autograd."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    number = ranks * per_rank
    kind = getattr(ours, name)
    modules = [Deferring(seed) for seed in range(number)]
    numbers = kind.stages_of(rank, ranks, number)
    cpu = torch.device("cpu")
    stages = [PipelineStage(modules[n], n, number, cpu, dw_builder=modules[n].build) for n in numbers]
    schedule = kind(one_or_all(kind, stages), 4, loss_fn=mean_square)
    x, y = draw(8, 0)
    feed(schedule, stages, x, y)
    weights = [Deferring(seed).weight for seed in range(number)]
    for rows, target in zip(x.chunk(4), y.chunk(4)):
        for weight in weights:
            rows = torch.tanh(rows @ weight)
        (mean_square(rows, target) / 4).backward()
    return {"seen": gap([modules[n].weight.grad for n in numbers], [weights[n].grad for n in numbers])}


def new_shapes() -> float:
    """Other lengths, other numbers of rows, uneven chunks, a new schedule object per step with other numbers."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    number, worst = 2 * ranks, 0.0
    stages = stages_for(blocks(number), ours.ScheduleZBVZeroBubble.stages_of(rank, ranks, number))
    engines = set()
    for seed, (rows, microbatches) in enumerate([(8, 4), (11, 4), (7, 7), (8, 4), (3, 2)]):
        schedule = ours.ScheduleZBVZeroBubble(stages, microbatches, loss_fn=mean_square)
        worst = max(worst, against_plain(schedule, stages, blocks, microbatches, rows, seed))
        engines |= set(stages[0].__dict__["_zeropipe_engines"].values())
    assert len(engines) == 1
    return worst


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if float(x[0, 0, 0]) == 7.0:
            raise RuntimeError("seven is bad luck")
        return x


class Outputs(nn.Module):
    """What cannot be put together again: a number beside the output, or outputs of two lengths."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.what == "outputs":
            return x, x.mean()
        return x[:, : self.calls].sum(1, keepdim=True).expand(-1, self.calls, -1)


def fails(where: str) -> str:
    """Something is wrong on one rank: the error that each rank raises."""
    rank = dist.get_rank()
    modules = blocks(dist.get_world_size())
    modules[0] = nn.Sequential(Picky(), modules[0])
    stages = stages_for(modules, (rank,))
    if rank == len(modules) - 1 and where in ("outputs", "lengths"):
        modules[rank] = stages[0].submod = nn.Sequential(modules[rank], Outputs(where))
    losses = {
        "detached": lambda output, target: mean_square(output, target).detach(),
        "outputs": lambda output, target: mean_square(output[0], target),
        "pair": lambda output, target: (mean_square(output, target), 1),
        "shape": lambda output, target: output,
    }
    schedule = ours.Schedule1F1B(stages[0], 4, loss_fn=losses.get(where, mean_square))
    x, y = draw(8, 0)
    if where == "module":
        x[4, 0, 0] = 7.0
    try:
        if where == "batch":  # three rows cannot be cut into four
            feed(schedule, stages, x[:3] if rank == 0 else x, y)
        elif where == "target rows":
            feed(schedule, stages, x, y[:3])
        elif where == "keyword":
            feed(schedule, stages, x, y, mask=torch.ones(()))
        elif where == "target":
            schedule.step(*((x,) if rank == 0 else ()))
        elif where == "target kind":
            feed(schedule, stages, x, {"labels": y})
        else:
            feed(schedule, stages, x, y)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "no error"
    if where in (
        "batch",
        "keyword",
        "target",
        "target kind",
        "target rows",
    ):  # it was refused before anything ran: the next step is fine
        assert against_plain_chain(schedule, stages, modules) < 1e-10
    return text


def against_plain_chain(schedule: Any, stages: list[Any], modules: list[nn.Module]) -> float:
    def make(number: int) -> list[nn.Module]:
        return [nn.Sequential(Picky(), block) if n == 0 else block for n, block in enumerate(blocks(number))]

    return against_plain(schedule, stages, make, 4, 8)


class Listed(nn.Module):
    """Returns a list, as exported modules do; the second item goes through all stages and is used at the end."""

    def __init__(self, block: nn.Module, last: bool) -> None:
        super().__init__()
        self.block, self.last = block, last

    def forward(self, x: Tensor, side: Tensor | None = None) -> list[Tensor] | Tensor:
        side = 2 * x if side is None else side
        return self.block(x) + side if self.last else [self.block(x), side]


class Chain(nn.Module):
    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Any) -> Tensor:
        for part in self.parts:
            x = part(*x) if isinstance(x, list) else part(x)
        return x


class Bounds(NamedTuple):
    """What attention kernels are given for packed sequences."""

    starts: Tensor
    longest: int


class Bounded(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, bounds: Bounds) -> Tensor:
        return self.block(x) * bounds.longest + bounds.starts.sum()


def odd_values() -> float:
    """Lists as outputs; named tuples as keyword arguments; subclasses of nn.Linear."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, y = draw(8, 0)

    def listed() -> list[nn.Module]:
        return [Listed(block, n == ranks - 1) for n, block in enumerate(blocks(ranks))]

    stages = stages_for(listed(), (rank,))
    got = feed(ours.ScheduleZBH1(stages[0], 4, loss_fn=mean_square), stages, x, y)
    plain = Chain(listed())
    losses = [mean_square(plain(rows), target) for rows, target in zip(x.chunk(4), y.chunk(4))]
    sum(loss / 4 for loss in losses).backward()
    worst = gap(gradients(stages), [p.grad for p in plain.parts[rank].parameters()])
    if stages[0].is_last:
        worst = max(worst, gap(got, (plain(x), losses)))
    bounds = [{"bounds": Bounds(torch.tensor([n]), n + 1)} for n in range(4)]
    stages = stages_for([Bounded(block) for block in blocks(ranks)], (rank,))
    output = ours.ScheduleGPipe(stages[0], 4).step(
        arg_mbs=[(rows,) for rows in x.chunk(4)] if rank == 0 else None, kwarg_mbs=bounds
    )
    if output is not None:
        rows = list(x.chunk(4))
        for block in blocks(ranks):
            rows = [block(each) * (n + 1) + n for n, each in enumerate(rows)]
        worst = max(worst, gap(output, torch.cat(rows)))
    return worst


class Sides(nn.Module):
    """Hands on a second tensor that nobody uses; what made it has no gradient, as in one process."""

    def __init__(self, seed: int, last: bool) -> None:
        super().__init__()
        self.block, self.unused, self.last = Block(seed), Block(seed + 100), last

    def forward(self, x: Tensor, side: Tensor | None = None) -> Any:
        return self.block(x) if self.last else (self.block(x), self.unused(x))


def nobodys_gradients(name: str, per_rank: int, options: dict[str, Any]) -> float:
    """Outputs that the next stage does not use: no gradient at all for what made them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    number, kind = ranks * per_rank, ours.get_schedule_class(name)

    def make() -> list[nn.Module]:
        return [Sides(n, n == number - 1) for n in range(number)]

    ours.configure(**options)
    try:
        stages = stages_for(make(), kind.stages_of(rank, ranks, number))
        schedule = kind(one_or_all(kind, stages), 4, loss_fn=mean_square)
        x, y = draw(8, 0)
        feed(schedule, stages, x, y)
    finally:
        ours.configure()
    plain = make()
    for rows, target in zip(x.chunk(4), y.chunk(4)):
        for module in plain[:-1]:
            rows, _ = module(rows)
        (mean_square(plain[-1](rows), target) / 4).backward()
    wanted = [p.grad for stage in stages for p in plain[stage.stage_index].parameters()]
    assert any(gradient is None for gradient in wanted)
    return gap(gradients(stages), wanted)
