"""The weight-gradient store: I is one ordinary backward pass, W runs the products it left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.products import Product
from zeropipe.engine.torch_private.autograd import ProductError, is_summed
from zeropipe.engine.torch_private.tensors import has_memory, num_aliases, storage_id
from zeropipe.errors import EngineError

Key = tuple[int, int]
Ran = Callable[[nn.Parameter], None]

LET_GO = (
    "its input is a view of a weight of a sharded stage, which regather=True lets go of before W: leave regather out, "
    "or give split='whole'"
)

# Not thread-local: on CUDA the autograd engine runs backward on a thread of its own.
_collecting: list[Product] | None = None
_adding = False


def put(product: Product) -> None:
    """Keep the product for W, or run it now if nobody collects (B)."""
    if _collecting is None:
        with torch.no_grad():
            product.run()
    else:
        product.version = product.versions()
        _collecting.append(product)


def put_or_give(product: Product, ctx: Any, number: int) -> Tensor | None:
    """`put` during a step of the engine; anywhere else the weight gradient, for autograd to do with as it likes.

    Elsewhere is also an `autograd.grad` that a stage calls itself. The weight is input `number` of the layer's `ctx`.
    """
    if (_collecting is None and not _adding) or not is_summed(ctx, number):
        return product.value()
    put(product)
    return None


@contextmanager
def adding() -> Iterator[None]:
    """A whole backward pass inside adds weight gradients straight to `.grad`, past autograd."""
    global _adding
    _adding = True
    try:
        yield
    finally:
        _adding = False


def nobody(parameter: nn.Parameter) -> None:
    """Nobody wants to know."""


class WeightStore:
    """Weight gradients waiting for their W, by (stage, microbatch).

        with store.collect(stage, microbatch):      # I
            torch.autograd.backward(outputs, gradients)
        ...
        store.flush(stage, microbatch)              # W, in any order

    Outside `collect`, a backward pass through the same layers is whole (B).

    Nobody else writes to what is kept. `own` copies tensors whose memory somebody else has, too: a buffer that later
    forwards change, a `.grad` that autograd made of a view of an output gradient and adds to in the next I. What it
    cannot see (another holder of the same tensor object) changes the tensor's version, and W refuses to use it.
    """

    def __init__(self) -> None:
        self._products: dict[Key, list[Product]] = {}
        self._parts: dict[Key, dict[int, list[Product]]] = {}

    @contextmanager
    def collect(self, stage: int, microbatch: int, *, own: bool = True) -> Iterator[None]:
        """Keep the weight-gradient products of the backward pass inside for `flush(stage, microbatch)`.

        With `own=False` the caller calls `own`, when it has let go of the outputs, their gradients and the inputs: what
        they share memory with need not be copied then.
        """
        global _collecting
        if _collecting is not None:
            raise EngineError(f"{stage}I{microbatch} started inside another I: one at a time")
        if (stage, microbatch) in self._products:
            raise EngineError(f"{stage}I{microbatch} ran twice: its first W is still to come")
        products: list[Product] = []
        _collecting = products
        try:
            yield
        finally:
            _collecting = None
        self._products[stage, microbatch] = products
        if own:
            self.own(stage, microbatch)

    def own(self, stage: int, microbatch: int) -> None:
        """Copy what others have, too, and could write to; ProductError if somebody has written already."""
        products = self._products.get((stage, microbatch), [])
        suspects = [product for product in products if _may_be_shared(product)]
        if suspects:
            _copy_shared(suspects, products)

    def flush(self, stage: int, microbatch: int, part: int = 0, parts: int = 1, ran: Ran = nobody) -> None:
        """Add what `collect(stage, microbatch)` kept to the gradients, and free it.

        With `parts`, only piece number `part` of that many pieces of about equal work. `ran` is told each parameter
        whose product is done.
        """
        with torch.no_grad():
            for product in self._take((stage, microbatch), part, parts):
                _run(product)
                ran(product.parameter)

    def run_some(self, stage: int, microbatch: int, parts: int, enough: Callable[[], bool]) -> None:
        """Run the first products that wait for a W of that many `parts`, one by one, until it is `enough`.

        The W itself then runs what is left, so every weight gets its shares in the same order.
        """
        pieces = self._pieces((stage, microbatch), parts)
        with torch.no_grad():
            for _, piece in sorted(pieces.items()):
                while piece:
                    if enough():
                        return
                    _run(piece.pop())

    def alive(self, stage: int | None = None) -> int:
        """Bytes kept between I and W, of one stage or of all; memory shared by several products counts once."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for product in self.products(stage)
            for storage in (tensor.untyped_storage() for tensor in product.tensors())
        }
        return sum(storages.values())

    def products(self, stage: int | None = None) -> Iterator[Product]:
        """The products waiting."""
        for key, products in self._products.items():
            if stage is None or key[0] == stage:
                yield from products
        for key, pieces in self._parts.items():
            if stage is None or key[0] == stage:
                for piece in pieces.values():
                    yield from piece

    def waiting(self, stage: int, microbatch: int) -> list[nn.Parameter]:
        """The parameters of the products that wait for the W of a microbatch, one entry each."""
        key = (stage, microbatch)
        pieces = [self._products.get(key, []), *self._parts.get(key, {}).values()]
        return [product.parameter for piece in pieces for product in piece]

    def clear(self) -> None:
        """Forget everything, after a step that failed."""
        self._products.clear()
        self._parts.clear()

    def _take(self, key: Key, part: int, parts: int) -> Iterator[Product]:
        """Hand over one piece."""
        pieces = self._pieces(key, parts)
        if part not in pieces:
            raise EngineError(f"{key[0]}W{key[1]} part {part} of {parts}: no such I ran, or this part ran already")
        piece = pieces.pop(part)
        if not pieces:
            del self._parts[key]
        return _drain(piece)

    def _pieces(self, key: Key, parts: int) -> dict[int, list[Product]]:
        """A key's pieces, each with its first product last; they are cut when first asked for."""
        if key in self._products:
            cuts = cut(self._products.pop(key), parts)
            self._parts[key] = {part: piece[::-1] for part, piece in cuts.items()}
        return self._parts.get(key, {})


