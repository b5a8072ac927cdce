"""Tensor parallelism: the layers of stages sharded over the `tp` dimension of a mesh by a plan, which is checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.engine.mesh.tp_check import check_tp_plan
from zeropipe.engine.mesh.tp_collectives import TPGroup
from zeropipe.engine.mesh.tp_layers import ParameterShards
from zeropipe.engine.mesh.tp_stage import (
    EXPERT_WEIGHTS,
    EXPERTS,
    LATENT,
    STYLES,
    find_styles,
    parent_name,
    shard_stage,
)
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.small_model import nonzero_dropout
from zeropipe.errors import ConfigError


def apply_tp(
    stages: Iterable[Any], mesh: DeviceMesh, plan: Mapping[str, str] | None = None, *, sequence: bool = False
) -> None:
    """Shard the layers of stages over `mesh`, in place, by the plan or the model's own plan.

    A plan has a style for names of modules in the full model (`*` for any number). For a Hugging Face model it is
    checked on a small copy first.
    """
    shards, stages, num_layers = ParameterShards(TPGroup.from_mesh(mesh), mesh), list(stages), 0
    for stage in stages:
        if hasattr(stage, "summed_over_tp"):
            raise ConfigError("a stage is already sharded over tp; call parallelize() once")
        stage_plan = find_plan(stage) if plan is None else dict(plan)
        if isinstance(stage, HFStage):
            check_hf_stage(stage, stage_plan, mesh.size())
            check_tp_plan(stage, stage_plan, sequence)
        else:
            check_plain_stage(stage, stage_plan, sequence)
        num_layers += len(find_styles(stage, stage_plan))
        shard_stage(stage, stage_plan, shards, sequence)
    if plan is not None and stages and not num_layers:
        found = ", ".join(sorted({parent_name(full) for stage in stages for full in stage.full_names().values()})[:3])
        warnings.warn(
            f"the plan has no layer of this rank, so every process of tp has all of them: they are {found}, ...; use * "
            "for numbers",
            stacklevel=3,
        )


def find_plan(stage: Any) -> dict[str, str]:
    """The plan of a Hugging Face model's class and config, with names of the full model."""
    if not isinstance(stage, HFStage):
        raise ConfigError("a stage of plain modules has no tensor-parallel plan; pass parallelize(plan={...})")
    base = getattr(stage.full_config, "base_model_tp_plan", None)
    if not base:
        raise ConfigError(
            f"model_type={stage.full_config.model_type!r} has no tensor-parallel plan; leave out tp, or in Python "
            "pass parallelize(plan={'model.layers.*.self_attn.q_proj': 'colwise', ...})"
        )
    prefix = stage.lm.base_model_prefix
    return {f"{prefix}.{name}": style for name, style in base.items()} | dict(getattr(stage.lm, "_tp_plan", None) or {})


def check_plain_stage(stage: Any, plan: Mapping[str, str], sequence: bool) -> None:
    """ConfigError for a stage of a user's own modules that the plan cannot shard."""
    if sequence:
        raise ConfigError("sequence_parallel needs stages of a Hugging Face model (hf_stages)")
    if not hasattr(stage, "full_names"):
        raise ConfigError(
            f"a stage is a {type(stage).__name__} without full_names(), which a plan needs; create stages with "
            "module_stages()"
        )
    _check_styles("the plan", plan, [style for style in STYLES if style != LATENT])
    for name, module in stage.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ConfigError(
                f"{name} has p={module.p}: processes of tp would draw different random numbers for the same tokens; "
                "set p=0"
            )


def check_hf_stage(stage: HFStage, plan: Mapping[str, str], tp: int) -> None:
    """ConfigError for a stage of a Hugging Face model that the plan cannot shard."""
    config = stage.full_config.get_text_config()
    _check_styles(f"model_type={stage.full_config.model_type!r}", plan, STYLES)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % tp:
            raise ConfigError(f"the model has {name}={heads}: tp={tp} must divide it")
    for name, value in nonzero_dropout(config.to_dict()).items():
        raise ConfigError(
            f"the model has {name}={value}: processes of tp would draw different random numbers for the same "
            f"tokens; set {name}=0"
        )
    for name, module in stage.named_modules():
        if ".lora_dropout." in name and getattr(module, "p", 0) > 0:
            raise ConfigError(
                f"the adapter has lora_dropout={module.p}: processes of tp would draw different random numbers for the "
                "same tokens; set lora_dropout=0"
            )


def _check_styles(owner: str, plan: Mapping[str, str], supported: Sequence[str]) -> None:
    for name, style in plan.items():
        is_in_experts = style in EXPERT_WEIGHTS and plan.get(parent_name(name)) == EXPERTS
        if style not in supported and not is_in_experts:
            raise ConfigError(
                f"{owner} shards {name} by {style!r}, which is not supported: must be one of {', '.join(supported)}; "
                "leave out tp, or pass a plan of your own"
            )
