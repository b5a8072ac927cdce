"""Names what a stage modified in place although a backward pass still needs it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from zeropipe.engine import fsdp_private
from zeropipe.engine.stages.contract import StageInfo
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.engine.torch_private.autograd import COPY, ProductError
from zeropipe.errors import EngineError


def explained(error: BaseException, stages: Mapping[int, StageInfo]) -> BaseException:
    """An error of autograd, or of the weight-gradient store, about such a tensor in words of the model."""
    if isinstance(error, ProductError):
        return EngineError(f"{_layer(error.parameter, stages)}: {error}")
    if torch_autograd.is_modified(error):
        return EngineError(
            f"a tensor that this backward needs {torch_autograd.modified_tensor(error)}was modified in place after the "
            f"forward that used it; in a pipeline other microbatches' forwards run in between: {COPY}"
        )
    return error


def _layer(parameter: Tensor, stages: Mapping[int, StageInfo]) -> str:
    """The full name of the module that has a parameter."""
    for number, stage in stages.items():
        owner = fsdp_private.owner_of(stage.module, parameter)
        for name, module in stage.module.named_modules():
            if module is owner or any(own is parameter for own in module._parameters.values()):
                return f"{_full_name(stage.module, module, name)} of stage {number}"
    return f"a layer with a weight of shape {list(parameter.shape)}"


def _full_name(stage: nn.Module, module: nn.Module, name: str) -> str:
    """The name of a module of a stage in the whole model, if the stage knows it."""
    if hasattr(stage, "full_names"):
        names = stage.full_names()
        for parameter in module._parameters:
            if full := names.get(f"{name}.{parameter}"):
                return str(full).rpartition(".")[0]
    return name or type(module).__name__
