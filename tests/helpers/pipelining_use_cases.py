"""What the local ranks run in test_pipelining_use.py: sharded stages, options, timelines, torch's names rebound."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_helpers import blocks
from mesh_cases import mesh_of, whole
from pipelining_cases import draw, feed, gap, gradients, mean_square, one_or_all, plain_step, stages_for
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.distributed.pipelining import pipeline as traced
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import zeropipe.pipelining as ours
from zeropipe.engine.backward.linear import defer
from zeropipe.engine.backward.store import WeightStore
from zeropipe.errors import ConfigError
from zeropipe.pipelining.engines import check_mesh, warn_about_copies, warn_about_replicas


class Stage(nn.Module):
    """Two blocks in a list, as models have them."""

    def __init__(self, number: int, of: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks(2 * of)[2 * number : 2 * number + 2])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(name: str, per_rank: int, summing: bool, beside: bool) -> float:
    """Stages under FSDP2 on 2 x 2 ranks, each pipeline with its own rows, against the plain model.

    `beside`: torch's class, too. Its zero-bubble schedules leave parameters of sharded stages without a gradient.
    """
    mesh = mesh_of({"pp": 2, "dp_shard": 2})
    rank, group, number, results = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), 2 * per_rank, []
    numbers = getattr(ours, name).stages_of(rank, 2, number)
    for kind in (getattr(ours, name), getattr(torchs, name))[: 2 if beside else 1]:
        modules = [Stage(n, number) for n in range(number)]
        for module in modules:
            for layer in module.layers:
                fully_shard(layer, mesh=mesh["dp_shard"])
            fully_shard(module, mesh=mesh["dp_shard"])
            for unit in (*module.layers, module):
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
                if summing:
                    unit.set_gradient_divide_factor(1.0)
        stages = stages_for(modules, numbers, group)
        schedule = kind(one_or_all(kind, stages), 4, loss_fn=mean_square)
        x, y = draw(8, mesh["dp_shard"].get_local_rank())
        got = feed(schedule, stages, x, y)
        results.append([whole(gradient) for gradient in gradients(stages)])
        if kind is getattr(ours, name):
            output, _ = feed(schedule, stages, x, y, "eval")
            assert output is None or gap(output, got[0]) < 1e-12
            assert all(torch.equal(whole(a), b) for a, b in zip(gradients(stages), results[0]))
    plain = [Stage(n, number) for n in range(number)]
    for pipeline in range(2):
        plain_step(plain, *draw(8, pipeline), 4)
    wanted = [p.grad if summing else p.grad / 2 for n in numbers for p in plain[n].parameters()]
    return max(gap(each, wanted) for each in results)


def sharded_on_a_mesh() -> float:
    """Two pipelines with different numbers of microbatches that share weights."""
    mesh = mesh_of({"pp": 2, "dp_shard": 2})
    rank, group, place = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), mesh["dp_shard"].get_local_rank()
    numbers, sizes = ours.ScheduleZBVZeroBubble.stages_of(rank, 2, 4), (3, 5)
    modules = [Stage(n, 4) for n in range(4)]
    for module in modules:
        fully_shard(module, mesh=mesh["dp_shard"]).set_force_sum_reduction_for_comms(True)
    stages = stages_for(modules, numbers, group)
    batch, refusals = draw(2 * sizes[place], place), []
    ours.configure(regather=True)
    try:
        feed(ours.ScheduleZBVZeroBubble(stages, sizes[place], loss_fn=mean_square), stages, *batch)
    except ConfigError as error:
        refusals.append(str(error))
    ours.configure(mesh=mesh)
    try:
        for call in (
            lambda: check_mesh(mesh, None),
            lambda: feed(ours.ScheduleZBVZeroBubble(stages, sizes[place], loss_fn=mean_square), stages, *batch),
        ):
            try:
                call()
            except ConfigError as error:
                refusals.append(str(error))
        assert "with regather=True all pipelines must have the same number of microbatches" in refusals[0]
        assert "the stages have [0, 1, 2, 3] in their group" in refusals[1]
        assert "ran different numbers of microbatches" in refusals[2]
        with warnings.catch_warnings(record=True) as warned:
            warn_about_replicas(mesh, stages)
            warn_about_replicas(mesh, stages_for([Stage(n, 4) for n in range(4)], numbers, group))
        assert ["are not summed over dp_shard" in str(warning.message) for warning in warned] == [True]
        for stage in stages:
            stage.submod.zero_grad()
        schedule = ours.ScheduleZBVZeroBubble(stages, sizes[place], loss_fn=mean_square, scale_grads=False)
        feed(schedule, stages, *batch)
    finally:
        ours.configure()
    plain = [Stage(n, 4) for n in range(4)]
    for pipeline, size in enumerate(sizes):
        plain_step(plain, *draw(2 * size, pipeline), size, scale=False)
    wanted = [p.grad / 2 for n in numbers for p in plain[n].parameters()]
    return gap([whole(gradient) for gradient in gradients(stages)], wanted)


def tensor_parallel(name: str, per_rank: int) -> float:
    """Stages that torch's own tensor parallelism has spread, beside the plain model."""
    mesh = mesh_of({"pp": 2, "tp": 2})
    rank, group, number = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), 2 * per_rank
    modules = blocks(number)
    for module in modules:
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    kind = getattr(ours, name)
    stages = stages_for(modules, kind.stages_of(rank, 2, number), group)
    x, y = draw(8, 0)
    plain = blocks(number)
    wanted = plain_step(plain, x, y, 4)
    got = feed(kind(one_or_all(kind, stages), 4, loss_fn=mean_square), stages, x, y)
    theirs = [p.grad for stage in stages for p in plain[stage.stage_index].parameters()]
    worst = gap([whole(gradient) for gradient in gradients(stages)], theirs)
    return max(worst, gap(got, wanted)) if stages[-1].is_last else worst


