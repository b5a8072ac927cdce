"""The fused head: its operators, of those of a head whose logits are whole.

F makes the logits of a chunk of tokens, their losses and the gradients of the hidden states; that of the weight is made
in F too, or in W. See `core/model/head.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeropipe.core.model.head import COMPILED_NUMBERS, PLAIN_NUMBERS, chunk_rows
from zeropipe.core.model.operators import FULL_HEAD, HEAD, Op
from zeropipe.estimating.operators import Sizes

_WIDE = 4  # bytes of what both passes over a chunk compute
# uncompiled, the second pass has three tensors of a chunk and a mask, beside the logits and their float32 copy
_COPIES = 3 * _WIDE + 1
_PLAIN_MOVED = 33 * _WIDE  # uncompiled, bytes of each of the logits that take as long as both passes (bench/head.py)


@dataclass(frozen=True)
class Head:
    """The operators of a head up to its products."""

    ops: tuple[Op, ...]
    logits: int  # per token, on one GPU


def fuse(head: Head, sizes: Sizes, is_compiled: bool) -> dict[str, list[Op]]:
    """The operators of the fused head: where W makes the weight's gradient, and where F does."""
    ops, logits = head.ops, head.logits
    at = max(range(len(ops)), key=lambda index: ops[index].is_product and ops[index].parameters)
    product = ops[at]
    inputs = round(product.flops / (2 * sizes.tokens * logits))
    hidden, whole = (float(sizes.tokens * number * sizes.element) for number in (inputs, logits))
    rows = chunk_rows(sizes.tokens, logits, COMPILED_NUMBERS if is_compiled else PLAIN_NUMBERS)
    copies = 0 if is_compiled else _COPIES + (_WIDE if sizes.element < _WIDE else 0)
    chunk, temporary = float(rows * logits * sizes.element), float(rows * logits * copies)
    is_trained = product.trained != 0
    again = replace(
        product, name="head_input", useful=0.0, parameters=0, trained=None, deferred=False, linear=None, back=0.0,
        kept=(hidden, hidden), kept_op=0.0, stash=0.0, gradient=0.0,
    )  # fmt: skip
    plain = whole / sizes.element * _PLAIN_MOVED
    passes = Op("loss", moved=(plain, 3 * whole), moved_back=3 * hidden)
    kept = hidden + whole if is_trained else 0.0
    in_w = [
        replace(product, back=0.0, kept=(kept, kept), stash=kept, gradient=0.0), again,
        replace(passes, workspace=_both(temporary + (0.0 if is_trained else hidden + chunk)),
            chunk=temporary + (0.0 if is_trained else chunk), chunks=sizes.tokens / rows),
    ]  # fmt: skip
    rest = [op for index, op in enumerate(ops) if index != at]
    if not is_trained:
        return {HEAD: [*rest, *in_w]}
    in_f = [
        replace(product, back=0.0, kept=(0.0, 0.0), stash=0.0, gradient=0.0, deferred=False), again,
        replace(again, name="head_weight", kept=(0.0, 0.0)),
        replace(passes, workspace=_both(temporary + hidden + chunk), chunk=temporary + chunk,
            chunks=sizes.tokens / rows),
    ]  # fmt: skip
    return {HEAD: [*rest, *in_w], FULL_HEAD: [*rest, *in_f]}


def _both(size: float) -> tuple[float, float]:
    return size, size
