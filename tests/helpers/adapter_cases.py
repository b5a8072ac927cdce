"""What the local ranks run in test_tp_adapters.py: LoRA on a mesh, beside peft on the plain model."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any
from unittest import mock

import checkpoint_cases
import expert_cases
import torch
from engine_helpers import error_of, hf_plain_step
from expert_cases import error_text, pipeline_index
from mesh_cases import compare_update, mesh_of, whole
from torch import nn
from torch._dynamo.utils import counters
from weights_cases import lora_model

from zeropipe.core.mesh import DATA_DIMENSIONS
from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, hf_model, hf_stages, parallelize
from zeropipe.engine.blocks import compiling

PREFIX = "base_model.model."


def lora(**changes: Any) -> Any:
    """Adapters of all linear layers but the head."""
    from peft import LoraConfig

    return LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": "all-linear", **changes})


def tokens(number: int, seed: int, is_even: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(number):
        ids = torch.randint(64, (2, 6 if is_even else (6, 8)[index % 2]), generator=generator)
        made.append({"input_ids": ids, "labels": ids})
    return made


def train_on_mesh(
    schedule: Schedule, sizes: dict[str, int], kind: str, changes: dict[str, Any], spreading: dict[str, Any],
    options: dict[str, Any], model: dict[str, Any] | None = None, steps: int = 2,
) -> dict[str, float]:  # fmt: skip
    """AdamW steps of an adapter with clipping: the largest differences from peft's on one process."""
    mesh, loss_fn = mesh_of(sizes), CausalLMLoss()
    plain = lora_model(hf_model(expert_cases.config_of(kind, **(model or {}))), lora(**changes)).double()
    stages = hf_stages(copy.deepcopy(plain), schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0)
    parallelize(stages, mesh, **spreading)
    pipelines, mine = math.prod(sizes.get(name, 1) for name in DATA_DIMENSIONS), pipeline_index(mesh, sizes)
    counters.clear()
    torch._dynamo.reset()
    seen = {"loss": 0.0, "norm": 0.0, "grad": 0.0, "weight": 0.0}
    backend = mock.Mock(return_value="aot_eager")  # inductor rounds norms, which compute in float32, in another order
    with (
        mock.patch.object(compiling, "inductor_backend", backend),
        Engine(schedule, stages, mesh=mesh, **options) as engine,
    ):
        ours, theirs = (
            torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01, foreach=False)
            for parameters in (engine.parameters(), list(plain.parameters()))
        )
        for step in range(steps):
            is_even = bool(options.get("compile"))
            every = [tokens(schedule.num_microbatches, 10 * step + i, is_even) for i in range(pipelines)]
            wanted = hf_plain_step(plain, [batch for some in every for batch in some], loss_fn)
            seen["loss"] = max(seen["loss"], abs(engine.train_step(every[mine], loss_fn).loss - wanted) / wanted)
            compare_update(seen, engine, plain, (ours, theirs), partial(difference, stages, plain))
    uncompiled = options.get("compile", False) and counters["stats"]["unique_graphs"] == 0
    return seen | {"uncompiled": float(uncompiled), "trained": min(count_trained(stages), 1)}


def difference(stages: dict[int, Any], plain: nn.Module, what: str) -> float:
    """The largest relative difference of any gradient or weight from the plain model's."""
    worst = 0.0
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            other = plain.get_parameter(PREFIX + stage.full_name(name))
            got, wanted = (parameter.grad, other.grad) if what == "grad" else (parameter.detach(), other.detach())
            worst = max(worst, error_of(whole(got), wanted))
    return worst


def count_trained(stages: dict[int, Any]) -> int:
    return sum(p.requires_grad for stage in stages.values() for p in stage.parameters())


def refused(kind: str, changes: dict[str, Any], sizes: dict[str, int], spreading: dict[str, Any]) -> str:
    """Why parallelize() refuses an adapter."""
    from zeropipe import build

    schedule, mesh = build("1f1b", ranks=1, microbatches=1), mesh_of(sizes)
    stages = hf_stages(lora_model(hf_model(expert_cases.config_of(kind)), lora(**changes)), schedule, 0)
    return error_text(lambda: parallelize(stages, mesh, **spreading))


class AdaptedModel(checkpoint_cases.Model):
    """A model with an adapter for chains of checkpoints."""

    def __init__(self) -> None:
        self.tied, self.device, self.loss_fn = False, "cpu", CausalLMLoss()
        self.config = expert_cases.config_of("qwen3")

    def plain(self) -> Any:
        model = lora_model(hf_model(self.config), lora()).double()
        return _WithoutPrefix(model), lambda batch: model(batch["input_ids"]).logits

    def stages(self, schedule: Schedule, rank: int, seed: int, mesh: Any) -> dict[int, Any]:
        model = lora_model(hf_model(self.config), lora(), seed).double()  # the base is the same for every seed
        return parallelize(hf_stages(model, schedule, rank), mesh)


class _WithoutPrefix(nn.Module):
    """A peft model whose parameters have the names of the full model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.removeprefix(f"inner.{PREFIX}"), parameter