def configured(options: dict[str, Any]) -> dict[str, Any]:
    """A step under options of the engine, beside the plain model; whether blocks were changed."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    number = 2 * ranks
    numbers = ours.ScheduleZBVZeroBubble.stages_of(rank, ranks, number)
    stages = stages_for([Stage(n, number) for n in range(number)], numbers)
    kinds = {type(layer) for stage in stages for layer in stage.submod.layers}
    x, y = draw(8, 0)
    ours.configure(**options)
    try:
        schedule = ours.ScheduleZBVZeroBubble(stages, 4, loss_fn=mean_square)
        feed(schedule, stages, x, y)
    finally:
        ours.configure()
    changed = kinds != {type(layer) for stage in stages for layer in stage.submod.layers}
    plain = [Stage(n, number) for n in range(number)]
    plain_step(plain, x, y, 4)
    seen = gap(gradients(stages), [p.grad for n in numbers for p in plain[n].parameters()])
    return {"seen": seen, "changed": changed}


def recorded() -> bool:
    """The timeline of a step is that of the schedule that ran."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    stages = stages_for(blocks(ranks), (rank,))
    x, y = draw(8, 0)
    ours.configure(record=True)
    try:
        schedule = ours.Schedule1F1B(stages[0], 4, loss_fn=mean_square)
        feed(schedule, stages, x, y)
        timeline = schedule.timeline()
    finally:
        ours.configure()
    with pytest.raises(ConfigError, match=r"no step was recorded: call configure\(record=True\) before step\(\)"):
        schedule.timeline()
    assert timeline.makespan > 0
    return timeline.schedule == schedule.schedule


def rebound() -> list[str]:
    """The classes that a program with torch's imports gets, before, while and after install()."""
    import torch.distributed.pipelining as theirs

    def homes() -> str:
        found = [theirs.ScheduleGPipe, torchs.get_schedule_class("zbvzerobubble"), torchs._PipelineScheduleRuntime]
        return " ".join(kind.__module__.split(".")[0] for kind in found)

    seen = [homes()]
    ours.install()
    ours.install()
    try:
        seen.append(homes())
        ranks, rank = dist.get_world_size(), dist.get_rank()
        stages = stages_for(blocks(ranks), (rank,))
        schedule = theirs.ScheduleGPipe(stages[0], 2, loss_fn=mean_square)
        feed(schedule, stages, *draw(4, 0))
        seen.append(type(schedule).__module__.split(".")[0])
    finally:
        ours.uninstall()
    return [*seen, homes()]


def compiled_by_the_user(how: str) -> float:
    """Blocks that the user has compiled, or checkpoints by operator, under a split backward."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    number = 2 * ranks
    numbers = ours.ScheduleZBVZeroBubble.stages_of(rank, ranks, number)
    modules = [Stage(n, number) for n in range(number)]
    for module in modules:
        for name, layer in module.layers.named_children():
            if how == "in place":
                layer.compile(backend="aot_eager", fullgraph=True)
            elif how == "wrapped":
                module.layers[int(name)] = torch.compile(layer, backend="aot_eager", fullgraph=True)
            else:
                module.layers[int(name)] = checkpoint_wrapper(layer, context_fn=selective)
    stages = stages_for(modules, numbers)
    schedule = ours.ScheduleZBVZeroBubble(stages, 4, loss_fn=mean_square)
    x, y = draw(8, 0)
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        feed(schedule, stages, x, y)
    deferred = [type(m).__name__ for s in stages for m in s.submod.modules() if isinstance(m, nn.Linear)]
    assert set(deferred) == {"DeferredLinear"}
    plain = [Stage(n, number) for n in range(number)]
    plain_step(plain, x, y, 4)
    return gap(gradients(stages), [p.grad for n in numbers for p in plain[n].parameters()])


def selective() -> Any:
    """Keep the results of matrix products, as trainers do."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def spread_products(compiled: bool) -> float:
    """Layers that torch's tensor parallelism has spread leave their weight gradients to W, equal to the plain ones."""
    mesh = mesh_of({"tp": dist.get_world_size()})
    (plain,), (module,) = blocks(1), blocks(1)
    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert defer(module) == 2
    if compiled:
        module.compile(backend="aot_eager", fullgraph=True)
    x, _ = draw(4, 0)
    inputs, store = [x.clone().requires_grad_() for _ in range(2)], WeightStore()
    with store.collect(0, 0):
        module(inputs[0]).square().sum().backward()
    zeros = torch.__version__ < "2.13"  # torch 2.11 makes zeros where a spread weight gets no gradient
    for given in (module.up.weight.grad, module.down.weight.grad):
        assert given is None or (zeros and not whole(given).any())
    store.flush(0, 0)
    plain(inputs[1]).square().sum().backward()
    mine = [whole(p.grad) for p in module.parameters()]
    return gap([inputs[0].grad, *mine], [inputs[1].grad, *(p.grad for p in plain.parameters())])


