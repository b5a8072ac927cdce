"""What the local ranks run in test_weights.py and test_save.py, and how their stages are looked at."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import SquareLoss, blocks, error_of, microbatches, plain_step
from stage_models import lm_loss
from torch import Tensor, nn

import zeropipe as zp
from zeropipe.core.schedule import Schedule
from zeropipe.engine import Engine, hf_model, hf_stages, module_stages
from zeropipe.engine.stages import save
from zeropipe.errors import ConfigError, ZeropipeError


def all_stages(source: Any, schedule: Schedule, **options: Any) -> list[nn.Module]:
    """The stages of all ranks, in order."""
    found: dict[int, nn.Module] = {}
    for rank in range(schedule.num_ranks):
        found |= hf_stages(source, schedule, rank, **options)
    return [found[stage] for stage in range(schedule.num_stages)]


def save_all_stages(stages: list[nn.Module], schedule: Schedule, directory: Any, **options: Any) -> None:
    """Every rank of a single process, one after the other."""
    for rank in range(schedule.num_ranks):
        own = {stage: stages[stage] for stage in schedule.placement.stages_of(rank)}
        save.save_stages(own, schedule.placement, rank, directory, **options)


def run(stages: list[nn.Module], batch: dict[str, Tensor]) -> Tensor:
    """The stages one after the other."""
    inputs: tuple[Tensor, ...] = ()
    for stage in stages:
        inputs = (stage(*inputs, **stage.pick(batch)),)
    return inputs[0]


def train_with_empty_stages(schedule: Schedule, layers: list[int]) -> float:
    """The largest difference from the plain model's gradients, where some stages have no modules."""
    plain, loss_fn = nn.Sequential(*blocks(sum(layers))), SquareLoss()
    batches = microbatches(schedule.num_microbatches)
    plain_step(plain, batches, loss_fn)
    stages = module_stages(blocks(sum(layers)), schedule, dist.get_rank(), layers=layers)
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with Engine(schedule, stages) as engine:
        engine.train_step(batches, loss_fn)
        return max(
            (
                error_of(parameter.grad, wanted[stage.full_name(name)])
                for stage in stages.values()
                for name, parameter in stage.named_parameters()
            ),
            default=0.0,
        )


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and stored buffer random: nothing is 0 or 1 by accident."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                scale = 0.05 if "bias" in name else 0.2
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + ("norm" in name))
    return model


def scale(stages: Any, factor: float) -> Any:
    """As if trained: every parameter changes, and a second time gives other values again."""
    with torch.no_grad():
        for parameter in {p: None for stage in stages.values() for p in stage.parameters()}:
            parameter.mul_(factor)
    return stages


def save_over(directory: str, schedule: Schedule, factor: float, failing: int | None = None) -> str:
    """Load, train, save into the same directory, on every rank; what the rank was told if one fails."""
    stages = scale(hf_stages(directory, schedule, dist.get_rank()), factor)
    try:
        with mock.patch.object(save, "write_tensors", _fail if dist.get_rank() == failing else save.write_tensors):
            save.save_stages(stages, schedule.placement, dist.get_rank(), directory)
    except ZeropipeError as error:
        return str(error)
    return ""


def _fail(tensors: Any, path: Any) -> None:
    raise ConfigError("the disk is full")


def save_in_wrong_group(directory: str, schedule: Schedule, config: Any) -> str:
    """All four processes are taken for the pipeline of two ranks."""
    stages = hf_stages(config, schedule, 0)
    try:
        save.save_stages(stages, schedule.placement, 0, directory)
    except ConfigError as error:
        return str(error)
    return ""


def save_in_group(directory: str, schedule: Schedule, config: Any) -> None:
    """The first of two pipelines of two ranks each saves."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() < 2:
        stages = hf_stages(config, schedule, dist.get_rank(), seed=3)
        save.save_stages(stages, schedule.placement, dist.get_rank(), directory, group=groups[0])


def lora_model(base: nn.Module, config: Any, seed: int = 0) -> nn.Module:
    """A plain peft model whose adapter is not zero."""
    import peft

    torch.manual_seed(seed)
    model = peft.get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


class TokenLoss:
    """CausalLMLoss in float64."""

    def count(self, microbatch: dict[str, Tensor]) -> int:
        return microbatch["labels"][:, 1:].numel()

    def __call__(self, logits: Tensor, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return lm_loss(logits, microbatch), self.count(microbatch)


def plain_tokens(model: nn.Module, batches: Any) -> None:
    """The gradients of the un-pipelined model."""
    total = sum(TokenLoss().count(batch) for batch in batches)
    for batch in batches:
        (lm_loss(model(batch["input_ids"], use_cache=False).logits, batch) / total).backward()


def train_adapter(schedule: Schedule, config: Any, lora: Any, batches: Any, directory: str, **options: Any) -> float:
    """A step of the pipeline and of the plain peft model, then the adapter is saved; the worst gradient."""
    plain = lora_model(hf_model(config, dtype=torch.float64), lora)
    stages = hf_stages(plain, schedule, dist.get_rank())
    named = {
        f"base_model.model.{stage.full_name(n)}": p for stage in stages.values() for n, p in stage.named_parameters()
    }
    plain_tokens(plain, batches)
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    with Engine(schedule, stages, **options) as engine:
        engine.train_step(batches, TokenLoss())
    error = max((error_of(p.grad, wanted[name]) for name, p in named.items()), default=0.0)
    torch.optim.SGD([p for p in named.values() if p.requires_grad] or [nn.Parameter(torch.ones(1))], lr=0.5).step()
    save.save_stages(stages, schedule.placement, dist.get_rank(), directory)
    return error


def wrapped_for_data_parallelism(config: Any) -> tuple[float, str]:
    """How far the stages of a model in DistributedDataParallel are from it; what is said of a sharded one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    schedule = zp.build("1f1b", ranks=4, microbatches=4)
    batch = {"input_ids": torch.arange(8)[None]}
    model = hf_model(config, seed=1)
    stages = all_stages(nn.parallel.DistributedDataParallel(model), schedule)
    difference = float((run(stages, batch) - model(**batch).logits).abs().max())
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        hf_stages(model, schedule, dist.get_rank())
    except ConfigError as error:
        return difference, str(error)
    return difference, ""
