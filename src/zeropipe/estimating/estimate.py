"""`zp.estimate`: what the layers of a model cost on a GPU, without having either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.gpus import find_gpu
from zeropipe.estimating.model import Model, ShapedModel, open_model
from zeropipe.estimating.operators import Sizes
from zeropipe.estimating.price import Pricing, layer_cost
from zeropipe.sim.layer_costs import DTYPE_NAMES, LayerCosts, ParameterBytes, Setting

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
    compile: bool = True,
    efficiency: dict[str, Any] | None = None,
) -> LayerCosts:
    """Costs of a model's layers from their shapes: an estimate, to be replaced by `zeropipe profile` where it matters.

    `model` is a known name (`zeropipe estimate --known`), a directory with config.json, a config file or a config as
    plain data. With several microbatch sizes, modes or sizes of `tp` the result has a setting for each combination.
    """
    opened, machine = open_model(model), find_gpu(gpu, efficiency)
    dtype = DTYPE_NAMES.get(str(dtype), dtype)
    if str(dtype) not in DTYPES:
        raise ConfigError(f"dtype={short(dtype)}: choose {', '.join(DTYPES)}")
    lists = {"microbatch_size": microbatch_size, "tp": tp, "sequence": [sequence]}
    for name, value in lists.items():
        for one in [value] if isinstance(value, (int, bool)) or not isinstance(value, Sequence) else value:
            require_positive_integers(**{name: one})
    if not isinstance(compile, bool):
        raise ConfigError(f"compile={short(compile)}: True or False is needed")
    settings = [
        _setting(opened, Pricing(machine, dtype, compile, ways), mode, size, sequence)
        for ways in _listed(tp) for size in _listed(microbatch_size) for mode in _modes(ac)
    ]  # fmt: skip
    state = ParameterBytes() if DTYPES[dtype] == 2 else ParameterBytes(4, 4, 8)
    reached = machine.efficiency
    return LayerCosts(
        opened.name, "estimate", opened.layers, tuple(settings), tied=opened.tied, sequence=sequence, dtype=dtype,
        link=machine.link(False), inter_node=machine.link(True), state=state,
        machine={
            "gpu": machine.name, "peak_flops": machine.peak_of(dtype), "memory": machine.memory,
            "bandwidth": machine.bandwidth, "efficiency": {**vars(reached)},
        },
    )  # fmt: skip


def num_parameters(model: str | Mapping[str, Any]) -> tuple[int, int]:
    """All parameters of a model, and those that a token meets: with tied ends, these count once in both."""
    return open_model(model).num_parameters()


def _setting(model: Model, pricing: Pricing, mode: str, size: int, sequence: int) -> Setting:
    at = Sizes(size * sequence, sequence, DTYPES[pricing.dtype], pricing.tp)
    message, wish = model.message(at), Checkpointing.parse(mode)
    costs = {
        name: layer_cost(ops, pricing, message, wish, block=name in model.layers)
        for name, ops in model.kinds(at).items()
    }
    return Setting(costs, mode, size, pricing.tp, pricing.compile)


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
