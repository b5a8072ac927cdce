"""The operators of each kind of layer: what they compute, move, keep and leave to W. All numbers are of one GPU.

How transformers' decoder layers run in this project's engine: `scaled_dot_product_attention` with the flash kernel,
norms in float32, weight gradients of linear layers and experts left to W. An operator's result is kept by whoever needs
it in the backward; a tensor that two of them need is counted with the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeropipe.core.model.operators import ADDED, ENDS, Op
from zeropipe.estimating.shapes import Experts, Layer, Shape


@dataclass(frozen=True)
class Sizes:
    """What is fixed for one estimate."""

    tokens: int  # of a microbatch
    sequence: int
    element: int  # bytes
    tp: int


def decoder(shape: Shape, layer: Layer, at: Sizes) -> list[Op]:
    """The operators of a decoder layer, in order."""
    attention = _latent if shape.latent else _attention
    if shape.family.attention == "whole":
        first = _on_every_gpu(attention(shape, layer, replace(at, tp=1)), at.tp)
    else:
        first = attention(shape, layer, at)
    mlp = _experts(shape, at) if layer.experts else _mlp(shape, shape.intermediate, at)
    more = [norm(shape.hidden, at, compiled=0) for _ in range(shape.family.norms - 2)]
    return [
        norm(shape.hidden, at), *first, _add(shape.hidden, at),
        norm(shape.hidden, at), *mlp, _add(shape.hidden, at), *more,
    ]  # fmt: skip


def _on_every_gpu(ops: list[Op], tp: int) -> list[Op]:
    """Operators that each GPU of `tp` runs whole: a share of each one's work is useful."""
    return [replace(op, useful=(op.flops if op.useful is None else op.useful) / tp) for op in ops]


def num_parameters(layers: Sequence[str], kinds: Mapping[str, Sequence[Op]], tied: int) -> tuple[int, int]:
    """All parameters of these layers and of both ends, and those that a token meets: `tied` ones count once."""
    total = active = -tied
    for op in (op for kind in (*ENDS, *layers) for op in kinds[kind]):
        total += op.parameters
        active += op.parameters if op.met is None else op.met
    return total, active


def embedding(shape: Shape, at: Sizes) -> list[Op]:
    """The lookup. Its gradient, as large as the table, is made in I."""
    rows, table = at.tokens * shape.hidden * at.element, shape.vocabulary // at.tp * shape.hidden
    back = table * (2.0 * at.element + 8)  # written, read, and added to the float32 gradient
    return [
        Op(
            "embedding",
            parameters=table,
            moved=(2 * rows, 2 * rows),
            moved_back=back,
            gradient=table * at.element,
        )
    ]


