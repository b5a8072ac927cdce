"""All uses of private names of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, TrainingState
from torch.distributed.tensor import DTensor

Call = Callable[[], None]


def units_of(module: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on, inner ones first; one of those that it got as a list."""
    units: dict[int, Any] = {}
    for child in module.modules():
        if isinstance(child, FSDPModule):
            units.setdefault(id(child._get_fsdp_state()), child)
    return list(units.values())[::-1]


def groups_of(unit: Any) -> list[Any]:
    """The unit's parameter groups: one, or none where it has no parameters of its own."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.11


def lazy_init(root: Any) -> None:
    """Initialize FSDP, as it does before its first forward."""
    root._get_fsdp_state()._lazy_init()


def sum_gradients(unit: Any) -> None:
    """Sum gradients instead of averaging: the engine divides by the number of tokens of all processes."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums


def allow_concurrent_reduces(unit: Any, num_units: int) -> None:
    """Allow all units of a stage to be reduced at the same time."""
    if hasattr(unit, "set_reduce_scatter_max_input_buffers"):  # since torch 2.13
        # with torch's default of 1 the computation waits for the reduce of the previous unit
        unit.set_reduce_scatter_max_input_buffers(num_units + 1, recurse=False)


def unsharded_parameters(unit: Any) -> list[Tensor]:
    """The unsharded weights of a unit, which modules and stored products hold; they exist after the first gather."""
    return [param._unsharded_param for param in _gathered_params(unit)]


def _gathered_params(unit: Any) -> list[Any]:
    """FSDP's records of the parameters of a unit that were gathered before."""
    return [p for group in groups_of(unit) for p in group.fsdp_params if hasattr(p, "_unsharded_param")]


def accumulate_in_reduce_dtype(unit: Any) -> None:
    """Accumulate gradients of microbatches in the dtype that they are reduced in, not in that of the weights."""
    for param in _gathered_params(unit):
        if param._unsharded_param.is_floating_point():
            # FSDP's own reduce_dtype is None where it is the dtype of computation
            param._unsharded_param.grad_dtype = param.mp_policy.reduce_dtype or param.orig_dtype


def list_shards(unit: Any) -> list[tuple[nn.Module, str, Tensor]]:
    """The parameters of a unit: the module of each, its name there, and this process's shard."""
    params = [param for group in groups_of(unit) for param in group.fsdp_params]
    return [(param._module_info.module, param._module_info.param_name, param.sharded_param) for param in params]


def find_owner(root: nn.Module, parameter: Tensor) -> nn.Module | None:
    """The module in `root` that an unsharded weight belongs to, also while the module holds its shard."""
    for param in (param for unit in units_of(root) for param in _gathered_params(unit)):
        if param._unsharded_param is parameter:
            return param._module_info.module
    return None


def has_gradient(unit: Any, parameter: Tensor) -> bool:
    """Whether FSDP has a gradient to reduce for this weight."""
    return any(p._unsharded_param is parameter and _has_gradient(p) for p in _gathered_params(unit))


def _has_gradient(param: Any) -> bool:
    return param._unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None


def discard_gradients(unit: Any) -> bool:
    """Discard the gradients that FSDP has to reduce; returns whether there were any."""
    found = [param for param in _gathered_params(unit) if _has_gradient(param)]
    for param in found:
        param._unsharded_param.grad = param.unsharded_accumulated_grad = None
    return bool(found)


class UnitWeights:
    """The unsharded weights of one unit, gathered and freed by calls and not by FSDP's hooks.

    While `is_controlled`, a hook that needs the weights calls `on_enter`, which returns when they are gathered; a hook
    after their last use calls `on_leave`, with whether it is a forward's. At other times hooks do what FSDP does.
    """

    def __init__(self, unit: Any, on_enter: Call, on_leave: Callable[[bool], None]) -> None:
        self._groups, self._on_enter, self._on_leave = groups_of(unit), on_enter, on_leave
        self.is_controlled = False
        for group in self._groups:
            self._replace_methods(group)

    def _replace_methods(self, group: Any) -> None:
        kind = type(group)  # the methods of the class: those of the group may be another engine's

        def unshard(*args: Any, **options: Any) -> None:
            if not self.is_controlled:
                kind.unshard(group, *args, **options)

        def wait_for_unshard() -> None:
            if self.is_controlled:
                self._on_enter()
            else:
                kind.wait_for_unshard(group)

        def reshard() -> None:
            if self.is_controlled:
                self._on_leave(group._training_state == TrainingState.FORWARD)
            else:
                kind.reshard(group)

        group.unshard, group.wait_for_unshard, group.reshard = unshard, wait_for_unshard, reshard

    @property
    def is_empty(self) -> bool:
        """Whether the unit has no weights of its own."""
        return not self._groups

    @property
    def is_available(self) -> bool:
        """Whether the weights are gathered, or being gathered; true for a unit without weights."""
        return all(group._all_gather_result is not None or group.is_unsharded for group in self._groups)

    @property
    def is_pending(self) -> bool:
        """Whether the weights are being gathered."""
        return any(group._all_gather_result is not None for group in self._groups)

    def start(self) -> list[Call]:
        """Start to gather; returns functions that make the current stream wait for the weights."""
        waits: list[Call] = []
        for group in self._groups:
            with group.use_training_state(TrainingState.IDLE):  # in others FSDP may not gather
                type(group).unshard(group, async_op=True)
            result = group._all_gather_result
            if result.all_gather_work is not None:
                waits.append(result.all_gather_work.wait)
            elif result.all_gather_event is not None:  # a group of one process
                waits.append(result.all_gather_event.wait)
        return waits

    def wait(self) -> None:
        """Wait for the gather that was started: then the unit's modules have the unsharded weights."""
        for group in self._groups:
            type(group).wait_for_unshard(group)

    def reshard(self) -> None:
        """Free the unsharded weights: the unit's modules have their shards again."""
        self.wait()  # otherwise FSDP does not start the next gather
        for group in self._groups:
            with group.use_training_state(TrainingState.IDLE):
                type(group).reshard(group)


