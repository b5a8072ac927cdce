"""Models whose operators are counted: their layers run on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zeropipe.core.model.cp_exchange import HEADS
from zeropipe.core.model.layers import find_excess_layers
from zeropipe.core.model.operators import LOSS, Counted, Op
from zeropipe.errors import ConfigError
from zeropipe.estimating.head import Head
from zeropipe.estimating.operators import Sizes, count_parameters, loss

if TYPE_CHECKING:
    from zeropipe.estimating.count.count import Counter

MAX_LAYERS = 1000  # all are built, on the meta device
_SMALL = Sizes(8, 8, 2, 1)  # for the layers and their parameters, which do not depend on sizes


@dataclass(frozen=True)
class CountedModel:
    """A model of any type that the engine can cut; `reason` names what shapes do not describe."""

    name: str
    config: Mapping[str, Any]
    reason: str
    _cache: dict[Sizes, Counted] = field(default_factory=dict, compare=False)
    _counters: dict[int, Counter] = field(default_factory=dict, compare=False)

    @property
    def tied(self) -> bool:
        return self._any_count().tied > 0

    @property
    def layers(self) -> tuple[str, ...]:
        return self._any_count().layers

    def layer_operators(self, sizes: Sizes) -> dict[str, Sequence[Op]]:
        found = self._count(sizes)
        return {**found.kinds, LOSS: [loss(found.logits, sizes)]}

    def fused_head(self, sizes: Sizes) -> Head | None:
        found = self._count(sizes)
        return None if found.fused_head is None else Head(found.fused_head, found.logits)

    def message_bytes(self, sizes: Sizes) -> float:
        return self._count(sizes).message

    def shared_bytes(self, sizes: Sizes) -> float:
        return 0.0  # not counted

    def allows_tp(self, tp: int) -> bool:
        try:
            self._count(replace(_SMALL, tp=tp))
        except ConfigError:
            return False
        return True

    def allows_sequence_parallel(self, tp: int) -> bool:
        try:
            self._count(replace(_SMALL, tokens=8 * tp, sequence=8 * tp, tp=tp, sequence_parallel=True))
        except ConfigError:
            return False
        return True

    def allows_ep(self, ep: int) -> bool:
        return ep == 1

    def allows_cp(self, cp: int) -> bool:
        return cp == 1

    def choose_exchange(self, wanted: str, cp: int, tp: int, sequence: int, crosses: bool, no_ring: str) -> str:
        return HEADS  # it has no parts of sequences

    def exchanged_bytes(self, kind: str, sizes: Sizes) -> float:
        return 0.0

    def num_parameters(self) -> tuple[int, int]:
        found = next((count for sizes, count in self._cache.items() if sizes.tp == 1), None) or self._count(_SMALL)
        return count_parameters(found.layers, found.kinds, found.tied)

    def _any_count(self) -> Counted:
        """The count for any sizes, for facts that do not depend on them."""
        return next(iter(self._cache.values()), None) or self._count(_SMALL)

    def _count(self, sizes: Sizes) -> Counted:
        if sizes not in self._cache:
            counter = self._counter(sizes.element)
            length = sizes.sample or sizes.sequence  # packed samples cost what rows of their length cost
            self._cache[sizes] = counter.count(length, -(-sizes.tokens // length), sizes.tp, sizes.sequence_parallel)
        return self._cache[sizes]

    def _counter(self, element: int) -> Counter:
        """The counter of the model in a dtype of `element` bytes."""
        if element not in self._counters:
            self._counters[element] = self._create_counter(element)
        return self._counters[element]

    def _create_counter(self, element: int) -> Counter:
        if excess := find_excess_layers(self.config, MAX_LAYERS):
            raise ConfigError(f"{self.name}: {excess}: {self.reason} are counted with at most {MAX_LAYERS} layers")
        try:
            import torch

            from zeropipe.estimating.count.count import Counter
        except ImportError:
            raise ConfigError(
                f"{self.name}: {self.reason} are estimated by running layers on the meta device, which needs torch: "
                "pip install 'zeropipe[engine]'"
            ) from None
        return Counter(self.config, torch.float32 if element == 4 else torch.bfloat16)
