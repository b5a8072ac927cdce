"""The weight-gradient store: I is one ordinary backward pass, W runs the products it left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.products import Product
from zeropipe.engine.backward.turns import use_waits
from zeropipe.engine.torch_private.autograd import ProductError, is_summed
from zeropipe.engine.torch_private.tensors import has_memory, num_aliases, storage_id
from zeropipe.errors import EngineError

Key = tuple[int, int]  # stage, microbatch
OnProduct = Callable[[nn.Parameter], None]

FREED_WEIGHT = (
    "its input is a view of a weight of a sharded stage, which regather=True frees before W; leave out regather or use "
    "split='whole'"
)

# Not thread-local: on CUDA the autograd engine runs backward on a thread of its own.
_collecting: list[Product] | None = None
_accumulating = False


def store_or_run(product: Product) -> None:
    """Keep the product for W during an I; run it now in any other backward pass."""
    if _collecting is None:
        with torch.no_grad():
            product.accumulate()
    else:
        product.version = product.current_version()
        _collecting.append(product)


def store_or_return(product: Product, ctx: Any, index: int) -> Tensor | None:
    """`store_or_run` during a step of the engine; otherwise return the weight gradient, which autograd then handles.

    Otherwise includes an `autograd.grad` that a stage calls itself. The weight is input `index` of `ctx`.
    """
    if (_collecting is None and not _accumulating) or not is_summed(ctx, index):
        return product.compute()
    store_or_run(product)
    return None


@contextmanager
def accumulate_directly() -> Iterator[None]:
    """Let a full backward pass inside add weight gradients directly to `.grad`, bypassing autograd."""
    global _accumulating
    _accumulating = True
    try:
        yield
    finally:
        _accumulating = False


@contextmanager
def accumulate_at_turns() -> Iterator[None]:
    """As `accumulate_directly`, for the backward pass of an Overlap: products run while it waits for a message.

    They run in their order, those that are left at the end.
    """
    global _collecting
    products: list[Product] = []

    def run_pending(share: float) -> None:
        """Run the first products, about `share` of the work of all."""
        remaining = sum(product.flops for product in products)
        left = (1 - share) * remaining
        with torch.no_grad():
            products.reverse()
            while products and (share == 1 or remaining > left):
                remaining -= products[-1].flops
                _run(products.pop())  # each is freed when the next one runs
            products.reverse()

    _collecting = products
    try:
        with use_waits(run_pending):
            yield
        run_pending(1.0)
    finally:
        _collecting = None


class WeightStore:
    """Weight gradients waiting for their W, by (stage, microbatch).

        with store.collect(stage, microbatch):      # I
            torch.autograd.backward(outputs, gradients)
        ...
        store.flush(stage, microbatch)              # W, in any order

    Outside `collect`, a backward pass through the same layers is a full one (B).

    Stored tensors are not written by others. `copy_shared` copies tensors whose memory is also used elsewhere: a buffer
    that later forwards modify, a `.grad` that autograd made of a view of an output gradient and adds to in the next I.
    A second reference to the same tensor object cannot be detected that way; a write through it changes the tensor's
    version, and W raises ProductError.
    """

    def __init__(self) -> None:
        self._products: dict[Key, list[Product]] = {}
        self._parts: dict[Key, dict[int, list[Product]]] = {}

    @contextmanager
    def collect(self, stage: int, microbatch: int, *, copy_shared: bool = True) -> Iterator[None]:
        """Keep the weight-gradient products of the backward pass inside for `flush(stage, microbatch)`.

        With `copy_shared=False` the caller calls `copy_shared` once it has freed the outputs, their gradients and the
        inputs: memory shared with those is not copied then.
        """
        global _collecting
        if _collecting is not None:
            raise EngineError(f"{stage}I{microbatch} started inside another I; run one I at a time")
        if (stage, microbatch) in self._products:
            raise EngineError(f"{stage}I{microbatch} ran twice before its W; run {stage}W{microbatch} first")
        products: list[Product] = []
        _collecting = products
        try:
            yield
        finally:
            _collecting = None
        self._products[stage, microbatch] = products
        if copy_shared:
            self.copy_shared(stage, microbatch)

    def copy_shared(self, stage: int, microbatch: int) -> None:
        """Copy stored tensors whose memory is used elsewhere; ProductError if one was modified already."""
        products = self._products.get((stage, microbatch), [])
        suspects = [product for product in products if _may_be_shared(product)]
        if suspects:
            _copy_shared(suspects, products)

    def flush(
        self, stage: int, microbatch: int, part: int = 0, parts: int = 1, on_product: OnProduct | None = None
    ) -> None:
        """Add the products that `collect(stage, microbatch)` kept to the gradients, and free them.

        With `parts`, only part number `part` of that many parts of about equal work. `on_product` is called with the
        parameter of each product that ran.
        """
        with torch.no_grad():
            for product in self._pop_part((stage, microbatch), part, parts):
                _run(product)
                if on_product is not None:
                    on_product(product.parameter)

    def run_early(self, stage: int, microbatch: int, parts: int, should_stop: Callable[[], bool]) -> None:
        """Run the first products of a W of `parts` parts, one by one, until `should_stop()`.

        The W itself then runs the rest, so every weight gets its gradients in the same order.
        """
        pending = self._divide((stage, microbatch), parts)
        with torch.no_grad():
            for _, products in sorted(pending.items()):
                while products:
                    if should_stop():
                        return
                    _run(products.pop())

    def pending_bytes(self, stage: int | None = None) -> int:
        """Bytes kept between I and W, of one stage or of all; memory shared by several products counts once."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for product in self.products(stage)
            for storage in (tensor.untyped_storage() for tensor in product.tensors())
        }
        return sum(storages.values())

    def products(self, stage: int | None = None) -> Iterator[Product]:
        """The pending products of one stage or of all."""
        for key in [*self._products, *self._parts]:
            if stage is None or key[0] == stage:
                yield from self._pending(key)

    def pending_parameters(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        """The parameters of the products that wait for a W, one entry for each product."""
        return [product.parameter for product in self._pending((stage, microbatch))]

    def clear(self) -> None:
        """Drop all products, after a step that failed."""
        self._products.clear()
        self._parts.clear()

    def _pending(self, key: Key) -> Iterator[Product]:
        yield from self._products.get(key, [])
        for products in self._parts.get(key, {}).values():
            yield from products

    def _pop_part(self, key: Key, part: int, parts: int) -> Iterator[Product]:
        pending = self._divide(key, parts)
        if part not in pending:
            raise EngineError(f"{key[0]}W{key[1]} part {part} of {parts}: its I did not run, or this part ran already")
        products = pending.pop(part)
        if not pending:
            del self._parts[key]
        return _drain(products)

    def _divide(self, key: Key, parts: int) -> dict[int, list[Product]]:
        """The parts of a W that did not run yet, each with its first product last; divided at the first call."""
        if key in self._products:
            divided = divide_into_parts(self._products.pop(key), parts)
            self._parts[key] = {part: products[::-1] for part, products in divided.items()}
        return self._parts.get(key, {})


def _may_be_shared(product: Product) -> bool:
    """Whether memory of a product may be used elsewhere: an input that is a leaf may be a buffer."""
    if product.has_own_tensors:
        return False
    return product.x.is_leaf or num_aliases(product.x) > 1 or num_aliases(product.dy) > 1


def _copy_shared(suspects: list[Product], products: list[Product]) -> None:
    """Copy each tensor of `suspects` whose memory is not used by the `products` of this I alone."""
    for product in suspects:  # a view references its base; a detached tensor is counted alone
        _require_unmodified(product)
        product.replace({id(tensor): tensor.detach() for tensor in product.tensors()})
    stored = {id(tensor): tensor for product in products for tensor in product.tensors()}
    uses = Counter(storage_id(tensor.untyped_storage()) for tensor in stored.values())
    shared = {k: t for k, t in stored.items() if num_aliases(t) > uses[storage_id(t.untyped_storage())]}
    for product in suspects:
        if any(id(tensor) in shared and not has_memory(tensor) for tensor in product.tensors()):
            raise ProductError(product.parameter, FREED_WEIGHT)
    copies = {key: tensor.clone() for key, tensor in shared.items()}
    for product in suspects:
        product.replace(copies)
        product.version = product.current_version()


def _run(product: Product) -> None:
    _require_unmodified(product)
    product.accumulate()


def _require_unmodified(product: Product) -> None:
    if product.current_version() != product.version:
        raise ProductError(product.parameter)


def _drain(products: list[Product]) -> Iterator[Product]:
    """Yield each product and drop it, so that it is freed when the next one is requested."""
    while products:
        yield products.pop()


def divide_into_parts(products: list[Product], parts: int) -> dict[int, list[Product]]:
    """Divide products into `parts` consecutive parts of about equal work; some may be empty."""
    if parts == 1:
        return {0: products}
    divided: dict[int, list[Product]] = {part: [] for part in range(parts)}
    total, done = sum(p.flops for p in products) or 1, 0
    for product in products:
        # by the middle of the product, so that rounding errors do not add up in the last part
        divided[min(parts - 1, parts * (2 * done + product.flops) // (2 * total))].append(product)
        done += product.flops
    return divided
