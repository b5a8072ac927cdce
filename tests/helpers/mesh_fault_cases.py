"""What the local ranks run in test_mesh_faults.py: a process is struck while others wait for it inside torch."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import SquareLoss, blocks, microbatches, nccl_on_one_gpu
from fault_cases import strike
from mesh_cases import mesh_of
from torch import nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, fsdp_private, module_stages, parallelize
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.errors import ConfigError, EngineError


def struck(schedule: Schedule, sizes: dict[str, int], kind: str, culprit: int, when: int, timeout: float) -> None:
    """Training on a mesh; the culprit is struck in its `when`-th forward or backward."""
    rank, left = dist.get_rank(), when

    def point(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0 and rank == culprit:
            strike(kind)

    def points(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        point()
        if output.requires_grad:
            output.register_hook(point)

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if device == "cuda":
        nccl_on_one_gpu()
        torch.zeros(1, device="cuda:0")  # a mesh would look for a GPU of its own for every rank
    mesh = mesh_of(sizes, device)
    modules = [block.to(device) for block in blocks(schedule.num_stages)]
    stages = module_stages(modules, schedule, mesh["pp"].get_local_rank())
    styles = {"up": "colwise", "down": "rowwise"}
    plan = {f"{block}.{name}": style for block in range(schedule.num_stages) for name, style in styles.items()}
    parallelize(stages, mesh, plan=plan if "tp" in sizes else None)
    for stage in stages.values():
        stage.register_forward_hook(points)
    with Engine(schedule, stages, mesh=mesh, timeout=timeout) as engine:
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.01)
        for step in range(10**6):
            engine.train_step(microbatches(schedule.num_microbatches, seed=step), SquareLoss())
            engine.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()


def struck_in_a_reduce(schedule: Schedule, kind: str, culprit: int, when: int, timeout: float) -> None:
    """Training with rolling gradients; the culprit is struck in its `when`-th reduce of a unit."""
    mesh, left, rank = mesh_of({"pp": 2, "dp_shard": 2}), when, dist.get_rank()
    real = fsdp_private.reduce

    def reduce(unit: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0 and rank == culprit:
            strike(kind)
        real(unit)

    modules: list[nn.Module] = [nn.Sequential(*blocks(2)) for _ in range(schedule.num_stages)]
    stages: dict[int, Any] = dict(module_stages(modules, schedule, mesh["pp"].get_local_rank()))
    parallelize(stages, mesh)
    with (
        mock.patch.object(fsdp_private, "reduce", reduce),
        Engine(schedule, stages, mesh=mesh, gradients="rolling", timeout=timeout) as engine,
    ):
        for step in range(10**6):
            engine.train_step(microbatches(schedule.num_microbatches, seed=step), SquareLoss())


def struck_in_set_up(schedule: Schedule, sizes: dict[str, int], where: str, *args: Any) -> None:
    """`struck` when this process is about to call a part of a Communicator; others may wait for it inside NCCL."""
    kind, culprit = args[0], args[1]
    if dist.get_rank() == culprit:
        setattr(Communicator, where, lambda *_, **__: strike(kind))
    struck(schedule, sizes, *args)


def again(schedule: Schedule, sizes: dict[str, int]) -> str:
    """An Engine on a mesh whose groups were broken."""
    with contextlib.suppress(EngineError):
        struck(schedule, sizes, "raise", 2, 5, 60.0)
    mesh = mesh_of(sizes)
    try:
        Engine(schedule, module_stages(blocks(schedule.num_stages), schedule, mesh["pp"].get_local_rank()), mesh=mesh)
    except ConfigError as error:
        return str(error)
    return "no error"
