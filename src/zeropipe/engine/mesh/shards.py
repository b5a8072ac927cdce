"""Stages sharded with FSDP2, driven by the engine.

FSDP gathers weights and reduces gradients by hooks around forward and backward. In a pipeline with a split backward
both come at the wrong time: a weight would be gathered for every microbatch, and the last W would never be reduced. So
the hooks are told to reduce nothing, and the Program says when a stage is gathered, let go and reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from zeropipe.engine import fsdp_private
from zeropipe.engine.backward.gradients import gradient
from zeropipe.errors import ConfigError


class Watcher(Protocol):
    """Who is told of the gathering and reducing of a stage's units."""

    def gathering(self) -> None: ...
    def begun(self, wait: Callable[[], object]) -> None: ...
    def gathered(self) -> None: ...
    def reducing(self) -> None: ...
    def reduced(self, unit: Any) -> None: ...


class Shards:
    """The FSDP units of one stage, outermost last."""

    def __init__(self, module: nn.Module, *, regather: bool = False, keeps_factors: bool = False) -> None:
        self.module, self.regather, self._keeps_factors = module, regather, keeps_factors
        self.units = fsdp_private.units_of(module)
        self._ready = False
        self._numbers: dict[int, int] | None = None
        self._watcher: Watcher | None = None

    def prepare(self) -> None:
        """Before a step: the hooks leave to the Program what it does. Collective when it is called first."""
        if not self._ready:
            self._set_up()
        fsdp_private.hold_hooks(self.module, keep_whole=not self.regather)

    def release(self) -> None:
        """After a step: who calls the stage by itself gets what its weights are then."""
        fsdp_private.release_hooks(self.module)

    def forget_gradients(self) -> bool:
        """Drop whole gradients that wait to be summed, and say whether there were any; between steps nothing waits."""
        found = [fsdp_private.forget_gradients(unit) for unit in self.units if self._ready]
        return any(found)

    def _set_up(self) -> None:
        """Once: sums instead of means (unless the owner says how gradients are scaled), and gradients that add up in
        the reduce dtype."""
        self._ready = True
        fsdp_private.lazy_init(self.module)
        for unit in self.units:
            fsdp_private.allow_reduces(unit, len(self.units))
            if not self._keeps_factors:
                fsdp_private.sum_gradients(unit)
        for unit in self.units:
            unit.unshard()
        for unit in self.units:
            fsdp_private.accumulate_in_reduce_dtype(unit)
        self.drop()

    def gather(self, backward: bool) -> None:
        """UNSHARD: start to gather the whole weights, those first that a forward, or a backward, needs first.

        Computation waits for them unit by unit. With `regather` a hook gathers each unit before its turn and lets go of
        it behind it, so that two are whole at a time; here only the first ones are started ahead of that.
        """
        blocks = self.units[:-1] if backward else self.units[-2::-1]
        # the outermost unit comes first: it has the embedding, the head, or nothing
        for unit in [self.units[-1], *(blocks[:1] if self.regather else blocks)]:
            unit.unshard(async_op=True)

    def number_of(self, parameter: Tensor) -> int | None:
        """The unit of a whole weight; None for one that is not sharded."""
        if self._numbers is None:
            units = enumerate(map(fsdp_private.whole_parameters, self.units))
            self._numbers = {id(whole): number for number, weights in units for whole in weights}
        return self._numbers.get(id(parameter))

    @contextmanager
    def told(self, added: Callable[[Tensor], None]) -> Iterator[None]:
        """`added` is called with each whole weight to which a backward pass adds its gradient."""
        hooks = [weight.register_post_accumulate_grad_hook(added) for weight in self.trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def trained(self) -> list[Tensor]:
        """The whole weights that get gradients."""
        weights = [weight for unit in self.units for weight in fsdp_private.whole_parameters(unit)]
        return [weight for weight in weights if weight.requires_grad]

    def reduce(self, number: int, keep: bool = False) -> None:
        """REDUCE of one unit: its gradients are complete. Every process must reduce the same units in one order.

        `keep` its whole weights: a backward pass is under way that may still need them.
        """
        unit = self.units[number]
        fsdp_private.wait_gathered(unit)
        for parameter in fsdp_private.whole_parameters(unit):
            if parameter.requires_grad and not fsdp_private.has_gradient(unit, parameter):
                gradient(parameter)  # another process may have one: all must send the same number of bytes
        if self._watcher is not None:
            self._watcher.reducing()
        fsdp_private.reduce(unit, keep)
        if self._watcher is not None:
            self._watcher.reduced(unit)
        fsdp_private.reclaim(unit)

    @property
    def num_units(self) -> int:
        """Those that have weights of their own."""
        return max(1, sum(bool(fsdp_private.whole_parameters(unit)) for unit in self.units))

    def whole_bytes(self) -> tuple[int, int]:
        """Of all weights of the stage, and of their gradients."""
        weights: list[Any] = [weight for unit in self.units for weight in fsdp_private.whole_parameters(unit)]
        sizes = [(w.numel(), w.element_size(), (w.grad_dtype or w.dtype).itemsize * w.requires_grad) for w in weights]
        return sum(n * size for n, size, _ in sizes), sum(n * size for n, _, size in sizes)

    def watched_by(self, watcher: Watcher) -> None:
        """From now on tell `watcher`, once, of all that is gathered and reduced."""
        self.prepare()
        self._watcher = watcher
        for unit in self.units:
            fsdp_private.watch_gathers(unit, watcher.gathering, watcher.begun, watcher.gathered)

    def finish(self) -> None:
        """Wait for the sums; gradients are in the sharded parameters, the whole weights are gone."""
        fsdp_private.finish(self.module)

    def drop(self) -> None:
        """RESHARD: let go of the whole weights."""
        for unit in self.units:
            fsdp_private.wait_gathered(unit)
            unit.reshard()

    def reset(self) -> None:
        """After a step that failed."""
        fsdp_private.reset(self.module)


class Reduction:
    """REDUCE_GRAD, from within the last B or W: a unit is reduced as soon as it is complete, in one order everywhere.

    The order must not depend on the data: of some experts one process may have tokens and another none. `keep` whole
    weights until `rest()`: a B needs weights for the gradients of its inputs, also those that are not trained.
    """

    def __init__(self, shards: Shards, waiting: Iterable[Tensor], keep: bool = False) -> None:
        self._shards, self._next, self._keep = shards, 0, keep
        self._left = Counter(shards.number_of(parameter) for parameter in waiting)

    def ran(self, parameter: Tensor) -> None:
        """A share of this weight's gradient was added."""
        self._left[self._shards.number_of(parameter)] -= 1
        while self._next < len(self._shards.units) and not self._left[self._next]:
            self._shards.reduce(self._next, self._keep)
            self._next += 1

    def rest(self) -> None:
        """Nothing more will come."""
        while self._next < len(self._shards.units):
            self._shards.reduce(self._next, self._keep)
            self._next += 1
        if self._keep:
            self._shards.drop()


def sharded(module: nn.Module) -> bool:
    """Whether a stage is sharded; ConfigError if it is not sharded in a way a pipeline can drive."""
    units = fsdp_private.units_of(module)
    if not units:
        return False
    if units[-1] is not module:
        raise ConfigError(
            "a stage holds sharded blocks but is not sharded itself: call fully_shard on the stage, too, after its "
            "blocks, or use parallelize()"
        )
    return True
