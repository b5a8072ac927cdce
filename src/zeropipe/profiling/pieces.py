"""A model in the pieces that are measured: only they are given memory, however large the model is."""

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

TOGETHER = 4  # layers of the piece that has several
# Of a config that somebody gives, what could make transformers look for code or files elsewhere. Attention and experts
# are run by torch's own kernels, unless it asks for plain ones.
_ELSEWHERE = re.compile(r"auto_map|_name_or_path|_?(attn|experts)_implementation(_internal)?")
_HERE = ("eager", "sdpa")
_LONGEST = 300  # characters of what transformers says


@dataclass(frozen=True)
class Cut:
    """Where one piece is in the model, and the kinds in it."""

    kinds: tuple[str, ...]
    cut: tuple[range, ...]
    stage: int


@dataclass(frozen=True)
class Pieces:
    """A model that can be built piece by piece."""

    model: Model
    whole: nn.Module  # without memory
    layers: tuple[str, ...]  # the kind of each decoder layer
    cuts: tuple[Cut, ...]

    def build(self, device: torch.device) -> dict[int, HFStage]:
        """Every piece as a stage of one pipeline, with random weights."""
        return {place: self.model.build_stage(one.cut, one.stage, device) for place, one in enumerate(self.cuts)}


def open_pieces(source: str | Mapping[str, Any], dtype: torch.dtype, seed: int) -> Pieces:
    """The pieces of a model, given as a directory or as the data of a config: its weights are not read."""
    model = open_model(_config(source), dtype, "lm", seed)
    family, whole = model.family, build_on_meta(model.config, dtype)
    numbers = layer_kinds(whole, family.layers, per_layer_fields(whole, family.layers))
    names = _names(whole.get_submodule(family.layers), numbers, model.config)
    return Pieces(model, whole, names, _cuts(names, family.allows_empty_ends))


def _config(source: str | Mapping[str, Any]) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise MissingExtra("transformers", "engine") from None
    try:
        if isinstance(source, str):
            return AutoConfig.from_pretrained(source)
        data = _ours(source)
        return AutoConfig.for_model(data.pop("model_type"), **data)
    except Exception as error:  # whatever transformers finds wrong with it
        reason = first_line(error).partition(". Should contain one of")[0][:_LONGEST]
        raise ConfigError(f"transformers cannot read this config: {reason}") from None


def _ours(data: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what leads elsewhere, in its parts too."""
    return {
        name: _ours(value) if isinstance(value, Mapping) else value
        for name, value in data.items()
        if not _ELSEWHERE.fullmatch(str(name)) or value in _HERE
    }


def _names(layers: nn.Module, numbers: list[int], config: Any) -> tuple[str, ...]:
    """A name for each layer's kind, as estimates have them: dense, experts, dense-sliding; then dense-2, ..."""
    types = getattr(config, "layer_types", None) or [""] * len(numbers)
    found: dict[int, str] = {}
    for layer, number, kind in zip(layers.children(), numbers, types):
        if number not in found:
            mixed = any(re.search(r"(^|\.)experts($|\.)", name) for name, _ in layer.named_modules())
            name = ("experts" if mixed else "dense") + ("-sliding" if "sliding" in str(kind) else "")
            same = sum(re.fullmatch(rf"{name}(-\d+)?", other) is not None for other in found.values())
            found[number] = f"{name}-{same + 1}" if same else name
    return tuple(found[number] for number in numbers)


def _cuts(layers: tuple[str, ...], allows_empty_ends: bool) -> tuple[Cut, ...]:
    """The embedding, one layer of each kind, several layers together, the head. Ends may have to keep a layer."""
    total, end = len(layers), 0 if allows_empty_ends else 1
    inner = range(end, total - end)
    cuts = [Cut(("embedding", *layers[:end]), (range(end), range(end, total)), 0)]
    for kind in dict.fromkeys(layers):
        place = next((at for at in inner if layers[at] == kind), None)
        if place is None:
            raise ConfigError(
                f"the model has a layer kind, {kind!r}, only where its embedding or head is, which it does not run "
                "without a layer: it cannot be measured alone"
            )
        cuts.append(Cut((kind,), (range(place), range(place, place + 1), range(place + 1, total)), 1))
    if len(inner) > 1:
        several = inner[:TOGETHER]
        cuts.append(
            Cut(tuple(layers[at] for at in several), (range(several.start), several, range(several.stop, total)), 1)
        )
    cuts.append(Cut((*layers[total - end :], "head"), (range(total - end), range(total - end, total)), 1))
    return tuple(cuts)


def facts(pieces: Pieces, stages: Mapping[int, HFStage], microbatch: Mapping[str, Tensor]) -> tuple[LayerGroup, ...]:
    """Parameters, operations and messages of the pieces, by running them once."""
    found: list[LayerGroup] = []
    inputs: tuple[Tensor, ...] = ()
    with torch.no_grad():
        for place, stage in stages.items():
            with FlopCounterMode(display=False, custom_mapping=_COUNTED) as counter:
                output = stage(*inputs, **stage.pick(microbatch))
            inputs = output if isinstance(output, tuple) else (output,)
            last = place == len(stages) - 1
            found.append(
                LayerGroup(
                    pieces.cuts[place].kinds,
                    sum(parameter.numel() for parameter in stage.parameters()),
                    float(counter.get_total_flops()),
                    0.0 if last else float(sum(tensor.nbytes for tensor in inputs)),
                )
            )
    return tuple(found)


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> float:
    """Operations of a decoder's attention, in which a token meets those before it: by a flag or by a mask.

    torch's own count knows no mask and, in 2.11, no keys with fewer heads than queries.
    """
    batch, heads, rows, width = query
    pairs = rows * (rows + 1) / 2 if rows == key[-2] else rows * key[-2]
    return 2 * batch * heads * pairs * (width + value[-1])


def _grouped(rows: Sequence[int], weights: Sequence[int], *_: Any, **__: Any) -> float:
    """Operations of experts, of which each has some of the rows: torch does not count them."""
    return 2 * math.prod(rows) * weights[-1]


_COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_efficient_attention: _attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention: _attention,
    torch.ops.aten._grouped_mm: _grouped,
}
