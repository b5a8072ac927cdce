"""Models whose shapes are not written down here: their layers are run without memory, and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zeropipe.core.model.layers import find_excess_layers
from zeropipe.core.model.operators import Counted, Op
from zeropipe.errors import ConfigError
from zeropipe.estimating.operators import Sizes, loss, num_parameters

if TYPE_CHECKING:
    from zeropipe.estimating.count.count import Counter

MOST_LAYERS = 1000  # all of them are built, without memory
_ONE = Sizes(8, 8, 2, 1)  # where only the layers and their parameters are asked for


@dataclass(frozen=True)
class CountedModel:
    """A model of any type that the engine can cut; `unknown` says what keeps its shape from being known."""

    name: str
    config: Mapping[str, Any]
    unknown: str
    _found: dict[Sizes, Counted] = field(default_factory=dict, compare=False)
    _counters: dict[int, Counter] = field(default_factory=dict, compare=False)

    @property
    def tied(self) -> bool:
        return self._any().tied > 0

    @property
    def layers(self) -> tuple[str, ...]:
        return self._any().layers

    def kinds(self, at: Sizes) -> dict[str, Sequence[Op]]:
        found = self._count(at)
        return {**found.kinds, "loss": [loss(found.logits, at)]}

    def message(self, at: Sizes) -> float:
        return self._count(at).message

    def allows(self, tp: int) -> bool:
        try:
            self._count(replace(_ONE, tp=tp))
        except ConfigError:
            return False
        return True

    def num_parameters(self) -> tuple[int, int]:
        found = next((one for at, one in self._found.items() if at.tp == 1), None) or self._count(_ONE)
        return num_parameters(found.layers, found.kinds, found.tied)

    def _any(self) -> Counted:
        """For what is the same at all sizes."""
        return next(iter(self._found.values()), None) or self._count(_ONE)

    def _count(self, at: Sizes) -> Counted:
        if at not in self._found:
            self._found[at] = self._counter(at.element).count(at.sequence, at.tokens // at.sequence, at.tp)
        return self._found[at]

    def _counter(self, element: int) -> Counter:
        """What counts the model with numbers of so many bytes."""
        if element not in self._counters:
            self._counters[element] = self._open(element)
        return self._counters[element]

    def _open(self, element: int) -> Counter:
        if above := find_excess_layers(self.config, MOST_LAYERS):
            raise ConfigError(f"{self.name}: {above}: {self.unknown} are counted with at most {MOST_LAYERS} layers")
        try:
            import torch

            from zeropipe.estimating.count.count import Counter
        except ImportError:
            raise ConfigError(
                f"{self.name}: {self.unknown} are estimated by running layers without memory, which needs torch: "
                "pip install 'zeropipe[engine]'"
            ) from None
        return Counter(self.config, torch.float32 if element == 4 else torch.bfloat16)
