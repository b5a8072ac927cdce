"""Stages sharded with FSDP2, controlled by the engine.

FSDP gathers weights and reduces gradients by hooks around forward and backward. In a pipeline with a split backward
both come at the wrong time: a weight would be gathered for every microbatch, and the last W would never be reduced. So
the hooks do neither, and the Program says when a stage is gathered, resharded and reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from zeropipe.core.action import Kind
from zeropipe.core.collectives import Collective
from zeropipe.engine import fsdp_private
from zeropipe.engine.backward.gradients import ensure_grad
from zeropipe.engine.mesh.reduce_limit import NO_LIMIT, ReduceLimit
from zeropipe.engine.mesh.unit_gatherer import CheckCollective, GatherObserver, UnitGatherer
from zeropipe.errors import ConfigError, EngineError


class ShardObserver(GatherObserver, Protocol):
    """Is called when a unit of a stage is gathered or reduced."""

    def on_reduce_start(self, is_first: bool) -> None: ...
    def on_reduce_end(self, unit: Any) -> None: ...


class ShardedStage:
    """The FSDP units of one stage, in the order of a backward pass, outermost last."""

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        *,
        regather: bool = False,
        keeps_factors: bool = False,
        limit: ReduceLimit = NO_LIMIT,
    ) -> None:
        self.stage, self.module, self.regather, self._keeps_factors = stage, module, regather, keeps_factors
        self.limit = limit
        self.units = fsdp_private.units_of(module)
        self._names = {id(child): name for name, child in module.named_modules()}
        names = [self._names[id(unit)] or "the stage outside its blocks" for unit in self.units]
        self._gatherer = UnitGatherer(stage, self.units, names, regather)
        self._check: CheckCollective | None = None
        self._is_initialized = False
        self._unit_indices: dict[int, int] | None = None
        self._calls: dict[int, Counter[int]] = {}  # by microbatch: how often its forward has called each unit
        self._observer: ShardObserver | None = None

    # steps

    def begin_step(self, check: CheckCollective) -> None:
        """Disable FSDP's hooks. `check` is called with each collective before it is started. Collective at first."""
        self.initialize()
        self._check = check
        self._calls.clear()
        fsdp_private.disable_reduce(self.module)
        self._gatherer.begin_step(check)

    def end_step(self) -> None:
        """Enable FSDP's hooks, for calls of the stage outside of steps."""
        self._gatherer.end_step()
        fsdp_private.reshard_after_forward(self.module)

    def discard_gradients(self) -> bool:
        """Discard unsharded gradients that wait for a reduce; returns whether there were any, as between steps."""
        found = [fsdp_private.discard_gradients(unit) for unit in self.units if self._is_initialized]
        return any(found)

    def initialize(self) -> None:
        """Once: gradients are summed, unless the owner sets factors, and accumulate in the reduce dtype. Collective."""
        if self._is_initialized:
            return
        self._is_initialized = True
        fsdp_private.lazy_init(self.module)
        for unit in self.units:
            fsdp_private.allow_concurrent_reduces(unit, len(self.units))
            if not self._keeps_factors:
                fsdp_private.sum_gradients(unit)
        for unit in self.units:
            unit.unshard()
        for unit in self.units:
            fsdp_private.accumulate_in_reduce_dtype(unit)
        self.reshard()

    # properties that all processes that share the stage must have in common

    def describe(self) -> list[str]:
        """A line for each weight, unit by unit."""
        lines = []
        for number, unit in enumerate(self.units):
            for module, name, shard in fsdp_private.list_shards(unit):
                prefix, dtype = self._names.get(id(module), ""), str(shard.dtype).removeprefix("torch.")
                full = f"{prefix}{'.' * bool(prefix)}{name}"
                frozen = "" if shard.requires_grad else ", frozen"
                lines.append(f"{full} in unit {number} of stage {self.stage}, {dtype} {list(shard.shape)}{frozen}")
        return lines

    def trained_flags(self) -> bytes:
        """Whether each weight is trained: the only property of `describe` that may change between steps."""
        return bytes(shard.requires_grad for unit in self.units for _, _, shard in fsdp_private.list_shards(unit))

    # weights

    def unshard(self, backward: bool) -> None:
        """UNSHARD: start to gather the weights, in the order in which a forward, or a backward, needs them."""
        self._gatherer.unshard(backward)

    @contextmanager
    def during_forward(self, microbatch: int) -> Iterator[None]:
        """Around an F, which uses the unsharded weights."""
        calls = self._calls[microbatch] = Counter[int]()

        def on_left(number: int, is_forward: bool) -> None:
            calls[number] += 1

        with self._gatherer.observed(on_left), self._gatherer.during_pass(backward=False):
            yield

    def during_backward(self) -> AbstractContextManager[None]:
        """Around a B or I, which uses the unsharded weights."""
        return self._gatherer.during_pass(backward=True)

    def reshard(self) -> None:
        """RESHARD: free the unsharded weights."""
        self._gatherer.reshard()

    # gradients

    def unit_index(self, parameter: Tensor) -> int | None:
        """The unit of an unsharded weight; None for a parameter that is not sharded."""
        if self._unit_indices is None:
            units = enumerate(map(fsdp_private.unsharded_parameters, self.units))
            self._unit_indices = {id(weight): number for number, weights in units for weight in weights}
        return self._unit_indices.get(id(parameter))

    @contextmanager
    def observe_gradients(self, microbatch: int, reducer: UnitReducer) -> Iterator[None]:
        """Tell `reducer` which gradients a B accumulates: of single weights, and of all weights of a unit.

        Layers may add to the gradients of their weights themselves, and then hooks on weights are not called. So a
        unit is also complete when the backward has left it as often as the forward did.
        """
        calls = self._calls.pop(microbatch, Counter[int]())

        def on_left(number: int, is_forward: bool) -> None:
            if not is_forward and calls[number]:  # a forward in a backward recomputes
                calls[number] -= 1
                if not calls[number]:
                    reducer.on_unit(number)

        hooks = [weight.register_post_accumulate_grad_hook(reducer.on_gradient) for weight in self.trained_weights]
        try:
            with self._gatherer.observed(on_left):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def trained_weights(self) -> list[Tensor]:
        """The unsharded weights that are trained."""
        return [weight for weight in self.unsharded_weights() if weight.requires_grad]

    def accumulating_tensors(self) -> list[Tensor]:
        """The tensors that accumulate gradients: unsharded weights, and parameters that are not sharded."""
        shards = {id(shard) for unit in self.units for _, _, shard in fsdp_private.list_shards(unit)}
        return [*(p for p in self.module.parameters() if id(p) not in shards), *self.unsharded_weights()]

    def unsharded_weights(self) -> list[Tensor]:
        """All unsharded weights; they exist from the first step on."""
        return [weight for unit in self.units for weight in fsdp_private.unsharded_parameters(unit)]

    @property
    def may_reduce(self) -> bool:
        """Whether the pass that runs gathers nothing more: a gather must not queue behind a reduce."""
        return self._gatherer.is_complete

    def reduce(self, number: int) -> None:
        """REDUCE_GRAD of one unit, whose gradients are complete; all processes reduce the same units in one order."""
        unit = self.units[number]
        if self._check is not None:
            self._check(Collective(Kind.REDUCE_GRAD, self.stage, number))
        self._gatherer.wait(number)  # FSDP finds the trained weights of a unit only after it was gathered
        for parameter in fsdp_private.unsharded_parameters(unit):
            if parameter.requires_grad and not fsdp_private.has_gradient(unit, parameter):
                ensure_grad(parameter)  # another process may have one: all must send the same number of bytes
        if self._observer is not None:
            self._observer.on_reduce_start(is_first=number == 0)
        fsdp_private.reduce(unit)
        if self._observer is not None:
            self._observer.on_reduce_end(unit)
        fsdp_private.free_reduced(unit)
        self.limit.add(unit)

    def finish(self) -> None:
        """Wait for the reduces: gradients are in the sharded parameters, and the unsharded weights are freed."""
        fsdp_private.wait_for_reduces(self.module)
        if self.discard_gradients():
            raise EngineError(
                f"stage {self.stage} has gradients that were added after they were summed over dp_shard: a module in "
                "it writes to gradients after its own backward"
            )

    # measurements

    @property
    def num_units(self) -> int:
        """The number of units with weights of their own, at least 1."""
        return max(1, sum(bool(fsdp_private.unsharded_parameters(unit)) for unit in self.units))

    def unsharded_bytes(self) -> tuple[int, int]:
        """Bytes of all unsharded weights of the stage, and of their gradients."""
        weights: list[Any] = self.unsharded_weights()
        sizes = [(w.numel(), w.element_size(), (w.grad_dtype or w.dtype).itemsize * w.requires_grad) for w in weights]
        return sum(n * size for n, size, _ in sizes), sum(n * size for n, _, size in sizes)

    def set_observer(self, observer: ShardObserver) -> None:
        """Call `observer` for all units that are gathered or reduced from now on."""
        self._observer = self._gatherer.observer = observer


