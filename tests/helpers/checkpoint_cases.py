"""What the local ranks run in test_checkpoint.py."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from engine_helpers import SquareLoss, blocks, error_of, microbatches, nccl_on_one_gpu
from mesh_cases import llama, mesh_of, modules, shard, whole
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine import (
    CausalLMLoss,
    Engine,
    MasterWeights,
    hf_model,
    hf_stages,
    load_checkpoint,
    module_stages,
    parallelize,
    save_checkpoint,
    save_stages,
)
from zeropipe.engine.checkpoint import writer
from zeropipe.engine.checkpoint.writer import StagedCheckpoint
from zeropipe.errors import ZeropipeError

BATCHES, BLOCKS = 6, 8


class Model:
    """Blocks in a row, the first and the last tied or not; or a tiny Llama, where `config` is given."""

    def __init__(self, tied: bool, config: dict[str, Any] | None = None, device: str = "cpu") -> None:
        self.tied, self.device = tied, device
        self.config = None if config is None else llama(tie_word_embeddings=tied, **config)
        self.loss_fn: Any = SquareLoss() if config is None else CausalLMLoss()

    def data(self, step: int) -> list[dict[str, Any]]:
        """The microbatches of a step, whatever the layout."""
        if self.config is None:
            return microbatches(BATCHES, step)
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randint(64, (1, 4 + index % 3), generator=generator) for index in range(4)]
        return [{"input_ids": tokens, "labels": tokens} for tokens in (t.to(self.device) for t in batches)]

    def _modules(self, seed: int) -> list[nn.Module]:
        made = modules(BLOCKS, self.tied)
        if self.tied:
            made[-1].weight = made[0].weight
        with torch.no_grad():
            for parameter in nn.ModuleList(made).parameters():
                parameter.add_(0.1 * seed)
        return made

    def plain(self) -> tuple[nn.Module, Callable[[dict[str, Any]], Tensor]]:
        """In one process, and how it is called."""
        if self.config is None:
            model: Any = nn.Sequential(*self._modules(0))
            return model, lambda batch: model(batch["inputs"])
        model = hf_model(self.config, device=self.device)
        return model, lambda batch: model(batch["input_ids"]).logits

    def stages(self, schedule: Schedule, rank: int, seed: int, mesh: Any) -> dict[int, Any]:
        if self.config is not None:
            made = hf_stages(self.config, schedule, rank, seed=seed, device=self.device)
            return parallelize(made, mesh, shard_cp="cp" in mesh.mesh_dim_names)
        made = module_stages(self._modules(seed), schedule, rank)
        if "dp_shard" in mesh.mesh_dim_names:
            shard(made, mesh)
        return made


def adamw(parameters: Any) -> tuple[Any, Any]:
    """Two groups and a schedule, so that options of groups matter."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 4], 0.5)


def oracle(model: Model, steps: int, path: Path) -> None:
    """Weights of one process after each step."""
    plain, call = model.plain()
    optimizer, scheduler = adamw(plain.parameters())
    for step in range(steps):
        batches = model.data(step)
        total = sum(model.loss_fn.count(batch) for batch in batches)
        for batch in batches:
            (model.loss_fn(call(batch), batch)[0] / total).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        torch.save(dict(plain.named_parameters(remove_duplicate=False)), path / f"{step}.pt")


def build(schedule: Schedule, sizes: dict[str, int], model: Model, seed: int = 0) -> tuple[Any, Any, Any]:
    """An engine on a mesh, and which microbatches are its own."""
    mesh = mesh_of(sizes, model.device)
    stages = model.stages(schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0, seed, mesh)
    pipelines = math.prod(size for name, size in sizes.items() if name.startswith("dp"))
    place = 0
    for name in ("dp_replicate", "dp_shard"):
        if name in sizes:
            place = place * sizes[name] + mesh[name].get_local_rank()
    return Engine(schedule, stages, mesh=mesh), stages, slice(place, None, pipelines)


