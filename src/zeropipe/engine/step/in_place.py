"""Tensors that a stage modifies in place: outputs keep their values or are refused, and errors name the module.

A buffer is copied when a stage returns it. Any other output is a new tensor in nearly every model and is only checked:
one that was modified in place before it was sent, used or returned to the caller is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zeropipe.engine import fsdp_private
from zeropipe.engine.blocks.state import State
from zeropipe.engine.stages.contract import StageInfo
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.engine.torch_private.autograd import COPY, ProductError
from zeropipe.errors import EngineError


def require_unmodified(tensors: Sequence[Tensor], version: int, name: str) -> None:
    """EngineError if tensors that `name` returned have another version (torch_tensors.sum_versions) now."""
    if torch_tensors.sum_versions(tensors) != version:
        raise EngineError(
            f"a tensor that {name} returned was modified in place before it was used: return a copy (x.clone()), or "
            "register it as a buffer"
        )


class StageBuffers:
    """The buffers of a stage, which later forwards may modify."""

    def __init__(self, module: nn.Module) -> None:
        self._state = State(module)
        self._memory: frozenset[int] = frozenset()

    def locate(self) -> None:
        """Find the memory of the buffers, before a step."""
        self._memory = frozenset(torch_tensors.memory_of(table[name]) for _, table, name in self._state.entries())

    def copy_shared(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or a copy if it shares memory with a buffer."""
        return tensor.clone() if self._memory and self._is_shared(tensor) else tensor

    def copy_all_shared(self, output: Any) -> Any:
        """The same for the tensors of a nested value."""
        if self._memory and any(map(self._is_shared, torch_tensors.tensors_in(output))):
            return torch_tensors.map_tensors(self.copy_shared, output)
        return output

    def _is_shared(self, tensor: Tensor) -> bool:
        return torch_tensors.memory_of(tensor) in self._memory


class StepOutputs:
    """Results that the caller gets at the end of a step."""

    def __init__(self) -> None:
        self._results: list[tuple[Sequence[Tensor], int, str]] = []

    def add(self, result: Any, name: str) -> Any:
        """Record the version of a result that `name` returned; returns the result."""
        tensors = list(torch_tensors.tensors_in(result))
        self._results.append((tensors, torch_tensors.sum_versions(tensors), name))
        return result

    def check(self) -> None:
        """EngineError if a result was modified since."""
        for tensors, version, name in self._results:
            require_unmodified(tensors, version, name)
        self._results.clear()


def explain_modified(error: BaseException, stages: Mapping[int, StageInfo]) -> BaseException:
    """An error of autograd, or of the weight-gradient store, about a modified tensor, with the module's name."""
    if isinstance(error, ProductError):
        return EngineError(f"{_find_module(error.parameter, stages)}: {error}")
    if torch_autograd.is_modified(error):
        return EngineError(
            f"a tensor that this backward needs {torch_autograd.modified_tensor(error)}was modified in place after the "
            f"forward that used it; in a pipeline other microbatches' forwards run in between: {COPY}"
        )
    return error


def _find_module(parameter: Tensor, stages: Mapping[int, StageInfo]) -> str:
    """The full name of the module that has a parameter."""
    for number, stage in stages.items():
        owner = fsdp_private.find_owner(stage.module, parameter)
        for name, module in stage.module.named_modules():
            if module is owner or any(own is parameter for own in module._parameters.values()):
                return f"{_full_name(stage.module, module, name)} of stage {number}"
    return f"a layer with a weight of shape {list(parameter.shape)}"


def _full_name(stage: nn.Module, module: nn.Module, name: str) -> str:
    """The name of a stage's module in the full model, if the stage has `full_names`."""
    if hasattr(stage, "full_names"):
        names = stage.full_names()
        for parameter in module._parameters:
            if full := names.get(f"{name}.{parameter}"):
                return str(full).rpartition(".")[0]
    return name or type(module).__name__