class UnitReducer:
    """REDUCE_GRAD, within a B or W: a unit is reduced as soon as it is complete, in one order on all processes.

    The order must not depend on the data: one process may have tokens for an expert and another none. `pending`: the
    weights that will get a gradient, each as often as it gets one. `gathers`: whether the pass gathers weights.
    """

    def __init__(self, sharded: ShardedStage, pending: Iterable[Tensor], gathers: bool = False) -> None:
        self._sharded, self._gathers, self._next = sharded, gathers, 0
        pending = list(pending)
        self._pending = Counter(map(id, pending))
        self._pending_in_unit = Counter(map(sharded.unit_index, pending))

    def on_gradient(self, parameter: Tensor) -> None:
        """A partial gradient of this weight was added."""
        number = self._sharded.unit_index(parameter)
        if number is not None and number < self._next:
            raise EngineError(
                f"stage {self._sharded.stage} adds to the gradient of a weight of shape {list(parameter.shape)} after "
                "it was summed over dp_shard: one backward gave it several gradients, as a checkpoint with "
                "use_reentrant=True does; use use_reentrant=False"
            )
        if self._pending[id(parameter)]:
            self._pending[id(parameter)] -= 1
            self._pending_in_unit[number] -= 1
        self._reduce_complete()

    def on_unit(self, number: int) -> None:
        """All gradients of a unit were added."""
        self._pending_in_unit[number] = 0
        self._reduce_complete()

    def _reduce_complete(self) -> None:
        if not self._gathers or self._sharded.may_reduce:
            while self._next < len(self._sharded.units) and not self._pending_in_unit[self._next]:
                self._sharded.limit.wait(1)
                self._reduce_next()

    def finish(self) -> None:
        """Reduce the units that are left: no more gradients will be added."""
        while self._next < len(self._sharded.units):
            self._reduce_next()

    def _reduce_next(self) -> None:
        self._sharded.reduce(self._next)
        self._next += 1


