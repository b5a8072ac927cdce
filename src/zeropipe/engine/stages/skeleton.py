"""The names and shapes of a full model on the meta device, which every rank has although it holds only some stages."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeropipe.engine.stages.families import quirk_of, refuse
from zeropipe.engine.transformers_private import build, causal_class, tied_names
from zeropipe.errors import ConfigError

_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
SCORE_WEIGHT = "score.weight"  # of a head that the checkpoint of a language model does not have


def find_decoder_config(config: Any) -> Any:
    """The config of the model that is cut: the config itself, or that of the text part of a multimodal model."""
    if (reason := quirk_of(config).refused) is not None:
        raise refuse(config, reason)
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise refuse(config, str(error)) from None
    if not hasattr(text, "model_type"):
        raise refuse(config, "this type has no text part, but its config has a text_config")
    part = config if type(text) is type(config) else text
    if causal_class(part) is None:
        what = "it" if part is config else f"its text part ({part.model_type})"
        raise refuse(config, f"transformers has no causal language model of {what}")
    found = copy.deepcopy(part)
    if part is not config:
        found.dtype = found.dtype or config.dtype
        found.tie_word_embeddings = getattr(config, "tie_word_embeddings", found.tie_word_embeddings)
    return found


def build_on_meta(config: Any, dtype: torch.dtype) -> nn.Module:
    """The full model of a config on the meta device."""
    with torch.device("meta"), SkipRandomInit(lambda tensor: tensor.is_meta):
        try:
            return build(config, dtype).train()
        except Exception as error:  # any error of the model's own code
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"transformers cannot build a model of this config (model_type={config.model_type!r}): "
                f"{type(error).__name__}: {reason}"
            ) from error


class SkipRandomInit(TorchFunctionMode):
    """Skip the random initialization of the tensors that `skips` returns True for: it takes most of the time.

    Tensors on the meta device stay as they are, others become 0.
    """

    # by name: transformers replaces the functions of torch while it builds a model
    _functions = frozenset({"kaiming_uniform_", "uniform_", "normal_"})

    def __init__(self, skips: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._skips = skips

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self._functions:
            tensor = args[0] if args else kwargs["tensor"]
            if self._skips(tensor):
                return tensor if tensor.is_meta else nn.init.zeros_(tensor)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ModelSkeleton:
    """A full model on the meta device, and the head that its stages get: "lm" or "score"."""

    model: nn.Module
    head: str

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of all stages, by name."""
        found = named_tensors(self.model)
        if self.head == "lm":
            return found
        score = torch.empty(self.model.config.num_labels, self.model.config.hidden_size, device="meta")
        return {name: tensor for name, tensor in found.items() if name not in self._lm_head} | {SCORE_WEIGHT: score}

    @cached_property
    def stored(self) -> set[str]:
        """The tensors that every checkpoint has: all but computed buffers and a score head."""
        return self.tensors.keys() - computed_buffers(self.model) - {SCORE_WEIGHT}

    def hint(self, missing: set[str]) -> str:
        """The way out if tensors are missing."""
        if missing <= self._lm_head:
            return "pass a model with a head, or head='score' for a classifier or a reward model"
        return "pass the full model"

    @cached_property
    def ties(self) -> dict[str, str]:
        """Parameter name -> the name it is tied to, by class and config."""
        return tied_names(self.model)

    @cached_property
    def tied_ends(self) -> tuple[str, str] | None:
        """The weights of head and embedding if they are tied; other ties do not span stages."""
        head, embedding = (self.ties.get(name, name) for name in self.ends)  # or both are tied to a third name
        return self.ends if head == embedding and self.head == "lm" else None

    @cached_property
    def ends(self) -> tuple[str, str]:
        """The names of the head's weight and of the embedding's."""
        return self._weight(self.model.get_output_embeddings()), self._weight(self.model.get_input_embeddings())

    @cached_property
    def _lm_head(self) -> set[str]:
        head = self.ends[0].removesuffix("weight")
        return {name for name in named_tensors(self.model) if name.startswith(head)}

    def _weight(self, module: nn.Module) -> str:
        own = next((name for name, other in self.model.named_modules() if other is module), None)
        if own is None:
            raise ConfigError(f"a {type(self.model).__name__} has no embedding or no head: it cannot be cut")
        return next(f"{own}.{name}" for name, tensor in module.named_parameters() if tensor is module.weight)


def strip_wrappers(name: str) -> str:
    """A tensor's name without the parts that torch.compile and checkpoint_wrapper add."""
    return _WRAPPERS.sub("", name)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied parameter under each of its names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def computed_buffers(module: nn.Module) -> set[str]:
    """Names of the non-persistent buffers, which no checkpoint has: a model computes them (rotary frequencies)."""
    return {name for name, _ in module.named_buffers(remove_duplicate=False)} - module.state_dict().keys()


def copy_into(name: str, into: Tensor, value: Tensor, source: str) -> None:
    """Copy a value of the same shape and kind of dtype; ConfigError for any other."""
    require_match(name, into, value.shape, value.dtype, source)
    with torch.no_grad():
        into.copy_(value)


def require_match(name: str, into: Tensor, shape: Iterable[int], dtype: torch.dtype, source: str) -> None:
    """ConfigError for a tensor of another shape (nothing is broadcast) or kind of dtype (integer, float, 8-bit)."""
    if tuple(shape) != tuple(into.shape):
        raise ConfigError(
            f"{name} has shape {tuple(shape)} in {source}: must be {tuple(into.shape)} by the config; use the weights "
            "and the config of one model"
        )
    is_8_bit = dtype.is_floating_point and dtype.itemsize == 1
    if is_8_bit or dtype.is_floating_point != into.dtype.is_floating_point:
        raise ConfigError(
            f"{name} is {str(dtype).removeprefix('torch.')} in {source}: must be a type like "
            f"{str(into.dtype).removeprefix('torch.')}; use weights that are not quantized"
        )


def format_names(names: Iterable[str]) -> str:
    """The first of some names, and the number of the others."""
    first, *more = sorted(names)
    return f"{first} (and {len(more)} more)" if more else first