def reduce_stream(unit: Any) -> Any:
    """The stream of the last collective of a unit's reduce."""
    group = groups_of(unit)[0]
    replicated = group._all_reduce_process_group if isinstance(group.mesh_info, DDPMeshInfo) else None
    return group.comm_ctx.reduce_scatter_stream if replicated is None else group.comm_ctx.all_reduce_stream


def weight_storages(unit: Any) -> list[Any]:
    """The storages of the unsharded weights of a unit, also while they are being gathered; empty ones if resharded."""
    storages = []
    for group in groups_of(unit):
        storages += [t.untyped_storage() for param in group.fsdp_params for t in param.all_gather_outputs]
        for pending in (group._all_gather_result, getattr(group.comm_ctx.all_gather_state, "all_gather_result", None)):
            if pending is not None and isinstance(pending.all_gather_output, Tensor):
                storages.append(pending.all_gather_output.untyped_storage())
    return storages


def gradient_storages(unit: Any) -> list[Any]:
    """The storages of the unsharded gradients of a unit, also while they are being reduced."""
    found = [parameter.grad for parameter in unsharded_parameters(unit)]
    for group in groups_of(unit):
        found += [param.unsharded_accumulated_grad for param in group.fsdp_params]
        found += [state.reduce_scatter_input for state in _pending_reduces(group.comm_ctx)]
    local = (gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in found)
    return [gradient.untyped_storage() for gradient in local if gradient is not None]


def free_reduced(unit: Any) -> None:
    """Free the inputs of reduces that have ended: torch keeps them until the end of the step."""
    for group in groups_of(unit):
        context = group.comm_ctx
        pending = _pending_reduces(context)
        _keep_reduces(context, [state for state in pending if state.event is not None and not state.event.query()])


def pending_reduces(unit: Any) -> list[Any]:
    """FSDP's records of reduces of the unit's stage that were started and not waited for."""
    return [state for group in groups_of(unit) for state in _pending_reduces(group.comm_ctx)]


def wait_for_reduce(unit: Any, state: Any) -> None:
    """Let the current stream wait for one of `pending_reduces`, and free its input."""
    for group in groups_of(unit):
        context, device = group.comm_ctx, group.device_handle
        pending = _pending_reduces(context)
        others = [other for other in pending if other is not state]
        if len(others) == len(pending):
            continue
        if state.event is not None:
            device.current_stream().wait_event(state.event)
        _keep_reduces(context, others)


def _pending_reduces(context: Any) -> list[Any]:
    """FSDP's records of reduces that were started, each with its input and the event of its end."""
    if hasattr(context, "reduce_scatter_states"):
        return list(context.reduce_scatter_states)
    return [] if context.reduce_scatter_state is None else [context.reduce_scatter_state]  # torch 2.11


def _keep_reduces(context: Any, states: list[Any]) -> None:
    """Let FSDP have these records of reduces only: the inputs of others are freed."""
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states[:] = states
    else:  # torch 2.11 has one at a time
        context.reduce_scatter_state = states[0] if states else None


def disable_reduce(root: Any) -> None:
    """Make FSDP's hooks reduce nothing."""
    root.set_is_last_backward(False)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(True)


def reshard_after_forward(root: Any) -> None:
    """Make forwards outside of steps free the weights: otherwise the next one would use outdated ones."""
    root.set_reshard_after_forward(True)


def reduce(unit: Any) -> None:
    """Start to sum a unit's gradients over the processes that share it."""
    unit.set_requires_gradient_sync(True, recurse=False)
    unit.set_reshard_after_backward(False, recurse=False)  # the Program says when weights are freed
    for group in groups_of(unit):
        group.post_backward()
    unit.set_requires_gradient_sync(False, recurse=False)
    unit.set_reshard_after_backward(True, recurse=False)


def wait_for_reduces(root: Any) -> None:
    """Wait for all reduces of a stage."""
    root.set_is_last_backward(True)
    root._get_fsdp_state()._root_post_backward_final_callback()
