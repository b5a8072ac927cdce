"""`zp.estimate`: the costs of a model's layers on a GPU, without the weights or the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.model.cp_exchange import EXCHANGES, HEADS
from zeropipe.core.model.operators import FULL_HEAD, HEAD, LOSS
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.estimating.adapters import add_adapters, freeze
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.gpus import find_gpu
from zeropipe.estimating.head import fuse
from zeropipe.estimating.model import Model, ShapedModel, open_model
from zeropipe.estimating.operators import Sizes
from zeropipe.estimating.price import Pricing, price_layer
from zeropipe.sim.layer_costs import (
    BF16_STATE,
    DTYPE_NAMES,
    STAGE,
    LayerCost,
    LayerCosts,
    ParameterBytes,
    Setting,
)
from zeropipe.sim.layer_file import DISPATCHES

DTYPES = {"bf16": 2, "float16": 2, "float32": 4}


def estimate(
    model: str | Mapping[str, Any] | ShapedModel | CountedModel,
    *,
    gpu: str = "h100",
    sequence: int = 4096,
    dtype: str = "bf16",
    microbatch_size: int | Sequence[int] = 1,
    ac: str | Sequence[str] = "none",
    tp: int | Sequence[int] = 1,
    sequence_parallel: bool | Sequence[bool] = False,
    compile: bool = True,
    efficiency: dict[str, Any] | None = None,
    lora: int | None = None,
    ep: int | Sequence[int] = 1,
    imbalance: float = 1.0,
    dispatch: str = "expert",
    sample: int | None = None,
    dense_mask: bool = False,
    cp: int | Sequence[int] = 1,
    fused_head: bool = True,
    cp_exchange: str = "auto",
    gpus_per_node: int = 8,
) -> LayerCosts:
    """Estimate the costs of a model's layers from their shapes. `zeropipe profile` measures them.

    `model` is a known name (`zeropipe estimate --known`), a directory with config.json, a config file or a config as
    plain data. With `lora` the model is frozen, and adapters of that rank are trained. With several microbatch sizes,
    modes or sizes of `tp` the result has a setting for each combination. `sequence_parallel` is for those with a `tp`
    above 1; with (False, True) they are there twice, where it is allowed. `ep` divides experts over so many GPUs, for
    settings with a `tp` of 1; `imbalance` is the load of the GPU with most rows over the mean, `dispatch` whether a
    token is sent once to each "expert" of it, or to each "process" that has some. With `sample` a sequence is a row of
    packed samples of so many tokens, which attend within themselves (`engine.attention`). With `dense_mask` a mask
    keeps the samples of a row apart. `cp` divides every sequence over so many GPUs. `fused_head` computes the loss in
    chunks of tokens, as the engine does by default where the model allows it, but not with `cp`. `cp_exchange` is that
    of a training file: with "auto" it is chosen by heads, length and whether `cp` is within a machine of
    `gpus_per_node`.
    """
    opened, machine = open_model(model), find_gpu(gpu, efficiency)
    dtype = DTYPE_NAMES.get(str(dtype), dtype)
    if str(dtype) not in DTYPES:
        raise ConfigError(f"dtype={short(dtype)}: must be one of {', '.join(DTYPES)}")
    require_positive_integers(sequence=sequence, gpus_per_node=gpus_per_node)
    require_sample(sample, sequence)
    sizes, tp_sizes = _list_integers("microbatch_size", microbatch_size), _list_integers("tp", tp)
    for name, value in (("compile", compile), ("fused_head", fused_head)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={short(value)}: must be True or False")
    if lora is not None:
        _require_adapters(opened, lora, tp_sizes)
    ep_sizes = _list_integers("ep", ep)
    _require_experts(opened, ep_sizes, tp_sizes, imbalance, dispatch, lora)
    cp_sizes = _list_integers("cp", cp)
    _require_parts(opened, cp_sizes, cp_exchange)
    no_ring = _explain_no_ring(compile, sample, dense_mask and cp_exchange == "auto")
    exchanges = {
        (num_parts, num_shards): opened.choose_exchange(
            cp_exchange, num_parts, num_shards, sequence, num_parts * num_shards > gpus_per_node, no_ring
        )
        for num_parts in cp_sizes for num_shards in tp_sizes
    }  # fmt: skip
    settings = [
        _estimate_setting(
            opened, Pricing(machine, dtype, compile, num_shards), mode, size,
            Sizes(
                size * part_length(sequence, num_parts, num_shards if is_parallel else 1), sequence, DTYPES[dtype],
                num_shards, is_parallel, num_experts, imbalance, dispatch, sample or 0,
                dense_mask or (sample is not None and exchanges[num_parts, num_shards] != HEADS), num_parts,
                exchanges[num_parts, num_shards],
            ),
            lora, fused_head and 1 in cp_sizes,
        )
        for num_parts in cp_sizes
        for num_shards, is_parallel in _list_shardings(opened, tp_sizes, sequence_parallel, sequence, num_parts)
        for num_experts in ep_sizes if num_experts == 1 or num_shards == 1
        for size in sizes for mode in _list_modes(ac)
    ]  # fmt: skip
    ends = _list_ends(settings[0])
    state = BF16_STATE if DTYPES[dtype] == 2 and lora is None else ParameterBytes(4, 4, 8, 4)
    if lora is not None:  # adapters are float32
        state = replace(state, frozen=DTYPES[dtype])
    return LayerCosts(
        opened.name, "estimate", opened.layers, tuple(settings), tied=opened.tied, sequence=sequence, dtype=dtype,
        lora_rank=lora, dispatch=dispatch, sample=sample, after=ends[0],
        after_full=ends[1], each=(STAGE,), fused_head=fused_head,
        link=machine.intra_node_link, inter_node=machine.inter_node_link, state=state,
        machine={
            "gpu": machine.name, "peak_flops": machine.peak_of(dtype), "memory": machine.memory,
            "bandwidth": machine.bandwidth, "host_bandwidth": machine.host_bandwidth,
            "efficiency": {**vars(machine.efficiency)},
        },
    )  # fmt: skip


def part_length(sequence: int, cp: int, multiple: int = 1) -> int:
    """The tokens of a sequence that each GPU of `cp` has: sequences are padded to two equal chunks for each of them.

    A part is divided into `multiple` equal chunks.
    """
    if cp == 1:
        return sequence
    return -(-sequence // (2 * cp * multiple)) * 2 * multiple


def require_sample(sample: int | None, sequence: int) -> None:
    """ConfigError unless packed samples of so many tokens fit in a sequence."""
    if sample is not None:
        require_positive_integers(sample=sample)
        if sample > sequence:
            raise ConfigError(
                f"sample={sample}: packed samples must be at most as long as a sequence, {sequence} tokens"
            )


def num_parameters(model: str | Mapping[str, Any]) -> tuple[int, int]:
    """All parameters of a model, and those active for one token; a tied weight counts once."""
    return open_model(model).num_parameters()


def can_estimate_adapters(model: ShapedModel | CountedModel) -> bool:
    """Whether the linear layers with an adapter are those of the shapes.

    They are not where one linear layer computes several results (types whose MLP is gathered over `tp`), and peft adds
    adapters of other forms to experts, and adapters to the vision model.
    """
    if not isinstance(model, ShapedModel):
        return False
    shape = model.shape
    return shape.experts is None and not shape.is_multimodal and shape.family.mlp != "gathered"


def _require_adapters(model: ShapedModel | CountedModel, rank: int, tp_sizes: list[int]) -> None:
    """ConfigError for a rank, or a model or layout that adapters are not estimated for."""
    require_positive_integers(lora=rank)
    if max(tp_sizes) > 1:
        raise ConfigError(f"tp={max(tp_sizes)}: costs of adapters (lora) are not known with tp; leave out one of them")
    if not can_estimate_adapters(model):
        raise ConfigError(
            f"lora={rank}: adapters of {model.name} cannot be estimated: must be a dense text model of a type in "
            "docs/plan.md; leave out lora: training all weights takes more memory"
        )


def _require_experts(
    model: ShapedModel | CountedModel, ep_sizes: list[int], tp_sizes: list[int], imbalance: float, dispatch: str,
    lora: int | None,
) -> None:  # fmt: skip
    """ConfigError for sizes of `ep`, or a model, that divided experts are not estimated for."""
    if isinstance(imbalance, bool) or not isinstance(imbalance, (int, float)) or not 1 <= imbalance < inf:
        raise ConfigError(f"imbalance={short(imbalance)}: must be a number from 1, like 1.2")
    if dispatch not in DISPATCHES:
        raise ConfigError(f"dispatch={short(dispatch)}: must be {' or '.join(map(repr, DISPATCHES))}")
    if max(ep_sizes) == 1:
        return
    if isinstance(model, CountedModel):
        raise ConfigError(f"ep={max(ep_sizes)}: {model.reason} are counted, without divided experts; leave out ep")
    if 1 not in tp_sizes:
        raise ConfigError(f"ep={max(ep_sizes)}: is estimated with tp=1 only; leave out tp")
    if lora is not None:
        raise ConfigError(f"ep={max(ep_sizes)}: divided experts beside adapters (lora) are not estimated; leave out ep")
    experts = model.shape.experts
    for ep in ep_sizes:
        if not model.allows_ep(ep):
            has = "no experts" if experts is None else f"{experts.number} experts: ep must divide them"
            raise ConfigError(f"ep={ep}: {model.name} has {has}")


def _explain_no_ring(compile: bool, sample: int | None, dense_mask: bool) -> str:
    """Why attention passes no keys round a ring; with dense masks it would compute slow products."""
    if compile:
        return "a ring is estimated in blocks that are not compiled"
    return "samples are packed" if sample or dense_mask else ""


def _require_parts(model: ShapedModel | CountedModel, cp_sizes: list[int], exchange: str) -> None:
    """ConfigError for sizes of `cp` that a model is not estimated for, and for an unknown exchange."""
    if exchange not in ("auto", *EXCHANGES):
        raise ConfigError(f"cp_exchange={short(exchange)}: must be auto or one of {', '.join(EXCHANGES)}")
    for cp in cp_sizes:
        if not model.allows_cp(cp):
            reason = (
                f"{model.reason} are counted, without parts of sequences"
                if isinstance(model, CountedModel)
                else f"{model.name} is the text model of a multimodal one, which cannot run in parts"
            )
            raise ConfigError(f"cp={cp}: {reason}; leave out cp")


def _list_ends(setting: Setting) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kinds at the end of the model, and those of full backwards; a fused head has the loss."""
    if LOSS in setting.kinds:
        return (HEAD, LOSS), ()
    return (HEAD,), (FULL_HEAD,) if FULL_HEAD in setting.kinds else ()