class Handing(nn.Module):
    """Two layers that hand on what torch's tensor parallelism makes of their output."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.up, self.down = block.up, block.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def spread_between_stages(name: str, per_rank: int, layout: str) -> float:
    """Stages that return DTensors, sharded along the sequence or as sums that are still to be made."""
    mesh = mesh_of({"pp": 2, "tp": 2})
    rank, group, number = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), 2 * per_rank
    between = Shard(0) if layout == "sharded" else Replicate()
    modules, plain = ([Handing(block) for block in blocks(number)] for _ in range(2))
    for n, module in enumerate(modules):
        last = n == number - 1
        up = ColwiseParallel(input_layouts=Replicate() if n == 0 else between)
        down = RowwiseParallel(output_layouts=Replicate() if last else between, use_local_output=last)
        parallelize_module(module, mesh["tp"], {"up": up, "down": down})
    kind = getattr(ours, name)
    stages = stages_for(modules, kind.stages_of(rank, 2, number), group)
    x, y = draw(8, 0)
    wanted = plain_step(plain, x, y, 4)
    schedule = kind(one_or_all(kind, stages), 4, loss_fn=mean_square)
    got = feed(schedule, stages, x, y)
    theirs = [p.grad for stage in stages for p in plain[stage.stage_index].parameters()]
    worst = gap([whole(gradient) for gradient in gradients(stages)], theirs)
    output, _ = feed(schedule, stages, x, y, "eval")
    return max(worst, gap(got, wanted), gap(output, wanted[0])) if stages[-1].is_last else worst


class Forgetful(list[Any]):
    """What trainers put where outputs would pile up."""

    def append(self, item: Any) -> None:
        pass


def reached_inside() -> dict[str, Any]:
    """What known users do with torch's insides: patched merging, lists that keep nothing, other modules in a stage."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    stages = stages_for(blocks(ranks), (rank,))
    schedule = ours.ScheduleZBH1(stages[0], 4, loss_fn=weighted)
    schedule._initialize_stage((), {})
    schedule._merge_outputs = lambda chunks: f"{len(chunks)} chunks"
    x, y = draw(8, 0)
    seen: dict[str, Any] = {"merged": feed(schedule, stages, x, y)[0]}
    stages[0].output_chunks = Forgetful()
    seen["forgotten"] = feed(schedule, stages, x, y)[0]
    plain = blocks(ranks)
    plain_step(plain, x, y, 4)
    stages[0].submod = blocks(ranks)[rank]  # the weights are new, so the engine must be
    _, losses = feed(schedule, stages, x, y, loss_kwargs={"weight": 3.0})
    seen["gap"] = gap(gradients(stages), [3 * p.grad for p in plain[rank].parameters()])
    seen["losses"] = len(losses)
    return seen


def weighted(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return weight * mean_square(output, target)


class Skipping(nn.Module):
    """The first block's output goes to the third, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.d(self.c(self.b(first)) + first)


def skips() -> str:
    """A traced model with a skip connection: what the stage that gets it says."""
    split = dict.fromkeys("bcd", SplitPoint.BEGINNING)
    pipe = traced(Skipping(), (draw(2, 0)[0],), split_spec=split)
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    try:
        ours.ScheduleGPipe(stage, 2)
    except ConfigError as error:
        return str(error)
    return "taken"


class Again(nn.Module):
    """The last stage uses a block of the second once more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        x = self.b(x)
        pipe_split()
        x = self.c(x)
        pipe_split()
        return self.b(x)


def copies() -> list[str]:
    """A traced model with a block in two stages: the warnings that each rank gives."""
    stage = traced(Again(), (draw(2, 0)[0],)).build_stage(dist.get_rank(), torch.device("cpu"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warn_about_copies([stage])
    return [str(warning.message) for warning in warned]
