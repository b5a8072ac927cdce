"""LoRA adapters: the model's weights are frozen, and every nn.Linear of a decoder layer has an adapter.

These are the adapters of `lora.target_modules = "all-linear"` without dropout. As in peft, an adapter's weights are
float32, also beside a 16-bit model; it computes in the dtype of the model, as `zeropipe train` does on a GPU. Experts,
routers and the ends of the model have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from zeropipe.core.model.operators import Op
from zeropipe.estimating.operators import Sizes

_FLOAT32 = 4  # bytes


def freeze(ops: Iterable[Op], sizes: Sizes) -> list[Op]:
    """The operators with frozen weights."""
    return [_freeze(op, sizes) for op in ops]


def add_adapters(ops: Iterable[Op], rank: int, sizes: Sizes) -> list[Op]:
    """The operators of a decoder layer with frozen weights, and an adapter of `rank` before each nn.Linear."""
    found: list[Op] = []
    for op in ops:
        if op.linear is not None:
            found += _adapter(op, op.linear, rank, sizes)
        found.append(_freeze(op, sizes))
    return found


def count_adapters(ops: Iterable[Op], rank: int, names: Collection[str] | None = None) -> int:
    """The parameters of adapters of `rank` before each nn.Linear, or before those with these names: "q_proj" is `q`."""
    return sum(
        rank * sum(op.linear) for op in ops if op.linear is not None and (names is None or f"{op.name}_proj" in names)
    )


def _freeze(op: Op, sizes: Sizes) -> Op:
    """No gradient of the weight, and nothing kept for it: neither a product's input nor a norm's eager result."""
    if not op.parameters:
        return op
    frozen = replace(op, trained=0, deferred=False, stash=0.0)
    if op.name == "embedding":
        return replace(frozen, moved_back=0.0, gradient=0.0)
    if op.name == "norm":
        eager = op.kept[0] * _FLOAT32 / (_FLOAT32 + sizes.element)
        return replace(frozen, kept=(eager, op.kept[1]))
    return replace(frozen, kept=(0.0, 0.0)) if op.is_product else frozen


def _adapter(op: Op, features: tuple[int, int], rank: int, sizes: Sizes) -> Sequence[Op]:
    """Both products of an adapter, and the sum with the result of `op`. Layers with the same input share it."""
    n_in, n_out = features
    x, middle, y = (float(sizes.tokens * number * sizes.element) for number in (n_in, rank, n_out))
    is_shared = op.stash == y
    down = replace(
        _product("lora_A", n_in, rank, sizes), kept=op.kept, kept_op=middle, stash=middle + (0.0 if is_shared else x),
        gradient=middle + x,
    )  # fmt: skip
    up = replace(_product("lora_B", rank, n_out, sizes), kept=(middle, middle), kept_op=y, stash=middle + y, gradient=y)
    return down, up, Op("lora_add", moved=(6 * y, 3 * y))


def _product(name: str, n_in: int, n_out: int, sizes: Sizes) -> Op:
    moved = float(sizes.element * (sizes.tokens * (n_in + n_out) + n_in * n_out))
    return Op(
        name, 2.0 * sizes.tokens * n_in * n_out, 0.0, n_in * n_out, trained=n_in * n_out, deferred=True,
        moved=(moved, moved),
    )  # fmt: skip