def link(
    schedule: Schedule, sizes: dict[str, int], model: Model, path: str, step: int, oracle: str, asynchronous: bool
) -> float:
    """One layout of a chain: load what the layout before saved, do one step, save. The difference from the oracle."""
    engine, stages, own = build(schedule, sizes, model, seed=step)
    with engine:
        optimizer, scheduler = adamw(engine.parameters())
        if step:
            loaded = load_checkpoint(path, engine, optimizer)
            assert loaded.step == step
            scheduler.load_state_dict(loaded.extra["scheduler"])
        engine.train_step(model.data(step)[own], model.loss_fn)
        engine.clip_grad_norm(0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        extra = {"scheduler": scheduler.state_dict()}
        saving = save_checkpoint(path, engine, optimizer, step=step + 1, extra=extra, asynchronous=asynchronous)
        if asynchronous:  # what comes now is not in the checkpoint
            before = [parameter.detach().clone() for parameter in engine.parameters()]
            with torch.no_grad():
                for parameter in engine.parameters():
                    parameter.add_(1.0)
                saving.wait()
                for parameter, value in zip(engine.parameters(), before, strict=True):
                    parameter.copy_(value)
    wanted = torch.load(Path(oracle) / f"{step}.pt", weights_only=True, map_location="cpu")
    return max(
        error_of(whole(parameter.detach()), wanted[stage.full_name(name)].detach())
        for stage in stages.values()
        for name, parameter in stage.named_parameters()
    )


def link_over_nccl(*args: Any) -> float:
    """`link` with all ranks on one GPU."""
    nccl_on_one_gpu()
    torch.zeros(1, device="cuda:0")  # a mesh would look for a GPU of its own for every rank
    return link(*args)


def weights_over_nccl(schedule: Schedule, sizes: dict[str, int], model: Model) -> tuple[int, float]:
    """How many whole weights come, and their largest difference from the plain model's."""
    nccl_on_one_gpu()
    torch.zeros(1, device="cuda:0")
    wanted = model.plain()[0].state_dict()
    engine, _, _ = build(schedule, sizes, model)
    with engine:
        differences = [float((weight - wanted[name]).abs().max()) for name, weight in engine.named_weights()]
    return len(differences), max(differences)


def small(schedule: Schedule, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """An engine over plain modules, with weights that depend on the seed."""
    modules = [module.to(dtype) for module in blocks(8)]
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.add_(seed)
    return Engine(schedule, module_stages(modules, schedule, dist.get_rank()))


def one_step(engine: Any, optimizer: Any, seed: int) -> None:
    batches = microbatches(engine.schedule.num_microbatches, seed)
    dtype = engine.parameters()[0].dtype
    batches = [{key: value.to(dtype) for key, value in batch.items()} for batch in batches]
    engine.train_step(batches, SquareLoss())
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
        one.zero_grad()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.1, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "masters": lambda p: MasterWeights(torch.optim.AdamW, p, lr=0.01),
    "two": lambda p: two(p, torch.optim.Muon, torch.optim.AdamW),
}


def two(parameters: Any, matrices: Callable[..., Any], others: Callable[..., Any]) -> list[Any]:
    """An optimizer for matrices, and one for the rest."""
    by_shape = [[one for one in parameters if (one.dim() == 2) == wanted] for wanted in (True, False)]
    return [matrices(by_shape[0], lr=0.01), others(by_shape[1], lr=0.02)]


def go_on(one: Schedule, other: Schedule, names: list[str], path: str) -> dict[str, float]:
    """Two steps and a save by one schedule, a third by both: the largest difference for each optimizer."""
    dtype = torch.bfloat16 if names == ["masters"] else torch.float64
    wanted, seen = {}, {}
    with small(one, dtype=dtype) as engine:
        for name in names:
            optimizer = OPTIMIZERS[name](engine.parameters())
            one_step(engine, optimizer, 0)
            one_step(engine, optimizer, 1)
            save_checkpoint(f"{path}/{name}", engine, optimizer, step=2)
            one_step(engine, optimizer, 2)
            wanted[name] = dict(engine.named_weights())
    with small(other, seed=3, dtype=dtype) as engine:
        for name in names:
            optimizer = OPTIMIZERS[name](engine.parameters())
            one_step(engine, optimizer, 5)
            load_checkpoint(f"{path}/{name}", engine, optimizer)
            one_step(engine, optimizer, 2)
            found = dict(engine.named_weights())
            assert found.keys() == wanted[name].keys()
            seen[name] = max(error_of(found[key].double(), value.double()) for key, value in wanted[name].items())
    return seen


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except ZeropipeError as error:
        return str(error)
    return ""


def refuses(schedule: Schedule, path: str) -> dict[str, str]:
    """What does not fit, in words; weights and optimizer stay as they are, and the engine goes on."""
    seen = {}
    with small(schedule) as engine:
        adam = torch.optim.Adam(engine.parameters(), lr=0.01)
        one_step(engine, adam, 0)
        seen["step"] = told(lambda: save_checkpoint(path, engine, step=1.5))
        seen["extra"] = told(lambda: save_checkpoint(path, engine, extra={"a": [object()]}))
        seen["differs"] = told(lambda: save_checkpoint(path, engine, extra=torch.tensor(dist.get_rank())))
        stranger = torch.optim.SGD([*engine.parameters(), torch.nn.Parameter(torch.ones(3))])
        seen["stranger"] = told(lambda: save_checkpoint(path, engine, stranger))
        seen["no optimizers"] = told(lambda: save_checkpoint(path, engine, [adam, None]))
        mine = adam if dist.get_rank() == 0 else None
        alike = mine or torch.optim.SGD(engine.parameters())
        seen["not alike"] = told(lambda: save_checkpoint(path, engine, alike))
        seen["one has none"] = told(lambda: save_checkpoint(path, engine, mine))
        seen["twice"] = told(lambda: save_checkpoint(path, engine, [adam, torch.optim.SGD(engine.parameters())]))
        assert not list(Path(path).glob("*/*"))
        seen["nothing"] = told(lambda: load_checkpoint(path, engine))
        save_checkpoint(f"{path}/bare", engine)
        save_checkpoint(f"{path}/two", engine, two(engine.parameters(), torch.optim.Muon, torch.optim.AdamW))
        other = two(engine.parameters(), torch.optim.SGD, torch.optim.AdamW)
        seen["other of two"] = told(lambda: load_checkpoint(f"{path}/two", engine, other))
        save_checkpoint(f"{path}/adam", engine, adam)
        seen["half"] = told(lambda: load_checkpoint(f"{path}/adam", engine, mine))
        masters = MasterWeights(torch.optim.Adam, engine.parameters())
        load_checkpoint(f"{path}/adam", engine, masters)  # of float64 weights it keeps no copies
        before = [parameter.detach().clone() for parameter in engine.parameters()]
        seen["no optimizer"] = told(lambda: load_checkpoint(f"{path}/bare", engine, adam))
        sgd = torch.optim.SGD(engine.parameters(), lr=0.5)
        seen["kind"] = told(lambda: load_checkpoint(f"{path}/adam", engine, sgd))
        fewer = torch.optim.Adam(engine.parameters()[1:], lr=0.5)
        seen["fewer"] = told(lambda: load_checkpoint(f"{path}/adam", engine, fewer))
        seen["random"] = told(lambda: load_checkpoint(f"{path}/adam", engine, random=True))
        assert not fewer.state
        assert fewer.param_groups[0]["lr"] == 0.5
        assert all(map(torch.equal, before, engine.parameters()))
        one_step(engine, adam, 1)
        for parameter in engine.parameters() if mine is None else ():
            parameter.requires_grad_(False)
        save_checkpoint(f"{path}/frozen", engine, mine)  # who trains nothing needs no optimizer
        load_checkpoint(f"{path}/frozen", engine, mine)
    with small(schedule, dtype=torch.bfloat16) as engine:
        adam = torch.optim.Adam(engine.parameters())
        masters = MasterWeights(torch.optim.Adam, engine.parameters())
        save_checkpoint(f"{path}/16", engine, adam)
        save_checkpoint(f"{path}/masters", engine, masters)
        seen["no masters"] = told(lambda: load_checkpoint(f"{path}/16", engine, masters))
        seen["masters"] = told(lambda: load_checkpoint(f"{path}/masters", engine, adam))
        seen["dtype"] = told(lambda: load_checkpoint(f"{path}/adam", engine))
    stages = module_stages([torch.nn.Linear(2, 2) for _ in range(8)], schedule, dist.get_rank())
    with Engine(schedule, stages) as engine:
        seen["names"] = told(lambda: load_checkpoint(f"{path}/adam", engine))
    return seen


def fails(schedule: Schedule, path: str) -> list[str]:
    """A rank cannot write, now and in the background: all say so, the checkpoint before stays, and training goes on."""
    said = []
    with small(schedule) as engine:
        optimizer = torch.optim.AdamW(engine.parameters())
        save_checkpoint(path, engine, optimizer, step=1)
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        with mock.patch.object(writer, "write_shards", full) if dist.get_rank() == 2 else nullcontext():
            said.append(told(lambda: save_checkpoint(path, engine, optimizer, step=2)))
            saving = save_checkpoint(path, engine, optimizer, step=3, asynchronous=True)
            one_step(engine, optimizer, 0)
            said.append(told(saving.wait))
            saving = save_checkpoint(path, engine, optimizer, step=4, asynchronous=True)
            one_step(engine, optimizer, 1)
            said.append(told(lambda: save_checkpoint(path, engine, optimizer, step=5)))  # tells of the one before
        with mock.patch.object(StagedCheckpoint, "commit", full):
            said.append(told(lambda: save_checkpoint(path, engine, optimizer, step=6)))
        assert load_checkpoint(path, engine, optimizer).step == 1
        one_step(engine, optimizer, 2)
        save_checkpoint(path, engine, optimizer, step=7, asynchronous=True)
    return said  # closing the engine has waited


def numbers_go_on(schedule: Schedule, path: str) -> bool:
    """Random numbers after loading are those after saving."""

    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), random.gauss(0, 1), float(numpy.random.rand())]

    with small(schedule) as engine:
        for generator in (torch.manual_seed, random.seed, numpy.random.seed):
            generator(dist.get_rank())
        random.gauss(0, 1)
        save_checkpoint(path, engine, random=True)
        wanted = draw()
        draw()
        load_checkpoint(path, engine, random=True)
        return draw() == wanted