def _may_be_shared(product: Product) -> bool:
    """Whether somebody else may have memory of a product, too: an input that nothing computed may be a buffer."""
    return product.x.is_leaf or num_aliases(product.x) > 1 or num_aliases(product.dy) > 1


def _copy_shared(suspects: list[Product], products: list[Product]) -> None:
    """Copy each tensor of the suspects whose memory is not that of the products of this I alone."""
    for product in suspects:  # a view holds what it is a view of; detached, it is counted alone
        _require_unmodified(product)
        product.replace({id(tensor): tensor.detach() for tensor in product.tensors()})
    kept = {id(tensor): tensor for product in products for tensor in product.tensors()}
    own = Counter(storage_id(tensor.untyped_storage()) for tensor in kept.values())
    shared = {k: t for k, t in kept.items() if num_aliases(t) > own[storage_id(t.untyped_storage())]}
    for product in suspects:
        if any(id(tensor) in shared and not has_memory(tensor) for tensor in product.tensors()):
            raise ProductError(product.parameter, LET_GO)
    copies = {key: tensor.clone() for key, tensor in shared.items()}
    for product in suspects:
        product.replace(copies)
        product.version = product.versions()


def _run(product: Product) -> None:
    _require_unmodified(product)
    product.run()


def _require_unmodified(product: Product) -> None:
    if product.versions() != product.version:
        raise ProductError(product.parameter)


def _drain(products: list[Product]) -> Iterator[Product]:
    """Each product in turn, freed as soon as the next one is asked for."""
    while products:
        yield products.pop()


def cut(products: list[Product], parts: int) -> dict[int, list[Product]]:
    """Split into `parts` runs of about equal work, in order; some may be empty."""
    if parts == 1:
        return {0: products}
    pieces: dict[int, list[Product]] = {part: [] for part in range(parts)}
    total, done = sum(p.flops for p in products) or 1, 0
    for product in products:
        # by the middle of the product, so that rounding does not pile up in the last piece
        pieces[min(parts - 1, parts * (2 * done + product.flops) // (2 * total))].append(product)
        done += product.flops
    return pieces
