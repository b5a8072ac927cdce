"""Every private call of FSDP2 in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, TrainingState

Call = Callable[[], None]


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


def shards_of(unit: Any) -> list[tuple[nn.Module, str, Tensor]]:
    """The parameters of a unit: the module that has each, its name there, and this process's part of it."""
    params = [param for group in groups_of(unit) for param in group.fsdp_params]
    return [(param._module_info.module, param._module_info.param_name, param.sharded_param) for param in params]


def owner_of(root: nn.Module, parameter: Tensor) -> nn.Module | None:
    """The module in `root` whose whole weight a parameter is, also while it holds a shard."""
    for unit in units_of(root):
        for param in (param for group in groups_of(unit) for param in group.fsdp_params if _was_gathered(param)):
            if param._unsharded_param is parameter:
                return param._module_info.module
    return None


def has_gradient(unit: Any, parameter: Tensor) -> bool:
    """Whether FSDP has a gradient to reduce for this weight."""
    for group in groups_of(unit):
        for param in group.fsdp_params:
            if getattr(param, "_unsharded_param", None) is parameter:
                return parameter.grad is not None or param.unsharded_accumulated_grad is not None
    return False


def forget_gradients(unit: Any) -> bool:
    """Drop the gradients that FSDP has to reduce, and say whether there were any."""
    found = False
    for group in groups_of(unit):
        for param in filter(_was_gathered, group.fsdp_params):
            whole = param._unsharded_param
            found = found or whole.grad is not None or param.unsharded_accumulated_grad is not None
            whole.grad = param.unsharded_accumulated_grad = None
    return found


class WholeWeights:
    """The whole weights of one unit: gathered and let go by who has this, and not by FSDP's hooks.

    While `driven`, a hook that needs the weights calls `entered`, which returns when they are whole; one that is done
    with them calls `left`, with whether it is a forward's. At other times hooks do what FSDP does.
    """

    def __init__(self, unit: Any, entered: Call, left: Callable[[bool], None]) -> None:
        self._groups, self._entered, self._left = groups_of(unit), entered, left
        self.driven = False
        for group in self._groups:
            self._take_over(group)

    def _take_over(self, group: Any) -> None:
        kind = type(group)  # its own methods: another engine may have taken the group over before

        def unshard(*args: Any, **options: Any) -> None:
            if not self.driven:
                kind.unshard(group, *args, **options)

        def wait_for_unshard() -> None:
            if self.driven:
                self._entered()
            else:
                kind.wait_for_unshard(group)

        def reshard() -> None:
            if self.driven:
                self._left(group._training_state == TrainingState.FORWARD)
            else:
                kind.reshard(group)

        group.unshard, group.wait_for_unshard, group.reshard = unshard, wait_for_unshard, reshard

    @property
    def is_empty(self) -> bool:
        """Whether the unit has no weights of its own."""
        return not self._groups

    @property
    def is_here(self) -> bool:
        """Whether the weights are whole, or being gathered; there may be none."""
        return all(group._all_gather_result is not None or group.is_unsharded for group in self._groups)

    @property
    def is_pending(self) -> bool:
        """Whether the weights are being gathered."""
        return any(group._all_gather_result is not None for group in self._groups)

    def start(self) -> list[Call]:
        """Start to gather them. Returns what makes the current stream wait for them, too."""
        waits: list[Call] = []
        for group in self._groups:
            with group.use_training_state(TrainingState.IDLE):  # in other states FSDP may gather in another way, or not
                type(group).unshard(group, async_op=True)
            result = group._all_gather_result
            if result.all_gather_work is not None:
                waits.append(result.all_gather_work.wait)
            elif result.all_gather_event is not None:  # one process alone
                waits.append(result.all_gather_event.wait)
        return waits

    def wait(self) -> None:
        """Take what was started: the unit's modules have the whole weights."""
        for group in self._groups:
            type(group).wait_for_unshard(group)

    def let_go(self) -> None:
        """The unit's modules have their shards again."""
        self.wait()  # else the next gathering would not be started
        for group in self._groups:
            with group.use_training_state(TrainingState.IDLE):
                type(group).reshard(group)


def reduce_stream(unit: Any) -> Any:
    """The stream on which the sums of a unit's gradients end."""
    group = groups_of(unit)[0]
    replicated = group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None
    return group.comm_ctx.reduce_scatter_stream if replicated is None else group.comm_ctx.all_reduce_stream


def whole_storages(unit: Any) -> list[Any]:
    """The storages that hold whole weights of a unit, or are about to; empty ones while they are let go."""
    storages = []
    for group in groups_of(unit):
        storages += [t.untyped_storage() for param in group.fsdp_params for t in param.all_gather_outputs]
        for pending in (group._all_gather_result, getattr(group.comm_ctx.all_gather_state, "all_gather_result", None)):
            if pending is not None and isinstance(pending.all_gather_output, Tensor):
                storages.append(pending.all_gather_output.untyped_storage())
    return storages


def gradient_storages(unit: Any) -> list[Any]:
    """The storages that hold whole gradients of a unit, also while they are being summed."""
    found = [parameter.grad for parameter in whole_parameters(unit)]
    for group in groups_of(unit):
        found += [param.unsharded_accumulated_grad for param in group.fsdp_params]
        found += [state.reduce_scatter_input for state in _reduces(group.comm_ctx)]
    return [gradient.untyped_storage() for gradient in found if gradient is not None]


def reclaim(unit: Any) -> None:
    """Free what the sums that have ended read: torch keeps it until the end of the step."""
    for group in groups_of(unit):
        context = group.comm_ctx
        left = [state for state in _reduces(context) if state.event is not None and not state.event.query()]
        if hasattr(context, "reduce_scatter_states"):
            context.reduce_scatter_states[:] = left
        else:  # torch 2.11 has one at a time
            context.reduce_scatter_state = left[0] if left else None


def _reduces(context: Any) -> list[Any]:
    """The sums under way, each with what it reads and with the event of its end."""
    if hasattr(context, "reduce_scatter_states"):
        return list(context.reduce_scatter_states)
    return [] if context.reduce_scatter_state is None else [context.reduce_scatter_state]  # torch 2.11


def hold_hooks(root: Any) -> None:
    """For a step: hooks reduce nothing."""
    root.set_is_last_backward(False)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(True)


def release_hooks(root: Any) -> None:
    """After a step: a forward outside of one lets go of weights, or the next one would not see them change."""
    root.set_reshard_after_forward(True)


def reduce(unit: Any) -> None:
    """Start the sum of a unit's gradients over the processes that share it."""
    unit.set_requires_gradient_sync(True, recurse=False)
    for group in groups_of(unit):
        group.post_backward()
    unit.set_requires_gradient_sync(False, recurse=False)


def finish(root: Any) -> None:
    """Wait for all sums of a stage."""
    root.set_is_last_backward(True)
    state_of(root)._root_post_backward_final_callback()