def load_each(schedule: Schedule, paths: list[str]) -> list[str]:
    """What is said about damaged checkpoints; nothing of them gets into the model."""
    with small(schedule, seed=1) as engine:
        optimizer = torch.optim.AdamW(engine.parameters())
        before = [parameter.detach().clone() for parameter in engine.parameters()]
        said = [told(lambda p=path: load_checkpoint(p, engine, optimizer)) for path in paths]
        assert all(map(torch.equal, before, engine.parameters()))
        assert not optimizer.state
    return said


def save_small(schedule: Schedule, path: str) -> None:
    with small(schedule) as engine:
        optimizer = torch.optim.AdamW(engine.parameters())
        one_step(engine, optimizer, 0)
        save_checkpoint(path, engine, optimizer, step=1, extra={"tensor": torch.ones(3)})


def save_until_killed(schedule: Schedule, path: str, victim: int, after: float, first: int) -> None:
    """Save again and again, each time weights that are all the same number; a rank is killed at some moment."""
    with small(schedule) as engine:
        optimizer = torch.optim.AdamW(engine.parameters())
        one_step(engine, optimizer, 0)
        for step in range(first, 10**9):
            with torch.no_grad():
                for tensor in [*engine.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]:
                    tensor.fill_(step)
            if step == max(first, 2) and dist.get_rank() == victim:  # once there is a checkpoint
                threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
            saving = save_checkpoint(path, engine, optimizer, step=step, asynchronous=step % 2 == 1)
            if step == 1:
                saving.wait()