def require_one_dtype(stage: int, module: nn.Module) -> None:
    """ConfigError for an FSDP unit whose weights are trained in several dtypes."""
    names = {id(child): name for name, child in module.named_modules()}
    for unit in fsdp_private.units_of(module):
        first: tuple[str, Tensor] | None = None
        for owner, name, shard in fsdp_private.list_shards(unit):
            if not shard.requires_grad:
                continue
            full = f"{names.get(id(owner), '')}.{name}".lstrip(".")
            first = first or (full, shard)
            if shard.dtype != first[1].dtype:
                raise ConfigError(
                    f"stage {stage}: {full} is trained in {shard.dtype}, {first[0]} of the same FSDP unit in "
                    f"{first[1].dtype}, and FSDP sums both in one message; use one dtype, freeze one of them, or shard "
                    "with parallelize(), which keeps such weights unsharded"
                )


def is_sharded(module: nn.Module) -> bool:
    """Whether a stage is sharded; ConfigError if it is sharded in a way that an engine cannot control."""
    units = fsdp_private.units_of(module)
    if not units:
        return False
    if units[-1] is not module:
        raise ConfigError(
            "a stage has sharded blocks but is not sharded itself; call fully_shard on the stage after its blocks, or "
            "use parallelize()"
        )
    return True