def head(shape: Shape, at: Sizes) -> list[Op]:
    """The last norm and the product that makes logits. The loss keeps a float32 copy, so they need not stay."""
    return [norm(shape.hidden, at), linear("head", shape.hidden, shape.vocabulary // at.tp, at)]


def loss(logits: int, at: Sizes) -> Op:
    """Cross entropy in float32 over so many logits per token: a copy of them, and their logarithm, which stays."""
    words = at.tokens * logits
    soft = 4.0 * words
    # the copy is read three times by the softmax: a row of a large vocabulary fits into no fast memory
    moved = words * (at.element + 4 + 3 * 4 + 4.0)
    back = words * (4 + 3 * 4 + 4 + at.element)  # zeros, the softmax's gradient, and that of the copy
    return Op("loss", kept=(soft, soft), kept_op=soft, moved=(moved, moved), moved_back=back, gradient=soft)


def linear(
    name: str, n_in: int, n_out: int, at: Sizes, *, rows: float = 1, bias: bool = False,
    keeper: str = "itself", copies: int = 1, parts: int = 1, summed: bool = False, everywhere: bool = False,
) -> Op:  # fmt: skip
    """x W^T of `rows` rows per token, with so many `copies` of the weight; `everywhere`: each GPU of `tp` computes it.

    Of the rows this GPU computes one of so many `parts`; the others are zeros.

    `keeper` of its input: "itself", "linear" (another one has the same input), or "attention", whose result it is; that
    keeps it from F to I only.
    """
    number = at.tokens * rows
    x, y = number * n_in * at.element, number * n_out * at.element
    kept = x if keeper == "itself" else 0.0
    waits = y + (0.0 if keeper == "linear" else x)
    moved = copies * n_in * n_out * at.element + x + y
    flops = 2 * number * n_in * n_out / parts
    return Op(
        name, flops, flops / at.tp if everywhere else None, copies * (n_in * n_out + bias * n_out), deferred=True,
        kept=(kept, kept), kept_op=y, moved=(moved, moved), stash=waits, gradient=y, summed=y if summed else 0.0,
        added=ADDED * copies * n_in * n_out * at.element if copies > 1 else 0.0,
    )  # fmt: skip


def norm(size: int, at: Sizes, *, compiled: float = 1, weight: int | None = None) -> Op:
    """An RMS norm: one by one it keeps a float32 copy and the normalised input; compiled only its input, if at all."""
    n = at.tokens * size
    one_by_one = n * (24 + 6 * at.element)
    return Op(
        "norm", parameters=size if weight is None else weight, kept=(n * (4 + at.element), compiled * n * at.element),
        moved=(one_by_one, 2 * n * at.element),
    )  # fmt: skip


def _add(size: int, at: Sizes) -> Op:
    moved = 3.0 * at.tokens * size * at.element
    return Op("residual", moved=(moved, moved))


def _rotate(size: int, at: Sizes) -> Op:
    n = at.tokens * size * at.element
    return Op("rotary", moved=(10 * n, 2 * n))


def _attention(shape: Shape, layer: Layer, at: Sizes) -> list[Op]:
    """Queries, keys and values (fewer of these two), their norms and rotation, attention, output."""
    heads, kv_heads = shape.heads // at.tp, max(1, shape.kv_heads // at.tp)
    q, kv, bias = heads * shape.head_dim, kv_heads * shape.head_dim, shape.qkv_bias
    part = q
    ops = [
        linear("q", shape.hidden, q, at, bias=bias),
        linear("k", shape.hidden, kv, at, bias=bias, keeper="linear"),
        linear("v", shape.hidden, kv, at, bias=bias, keeper="linear"),
    ]
    if shape.family.attention == "gathered" and at.tp > 1:
        heads, q, kv = shape.heads, q * at.tp, kv * at.tp
        ops.append(Op("gather", summed=at.tokens * (q + 2 * kv) * at.element / 2))  # half of what a sum says
    if shape.family.qk_norm:
        one = shape.family.qk_norm == 1
        ops += [norm(size, at, weight=shape.head_dim if one else size) for size in (q, kv)]
    product = [_product(shape, layer, at, heads, shape.head_dim, shape.head_dim, q + 2 * kv)]
    if part != q:
        product = _on_every_gpu(product, at.tp)
    ops += [_rotate(q + kv, at), *product]
    return [*ops, linear("o", part, shape.hidden, at, bias=shape.o_bias, keeper="attention", summed=at.tp > 1)]


def _latent(shape: Shape, layer: Layer, at: Sizes) -> list[Op]:
    """Queries, keys and values through small latent vectors (DeepSeek)."""
    latent, heads = shape.latent, shape.heads // at.tp
    assert latent is not None
    q, k, v = heads * (latent.nope + latent.rope), heads * (latent.nope + latent.rope), heads * latent.value
    if latent.q_rank is None:
        ops = [linear("q", shape.hidden, q, at)]
    else:
        ops = [
            linear("q_a", shape.hidden, latent.q_rank, at, bias=shape.qkv_bias, everywhere=True),
            norm(latent.q_rank, at),
            linear("q_b", latent.q_rank, q, at),
        ]  # fmt: skip
    ops += [
        linear(
            "kv_a", shape.hidden, latent.kv_rank + latent.rope, at, bias=shape.qkv_bias, keeper="linear",
            everywhere=True,
        ),
        norm(latent.kv_rank, at),
        linear("kv_b", latent.kv_rank, heads * (latent.nope + latent.value), at), _rotate(q + k, at),
        _product(shape, layer, at, heads, latent.nope + latent.rope, latent.value, q + k + v),
    ]  # fmt: skip
    return [*ops, linear("o", v, shape.hidden, at, bias=shape.o_bias, keeper="attention", summed=at.tp > 1)]


def _product(shape: Shape, layer: Layer, at: Sizes, heads: int, qk: int, v: int, inputs: int) -> Op:
    """Attention itself: causal, or under a window's mask, with which the kernel visits all pairs."""
    s, window = at.sequence, layer.window
    masked = window is not None and window < s
    pairs = (window * s - window * (window - 1) / 2) / s if masked and window else (s + 1) / 2
    each = 2 * heads * (qk + v) * at.tokens
    out, sums = at.tokens * heads * v * at.element, at.tokens * heads * 4
    keys = at.tokens * (heads * (qk + v)) * at.element if masked else 0.0  # a mask needs keys repeated for all heads
    kept = at.tokens * inputs * at.element + out + sums + keys
    moved = at.tokens * inputs * at.element + out + 2 * keys
    return Op(
        "attention", each * (s if masked else pairs), each * pairs, attention=True, kept=(kept, kept),
        kept_op=out + sums, moved=(moved, moved), gradient=2.0 * out,
    )  # fmt: skip


def _mlp(shape: Shape, size: int, at: Sizes) -> list[Op]:
    """Gate, up, their product, down."""
    width, bias = size // at.tp, shape.mlp_bias
    n = at.tokens * width * at.element
    gather = []
    if shape.family.mlp == "gathered" and at.tp > 1:
        n = at.tokens * size * at.element
        gather = [Op("gather", summed=n)]  # of two tensors: half of what a sum says
    return [
        linear("gate", shape.hidden, width, at, bias=bias),
        linear("up", shape.hidden, width, at, bias=bias, keeper="linear"),
        *gather,
        Op("act", kept=(3 * n, 2 * n), moved=(5 * n, 3 * n)),
        linear("down", width, shape.hidden, at, bias=bias, summed=at.tp > 1),
    ]  # fmt: skip


def _experts(shape: Shape, at: Sizes) -> list[Op]:
    """A router, rows sorted by expert, gate and up and down of each expert, and what all tokens go through.

    GPUs of `tp` have whole experts, and room for the rows of all.
    """
    experts = shape.experts
    assert experts is not None
    width, rows, copies = experts.size, experts.chosen, experts.number // at.tp
    n, h = at.tokens * rows * width * at.element, at.tokens * rows * shape.hidden * at.element
    # a router is no plain linear layer: its weight gradient is made in I
    router = linear("router", shape.hidden, experts.number, at, everywhere=True)
    router = replace(router, deferred=False, back=2.0, stash=0.0)
    extra = experts.number if experts.scoring_bias else 0
    ops = [
        router, Op("choice", parameters=extra, moved=(2 * h, 2 * h)),
        _chosen(linear("gate_up", shape.hidden, 2 * width, at, rows=rows, copies=copies, parts=at.tp), experts),
        Op("act", kept=(3 * n, 2 * n), moved=(5 * n, 3 * n)),
        _chosen(linear("down", width, shape.hidden, at, rows=rows, copies=copies, parts=at.tp), experts),
        Op("weigh", kept=(h, h), kept_op=0.0, moved=(4 * h, 3 * h), summed=h / rows if at.tp > 1 else 0.0),
    ]  # fmt: skip
    if experts.shared is not None:
        gate = [linear("shared_gate", shape.hidden, 1, at, keeper="linear", everywhere=True)] if experts.gated else []
        shared = _mlp(shape, experts.shared, at)
        if shape.family.shared_expert == "whole":
            shared = _on_every_gpu(_mlp(shape, experts.shared, replace(at, tp=1)), at.tp)
        ops += [*shared, *gate, _add(shape.hidden, at)]
    return ops


def _chosen(op: Op, experts: Experts) -> Op:
    """A product of all experts, of which a token meets some."""
    return replace(op, met=op.parameters * experts.chosen // experts.number)
