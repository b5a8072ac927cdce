"""Tensor parallelism: the layers of a stage spread over the processes of a mesh's `tp` dimension.

What is left to communicate are two sums per layer and direction: of the outputs of row-wise layers, and of the
gradients of what goes into column-wise ones. With sequence parallelism each sum becomes the gathering of parts and the
sum of which each process keeps a part, so that between attention and MLP a process has a part of the tokens only.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.engine.mesh.sequence import spread_sequence
from zeropipe.engine.mesh.spreading import (
    Sharing,
    enter_last,
    hooks,
    spread_embedding,
    spread_experts,
    spread_linear,
)
from zeropipe.engine.mesh.talk import Peers
from zeropipe.engine.mesh.vocabulary import as_pieces
from zeropipe.engine.stages.adapters import is_adapter_name
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.small_model import nonzero_dropout
from zeropipe.errors import ConfigError

COLWISE = ("colwise", "colwise_gather_output")
ROWWISE = ("rowwise", "rowwise_split_input")
SUMMED = "replicated_with_grad_allreduce"
EXPERTS, EXPERT_WEIGHTS = "moe_tp_experts", ("packed_colwise", "packed_rowwise", "colwise", "rowwise")
LATENT = "mla_kv_a_proj"
WHOLE = ("embedding_rowwise", "embedding_colwise", "replicate")  # every process has all of it: gradients are equal
STYLES = (*COLWISE, *ROWWISE, SUMMED, EXPERTS, LATENT, *WHOLE)


def spread(
    stages: Iterable[Any], mesh: DeviceMesh, plan: Mapping[str, str] | None = None, *, sequence: bool = False
) -> None:
    """Spread the layers of stages over `mesh`, by the model's own plan or the one given, in place.

    A plan says for a module's name in the whole model (`*` for any number) how its weight is spread. What it makes of
    a Hugging Face model is proven on a small copy first.
    """
    from zeropipe.engine.mesh.proof import prove

    sharing, stages, names = Sharing(Peers.of(mesh), mesh), list(stages), 0
    for stage in stages:
        if hasattr(stage, "summed_over_tp"):
            raise ConfigError("a stage is spread over tp already: call parallelize() once")
        found = plan_of(stage) if plan is None else dict(plan)
        if isinstance(stage, HFStage):
            check_plan(stage, found, mesh.size())
            prove(stage, found, sequence)
        else:
            check_plain(stage, found, sequence)
        names += len(_styles(stage, found))
        spread_stage(stage, found, sharing, sequence)
    if plan is not None and stages and not names:
        there = ", ".join(sorted({_parent(full) for stage in stages for full in stage.full_names().values()})[:3])
        warnings.warn(
            f"the plan names no layer of this rank, which stay whole on every process of tp: they are {there}, ...; "
            "* stands for a number",
            stacklevel=3,
        )


def spread_stage(stage: Any, plan: Mapping[str, str], sharing: Sharing, sequence: bool) -> None:
    """Spread one stage."""
    styles = _styles(stage, plan)
    hook, summed = hooks(sharing.peers), []
    ends = _spread_ends(stage, plan, sharing, styles)
    head = ends[1:] if ends and stage.is_last and stage.head == "lm" else []
    merged = [parent for parent in _parents(styles, "colwise") if _goes_all_in(stage, parent, styles)]
    for here, (full, style) in styles.items():
        module = stage.get_submodule(here)
        if style == SUMMED:
            summed += [f"{here}.{name}" for name, _ in module.named_parameters(recurse=False)]
        elif style == EXPERTS:
            spread_experts(full, module, sharing)
        elif style == LATENT:
            size = stage.full_config.get_text_config().qk_rope_head_dim
            module.register_forward_hook(enter_last(sharing.peers, size))
        elif style in COLWISE:
            spread_linear(full, module, 0, sharing)
            if _parent(here) not in merged:
                module.register_forward_pre_hook(hook.enter, with_kwargs=True)
            if style == "colwise_gather_output":
                module.register_forward_hook(hook.gather_output)
        elif style in ROWWISE:
            spread_linear(full, module, 1, sharing)
            summed += [f"{here}.bias"] if module.bias is not None else []
            if style == "rowwise_split_input":
                module.register_forward_pre_hook(hook.split_input, with_kwargs=True)
    if sequence:
        rowwise = [here for here in styles if styles[here][1] in ROWWISE]
        summed += spread_sequence(stage, merged, [*styles, *head], rowwise, sharing)
    else:
        for parent in (*merged, *head):
            stage.get_submodule(parent).register_forward_pre_hook(hook.enter, with_kwargs=True)
        for here, (_, style) in styles.items():
            if style in ROWWISE:
                stage.get_submodule(here).register_forward_hook(hook.leave)
    stage.summed_over_tp = tuple(dict.fromkeys(summed))


def plan_of(stage: Any) -> dict[str, str]:
    """The plan a Hugging Face model brings along, with names of the whole model."""
    if not isinstance(stage, HFStage):
        raise ConfigError(
            "a stage of plain modules brings no plan for tensor parallelism: give parallelize(plan={...})"
        )
    base = getattr(stage.full_config, "base_model_tp_plan", None)
    if not base:
        raise ConfigError(
            f"model_type={stage.full_config.model_type!r} brings no plan for tensor parallelism: leave tp "
            "out, or in Python give parallelize(plan={'model.layers.*.self_attn.q_proj': 'colwise', ...})"
        )
    prefix = stage.lm.base_model_prefix
    return {f"{prefix}.{name}": style for name, style in base.items()} | dict(getattr(stage.lm, "_tp_plan", None) or {})


def check_plain(stage: Any, plan: Mapping[str, str], sequence: bool) -> None:
    """ConfigError for what a plan cannot do with a stage of a user's own modules."""
    if sequence:
        raise ConfigError("sequence_parallel needs stages of a Hugging Face model (hf_stages)")
    if not hasattr(stage, "full_names"):
        raise ConfigError(
            f"a stage is a {type(stage).__name__} without full_names(), which a plan needs: make stages with "
            "module_stages()"
        )
    _check_styles("the plan", plan, [style for style in STYLES if style != LATENT])
    for name, module in stage.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ConfigError(
                f"{name} has p={module.p}: processes of tp would draw different random numbers for the same tokens; "
                "set p=0"
            )


