"""Stages sharded with FSDP2, driven by the engine.

FSDP gathers weights and reduces gradients by hooks around forward and backward. In a pipeline with a split backward
both come at the wrong time: a weight would be gathered for every microbatch, and the last W would never be reduced. So
the hooks are told to reduce nothing, and the Program says when a stage is gathered, let go and reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from zeropipe.core.action import Kind
from zeropipe.core.collectives import Collective
from zeropipe.engine import fsdp_private
from zeropipe.engine.backward.gradients import ensure_grad
from zeropipe.engine.mesh.gathering import Gathering, GatherWatcher, Issue
from zeropipe.errors import ConfigError, EngineError


class Watcher(GatherWatcher, Protocol):
    """Who is told of the gathering and reducing of a stage's units."""

    def reducing(self) -> None: ...
    def reduced(self, unit: Any) -> None: ...


class Shards:
    """The FSDP units of one stage, in the order of a backward pass, outermost last."""

    def __init__(self, stage: int, module: nn.Module, *, regather: bool = False, keeps_factors: bool = False) -> None:
        self.stage, self.module, self.regather, self._keeps_factors = stage, module, regather, keeps_factors
        self.units = fsdp_private.units_of(module)
        self._names = {id(child): name for name, child in module.named_modules()}
        names = [self._names[id(unit)] or "the stage outside its blocks" for unit in self.units]
        self._gathering = Gathering(stage, self.units, names, regather)
        self._issue: Issue | None = None
        self._ready = False
        self._numbers: dict[int, int] | None = None
        self._watcher: Watcher | None = None

    def prepare(self, issue: Issue) -> None:
        """Before a step: the hooks leave to the Program what it does. Collective when it is called first.

        `issue` is told each collective before it is called.
        """
        self.set_up()
        self._issue = issue
        fsdp_private.hold_hooks(self.module)
        self._gathering.hold(issue)

    def release(self) -> None:
        """After a step: who calls the stage by itself gets what its weights are then."""
        self._gathering.release()
        fsdp_private.release_hooks(self.module)

    def forget_gradients(self) -> bool:
        """Drop whole gradients that wait to be summed, and say whether there were any; between steps nothing waits."""
        found = [fsdp_private.forget_gradients(unit) for unit in self.units if self._ready]
        return any(found)

    def set_up(self) -> None:
        """Once: sums instead of means (unless the owner says how gradients are scaled), and gradients that add up in
        the reduce dtype. Collective."""
        if self._ready:
            return
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

    # what all processes that share the stage must have alike

    def describe(self) -> list[str]:
        """A line for each weight, unit by unit."""
        found = []
        for number, unit in enumerate(self.units):
            for module, name, shard in fsdp_private.shards_of(unit):
                prefix, kind = self._names.get(id(module), ""), str(shard.dtype).removeprefix("torch.")
                full = f"{prefix}{'.' * bool(prefix)}{name}"
                frozen = "" if shard.requires_grad else ", frozen"
                found.append(f"{full} in unit {number} of stage {self.stage}, {kind} {list(shard.shape)}{frozen}")
        return found

    def flags(self) -> bytes:
        """Which weights get gradients: of what `describe` says, this may change between steps."""
        return bytes(shard.requires_grad for unit in self.units for _, _, shard in fsdp_private.shards_of(unit))

    # weights

    def gather(self, backward: bool) -> None:
        """UNSHARD: start to gather the whole weights, those first that a forward, or a backward, needs first."""
        self._gathering.gather(backward)

    def passing(self, backward: bool) -> AbstractContextManager[None]:
        """Around an F, B or I, which uses the whole weights."""
        return self._gathering.passing(backward)

    def drop(self) -> None:
        """RESHARD: let go of the whole weights."""
        self._gathering.drop()

    # gradients

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
        return [weight for weight in self.whole_weights() if weight.requires_grad]

    def accumulating(self) -> list[Tensor]:
        """The tensors to which backward passes add gradients: whole weights, and parameters that are not sharded."""
        pieces = {id(shard) for unit in self.units for _, _, shard in fsdp_private.shards_of(unit)}
        return [*(p for p in self.module.parameters() if id(p) not in pieces), *self.whole_weights()]

    def whole_weights(self) -> list[Tensor]:
        """All whole weights; they exist since the first step."""
        return [weight for unit in self.units for weight in fsdp_private.whole_parameters(unit)]

    @property
    def may_reduce(self) -> bool:
        """Whether the pass that runs gathers nothing more: what it needs must not wait for gradients."""
        return self._gathering.is_complete

    def reduce(self, number: int) -> None:
        """REDUCE of one unit: its gradients are complete. Every process must reduce the same units in one order."""
        unit = self.units[number]
        if self._issue is not None:
            self._issue(Collective(Kind.REDUCE_GRAD, self.stage, number))
        self._gathering.take(number)  # a unit that nothing has used yet: FSDP would not know which weights are trained
        for parameter in fsdp_private.whole_parameters(unit):
            if parameter.requires_grad and not fsdp_private.has_gradient(unit, parameter):
                ensure_grad(parameter)  # another process may have one: all must send the same number of bytes
        if self._watcher is not None:
            self._watcher.reducing()
        fsdp_private.reduce(unit)
        if self._watcher is not None:
            self._watcher.reduced(unit)
        fsdp_private.reclaim(unit)

    def finish(self) -> None:
        """Wait for the sums; gradients are in the sharded parameters, the whole weights are gone."""
        fsdp_private.finish(self.module)

    # measurements

    @property
    def num_units(self) -> int:
        """Those that have weights of their own."""
        return max(1, sum(bool(fsdp_private.whole_parameters(unit)) for unit in self.units))

    def whole_bytes(self) -> tuple[int, int]:
        """Of all weights of the stage, and of their gradients."""
        weights: list[Any] = self.whole_weights()
        sizes = [(w.numel(), w.element_size(), (w.grad_dtype or w.dtype).itemsize * w.requires_grad) for w in weights]
        return sum(n * size for n, size, _ in sizes), sum(n * size for n, _, size in sizes)

    def watched_by(self, watcher: Watcher) -> None:
        """From now on tell `watcher`, once, of all that is gathered and reduced."""
        self._watcher = self._gathering.watcher = watcher


