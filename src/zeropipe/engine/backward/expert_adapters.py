"""LoRA adapters on stacks of experts: two products of few columns beside each product of the stack.

peft adds B A to the weights of all experts in every forward. Here each row goes through A and B of its expert: no
weights are computed, and the experts may be some of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.ops import grouped_linear, grouped_outer

_ALIGNMENT = 8  # grouped kernels need rows of 16 bytes


def defer_adapters(module: nn.Module, is_routed_stack: Callable[[nn.Module], bool]) -> None:
    """Let the deferred stacks of experts in a module compute their adapters."""
    for child in module.modules():
        wrapper: Any = child
        if not _is_wrapper(wrapper) or not is_routed_stack(stack := wrapper.get_base_layer()):
            continue
        if wrapper.parameter_name in stack.defers:
            wrapper.__class__ = _pass_through_class(type(wrapper))
            stack.adapters = {**stack.adapters, wrapper.parameter_name: wrapper}


def _is_wrapper(module: nn.Module) -> bool:
    """Whether this is peft's adapter on a parameter; compared by name, so that peft need not be imported."""
    return (type(module).__module__, type(module).__name__) == ("peft.tuners.lora.layer", "ParamWrapper")


def has_foreign_adapters(module: nn.Module, is_routed_stack: Callable[[nn.Module], bool]) -> bool:
    """Whether peft itself computes an adapter on a deferred stack in a module, for which it needs all experts."""
    wrappers: list[Any] = [child for child in module.modules() if _is_wrapper(child)]
    return any(is_routed_stack(wrapper.get_base_layer()) for wrapper in wrappers)


@functools.cache
def _pass_through_class(base: type[Any]) -> type[Any]:
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _active_adapter(self) is None:
            return base.forward(self, x, *args, **kwargs)
        return self.base_layer(x, *args, **kwargs)

    return type("ExpertAdapter", (base,), {"forward": forward, "__module__": __name__})


def _active_adapter(wrapper: Any) -> str | None:
    """The adapter that a stack computes; None if peft has to: it is disabled or merged, or one of several."""
    if wrapper.disable_adapters or wrapper.merged or wrapper.num_experts == 1:
        return None
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    return active[0] if len(active) == 1 else None


def add_adapter(y: Tensor, stack: Any, name: str, x: Tensor, offsets: Tensor) -> Tensor:
    """Add the adapter of a stack's weights to their product with rows, if there is one."""
    wrapper = stack.adapters.get(name)
    key = None if wrapper is None else _active_adapter(wrapper)
    if key is None:
        return y
    a, b = (to_local(part[key].weight).to(x.dtype) for part in (wrapper.lora_A, wrapper.lora_B))
    here = slice(stack.first_expert, stack.first_expert + to_local(getattr(stack, name)).shape[0])
    a = a.reshape(wrapper.num_experts, -1, a.shape[-1])[here].transpose(1, 2)  # (experts, in, rank)
    b = b.reshape(b.shape[0], -1, wrapper.num_experts)[..., here].permute(2, 1, 0)  # (experts, rank, out)
    padding = -a.shape[2] % _ALIGNMENT
    a, b = functional.pad(a, (0, padding)), functional.pad(b, (0, 0, 0, padding))
    inner = _GroupedProduct.apply(x, a.contiguous(), offsets)
    return y + _GroupedProduct.apply(inner, b.contiguous(), offsets) * wrapper.scaling[key]


class _GroupedProduct(torch.autograd.Function):
    """Rows times the matrix of their expert; both gradients are computed in I."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return grouped_linear(x, weight, offsets, True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, offsets = ctx.saved_tensors
        return grouped_linear(dy, weight, offsets, False), grouped_outer(x, dy, offsets), None
