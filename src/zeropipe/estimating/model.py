"""A model as the operators of each kind of layer: computed from its shape, or counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from zeropipe.core.model.cp_exchange import HEADS, AttentionHeads, parse_exchange
from zeropipe.core.model.operators import HEAD, LOSS, Op
from zeropipe.errors import ConfigError
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.head import Head
from zeropipe.estimating.operators import (
    Sizes,
    count_parameters,
    decoder_layer,
    embedding,
    exchanged_bytes,
    head,
    loss,
    shared_bytes,
)
from zeropipe.estimating.shapes import Layer, Shape, UnknownShape, read_config, read_shape


class Model(Protocol):
    """The interface that an estimate needs."""

    @property
    def name(self) -> str: ...

    @property
    def tied(self) -> bool: ...

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of each decoder layer."""
        ...

    def layer_operators(self, sizes: Sizes) -> Mapping[str, Sequence[Op]]:
        """The operators of each kind, and of "embedding", "head" and "loss"; ConfigError for an invalid `tp`."""
        ...

    def fused_head(self, sizes: Sizes) -> Head | None:
        """The head of which the engine computes losses in chunks; None if its logits stay whole."""
        ...

    def message_bytes(self, sizes: Sizes) -> float:
        """Bytes of a layer's output."""
        ...

    def shared_bytes(self, sizes: Sizes) -> float:
        """Bytes that all layers of a stage share, kept from F to I."""
        ...

    def allows_tp(self, tp: int) -> bool:
        """Whether the layers can be sharded over `tp` GPUs."""
        ...

    def allows_sequence_parallel(self, tp: int) -> bool:
        """Whether sequences can be sharded over `tp` GPUs too."""
        ...

    def allows_ep(self, ep: int) -> bool:
        """Whether experts can be divided over `ep` GPUs, and the estimate knows them."""
        ...

    def allows_cp(self, cp: int) -> bool:
        """Whether each of `cp` GPUs can have a part of every sequence, and the estimate knows it."""
        ...

    def choose_exchange(self, wanted: str, cp: int, tp: int, sequence: int, crosses: bool, no_ring: str) -> str:
        """What attention exchanges over `cp`, which crosses machines or not; `no_ring`: why that is no ring."""
        ...

    def exchanged_bytes(self, kind: str, sizes: Sizes) -> float:
        """Bytes of the rows of an exchange of a layer of this kind; 0 without divided experts."""
        ...

    def num_parameters(self) -> tuple[int, int]:
        """All parameters, and those active for one token; a tied weight counts once."""
        ...


def open_model(model: str | Mapping[str, Any] | ShapedModel | CountedModel) -> ShapedModel | CountedModel:
    """Open a known name, a directory with config.json, a config file, or a config. An open model is returned."""
    if isinstance(model, (ShapedModel, CountedModel)):
        return model
    try:
        return ShapedModel(read_shape(model))
    except UnknownShape as reason:
        return CountedModel(*read_config(model), str(reason))


@dataclass(frozen=True)
class ShapedModel:
    """A model whose operators are computed from its shape."""

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
        return {
            layer: ("experts" if layer.has_experts else "dense") + ("-sliding" if layer.window else "")
            for layer in dict.fromkeys(self.shape.layers)
        }

    def layer_operators(self, sizes: Sizes) -> dict[str, list[Op]]:
        tp = sizes.tp
        if tp > 1 and not self.shape.family.has_tp_plan:
            raise ConfigError(f"tp={tp}: transformers has no tensor-parallel plan for {self.name}; leave out tp")
        for name, value in self._sharded_sizes().items():
            if value % tp:
                raise ConfigError(f"tp={tp}: {self.name} has {name}={value}: tp must divide it")
        return {
            **{name: decoder_layer(self.shape, layer, sizes) for layer, name in self._names.items()},
            "embedding": embedding(self.shape, sizes),
            HEAD: head(self.shape, sizes),
            LOSS: [loss(self.shape.vocabulary // tp, sizes)],
        }

    def fused_head(self, sizes: Sizes) -> Head:
        return Head(tuple(head(self.shape, sizes)), self.shape.vocabulary // sizes.tp)

    def message_bytes(self, sizes: Sizes) -> float:
        return float(sizes.outside.tokens * self.shape.hidden * sizes.element)

    def shared_bytes(self, sizes: Sizes) -> float:
        return shared_bytes(self.shape, sizes)

    def allows_tp(self, tp: int) -> bool:
        is_divisible = all(size % tp == 0 for size in self._sharded_sizes().values())
        return tp == 1 or (self.shape.family.has_tp_plan and is_divisible)

    def allows_sequence_parallel(self, tp: int) -> bool:
        return self.allows_tp(tp)

    def allows_ep(self, ep: int) -> bool:
        experts = self.shape.experts
        return ep == 1 or (experts is not None and experts.number % ep == 0)

    def allows_cp(self, cp: int) -> bool:
        return cp == 1 or not self.shape.is_multimodal

    def choose_exchange(self, wanted: str, cp: int, tp: int, sequence: int, crosses: bool, no_ring: str) -> str:
        if cp == 1:
            return HEADS
        shape, latent = self.shape, self.shape.latent
        if wanted == "auto" and any(layer.window and layer.window < sequence for layer in shape.layers):
            no_ring = no_ring or "attention has windows"
        if latent is None:
            heads = AttentionHeads(shape.heads, shape.kv_heads, 2 * shape.head_dim, tp)
        else:
            heads = AttentionHeads(shape.heads, shape.heads, latent.nope + latent.rope + latent.value, tp)
        return parse_exchange(wanted, heads, cp, sequence, crosses=crosses, no_ring=no_ring).name

    def exchanged_bytes(self, kind: str, sizes: Sizes) -> float:
        return exchanged_bytes(self.shape, sizes) if sizes.ep > 1 and kind.startswith("experts") else 0.0

    def _sharded_sizes(self) -> dict[str, int]:
        """The sizes that `tp` must divide, by the names of the config's fields."""
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
        tied = shape.tied * shape.vocabulary * shape.hidden
        return count_parameters(self.layers, self.layer_operators(Sizes(1, 1, 2, 1)), tied)
