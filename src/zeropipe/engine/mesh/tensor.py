"""Tensor parallelism: layers spread over the processes of a mesh's `tp` dimension.

A weight at rest is a DTensor, so that optimizers, FSDP and checkpoints know what it is. Layers compute with this
process's piece of it, so a weight gradient is a local product and can wait for W like any other. What is left to
communicate are two sums per layer and direction: of the outputs of row-wise layers, and of the gradients of what goes
into column-wise ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zeropipe.engine.backward.linear import defer
from zeropipe.errors import ConfigError

WHOLE = ("embedding_rowwise", "embedding_colwise", "replicate")  # every process has all of it: gradients are equal
STYLES = ("colwise", "rowwise", "colwise_gather_output", "replicated_with_grad_allreduce")


class Enter(torch.autograd.Function):
    """Into layers that are spread by columns: the input as it is; backward sums its gradient over the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sum(dy, ctx.group), None


class Leave(torch.autograd.Function):
    """Out of a layer that is spread by rows: the sum over the processes; backward hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class Collect(torch.autograd.Function):
    """The pieces of the last dimension put together; backward takes this process's piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, place: int, number: int) -> Tensor:
        ctx.place, ctx.number = place, number
        pieces = collectives.all_gather_tensor(x.contiguous(), 0, group)
        return torch.cat(collectives.wait_tensor(pieces).chunk(number), -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return dy.chunk(ctx.number, -1)[ctx.place].contiguous(), None, None, None


def _sum(x: Tensor, group: Any) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


def spread(stage: Any, mesh: DeviceMesh, plan: Mapping[str, str] | None = None) -> None:
    """Spread the layers of a stage over `mesh`, by the model's own plan or the one given, in place.

    A plan says for a module's name in the whole model (`*` for any number) how its weight is spread.
    """
    plan = dict(plan_of(stage) if plan is None else plan)
    names = stage.full_names()
    modules = {_module_name(full): _module_name(here) for here, full in names.items()}
    summed, parents = [], set()
    for full, here in sorted(modules.items()):
        style = _style(full, plan)
        if style is None or style in WHOLE:
            continue
        module = stage.get_submodule(here)
        if style == "replicated_with_grad_allreduce":
            summed += [f"{here}.{name}" for name, _ in module.named_parameters(recurse=False)]
            continue
        _check_linear(full, module, style, mesh.size())
        if style == "colwise" and here.rpartition(".")[0]:
            parents.add(here.rpartition(".")[0])
        summed += [f"{here}.{name}" for name in _spread_linear(module, style, mesh)]
    for parent in sorted(parents):
        _enter_at(stage.get_submodule(parent), mesh)
    stage.summed_over_tp = tuple(summed)


def plan_of(stage: Any) -> dict[str, str]:
    """The plan a Hugging Face model brings along, with names of the whole model; what is unknown is refused."""
    lm = getattr(stage, "lm", None)
    if lm is None:
        raise ConfigError(
            "a stage of plain modules brings no plan for tensor parallelism: give parallelize(plan={...})"
        )
    base = getattr(stage.whole_config, "base_model_tp_plan", None)
    if not base:
        raise ConfigError(
            f"model_type={stage.whole_config.model_type!r} brings no plan for tensor parallelism: give "
            "parallelize(plan={'layers.*.self_attn.q_proj': 'colwise', ...})"
        )
    prefix = lm.base_model_prefix
    found = {f"{prefix}.{name}": style for name, style in base.items()} | dict(getattr(lm, "_tp_plan", None) or {})
    for name, style in found.items():
        if style not in STYLES + WHOLE:
            raise ConfigError(
                f"model_type={stage.whole_config.model_type!r} spreads {name} by {style!r}, which is not supported: "
                f"known are {', '.join(STYLES)}; leave tp out, or give a plan of your own"
            )
    return found


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), plan.get(name))


def _module_name(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _check_linear(name: str, module: nn.Module, style: str, number: int) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear) or weight is None:
        raise ConfigError(f"{name} is a {type(module).__name__}: only linear layers can be spread over tp")
    rows = weight.shape[1 if style == "rowwise" else 0]
    if rows % number:
        raise ConfigError(
            f"{name} has {rows} {'inputs' if style == 'rowwise' else 'outputs'}: tp={number} must divide it"
        )


def _spread_linear(module: Any, style: str, mesh: DeviceMesh) -> list[str]:
    """Keep this process's piece of a linear layer; returns the parameters whose gradients are summed over tp."""
    place, number, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    defer(module)  # a deferred layer computes with pieces, also where nothing is split
    module.weight = _piece(module.weight, 1 if style == "rowwise" else 0, mesh)
    if style == "rowwise":
        module.register_forward_hook(lambda _, __, y: Leave.apply(y, group))
        module.adds_bias = place == 0  # once, not once per process
        return ["bias"] if module.bias is not None else []
    if module.bias is not None:
        module.bias = _piece(module.bias, 0, mesh)
    if style == "colwise_gather_output":
        module.register_forward_pre_hook(lambda _, args: (Enter.apply(args[0], group), *args[1:]))
        module.register_forward_hook(lambda _, __, y: Collect.apply(y, group, place, number))
    return []


def _piece(parameter: nn.Parameter, dimension: int, mesh: DeviceMesh) -> nn.Parameter:
    piece = parameter.detach().chunk(mesh.size(), dimension)[mesh.get_local_rank()].contiguous().clone()
    whole = DTensor.from_local(
        piece, mesh, (Shard(dimension),), run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _enter_at(parent: nn.Module, mesh: DeviceMesh) -> None:
    """One sum for all column-wise layers of an attention or an MLP."""
    group = mesh.get_group()

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (Enter.apply(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": Enter.apply(kwargs["hidden_states"], group)}

    parent.register_forward_pre_hook(enter, with_kwargs=True)
