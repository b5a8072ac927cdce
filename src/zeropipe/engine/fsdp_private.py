"""Every private call of FSDP2 in one place; tests/test_fsdp_private.py looks at each of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def units_of(module: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on, inner ones first."""
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    return units[::-1]


def state_of(unit: Any) -> Any:
    return unit._get_fsdp_state()


def groups_of(unit: Any) -> list[Any]:
    """The unit's parameter groups: one, or none where it has no parameters of its own."""
    state = state_of(unit)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.11


def lazy_init(root: Any) -> None:
    """What FSDP does before its first forward."""
    state_of(root)._lazy_init()


def sum_gradients(unit: Any) -> None:
    """Gradients are summed, not averaged: the engine divides by the number of tokens of all processes."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums


def allow_reduces(unit: Any, num_units: int) -> None:
    """All units of a stage may be reduced at the same time."""
    if hasattr(unit, "set_reduce_scatter_max_input_buffers"):  # since torch 2.13
        # with torch's default of 1 the computation waits for the reduce of the unit before
        unit.set_reduce_scatter_max_input_buffers(num_units + 1, recurse=False)


def whole_parameters(unit: Any) -> list[Tensor]:
    """The whole weights that modules and stored products hold; they exist since the first gathering."""
    return [param._unsharded_param for group in groups_of(unit) for param in group.fsdp_params if _was_gathered(param)]


def _was_gathered(param: Any) -> bool:
    return hasattr(param, "_unsharded_param")


def accumulate_in_reduce_dtype(unit: Any) -> None:
    """Gradients of several microbatches add up in the dtype they are reduced in, not in the one they are made in."""
    for group in groups_of(unit):
        for param in group.fsdp_params:
            wanted = param.reduce_dtype or param.orig_dtype
            if param._unsharded_param.is_floating_point():
                param._unsharded_param.grad_dtype = wanted


def has_gradient(unit: Any, parameter: Tensor) -> bool:
    """Whether FSDP has a gradient to reduce for this weight."""
    for group in groups_of(unit):
        for param in group.fsdp_params:
            if getattr(param, "_unsharded_param", None) is parameter:
                return parameter.grad is not None or param.unsharded_accumulated_grad is not None
    return False


def wait_gathered(unit: Any) -> None:
    """Take a gathering that was started and that no forward has waited for; else the next one would not be started."""
    for group in groups_of(unit):
        group.wait_for_unshard()


def hold_hooks(root: Any, keep_whole: bool) -> None:
    """For a step: hooks reduce nothing, and drop no weights if these are kept whole."""
    root.set_is_last_backward(False)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(not keep_whole)
    root.set_reshard_after_forward(not keep_whole)


def reduce(unit: Any) -> None:
    """Start the sum of a unit's gradients over the processes that share it, and let go of its whole weights."""
    unit.set_requires_gradient_sync(True, recurse=False)
    unit.set_reshard_after_backward(True, recurse=False)
    for group in groups_of(unit):
        group.post_backward()
    unit.set_requires_gradient_sync(False, recurse=False)


def finish(root: Any) -> None:
    """Wait for all sums of a stage."""
    root.set_is_last_backward(True)
    state_of(root)._root_post_backward_final_callback()


def reset(root: Any) -> None:
    """Forget a step that failed."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
