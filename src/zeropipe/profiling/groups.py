"""The groups of layers that a profile runs: only they get memory, however large the model is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zeropipe.core.model.probe import LayerGroup
from zeropipe.engine.stages.build import Model, open_model
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.skeleton import build_on_meta
from zeropipe.engine.stages.small_model import layer_kinds, per_layer_fields
from zeropipe.errors import ConfigError, MissingExtra, first_line

NUM_LAYERS_TOGETHER = 4  # of the group with several layers
# Fields of a user's config with which transformers would load code or files from elsewhere. Attention and experts use
# torch's kernels, or eager ones if the config has them.
_EXTERNAL = re.compile(r"auto_map|_name_or_path|_?(attn|experts)_implementation(_internal)?")
_LOCAL_KERNELS = ("eager", "sdpa")
_MAX_REASON = 300  # characters of an error of transformers


@dataclass(frozen=True)
class GroupCut:
    """One group: the kinds of its layers, and the cut of the model in which it is a stage."""

    kinds: tuple[str, ...]
    cut: tuple[range, ...]
    stage: int


@dataclass(frozen=True)
class GroupedModel:
    """A model that is built group by group."""

    model: Model
    skeleton: nn.Module  # on the meta device
    layers: tuple[str, ...]  # the kind of each decoder layer
    cuts: tuple[GroupCut, ...]

    def build(self, device: torch.device) -> dict[int, HFStage]:
        """Build every group as a stage of one pipeline, with random weights."""
        return {index: self.model.build_stage(group.cut, group.stage, device) for index, group in enumerate(self.cuts)}


def open_groups(
    source: str | Mapping[str, Any], dtype: torch.dtype, seed: int, attention: str = "sdpa"
) -> GroupedModel:
    """Open a model, from a directory or a config, without its weights."""
    model = open_model(_load_config(source), dtype, "lm", seed, attention=attention)
    family, skeleton = model.family, build_on_meta(model.config, dtype)
    numbers = layer_kinds(skeleton, family.layers, per_layer_fields(skeleton, family.layers))
    names = _name_kinds(skeleton.get_submodule(family.layers), numbers, model.config)
    return GroupedModel(model, skeleton, names, _choose_groups(names, family.allows_empty_ends))


def _load_config(source: str | Mapping[str, Any]) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtra("transformers", "engine") from None
    try:
        if isinstance(source, str):
            return AutoConfig.from_pretrained(source)
        data = _drop_external(source)
        return AutoConfig.for_model(data.pop("model_type"), **data)
    except Exception as error:  # transformers raises errors of many types
        reason = first_line(error).partition(". Should contain one of")[0][:_MAX_REASON]
        raise ConfigError(f"transformers cannot read this config: {reason}") from None


def _drop_external(data: Mapping[str, Any]) -> dict[str, Any]:
    """A config without external fields, also in nested configs."""
    return {
        name: _drop_external(value) if isinstance(value, Mapping) else value
        for name, value in data.items()
        if not _EXTERNAL.fullmatch(str(name)) or value in _LOCAL_KERNELS
    }


def _name_kinds(layers: nn.Module, numbers: list[int], config: Any) -> tuple[str, ...]:
    """The name of each layer's kind, as in estimates: dense, experts, dense-sliding; then dense-2, ..."""
    types = getattr(config, "layer_types", None) or [""] * len(numbers)
    found: dict[int, str] = {}
    for layer, number, kind in zip(layers.children(), numbers, types):
        if number not in found:
            has_experts = any(re.search(r"(^|\.)experts($|\.)", name) for name, _ in layer.named_modules())
            name = ("experts" if has_experts else "dense") + ("-sliding" if "sliding" in str(kind) else "")
            same = sum(re.fullmatch(rf"{name}(-\d+)?", other) is not None for other in found.values())
            found[number] = f"{name}-{same + 1}" if same else name
    return tuple(found[number] for number in numbers)


def _choose_groups(layers: tuple[str, ...], allows_empty_ends: bool) -> tuple[GroupCut, ...]:
    """The embedding, one layer of each kind, several layers, the head. Ends may need a layer."""
    total, end = len(layers), 0 if allows_empty_ends else 1
    inner = range(end, total - end)
    cuts = [GroupCut(("embedding", *layers[:end]), (range(end), range(end, total)), 0)]
    for kind in dict.fromkeys(layers):
        index = next((n for n in inner if layers[n] == kind), None)
        if index is None:
            raise ConfigError(
                f"layers of kind {kind!r} are only at the ends of the model, which do not run without a layer: their "
                "costs cannot be measured separately"
            )
        cuts.append(GroupCut((kind,), (range(index), range(index, index + 1), range(index + 1, total)), 1))
    if len(inner) > 1:
        several = inner[:NUM_LAYERS_TOGETHER]
        cuts.append(
            GroupCut(tuple(layers[n] for n in several), (range(several.start), several, range(several.stop, total)), 1)
        )
    cuts.append(GroupCut((*layers[total - end :], "head"), (range(total - end), range(total - end, total)), 1))
    return tuple(cuts)


def describe_groups(
    model: GroupedModel, stages: Mapping[int, HFStage], microbatch: Mapping[str, Tensor]
) -> tuple[LayerGroup, ...]:
    """Parameters, FLOPs and messages of the groups, by running them once."""
    found: list[LayerGroup] = []
    inputs: tuple[Tensor, ...] = ()
    with torch.no_grad():
        for index, stage in stages.items():
            with FlopCounterMode(display=False, custom_mapping=_FLOP_FORMULAS) as counter:
                output = stage(*inputs, **stage.pick(microbatch))
            inputs = output if isinstance(output, tuple) else (output,)
            is_last = index == len(stages) - 1
            found.append(
                LayerGroup(
                    model.cuts[index].kinds,
                    sum(parameter.numel() for parameter in stage.parameters()),
                    float(counter.get_total_flops()),
                    0.0 if is_last else float(sum(tensor.nbytes for tensor in inputs)),
                )
            )
    return tuple(found)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> float:
    """FLOPs of causal attention, by a flag or by a mask.

    torch's own formula ignores masks, and in 2.11 does not accept fewer key heads than query heads.
    """
    batch, heads, rows, width = query
    pairs = rows * (rows + 1) / 2 if rows == key[-2] else rows * key[-2]
    return 2 * batch * heads * pairs * (width + value[-1])


def _grouped_flops(rows: Sequence[int], weights: Sequence[int], *_: Any, **__: Any) -> float:
    """FLOPs of a grouped product of experts, which torch does not count."""
    return 2 * math.prod(rows) * weights[-1]


_FLOP_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_efficient_attention: _attention_flops,
    torch.ops.aten._scaled_dot_product_cudnn_attention: _attention_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
}