def _estimate_setting(
    model: Model, pricing: Pricing, mode: str, microbatch_size: int, sizes: Sizes, lora: int | None, fused_head: bool
) -> Setting:
    message, checkpointing = model.message_bytes(sizes), Checkpointing.parse(mode)
    kinds = model.layer_operators(sizes)
    if lora is not None:
        kinds = {
            name: add_adapters(ops, lora, sizes) if name in model.layers else freeze(ops, sizes)
            for name, ops in kinds.items()
        }
    if fused_head and (head := model.fused_head(sizes)) is not None:
        head = head if lora is None else replace(head, ops=tuple(freeze(head.ops, sizes)))
        whole = [*kinds[HEAD], *kinds[LOSS]]
        ends = fuse(head, sizes, pricing.compile) if sizes.cp == 1 else {HEAD: whole, FULL_HEAD: whole}
        kinds = {name: ops for name, ops in kinds.items() if name != LOSS} | ends
    costs = {
        name: price_layer(
            ops, pricing, message, checkpointing, is_block=name in model.layers,
            exchanged=model.exchanged_bytes(name, sizes),
        )
        for name, ops in kinds.items()
    }  # fmt: skip
    costs[STAGE] = LayerCost(0.0, 0.0, 0.0, activation=model.shared_bytes(sizes))
    return Setting(
        costs,
        mode,
        microbatch_size,
        pricing.tp,
        pricing.compile,
        sizes.sequence_parallel,
        sizes.ep,
        sizes.cp,
        sizes.exchange if sizes.cp > 1 else "",
    )