def save_hf(schedule: Schedule, config: Any, sizes: dict[str, int], path: str) -> str:
    """A sharded run saved; what save_stages says of it."""
    mesh = mesh_of(sizes)
    stages = parallelize(hf_stages(config, schedule, mesh["pp"].get_local_rank(), seed=4), mesh)
    with Engine(schedule, stages, mesh=mesh) as engine:
        save_checkpoint(path, engine)
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    return told(lambda: save_stages(stages, schedule.placement, rank, f"{path}-hf", group=group))


def logits_of(schedule: Schedule, config: Any, path: str, tokens: Tensor) -> Tensor:
    """What an engine makes of a checkpoint."""
    with Engine(schedule, hf_stages(config, schedule, dist.get_rank(), seed=1)) as engine:
        load_checkpoint(path, engine)
        return engine.forward([{"input_ids": tokens}] * schedule.num_microbatches, broadcast=True)[0]


def weights_of(
    schedule: Schedule, sizes: dict[str, int], model: Model, asking: list[int] | None, stop: bool = False
) -> tuple[int, float, float]:
    """How many weights come, their largest difference from the plain model's, and the most memory they needed.

    Memory: bytes of all tensors that are alive beside those before, in units of the largest weight.
    """
    wanted = model.plain()[0].state_dict()
    largest = max(tensor.nbytes for tensor in wanted.values())
    engine, _, own = build(schedule, sizes, model)
    with engine:
        there = _alive()  # kept, so that no new tensor gets the memory of one of them
        before = {tensor.untyped_storage().data_ptr() for tensor in there}
        number, worst, most = 0, 0.0, 0
        for name, weight in engine.named_weights(asking):
            worst = max(worst, float((weight - wanted[name]).abs().max()))
            number += 1
            if weight.nbytes == largest and not most:  # to look takes long
                storages = {t.untyped_storage().data_ptr(): t.nbytes for t in _alive()}
                most = sum(size for address, size in storages.items() if address not in before)
            del name, weight
            if stop and dist.get_rank() == 1:
                break
        engine.train_step(model.data(0)[own], model.loss_fn)
    return number, worst, most / largest


def _alive() -> list[Tensor]:
    return [o for o in gc.get_objects() if type(o) is Tensor]


def wrong_ranks(schedule: Schedule) -> list[str]:
    """What is said of ranks that are not there, or that others do not name."""
    with small(schedule) as engine:
        return [
            told(lambda: next(engine.named_weights([7]))),
            told(lambda: next(engine.named_weights([dist.get_rank()]))),
        ]


def published_and_merged(schedule: Schedule, config: Any, lora: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On rank 0: the weights of a model as it is published, and with its adapter merged."""
    with Engine(schedule, hf_stages(config, schedule, dist.get_rank())) as engine:
        published = dict(engine.named_weights([0], published=True))
    with Engine(schedule, hf_stages(config, schedule, dist.get_rank(), adapter=lora)) as engine:
        return published, dict(engine.named_weights([0], merge=True))
