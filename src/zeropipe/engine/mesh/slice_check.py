"""Check that a model computes the same in slices of its sequences, on a small copy; a model that fails is refused.

A plain batch in slices of unequal length must have the logits and gradients of the whole, a batch with padding and
packed rows its logits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.core.slices import parse_shares
from zeropipe.engine.mesh.cp_check import calls_attention, list_batches, part_name, run_watched, sees_later_tokens
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.slice_attention import slice_stage
from zeropipe.engine.stages.slices import SLICE, Slice
from zeropipe.engine.stages.verify import (
    build_small_stage,
    format_error,
    is_close,
    isolated_torch_state,
    rounding_error,
)
from zeropipe.engine.transformers_private import base_implementation
from zeropipe.errors import ConfigError

BOUNDS = (0, 4, 9, 11)  # of the slices of a small batch

_cache: dict[str, str | None] = {}  # config, as JSON -> the reason why sequences cannot be cut

Batch = dict[str, Any]


def prepare_slices(schedule: Schedule, stages: Sequence[nn.Module], sizes: tuple[float, ...] | None) -> None:
    """Let stages run a schedule's slices; ConfigError for what cannot."""
    if schedule.num_slices == 1:
        if sizes is not None:
            raise ConfigError(f"slice_sizes={sizes}: the schedule {schedule.name} has no slices")
        return
    parse_shares(sizes, schedule.num_slices)
    for stage in stages:
        if not isinstance(stage, HFStage):
            raise ConfigError(
                f"a stage is a {type(stage).__name__}: slices run with Hugging Face models; use hf_stages, or a "
                "schedule without slices"
            )
        if stage.context is not None:
            raise ConfigError(f"{schedule.num_slices} slices with cp={stage.context.group.size}: use one of them")
        if stage.sequence_shards > 1:
            raise ConfigError(f"{schedule.num_slices} slices with sequence_parallel: leave out one of them")
        check_slices(stage)
        slice_stage(stage)


def check_slices(stage: HFStage) -> None:
    """ConfigError unless a small copy of the stage's model computes the same in slices. Results are cached."""
    config = stage.full_config
    implementation = base_implementation(config._attn_implementation)
    if implementation not in ("eager", "sdpa"):
        raise ConfigError(f"attn_implementation={implementation!r} with slices: use 'sdpa'")
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in _cache:
        try:
            _cache[key] = find_difference(config, stage.family)
        except ConfigError:
            raise
        except Exception as error:
            _cache[key] = f"a small copy of it does not run in slices ({format_error(error)})"
    if (reason := _cache[key]) is not None:
        raise ConfigError(f"model_type={config.model_type!r} cannot run with slices: {reason}; use one slice")


def find_difference(config: Any, family: Any) -> str | None:
    """The first difference of a model in slices from the whole one, in words; None if there is none."""
    if "position_ids" not in family.inputs:
        return "its forward takes no position_ids"
    if family.has_router_loss:
        return "its load-balancing loss is of whole sequences (set output_router_logits=False)"
    small = build_small_stage(config, family, 1)
    with isolated_torch_state():
        if sees_later_tokens(small):
            return "its tokens attend to later ones"
        if not _uses_interface(copy.deepcopy(small)):
            return "its attention is not called through transformers' attention interface"
        plain, *others = list_batches(small)
        reason = _compare(copy.deepcopy(small).double(), plain)  # some models magnify rounding
        return reason or next((found for batch in others if (found := _compare(small, batch))), None)


def _uses_interface(stage: HFStage) -> bool:
    """Whether a model calls its attention so that it can be replaced; changes the stage."""
    slice_stage(stage)
    return calls_attention(stage, "slice_attention")


def _compare(small: HFStage, batch: Batch) -> str | None:
    """The first difference, in words; of a plain batch also that of gradients."""
    is_plain = len(batch) == 1
    sliced = copy.deepcopy(small)
    small.tie()
    sliced.tie()
    slice_stage(sliced)
    with torch.set_grad_enabled(is_plain):
        whole, seen = run_watched(small, batch)
        found = []
        for index in range(len(BOUNDS) - 1):
            part = Slice(index, BOUNDS)
            with sliced.slices.during(part, 0, backward=False):
                found.append((part, *run_watched(sliced, {**batch, SLICE: part})))
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()  # of padding it is chance
        if not is_close(torch.cat([outputs[0] for _, outputs, _ in found], 1)[real], whole[0][real]):
            return _name_mixer(small, seen, [modules for _, _, modules in found], real) or "it gives other logits"
        if not is_plain:
            return None
        gradient = torch.randn_like(whole[0])
        torch.autograd.backward(whole, [gradient])
        for part, outputs, _ in reversed(found):
            with sliced.slices.during(part, 0, backward=True):
                torch.autograd.backward(outputs, [part.take(gradient, 1)])
    rounded = rounding_error(parameter.grad for parameter in small.parameters())
    for name, parameter in small.named_parameters():
        if not is_close(sliced.get_parameter(name).grad, parameter.grad, rounded):
            return f"it gives another gradient of {small.full_names()[name]}"
    return None


def _name_mixer(
    small: HFStage, seen: dict[str, Tensor], found: Sequence[dict[str, Tensor]], real: Tensor
) -> str | None:
    """The part of a layer whose output differs first, by name."""
    for name, whole in seen.items():
        parts = [modules.get(name, whole) for modules in found]
        lengths = [end - begin for begin, end in pairwise(BOUNDS)]
        if whole.shape[:2] != real.shape or any(x.shape[1] != n for x, n in zip(parts, lengths, strict=True)):
            continue
        if not is_close(torch.cat(parts, 1)[real], whole[real]):
            part = part_name(small, small.get_submodule(name))
            return f"{part} mixes or counts tokens outside of transformers' attention interface"
    return None
