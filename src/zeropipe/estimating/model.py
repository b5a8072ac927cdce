"""A model as an estimate sees it: the operators of each kind of layer, from its shape, or counted in a run of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from zeropipe.core.model.operators import Op
from zeropipe.errors import ConfigError
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.operators import Sizes, decoder, embedding, head, loss, num_parameters
from zeropipe.estimating.shapes import Layer, NotKnown, Shape, named_config, shape_of


class Model(Protocol):
    """What an estimate asks for."""

    @property
    def name(self) -> str: ...

    @property
    def tied(self) -> bool: ...

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of each decoder layer."""
        ...

    def kinds(self, at: Sizes) -> Mapping[str, Sequence[Op]]:
        """The operators of each kind, and of "embedding", "head" and "loss"; ConfigError for a `tp` that cannot be."""
        ...

    def message(self, at: Sizes) -> float:
        """Bytes that a layer hands on."""
        ...

    def allows(self, tp: int) -> bool:
        """Whether so many GPUs can share its layers."""
        ...

    def num_parameters(self) -> tuple[int, int]:
        """All, and those that a token meets: with tied ends, these count once in both."""
        ...


def open_model(model: str | Mapping[str, Any] | ShapedModel | CountedModel) -> ShapedModel | CountedModel:
    """A known name, a directory with config.json, a config file, a config as plain data, or what is open already."""
    if isinstance(model, (ShapedModel, CountedModel)):
        return model
    try:
        return ShapedModel(shape_of(model))
    except NotKnown as reason:
        return CountedModel(*named_config(model), str(reason))


@dataclass(frozen=True)
class ShapedModel:
    """A model whose shape says everything."""

    shape: Shape

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def tied(self) -> bool:
        return self.shape.tied

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self._names[layer] for layer in self.shape.layers)

    @cached_property
    def _names(self) -> dict[Layer, str]:
        names = {}
        for layer in dict.fromkeys(self.shape.layers):
            words = ["experts" if layer.experts else "dense", *(["sliding"] if layer.window else [])]
            names[layer] = "-".join(words)
        return names

    def kinds(self, at: Sizes) -> dict[str, list[Op]]:
        if at.tp > 1 and not self.shape.family.tp:
            raise ConfigError(
                f"tp={at.tp}: transformers has no plan for tensor parallelism of {self.name}: leave it out"
            )
        for name, value in self._shared().items():
            if value % at.tp:
                raise ConfigError(
                    f"tp={at.tp}: {self.name} has {name}={value}, which it does not divide: give another tp"
                )
        found = {name: decoder(self.shape, layer, at) for layer, name in self._names.items()}
        found |= {"embedding": embedding(self.shape, at), "head": head(self.shape, at)}
        return found | {"loss": [loss(self.shape.vocabulary // at.tp, at)]}

    def message(self, at: Sizes) -> float:
        return float(at.tokens * self.shape.hidden * at.element)

    def allows(self, tp: int) -> bool:
        return tp == 1 or (self.shape.family.tp and all(size % tp == 0 for size in self._shared().values()))

    def _shared(self) -> dict[str, int]:
        """What tensor parallelism shares out, by the names of the config's fields: its size has to divide all."""
        shape = self.shape
        sizes = {
            "num_attention_heads": shape.heads,
            "intermediate_size": shape.intermediate,
            "vocab_size": shape.vocabulary,
        }
        if shape.latent is None:
            sizes["num_key_value_heads"] = shape.kv_heads
        if shape.experts:
            sizes["num_experts"] = shape.experts.number
            sizes["shared_expert_intermediate_size"] = shape.experts.shared or 0
        return sizes

    def num_parameters(self) -> tuple[int, int]:
        shape = self.shape
        return num_parameters(self.layers, self.kinds(Sizes(1, 1, 2, 1)), shape.tied * shape.vocabulary * shape.hidden)
