"""Models without memory, from the configs that users have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeropipe.engine.stages.families import entry_of, refusal
from zeropipe.engine.transformers_private import build, causal_class
from zeropipe.errors import ConfigError


def decoder_config(config: Any) -> Any:
    """The config of what is cut: the model's own, or that of the text part of a model that also sees or hears."""
    if (reason := entry_of(config).refused) is not None:
        raise refusal(config, reason)
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise refusal(config, str(error)) from None
    if not hasattr(text, "model_type"):
        raise refusal(config, "this type has no text part, but its config has a text_config")
    part = config if type(text) is type(config) else text
    if causal_class(part) is None:
        what = "it" if part is config else f"its text part ({part.model_type})"
        raise refusal(config, f"transformers has no causal language model of {what}")
    found = copy.deepcopy(part)
    if part is not config:
        found.dtype = found.dtype or config.dtype
        found.tie_word_embeddings = getattr(config, "tie_word_embeddings", found.tie_word_embeddings)
    return found


def meta_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """The whole model without memory."""
    with torch.device("meta"), Undrawn(lambda tensor: tensor.is_meta):
        try:
            return build(config, dtype).train()
        except Exception as error:  # whatever transformers finds wrong with it
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"transformers cannot build a model of this config (model_type={config.model_type!r}): "
                f"{type(error).__name__}: {reason}"
            ) from error


class Undrawn(TorchFunctionMode):
    """Random numbers are not drawn for tensors that have no use for them: to draw them is most of the work.

    Tensors without memory are left alone, the others are 0.
    """

    # by name: transformers puts functions of its own in the place of torch's while it fills a model
    _drawing = frozenset({"kaiming_uniform_", "uniform_", "normal_"})

    def __init__(self, is_meant: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._is_meant = is_meant

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self._drawing:
            tensor = args[0] if args else kwargs["tensor"]
            if self._is_meant(tensor):
                return tensor if tensor.is_meta else nn.init.zeros_(tensor)
        return func(*args, **kwargs)
