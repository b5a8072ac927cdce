"""`zp.estimate`: what the layers of a model cost on a GPU, without having either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeropipe.core.checkpointing import Checkpointing
from zeropipe.errors import ConfigError, short
from zeropipe.search.estimate.gpus import find_gpu
from zeropipe.search.estimate.operators import Op, Sizes, decoder, embedding, head, loss
from zeropipe.search.estimate.price import Pricing, layer_cost
from zeropipe.search.estimate.shapes import Layer, Shape, shape_of
from zeropipe.sim.layer_costs import LayerCosts, Setting, State

DTYPES = {"bf16": 2, "float16": 2, "float32": 4}
SHORT = {"bfloat16": "bf16", "fp16": "float16", "fp32": "float32"}


def estimate(
    model: str | Mapping[str, Any],
    *,
    gpu: str = "h100",
    sequence: int = 4096,
    dtype: str = "bf16",
    microbatch_size: int | Sequence[int] = 1,
    ac: str | Sequence[str] = "none",
    tp: int | Sequence[int] = 1,
    compile: bool = True,
    efficiency: dict[str, Any] | None = None,
) -> LayerCosts:
    """Costs of a model's layers from their shapes: an estimate, to be replaced by `zeropipe profile` where it matters.

    `model` is a known name (`zeropipe estimate --known`), a directory with config.json, a config file or a config as
    plain data. With several microbatch sizes, modes or sizes of `tp` the result has a setting for each combination.
    """
    shape, machine = shape_of(model), find_gpu(gpu, efficiency)
    dtype = SHORT.get(str(dtype), dtype)
    if str(dtype) not in DTYPES:
        raise ConfigError(f"dtype={short(dtype)}: choose {', '.join(DTYPES)}")
    lists = {"microbatch_size": microbatch_size, "tp": tp, "sequence": [sequence]}
    for name, value in lists.items():
        for one in [value] if isinstance(value, (int, bool)) or not isinstance(value, Sequence) else value:
            if type(one) is not int or one < 1:
                raise ConfigError(f"{name}={short(one)}: a whole number from 1 on is needed")
    if not isinstance(compile, bool):
        raise ConfigError(f"compile={short(compile)}: True or False is needed")
    kinds = _kinds(shape)
    settings = [
        _setting(shape, kinds, Pricing(machine, dtype, compile, ways), mode, size, sequence)
        for ways in _listed(tp) for size in _listed(microbatch_size) for mode in _modes(ac)
    ]  # fmt: skip
    state = State() if DTYPES[dtype] == 2 else State(4, 4, 8)
    reached = machine.efficiency
    return LayerCosts(
        shape.name, "estimate", tuple(kinds[layer] for layer in shape.layers), tuple(settings), tied=shape.tied,
        sequence=sequence, dtype=dtype, link=machine.link(False), inter_node=machine.link(True), state=state,
        machine={
            "gpu": machine.name, "peak_flops": machine.peak_of(dtype), "memory": machine.memory,
            "bandwidth": machine.bandwidth, "efficiency": {**vars(reached)},
        },
    )  # fmt: skip


def num_parameters(model: str | Mapping[str, Any]) -> tuple[int, int]:
    """All parameters of a model, and those that a token meets: with tied ends, these count once in both."""
    shape, at = shape_of(model), Sizes(1, 1, 2, 1)
    ends = [embedding(shape, at), head(shape, at)]
    total = sum(op.parameters for ops in ends for op in ops) - shape.tied * shape.vocabulary * shape.hidden
    active = total
    for layer in shape.layers:
        ops = decoder(shape, layer, at)
        whole = sum(op.parameters for op in ops)
        idle = 0
        if layer.experts and shape.experts:
            stacks = sum(op.parameters for op in ops if op.name in ("gate_up", "down") and _is_stack(op, shape))
            idle = stacks * (shape.experts.number - shape.experts.chosen) // shape.experts.number
        total, active = total + whole, active + whole - idle
    return total, active


def _is_stack(op: Op, shape: Shape) -> bool:
    assert shape.experts is not None
    return op.parameters >= shape.experts.number * shape.experts.size * shape.hidden


def _kinds(shape: Shape) -> dict[Layer, str]:
    """A name for each kind of layer."""
    names = {}
    for layer in dict.fromkeys(shape.layers):
        words = ["experts" if layer.experts else "dense", *(["sliding"] if layer.window else [])]
        names[layer] = "-".join(words)
    return names


def _setting(
    shape: Shape, kinds: Mapping[Layer, str], pricing: Pricing, mode: str, size: int, sequence: int
) -> Setting:
    _require_divisible(shape, pricing.tp)
    at = Sizes(size * sequence, sequence, DTYPES[pricing.dtype], pricing.tp)
    message = float(at.tokens * shape.hidden * at.element)
    wish = Checkpointing.parse(mode)
    costs = {name: layer_cost(decoder(shape, layer, at), pricing, message, wish) for layer, name in kinds.items()}
    for name, ops in (("embedding", embedding), ("head", head), ("loss", loss)):
        costs[name] = layer_cost(ops(shape, at), pricing, message, wish, block=False)
    return Setting(costs, mode, size, pricing.tp, pricing.compile)


def shared_sizes(shape: Shape) -> dict[str, int]:
    """What tensor parallelism shares out, by the names of the config's fields: its size has to divide all of them."""
    sizes = {
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
    }
    if shape.latent is None:
        sizes["num_key_value_heads"] = shape.kv_heads
    if shape.experts:
        sizes["moe_intermediate_size"] = shape.experts.size
        sizes["shared_expert_intermediate_size"] = shape.experts.shared
    return sizes


def _require_divisible(shape: Shape, tp: int) -> None:
    for name, value in shared_sizes(shape).items():
        if value % tp:
            raise ConfigError(f"tp={tp}: {shape.name} has {name}={value}, which it does not divide: give another tp")


def _listed(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(dict.fromkeys(value))


def _modes(value: str | Sequence[str]) -> list[str]:
    """The modes; `selective:N` is made of `none` and `full`, which are added."""
    if not isinstance(value, (str, Sequence)):
        raise ConfigError(f"ac={short(value)}: a mode like 'full' is needed, or several")
    modes: dict[str, None] = {}
    for text in [value] if isinstance(value, str) else value:
        every = Checkpointing.parse(text).every
        modes.update(dict.fromkeys(("none", "full") if every > 1 else (text,)))
    return list(modes)
