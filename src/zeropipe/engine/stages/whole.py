"""The names and shapes of a whole model, which every rank knows though it holds only a part."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from zeropipe.engine.transformers_private import tied_names
from zeropipe.errors import ConfigError

_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
SCORE = "score.weight"  # of a head that a language model's checkpoint does not have


@dataclass(frozen=True)
class Whole:
    """A model without memory, and which head its stages get: "lm" or "score"."""

    model: nn.Module
    head: str

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of all stages together, by name."""
        found = tensors_of(self.model)
        if self.head == "lm":
            return found
        score = torch.empty(self.model.config.num_labels, self.model.config.hidden_size, device="meta")
        return {name: tensor for name, tensor in found.items() if name not in self._lm_head} | {SCORE: score}

    @cached_property
    def stored(self) -> set[str]:
        """What a checkpoint holds of them for certain: all but what is computed, and a score head."""
        return self.tensors.keys() - computed(self.model) - {SCORE}

    def way_out(self, missing: set[str]) -> str:
        """What to do about tensors that are missing."""
        if missing <= self._lm_head:
            return "give the model with it, or head='score' for a classifier or a reward model"
        return "give the whole model, not a part"

    @cached_property
    def ties(self) -> dict[str, str]:
        """Name -> the name it is tied to, as class and config say."""
        return tied_names(self.model)

    @cached_property
    def tie(self) -> tuple[str, str] | None:
        """The head's weight and the embedding's, if they are tied; other ties do not span stages."""
        head, embedding = (self.ties.get(name, name) for name in self.ends)  # or both to a third name
        return self.ends if head == embedding and self.head == "lm" else None

    @cached_property
    def ends(self) -> tuple[str, str]:
        """The names of the head's weight and of the embedding's."""
        return self._weight(self.model.get_output_embeddings()), self._weight(self.model.get_input_embeddings())

    @cached_property
    def _lm_head(self) -> set[str]:
        head = self.ends[0].removesuffix("weight")
        return {name for name in tensors_of(self.model) if name.startswith(head)}

    def _weight(self, module: nn.Module) -> str:
        own = next((name for name, other in self.model.named_modules() if other is module), None)
        if own is None:
            raise ConfigError(f"a {type(self.model).__name__} has no embedding or no head: it cannot be cut")
        return next(f"{own}.{name}" for name, tensor in module.named_parameters() if tensor is module.weight)


def unwrapped_name(name: str) -> str:
    """A tensor's name without what torch.compile and checkpointing of single modules put into it."""
    return _WRAPPERS.sub("", name)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied one under each of its names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def computed(module: nn.Module) -> set[str]:
    """Buffers that no checkpoint holds: a model computes them when it is made (rotary frequencies)."""
    return {name for name, _ in module.named_buffers(remove_duplicate=False)} - module.state_dict().keys()


def put(name: str, into: Tensor, value: Tensor, where: str) -> None:
    """Copy a value that must have the same shape and be a number of the same kind."""
    require_fit(name, into, value.shape, value.dtype, where)
    with torch.no_grad():
        into.copy_(value)


def require_fit(name: str, into: Tensor, shape: Iterable[int], dtype: torch.dtype, where: str) -> None:
    """ConfigError for a tensor of another shape (nothing is broadcast) or of another kind of number."""
    if tuple(shape) != tuple(into.shape):
        raise ConfigError(
            f"{name} is {tuple(shape)} in {where}: the config makes it {tuple(into.shape)}; give the weights and the "
            "config of one model"
        )
    is_small = dtype.is_floating_point and dtype.itemsize == 1
    if is_small or dtype.is_floating_point != into.dtype.is_floating_point:
        raise ConfigError(
            f"{name} is {_word(dtype)} in {where}, the model has {_word(into.dtype)}: give weights that are not "
            "quantised"
        )


def listed(names: Iterable[str]) -> str:
    """The first of some names, and how many there are more."""
    first, *more = sorted(names)
    return f"{first} (and {len(more)} more)" if more else first


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