def _check_styles(who: str, plan: Mapping[str, str], known: Sequence[str]) -> None:
    for name, style in plan.items():
        inside = style in EXPERT_WEIGHTS and plan.get(_parent(name)) == EXPERTS
        if style not in known and not inside:
            raise ConfigError(
                f"{who} spreads {name} by {style!r}, which is not supported: known are {', '.join(known)}; leave tp "
                "out, or give a plan of your own"
            )


def check_plan(stage: HFStage, plan: Mapping[str, str], number: int) -> None:
    """ConfigError for what a plan cannot do."""
    config = stage.full_config.get_text_config()
    _check_styles(f"model_type={stage.full_config.model_type!r}", plan, STYLES)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % number:
            raise ConfigError(f"the model has {name}={heads}: tp={number} must divide it")
    for name, value in nonzero_dropout(config.to_dict()).items():
        raise ConfigError(
            f"the model has {name}={value}: processes of tp would draw different random numbers for the same "
            f"tokens; set {name}=0"
        )
    if any(is_adapter_name(name) for name in stage.full_names()):
        raise ConfigError("stages with an adapter cannot be spread over tp: use dp_shard, or merge the adapter first")


def _styles(stage: Any, plan: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The modules of a stage that a plan names: their names here and in the whole model, and their styles."""
    found = {}
    for here, full in sorted(stage.full_names().items()):
        style = _style(_parent(full), plan)
        own = _style(full, plan)
        if own is not None and style != EXPERTS:
            raise ConfigError(f"the plan spreads {full} by {own!r}: only weights of linear layers and experts can be")
        if style is not None and style not in WHOLE:
            found[_parent(here)] = (_parent(full), style)
    return found


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), plan.get(name))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _parents(styles: Mapping[str, tuple[str, str]], wanted: str) -> list[str]:
    return sorted({_parent(here) for here, (_, style) in styles.items() if style == wanted} - {""})


def _goes_all_in(stage: Any, parent: str, styles: Mapping[str, tuple[str, str]]) -> bool:
    """Whether all of an attention or MLP is spread, so that its column-wise layers share one sum of gradients.

    Otherwise something in it computes with all of the input, whose gradient from there is whole already.
    """
    module = stage.get_submodule(parent)
    if any(module is block for block in getattr(stage, "blocks", ())) or module is getattr(stage, "lm", None):
        return False
    owners = {f"{parent}.{_parent(name)}".rstrip(".") for name, _ in module.named_parameters()}
    return all(styles.get(owner, ("", ""))[1] in ("colwise", "rowwise", SUMMED) for owner in owners)


def _spread_ends(stage: Any, plan: Mapping[str, str], sharing: Sharing, styles: dict[str, Any]) -> list[str]:
    """Spread embedding and head over the vocabulary, if the plan spreads the head and tp divides both.

    Logits are then never put together: losses take pieces. Returns the names of both ends, if they are spread.
    """
    if not isinstance(stage, HFStage):
        return []
    ends = [_parent(name) for name in stage.tied_names]
    spreads = _style(stage.full_name(ends[1]), plan) == "colwise_gather_output" if ends[1] else False
    styles.pop(ends[1], None)
    embedding, head = (stage.get_submodule(name) if name else None for name in ends)
    if not spreads or not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        return []
    if embedding.max_norm is not None or not all(sharing.divides(end.weight.shape[0]) for end in (embedding, head)):
        return []
    if "weight" in embedding._parameters:
        spread_embedding(stage.full_name(ends[0]), embedding, sharing)
    if "weight" in head._parameters and stage.head == "lm":
        spread_linear(stage.full_name(ends[1]), head, 0, sharing)
        if sharing.mesh is not None:
            stage.register_forward_hook(as_pieces(sharing.mesh))
    return ends
