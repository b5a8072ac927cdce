"""What the local ranks run in test_rolling.py: gradients that are reduced as the step goes on, beside whole ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from adapter_cases import lora
from engine_helpers import SquareLoss, blocks, error_of, microbatches
from expert_cases import config_of, pipeline_index, tokens
from mesh_cases import mesh_of, train_compiled_on_mesh
from torch import Tensor
from weights_cases import lora_model

from zeropipe.core.mesh import DATA_DIMENSIONS
from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, fsdp_private, hf_model, hf_stages, module_stages, parallelize
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.blocks import compiling
from zeropipe.engine.torch_private.tensors import storage_id
from zeropipe.errors import ConfigError


class WholeGradients:
    """Measures the bytes of whole gradients of all stages of a rank before and after each reduce of a unit."""

    def __init__(self, engine: Engine) -> None:
        self.units = [unit for sharded in engine._shards.values() for unit in sharded.units]
        self.peak = self.num_reduces = 0

    def count(self) -> int:
        storages = [storage for unit in self.units for storage in fsdp_private.gradient_storages(unit)]
        return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())

    @contextmanager
    def measured(self) -> Iterator[None]:
        real = fsdp_private.reduce

        def reduce(unit: Any) -> None:
            self.peak, self.num_reduces = max(self.peak, self.count()), self.num_reduces + 1
            real(unit)
            self.peak = max(self.peak, self.count())

        with mock.patch.object(fsdp_private, "reduce", reduce):
            yield

    def unit_bytes(self) -> list[int]:
        """The bytes of the gradients of each unit."""
        return [
            sum(w.numel() * (w.grad_dtype or w.dtype).itemsize for w in weights if w.requires_grad)
            for weights in map(fsdp_private.unsharded_parameters, self.units)
        ]


def compare(
    schedule: Schedule, sizes: dict[str, int], kind: str, changes: dict[str, Any], spreading: dict[str, Any],
    options: dict[str, Any], gradients: str, adapter: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Two accumulated steps with clipping, whole and rolling: the largest difference, peaks of whole gradients."""
    mesh, loss_fn = mesh_of(sizes), CausalLMLoss()
    pipelines, mine = math.prod(sizes.get(name, 1) for name in DATA_DIMENSIONS), pipeline_index(mesh, sizes)
    every = [[tokens(schedule.num_microbatches, i, step, False) for i in range(pipelines)] for step in range(2)]
    found: dict[str, list[Tensor | None]] = {}
    seen: dict[str, float] = {}
    backend = mock.Mock(return_value="aot_eager")
    for policy in ("whole", gradients):
        model: Any = config_of(kind, **changes)
        if adapter:
            model = lora_model(hf_model(model), lora()).double()
        stages = hf_stages(model, schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0)
        parallelize(stages, mesh, **spreading)
        with (
            mock.patch.object(compiling, "inductor_backend", backend),
            Engine(schedule, stages, mesh=mesh, gradients=policy, **options) as engine,
        ):
            losses = [engine.train_step(every[0][mine], loss_fn).loss]
            whole = WholeGradients(engine)
            with whole.measured():
                losses.append(engine.train_step(every[1][mine], loss_fn).loss)
            norm = engine.clip_grad_norm(0.5)
            found[policy] = [None if p.grad is None else to_local(p.grad).clone() for p in engine.parameters()]
            found[f"{policy} other"] = [torch.tensor([*losses, norm], dtype=torch.float64)]
            seen |= {f"{policy} peak": whole.peak, f"{policy} reduces": whole.num_reduces}
            units = whole.unit_bytes()
            outer = max(units[len(sharded.units) - 1] for sharded in engine._shards.values()) if units else 0
            seen |= {"stages": sum(units), "unit": max(units, default=0), "outer": outer}
            seen["largest stage"] = max(sum(sharded.unsharded_bytes()[1:]) for sharded in engine._shards.values())
    pairs = [*zip(found["whole"], found[gradients]), *zip(found["whole other"], found[f"{gradients} other"])]
    seen["error"] = max(error_of(got, wanted) for wanted, got in pairs if wanted is None or wanted.numel())
    return seen


def compare_dtypes(schedule: Schedule, reduce_dtype: torch.dtype, gradients: str) -> dict[str, Any]:
    """Weights in float32, computed in bfloat16: how far gradients are from those of float32 sums, and their dtypes."""
    mesh, loss_fn = mesh_of({"pp": 2, "dp_shard": 2}), SquareLoss()
    mine = mesh["dp_shard"].get_local_rank()
    data = [microbatches(schedule.num_microbatches, pipeline) for pipeline in range(2)]
    data = [[{k: v.to(torch.bfloat16) for k, v in batch.items()} for batch in some] for some in data]
    found: list[list[Tensor]] = []
    seen: dict[str, Any] = {}
    for policy, dtype in (("whole", reduce_dtype), (gradients, reduce_dtype), ("whole", torch.float32)):
        copies = [module.to(torch.float32) for module in blocks(schedule.num_stages)]
        stages: dict[int, Any] = dict(module_stages(copies, schedule, mesh["pp"].get_local_rank()))
        parallelize(stages, mesh, dtype=torch.bfloat16, reduce_dtype=dtype)
        with Engine(schedule, stages, mesh=mesh, gradients=policy) as engine:
            engine.train_step(data[mine], loss_fn)
            whole = WholeGradients(engine)
            engine.train_step(data[mine], loss_fn)
            found.append([to_local(p.grad).clone() for p in engine.parameters()])
            seen["dtypes"] = {str(p.grad.dtype) for p in engine.parameters()}
            seen["rolling bytes" if policy == gradients else "float32 bytes"] = sum(whole.unit_bytes())
    in_whole, rolling, exact = found
    seen["error"] = max(map(error_of, rolling, exact))
    seen["whole error"] = max(map(error_of, in_whole, exact))
    return seen


def compiled_with(backend: Any, *args: Any) -> dict[str, float]:
    """`train_compiled_on_mesh` with a compiler of a test's own."""
    torch._dynamo.reset()
    with mock.patch.object(compiling, "inductor_backend", mock.Mock(return_value=backend)):
        return train_compiled_on_mesh(*args)


def refused(schedule: Schedule, numbers: tuple[int, int]) -> list[str]:
    """What is said of pipelines with different numbers of microbatches, and of options that do not go together."""
    mesh, said = mesh_of({"pp": 2, "dp_shard": 2}), []
    mine = mesh["dp_shard"].get_local_rank()
    stages: dict[int, Any] = dict(module_stages(blocks(schedule.num_stages), schedule, mesh["pp"].get_local_rank()))
    parallelize(stages, mesh)
    for options in ({"gradients": "sometimes"}, {"gradients": "rolling", "dynamic_weights": True}):
        try:
            Engine(schedule, stages, mesh=mesh, **options)
        except ConfigError as error:
            said.append(str(error))
    with Engine(schedule, stages, mesh=mesh, gradients="rolling") as engine:
        engine.eval_step(microbatches(numbers[mine]), SquareLoss())  # has no gradients
        try:
            engine.train_step(microbatches(numbers[mine]), SquareLoss())
        except ConfigError as error:
            said.append(str(error))
        engine.train_step(microbatches(4), SquareLoss())
    return said