class Reduction:
    """REDUCE_GRAD, from within the last B or W: a unit is reduced as soon as it is complete, in one order everywhere.

    The order must not depend on the data: of some experts one process may have tokens and another none. `waiting`: the
    weights that will get a gradient, each as often as it gets one.
    """

    def __init__(self, shards: Shards, waiting: Iterable[Tensor]) -> None:
        self._shards, self._next = shards, 0
        waiting = list(waiting)
        self._left = Counter(map(id, waiting))
        self._left_in = Counter(map(shards.number_of, waiting))

    def ran(self, parameter: Tensor) -> None:
        """A share of this weight's gradient was added."""
        number = self._shards.number_of(parameter)
        if number is not None and number < self._next:
            raise EngineError(
                f"stage {self._shards.stage} adds to the gradient of a weight of shape {list(parameter.shape)} after "
                "it was summed over dp_shard: one backward gave it several gradients, as a checkpoint with "
                "use_reentrant=True does; use use_reentrant=False"
            )
        if self._left[id(parameter)]:
            self._left[id(parameter)] -= 1
            self._left_in[number] -= 1
        if self._shards.may_reduce:
            while self._next < len(self._shards.units) and not self._left_in[self._next]:
                self._reduce()

    def rest(self) -> None:
        """Nothing more will come."""
        while self._next < len(self._shards.units):
            self._reduce()

    def _reduce(self) -> None:
        self._shards.reduce(self._next)
        self._next += 1


def require_one_dtype(stage: int, module: nn.Module) -> None:
    """ConfigError for an FSDP unit whose weights are trained in several dtypes."""
    names = {id(child): name for name, child in module.named_modules()}
    for unit in fsdp_private.units_of(module):
        first: tuple[str, Tensor] | None = None
        for owner, name, shard in fsdp_private.shards_of(unit):
            if not shard.requires_grad:
                continue
            full = f"{names.get(id(owner), '')}.{name}".lstrip(".")
            first = first or (full, shard)
            if shard.dtype != first[1].dtype:
                raise ConfigError(
                    f"stage {stage}: {full} is trained in {shard.dtype}, {first[0]} of the same FSDP unit in "
                    f"{first[1].dtype}, and FSDP sums both in one message: give both one dtype, freeze one, or shard "
                    f"with parallelize(), which keeps such weights whole"
                )


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