def _list_shardings(
    model: Model, tp_sizes: Sequence[int], sequence_parallel: bool | Sequence[bool], sequence: int, cp: int
) -> list[tuple[int, bool]]:
    """Each size of `tp`, without and with sequence parallelism, as requested; with `tp` of 1 there is none."""
    values = [sequence_parallel] if isinstance(sequence_parallel, bool) else list(dict.fromkeys(sequence_parallel))
    if not values or not all(isinstance(value, bool) for value in values):
        raise ConfigError(f"sequence_parallel={short(sequence_parallel)}: must be True, False or a list of both")
    if True in values and max(tp_sizes) == 1:
        raise ConfigError("sequence_parallel=True shards sequences over tp; use a tp of at least 2, or leave it out")
    found: list[tuple[int, bool]] = []
    for tp in tp_sizes:
        found += [(tp, value) for value in values if not value] if tp > 1 else [(tp, False)]
        if tp == 1 or True not in values:
            continue
        if (sequence % tp == 0 or cp > 1) and (False not in values or model.allows_sequence_parallel(tp)):
            found.append((tp, True))
        elif False not in values:
            raise ConfigError(f"sequence={sequence}: must be a multiple of tp={tp} with sequence_parallel")
    return found


def _list_integers(name: str, value: int | Sequence[int]) -> list[int]:
    values = list(dict.fromkeys(value)) if isinstance(value, Sequence) else [value]
    for item in values:
        require_positive_integers(**{name: item})
    return values


def _list_modes(value: str | Sequence[str]) -> list[str]:
    """The modes. `selective:N` combines `none` and `full`, which replace it."""
    if not isinstance(value, (str, Sequence)):
        raise ConfigError(f"ac={short(value)}: must be a mode like 'full', or a list of modes")
    modes: dict[str, None] = {}
    for text in [value] if isinstance(value, str) else value:
        every = Checkpointing.parse(text).every
        modes.update(dict.fromkeys(("none", "full") if every > 1 else (text,)))
    return list(modes)
