"""The operators of each kind of layer: FLOPs, bytes and parameters, all for one GPU.

They are those of transformers' decoder layers in this project's engine: `scaled_dot_product_attention` with the flash
kernel, norms in float32, weight gradients of linear layers and experts deferred to W. A result is counted with the
first operator that needs it in its backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, gcd
from typing import Any

from zeropipe.core.model.cp_exchange import HEADS, RING
from zeropipe.core.model.operators import ADDED, ENDS, Op
from zeropipe.estimating.shapes import Experts, Layer, Shape

MASKED_SCORES = 3 * 2**24  # in float32, where a ring computes products of some queries at a time: MAX_SCORES there


@dataclass(frozen=True)
class Sizes:
    """The sizes of an estimate."""

    tokens: int  # of a microbatch, on one GPU of `cp`
    sequence: int
    element: int  # bytes of an element
    tp: int
    sequence_parallel: bool = False
    ep: int = 1
    imbalance: float = 1.0  # rows of the process that gets most over their mean, with ep
    dispatch: str = "expert"  # a token is sent once to each "expert" of it, or to each "process" that has some
    sample: int = 0  # tokens of a packed sample; 0: a sequence is one
    dense_mask: bool = False  # rows of several samples, which a mask keeps apart
    cp: int = 1  # GPUs that have a part of every sequence each
    exchange: str = HEADS  # what they exchange in attention

    @property
    def outside(self) -> Sizes:
        """The sizes outside attention and MLP: with sequence parallelism a GPU has a chunk of every sequence."""
        return replace(self, tokens=self.tokens // self.tp) if self.sequence_parallel else self


def decoder_layer(shape: Shape, layer: Layer, sizes: Sizes) -> list[Op]:
    """The operators of a decoder layer, in order."""
    attention = _latent if shape.latent else _attention
    if shape.family.attention == "replicated":
        ops = _replicate(attention(shape, layer, replace(sizes, tp=1)), sizes.tp)
    else:
        ops = attention(shape, layer, sizes)
    mlp = _experts(shape, sizes) if layer.has_experts else _mlp(shape, shape.intermediate, sizes)
    outside, size = sizes.outside, shape.hidden
    if shape.experts is not None or shape.is_multimodal:  # routers' losses are of whole sequences
        ops = [replace(op, keys=0.0, repeated=0.0) for op in ops]
    before_attention = _gather_tokens(size, sizes, shape.family.attention == "sharded" and shape.latent is None)
    before_mlp = _gather_tokens(size, sizes, shape.family.mlp == "sharded" and not layer.has_experts)
    more_norms = [norm(size, outside, compiled=0) for _ in range(shape.family.norms - 2)]
    return [
        norm(size, outside), *before_attention, *ops, _residual(size, outside),
        norm(size, outside), *before_mlp, *mlp, _residual(size, outside), *more_norms,
    ]  # fmt: skip


def _gather_tokens(size: int, sizes: Sizes, is_sharded: bool) -> list[Op]:
    """With sequence parallelism: gather sequences before attention or an MLP, and scatter them after it.

    Of one that is all sharded, both replace the sums of its output and of its input's gradient, and both copy. Else
    these sums remain, and a process takes its chunk of what it has.
    """
    if not sizes.sequence_parallel:
        return []
    full = sizes.tokens * size * sizes.element
    copied = 4.0 * full if is_sharded else 2.0 * (full + full / sizes.tp)
    summed = 0.0 if is_sharded else full / 2  # a gather moves half of what a sum moves
    return [Op("gather", moved=(copied, copied), moved_back=copied, summed=summed)]


def _replicate(ops: list[Op], tp: int) -> list[Op]:
    """Operators that every GPU of `tp` repeats: 1 / tp of the work is useful."""
    return [replace(op, useful=(op.flops if op.useful is None else op.useful) / tp) for op in ops]


def count_parameters(layers: Sequence[str], kinds: Mapping[str, Sequence[Op]], tied: int) -> tuple[int, int]:
    """All parameters of the layers and both ends, and those active for one token; the `tied` ones count once."""
    total = active = -tied
    for op in (op for kind in (*ENDS, *layers) for op in kinds[kind]):
        total += op.parameters
        active += op.parameters if op.met is None else op.met
    return total, active


def shared_bytes(shape: Shape, sizes: Sizes) -> float:
    """What all layers of a stage share, kept from F to I: positions, rotary factors, and a mask if there is one.

    Rows of one sample have the same positions.
    """
    width = shape.head_dim if shape.latent is None else shape.latent.rope
    positions = sizes.tokens if sizes.dense_mask or sizes.sample else -(-sizes.sequence // sizes.cp)
    mask = _mask_rows(shape.heads // sizes.tp, sizes) * sizes.sequence if sizes.dense_mask else 0
    return positions * (8.0 + 2 * width * sizes.element) + mask


def embedding(shape: Shape, sizes: Sizes) -> list[Op]:
    """The lookup. Its gradient, as large as the table, is computed in I."""
    rows, table = sizes.tokens * shape.hidden * sizes.element, shape.vocabulary // sizes.tp * shape.hidden
    back = table * (2.0 * sizes.element + 8)  # written, read, and added to the float32 gradient
    moved = (2 * rows, 2 * rows)
    return [Op("embedding", parameters=table, moved=moved, moved_back=back, gradient=table * sizes.element)]


def head(shape: Shape, sizes: Sizes) -> list[Op]:
    """The last norm and the product of logits, which are not kept: the loss keeps a float32 copy."""
    return [norm(shape.hidden, sizes.outside), linear("head", shape.hidden, shape.vocabulary // sizes.tp, sizes)]


def loss(logits: int, sizes: Sizes) -> Op:
    """Cross entropy in float32 over `logits` per token: a copy of them, and their logarithm, which is kept."""
    number = sizes.tokens * logits
    soft = 4.0 * number
    # the softmax reads the copy three times: a row of a large vocabulary does not fit into shared memory
    moved = number * (sizes.element + 4 + 3 * 4 + 4.0)
    back = number * (4 + 3 * 4 + 4 + sizes.element)  # zeros, the softmax's gradient, and that of the copy
    return Op("loss", kept=(soft, soft), kept_op=soft, moved=(moved, moved), moved_back=back, gradient=soft)


def linear(
    name: str, n_in: int, n_out: int, sizes: Sizes, *, rows: float = 1, bias: bool = False,
    kept_by: str = "itself", copies: int = 1, row_shards: int = 1, summed: bool = False, replicated: bool = False,
) -> Op:  # fmt: skip
    """x W^T of `rows` rows per token, with `copies` of the weight (experts); `replicated` on every GPU of `tp`.

    This GPU computes 1 / `row_shards` of the rows; the others are zeros. The input is kept by this operator ("itself"),
    by another "linear" with the same input, or from F to I only by the "attention" whose result it is.
    """
    number = sizes.tokens * rows
    x, y = number * n_in * sizes.element, number * n_out * sizes.element
    kept = x if kept_by == "itself" else 0.0
    waits = y + (0.0 if kept_by == "linear" else x)
    moved = copies * n_in * n_out * sizes.element + x + y
    flops = 2 * number * n_in * n_out / row_shards
    return Op(
        name, flops, flops / sizes.tp if replicated else None, copies * (n_in * n_out + bias * n_out), deferred=True,
        kept=(kept, kept), kept_op=y, moved=(moved, moved), stash=waits, gradient=y, summed=y if summed else 0.0,
        added=ADDED * copies * n_in * n_out * sizes.element if copies > 1 else 0.0,
        linear=(n_in, n_out),
    )  # fmt: skip


def norm(size: int, sizes: Sizes, *, compiled: float = 1, weight: int | None = None) -> Op:
    """An RMS norm. Eager, it keeps a float32 copy and the normalized input; compiled, sizes most its input."""
    n = sizes.tokens * size
    eager = n * (24 + 6 * sizes.element)
    return Op(
        "norm", parameters=size if weight is None else weight,
        kept=(n * (4 + sizes.element), compiled * n * sizes.element), moved=(eager, 2 * n * sizes.element),
    )  # fmt: skip


def _residual(size: int, sizes: Sizes) -> Op:
    moved = 3.0 * sizes.tokens * size * sizes.element
    return Op("residual", moved=(moved, moved))


def _rotary(size: int, sizes: Sizes) -> Op:
    n = sizes.tokens * size * sizes.element
    return Op("rotary", moved=(10 * n, 2 * n))


def _attention(shape: Shape, layer: Layer, sizes: Sizes) -> list[Op]:
    """Queries, keys and values, their norms and rotary embeddings, attention, output."""
    heads, kv_heads = shape.heads // sizes.tp, max(1, shape.kv_heads // sizes.tp)
    q, kv, bias = heads * shape.head_dim, kv_heads * shape.head_dim, shape.qkv_bias
    own = q  # of this GPU's heads
    ops = [
        linear("q", shape.hidden, q, sizes, bias=bias),
        linear("k", shape.hidden, kv, sizes, bias=bias, kept_by="linear"),
        linear("v", shape.hidden, kv, sizes, bias=bias, kept_by="linear"),
    ]
    if shape.family.attention == "gathered" and sizes.tp > 1:
        heads, q, kv = shape.heads, q * sizes.tp, kv * sizes.tp
        ops.append(
            Op("gather", summed=sizes.tokens * (q + 2 * kv) * sizes.element / 2)
        )  # a gather moves half of what a sum moves
    if shape.family.qk_norm:
        is_per_head = shape.family.qk_norm == 1
        ops += [norm(size, sizes, weight=shape.head_dim if is_per_head else size) for size in (q, kv)]
    attend = _attend(layer, sizes, heads, kv // shape.head_dim, shape.head_dim, shape.head_dim)
    if own != q:
        attend = _replicate(attend, sizes.tp)
    return [*ops, _rotary(q + kv, sizes), *attend, _output(own, shape, sizes)]


def _output(size: int, shape: Shape, sizes: Sizes) -> Op:
    """The last product of attention. With `cp` its input is exchanged: not the tensor that attention keeps."""
    kept_by = "attention" if sizes.cp == 1 else "itself"
    return linear("o", size, shape.hidden, sizes, bias=shape.o_bias, kept_by=kept_by, summed=sizes.tp > 1)


def _latent(shape: Shape, layer: Layer, sizes: Sizes) -> list[Op]:
    """Multi-head latent attention (DeepSeek)."""
    latent, heads = shape.latent, shape.heads // sizes.tp
    assert latent is not None
    q, k, v = heads * (latent.nope + latent.rope), heads * (latent.nope + latent.rope), heads * latent.value
    if latent.q_rank is None:
        ops = [linear("q", shape.hidden, q, sizes)]
    else:
        ops = [
            linear("q_a", shape.hidden, latent.q_rank, sizes, bias=shape.qkv_bias, replicated=True),
            norm(latent.q_rank, sizes),
            linear("q_b", latent.q_rank, q, sizes),
        ]  # fmt: skip
    ops += [
        linear(
            "kv_a", shape.hidden, latent.kv_rank + latent.rope, sizes, bias=shape.qkv_bias, kept_by="linear",
            replicated=True,
        ),
        norm(latent.kv_rank, sizes),
        linear("kv_b", latent.kv_rank, heads * (latent.nope + latent.value), sizes), _rotary(q + k, sizes),
        *_attend(layer, sizes, heads, heads, latent.nope + latent.rope, latent.value),
    ]  # fmt: skip
    return [*ops, _output(v, shape, sizes)]


def _attend(layer: Layer, sizes: Sizes, heads: int, kv_heads: int, qk: int, v: int) -> list[Op]:
    """Attention, and with `cp` what it exchanges.

    Heads are exchanged for tokens before and after it; with fewer key heads than GPUs several get the same one. Else
    keys and values of all tokens are gathered, or passed round a ring.
    """
    keys = kv_heads * (qk + v)
    if sizes.cp == 1:
        return [_attention_kernel(layer, sizes, heads, qk, v, keys)]
    if sizes.exchange == HEADS:
        keys *= sizes.cp // gcd(kv_heads, sizes.cp)
        kernel = _attention_kernel(layer, sizes, heads, qk, v, keys)
        return [_exchange(heads * qk + keys, 6, sizes), kernel, _exchange(heads * v, 8, sizes)]
    if sizes.exchange == RING:
        return _attend_around_ring(layer, sizes, heads, qk, v, keys)
    keys *= sizes.cp
    kernel = _attention_kernel(layer, sizes, heads, qk, v, keys, repeats_keys=heads > kv_heads)
    return [_exchange(keys, 4, sizes), kernel]


def _attend_around_ring(layer: Layer, sizes: Sizes, heads: int, qk: int, v: int, keys: int) -> list[Op]:
    """Attention to one part of the keys after the other, and the merges of the results, in float32.

    The first part has all queries, of the others half have half of them or of their keys. Two parts of keys are there
    at a time, for all heads that of which attention is computed. In the backward float32 gradients go round with them.
    """
    kernel = _attention_kernel(layer, sizes, heads, qk, v, keys)
    has_mask = kernel.flops != kernel.useful
    own, own_keys, all_heads = (sizes.tokens * float(n) for n in (heads * v, keys, heads * (qk + v)))
    merged = (1 + 0.75 * (sizes.cp - 1)) * own
    sums, out = 4.0 * sizes.tokens * heads, own * sizes.element
    kept = sizes.tokens * heads * qk * sizes.element + own_keys * sizes.element + out + sums
    parts = 3 * own_keys * sizes.element  # keys that are there, packed to be sent, and those that arrive
    repeated = all_heads * sizes.element * (all_heads > own_keys)
    scores = 4.0 * MASKED_SCORES * has_mask
    round_trip = sizes.cp * own_keys * sizes.element
    backward = round_trip + 4 * own_keys * sizes.cp**2 / (sizes.cp - 1)
    f_memory = own * (8 + sizes.element) + parts + repeated + scores
    i_memory = sizes.tokens * heads * qk * 8.0 + 12 * own_keys + parts + 2 * repeated + scores
    return [
        replace(
            kernel, float32=has_mask, kept=(kept, kept), kept_op=merged * sizes.element + sizes.cp * sums,
            gradient=i_memory, workspace=(f_memory, f_memory),
        ),
        Op(
            "exchange", exchanged=round_trip, exchanged_back=backward, moved=(20 * merged, 20 * merged),
            moved_back=(sizes.tokens * heads * qk + 2 * own_keys) * 12.0 * sizes.cp,
            hides=(sizes.cp - 1) / sizes.cp,
        ),
    ]  # fmt: skip


def _exchange(size: int, copies: int, sizes: Sizes) -> Op:
    """An exchange of so many elements per token of this GPU, and the reads and writes of those that it copies."""
    exchanged = float(sizes.tokens * size * sizes.element)
    moved = copies * exchanged
    return Op("exchange", exchanged=exchanged, moved=(moved, moved), moved_back=moved, gradient=exchanged)


def _mask_rows(heads: int, sizes: Sizes) -> int:
    """Rows of a dense mask: those of the tokens that this GPU attends with."""
    return sizes.tokens * (sizes.cp if sizes.exchange == HEADS else 1)


def _attention_kernel(
    layer: Layer, sizes: Sizes, heads: int, qk: int, v: int, keys: int, *, repeats_keys: bool = False
) -> Op:
    """Attention: causal, or with a mask, that of a window for example, with which the kernel computes all pairs.

    Packed samples run kernels that compute the pairs within a sample and its windows only, or have a mask. `keys`:
    elements of keys and values per token of this GPU. Attention with a mask repeats them for all heads.
    """
    s, window = sizes.sequence, layer.window
    if sizes.sample and not sizes.dense_mask:
        s = sizes.sample
    has_window = window is not None and window < s
    is_masked = sizes.dense_mask or (has_window and not sizes.sample)
    pairs = (window * s - window * (window - 1) / 2) / s if has_window and window else (s + 1) / 2
    each = 2 * heads * (qk + v) * sizes.tokens
    out, sums = sizes.tokens * heads * v * sizes.element, sizes.tokens * heads * 4
    inputs = sizes.tokens * (heads * qk + keys) * sizes.element
    repeated = 0.0
    if is_masked or repeats_keys:
        all_tokens = sizes.tokens * (1 if sizes.exchange == HEADS else sizes.cp)
        repeated += all_tokens * (heads * (qk + v)) * sizes.element
    if sizes.dense_mask:  # each layer converts it to the dtype of the queries
        repeated += _mask_rows(heads, sizes) * s * sizes.element
    sliceable = sizes.cp == 1 and not (sizes.sequence_parallel or sizes.sample or is_masked)
    own_keys = sizes.tokens * keys * sizes.element
    all_keys = sizes.tokens * heads * (qk + v) * sizes.element
    kept = inputs + out + sums + repeated
    moved = inputs + out + 2 * repeated
    return Op(
        "attention", each * (s if is_masked else pairs), each * pairs, attention=True, kept=(kept, kept),
        kept_op=out + sums, moved=(moved, moved), gradient=2.0 * out, keys=own_keys * sliceable,
        repeated=all_keys * (sliceable and all_keys > own_keys),
    )  # fmt: skip


def _mlp(shape: Shape, size: int, sizes: Sizes) -> list[Op]:
    """Gate, up, their product, and down."""
    width, bias = size // sizes.tp, shape.mlp_bias
    n = sizes.tokens * width * sizes.element
    gather = []
    if shape.family.mlp == "gathered" and sizes.tp > 1:
        n = sizes.tokens * size * sizes.element
        gather = [Op("gather", summed=n)]  # of two tensors: each moves half of what a sum moves
    return [
        linear("gate", shape.hidden, width, sizes, bias=bias),
        linear("up", shape.hidden, width, sizes, bias=bias, kept_by="linear"),
        *gather,
        Op("act", kept=(3 * n, 2 * n), moved=(5 * n, 3 * n)),
        linear("down", width, shape.hidden, sizes, bias=bias, summed=sizes.tp > 1),
    ]  # fmt: skip


def _experts(shape: Shape, sizes: Sizes) -> list[Op]:
    """A router, rows sorted by expert, gate, up and down of each expert, and the shared expert.

    Experts are sharded over `tp`, one GPU each; every GPU allocates the rows of all. Or they are divided over `ep`: a
    GPU gets rows of all GPUs for its own experts, on average as many as it sends.
    """
    experts = shape.experts
    assert experts is not None
    width, rows, copies = experts.intermediate, experts.num_active, experts.number // (sizes.tp * sizes.ep)
    n, h = sizes.tokens * rows * width * sizes.element, sizes.tokens * rows * shape.hidden * sizes.element
    # a router is not an nn.Linear, so its weight gradient is computed in I
    router = linear("router", shape.hidden, experts.number, sizes, replicated=True)
    router = replace(router, deferred=False, back=2.0, stash=0.0)
    per_expert: Any = {"rows": rows, "copies": copies, "row_shards": sizes.tp}
    biases = experts.number if experts.scoring_bias else 0
    products = [
        *([Op("regroup", moved=(4 * h, 4 * h), kept_op=h, gradient=2 * h)] if sizes.ep > 1 else []),
        _active(linear("gate_up", shape.hidden, 2 * width, sizes, **per_expert), experts),
        Op("act", kept=(3 * n, 2 * n), moved=(5 * n, 3 * n)),
        _active(linear("down", width, shape.hidden, sizes, **per_expert), experts),
    ]
    ops = [
        router, Op("choice", parameters=biases, moved=(2 * h, 2 * h)),
        *([_scale_rows(op, sizes.imbalance) for op in products] if sizes.ep > 1 else products),
        Op("weigh", kept=(h, h), kept_op=0.0, moved=(4 * h, 3 * h), summed=h / rows if sizes.tp > 1 else 0.0),
    ]  # fmt: skip
    if experts.shared is not None:
        gate = (
            [linear("shared_gate", shape.hidden, 1, sizes, kept_by="linear", replicated=True)]
            if experts.has_shared_gate
            else []
        )
        shared = _mlp(shape, experts.shared, sizes)
        if shape.family.shared_expert == "replicated":
            shared = _replicate(_mlp(shape, experts.shared, replace(sizes, tp=1)), sizes.tp)
        ops += [*shared, *gate, _residual(shape.hidden, sizes)]
    return ops


def _scale_rows(op: Op, factor: float) -> Op:
    """An operator of routed rows, with so many times as many rows."""
    return replace(
        op, routed=True, flops=factor * op.flops, useful=op.flops if op.useful is None else op.useful,
        kept=(factor * op.kept[0], factor * op.kept[1]), kept_op=factor * op.kept_op,
        moved=(factor * op.moved[0], factor * op.moved[1]), stash=factor * op.stash, gradient=factor * op.gradient,
    )  # fmt: skip


def exchanged_bytes(shape: Shape, sizes: Sizes) -> float:
    """Bytes of the rows that the GPU with most of them gets in an exchange."""
    assert shape.experts is not None
    rows = float(shape.experts.num_active)
    if sizes.dispatch == "process":
        rows = _count_processes(shape.experts, sizes.ep)
    return sizes.imbalance * sizes.tokens * rows * shape.hidden * sizes.element


def _count_processes(experts: Experts, ep: int) -> float:
    """The mean number of processes that have an expert of a token, if all sets of experts are equally likely."""
    others, active = experts.number - experts.number // ep, experts.num_active
    return ep * (1 - comb(others, active) / comb(experts.number, active))


def _active(op: Op, experts: Experts) -> Op:
    """A product of all experts, of which some are active for a token."""
    return replace(op, met=op.parameters * experts.num_active // experts.number, divided=op.parameters)
