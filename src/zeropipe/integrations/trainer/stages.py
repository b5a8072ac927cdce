"""The stages of a rank as one module, under the names of the full model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.memory import unwrap_model
from zeropipe.errors import ConfigError

ADAPTER_PREFIX = "base_model.model."  # of the names in a PeftModel


class StageGroup(nn.Module):
    """What Trainer gets in place of the wrapped model: the parameters of this rank's stages."""

    def __init__(self, stages: Mapping[int, HFStage], model: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        self.prefix = ADAPTER_PREFIX if is_adapted(model) else ""
        self._model = (model,)  # in a tuple: no submodule

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under their names in the full model."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                if id(parameter) not in seen or not remove_duplicate:
                    seen.add(id(parameter))
                    yield prefix + self.prefix + stage.full_name(name), parameter

    def train(self, mode: bool = True) -> StageGroup:
        """Set the mode of the stages, and that of the model that callbacks see."""
        for model in self._model:
            model.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("the model is cut into stages, which only trainer.engine runs; save it to load it elsewhere")


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is one of peft."""
    return type(model).__module__.startswith("peft.")


def require_whole(model: nn.Module, stages: Mapping[int, HFStage]) -> None:
    """ConfigError if stages are cut from a part of the model, like the text model of a multimodal one."""
    whole, cut = type(unwrap_model(model)), type(next(iter(stages.values())).lm)
    if whole is not cut:
        raise ConfigError(f"a {whole.__name__} is trained as a {cut.__name__} on a pipeline: pass that model")


def drop_weights(model: nn.Module) -> None:
    """Move the full model to the meta device: the weights are in the stages, and stale ones cannot be used."""
    model.to("meta")
    inner = unwrap_model(model)
    if isinstance(inner, PreTrainedModel):
        inner.tie_weights()
