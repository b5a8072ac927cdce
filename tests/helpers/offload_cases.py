"""What the local ranks run in test_offload.py: the same steps with and without copies to the host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import train
from stage_models import CONFIGS
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, LocalRanks, hf_stages, module_stages, parallelize
from zeropipe.engine.blocks import compiling
from zeropipe.engine.step import offload

__all__ = ["LocalRanks", "train"]


class Moved:
    """Counts what is copied to the host, and checks that its memory is freed."""

    def __init__(self) -> None:
        self.num_bytes = self.held = self.num_copies = 0

    def __enter__(self) -> Moved:
        run = offload.Offloader.offload
        release = offload.Offloader._release_inputs

        def watch(other: offload.Offloader, cell: Any, wrap: Any) -> None:
            storages: list[Any] = []

            def remember(self: Any, cell: Any, sources: list[Tensor]) -> None:
                storages.extend(source.untyped_storage()._weak_ref() for source in sources)
                self_sizes = [source.untyped_storage().nbytes() for source in sources]
                self_total.append(sum(self_sizes))
                release(self, cell, sources)

            self_total: list[int] = []
            with mock.patch.object(offload.Offloader, "_release_inputs", remember):
                run(other, cell, wrap)
            gc.collect()
            self.num_bytes += sum(self_total)
            self.num_copies += len(storages)
            self.held += sum(not torch.UntypedStorage._expired(one) for one in storages)
            for one in storages:
                torch.UntypedStorage._free_weak_ref(one)

        self._patches = [
            mock.patch.object(offload.Offloader, "offload", watch), mock.patch.object(offload, "LEAST_BYTES", 1),
        ]  # fmt: skip
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for patch in self._patches:
            patch.stop()


def token_batches(number: int, seed: int, packed: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(number):
        ids = torch.randint(61, (2, 12), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + index % 4] = -100
        batches.append({"input_ids": ids, "labels": labels})
        if packed:
            batches[-1]["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)])[None].repeat(2, 1)
    return batches


def hf_steps(
    schedule: Schedule, family: str, shard: str, packed: bool, options: dict[str, Any], layers: int
) -> tuple[list[Tensor], list[float]]:
    """Gradients and losses of two steps."""
    config = CONFIGS[family](num_hidden_layers=layers)
    mesh = None
    if shard:
        mesh = torch.distributed.init_device_mesh("cpu", (schedule.num_ranks, 2), mesh_dim_names=("pp", shard))
    rank = dist.get_rank() if mesh is None else mesh.get_local_rank("pp")
    stages = hf_stages(config, schedule, rank, dtype=torch.float64)
    if mesh is not None:
        stages = parallelize(stages, mesh)
    found, losses = [], []
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        for step in range(2):
            losses.append(
                engine.train_step(token_batches(schedule.num_microbatches, step, packed), CausalLMLoss()).loss
            )
            for parameter in engine.parameters():
                gradient = parameter.grad
                found.append(getattr(gradient, "_local_tensor", gradient).clone())
                parameter.grad = None
    return found, losses


def hf_with_and_without(
    plain: Schedule, offloaded: Schedule, family: str, shard: str = "", packed: bool = False, layers: int = 4,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Whether both are equal bit for bit, and what was copied."""
    wanted, losses = hf_steps(plain, family, shard, packed, options or {}, layers)
    with Moved() as moved:
        got, own_losses = hf_steps(offloaded, family, shard, packed, options or {}, layers)
    equal = len(got) == len(wanted) and all(map(torch.equal, got, wanted)) and losses == own_losses
    return {"equal": equal, "bytes": moved.num_bytes, "copies": moved.num_copies, "held": moved.held}


def hf_compiled(*arguments: Any, **keywords: Any) -> dict[str, Any]:
    """The same with compiled blocks, by a compiler that only runs their graphs."""
    with mock.patch.object(compiling, "inductor_backend", mock.Mock(return_value="aot_eager")):
        return hf_with_and_without(*arguments, **keywords)


def modules_with_and_without(
    plain: Schedule, offloaded: Schedule, make: Callable[[int], list[nn.Module]], width: int
) -> dict[str, Any]:
    """The same for a list of modules."""
    found = []
    with Moved() as moved:
        for schedule in (plain, offloaded):
            stages = module_stages(make(schedule.num_stages), schedule, dist.get_rank())
            generator = torch.Generator().manual_seed(0)
            batches = [
                {"inputs": torch.randn(3, width, generator=generator, dtype=torch.float64)}
                for _ in range(schedule.num_microbatches)
            ]
            with Engine(schedule, stages) as engine:
                result = engine.train_step(batches, lambda output, _: (output.square().sum(), output.numel()))
                found.append((result.loss, [p.grad.clone() for p in engine.parameters()]))
    (loss, wanted), (own_loss, got) = found
    equal = loss == own_loss and all(map(torch.equal, got, wanted))
    return {"equal": equal, "bytes": moved.num_bytes, "copies": moved.num_copies, "held": moved.held}


class Modifies(nn.Module):
    """Its backward needs a tensor that it modifies in place after its forward, in the forward of a later microbatch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.float64)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.linear(x))
        if self.last is not None:
            self.last.detach().add_(1.0)
        self.last = y
        return y * 1.0


class Shares(nn.Module):
    """Every forward saves the same tensor, which the module made in the first one, and views of others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3 * width, dtype=torch.float64)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.linear(x).chunk(3, -1)
        if self.table is None:
            self.table = torch.linspace(1, 2, x.shape[-1], dtype=torch.float64)
        return torch.sigmoid(a) * b * self.table + c.t().contiguous().t() * a


def modifying(number: int) -> list[nn.Module]:
    return [Modifies(6) for _ in range(number)]


def sharing(number: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Shares(6) for _ in range(number)]


def failing_copy(schedule: Schedule, rank: int) -> str:
    """The error of a step in which one rank cannot copy."""
    torch.manual_seed(3)
    stages = module_stages(sharing(schedule.num_stages), schedule, dist.get_rank())
    batches = [{"inputs": torch.ones(3, 6, dtype=torch.float64)} for _ in range(schedule.num_microbatches)]

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory left on the host")

    take = fail if dist.get_rank() == rank else offload.HostPool.take
    with (
        mock.patch.object(offload.HostPool, "take", take), mock.patch.object(offload, "LEAST_BYTES", 1),
        Engine(schedule, stages, timeout=60) as engine,
    ):  # fmt: skip
        try:
            engine.train_step(batches, lambda output, _: (output.sum(), output.numel()))
        except Exception as error:
            return str(error)
    return ""
