"""Check that a model computes the same in parts of its sequences, on a small copy; a model that fails is refused.

Threads simulate the processes of `cp`, on the CPU and without a process group. A plain batch of a length that has to
be padded, a batch with padding and packed rows must have the logits of the undivided copy, the first one its gradients.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.core.model.cp_exchange import GATHER, RING
from zeropipe.engine.mesh.cp_stage import split_stage
from zeropipe.engine.mesh.tp_check import SimulatedTP
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.sequence_parts import SequenceParts
from zeropipe.engine.stages.verify import (
    build_small_stage,
    format_error,
    is_close,
    isolated_torch_state,
    rounding_error,
)
from zeropipe.errors import ConfigError

CP = 2  # simulated processes
SAMPLE_LENGTHS = (5, 6)  # of two packed samples; their sum is padded

_cache: dict[str, str | None] = {}  # config, as JSON -> the reason why sequences cannot be divided

Batch = dict[str, Tensor]


class _Failed(Exception):
    """A module does not run a part of a sequence."""


def check_parts(stage: HFStage, exchange: str, copies_keys: bool = False) -> None:
    """ConfigError unless a small copy of the stage's model computes the same in parts.

    `copies_keys`: several processes get the same key heads.
    """
    if reason := explain_refusal(stage, exchange, copies_keys):
        kind = stage.full_config.model_type
        raise ConfigError(f"model_type={kind!r} cannot run with cp: {reason}; leave out cp")


def explain_refusal(stage: HFStage, exchange: str, copies_keys: bool = False) -> str:
    """Why a model cannot run with cp; empty if a small copy of it computes the same in parts. Results are cached."""
    config = stage.full_config
    key = json.dumps([config.to_dict(), exchange, copies_keys], sort_keys=True, default=str)
    if key not in _cache:
        try:
            _cache[key] = find_difference(config, stage.family, exchange, copies_keys)
        except ConfigError:
            raise
        except Exception as error:
            _cache[key] = f"a small copy of it does not run in parts ({format_error(error)})"
    return _cache[key] or ""


def find_difference(config: Any, family: Any, exchange: str, copies_keys: bool = False) -> str | None:
    """The first difference of a model in parts from the undivided one, in words; None if there is none."""
    if "position_ids" not in family.inputs:
        return "its forward takes no position_ids"
    small = build_small_stage(config, family, 1 if copies_keys else CP)
    with isolated_torch_state():
        if sees_later_tokens(small):
            return "its tokens attend to later ones"
        if not _uses_interface(copy.deepcopy(small), exchange):
            return "its attention is not called through transformers' attention interface"
        plain, *others = list_batches(small)
        reason = _compare(copy.deepcopy(small).double(), exchange, [plain])  # some models magnify rounding
        return reason or _compare(small, exchange, others)  # with padding they may overflow in float64


def _compare(small: HFStage, exchange: str, batches: Sequence[Batch]) -> str | None:
    """The first difference, in words; of a plain batch also that of gradients."""
    with SimulatedTP(CP) as simulated:
        copies = [copy.deepcopy(small) for _ in range(CP)]
        small.tie()
        for part, group in zip(copies, simulated.groups):
            part.tie()
            split_stage(part, group, exchange)
        for batch in batches:
            is_plain = len(batch) == 1
            with torch.set_grad_enabled(is_plain):
                whole, seen = run_watched(small, batch)
                gradients = [torch.randn_like(one) for one in whole] if is_plain else None
                if gradients is not None:
                    torch.autograd.backward(whole, gradients)
                found = simulated.run(_run_part, [(part, batch, gradients) for part in copies])
            real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))  # what padding attends to is chance
            if not _are_close([outputs[0] for outputs, _ in found], whole[0], real):
                return _name_mixer(small, seen, found, real) or "it gives other logits"
            if not all(map(is_close, found[0][0][1:], whole[1:])):
                return "it gives another load-balancing loss: set output_router_logits=False"
            if gradients is not None and (reason := _compare_gradients(small, copies)):
                return reason
    return None


def sees_later_tokens(stage: HFStage) -> bool:
    """Whether the last token of a row changes what the others give: padding at the end would change it too."""
    ids = list_batches(stage)[0]["input_ids"]
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 1) % stage.lm.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        one, two = (small_logits(stage, some)[:, :-1] for some in (ids, other))
    return not is_close(one, two)


def small_logits(stage: HFStage, ids: Tensor) -> Tensor:
    output = stage(**stage.pick({"input_ids": ids}))
    return output[0] if isinstance(output, tuple) else output


def _uses_interface(stage: HFStage, exchange: str) -> bool:
    """Whether a model calls its attention so that it can be replaced; changes the stage."""
    with SimulatedTP(1) as simulated:
        split_stage(stage, simulated.groups[0], GATHER if exchange == RING else exchange)  # a ring calls nothing
        return calls_attention(stage, "split_attention")


def calls_attention(stage: HFStage, name: str) -> bool:
    """Whether a model calls the attention that its modules have under this name, a tuple with `run`; changes them."""
    calls: list[bool] = []
    for module in stage.modules():
        if (attention := getattr(module, name, None)) is not None:

            def run(*args: Any, own: Any = attention.run, **kwargs: Any) -> Any:
                calls.append(True)
                return own(*args, **kwargs)

            setattr(module, name, attention._replace(run=run))
    with torch.no_grad():
        small_logits(stage, list_batches(stage)[0]["input_ids"])
    return bool(calls)


def list_batches(stage: HFStage) -> list[Batch]:
    """A plain, a padded and, if the model can, a packed batch."""
    size, length = stage.lm.get_input_embeddings().weight.shape[0], sum(SAMPLE_LENGTHS)
    ids = torch.randint(min(5, size - 1), size, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, SAMPLE_LENGTHS[1] :] = 0
    packed = {"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, *SAMPLE_LENGTHS]).cumsum(0)}
    return [
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": mask},
        *([packed] if stage.family.can_pack else []),
    ]


def _run_part(stage: HFStage, batch: Batch, gradients: Sequence[Tensor] | None) -> Any:
    """The outputs of one simulated process, and those of its modules; with `gradients` also a backward."""
    with torch.set_grad_enabled(gradients is not None):
        outputs, seen = run_watched(stage, batch)
        if gradients is not None:
            first, *rest = gradients  # of a loss every process has an equal share
            own = [stage.context.take(first, 1), *(one / stage.context.group.size for one in rest)]
            torch.autograd.backward(outputs, own)
    return [one.detach() for one in outputs], seen


def run_watched(stage: HFStage, batch: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of a stage, and of each module in its blocks, in the order in which they end."""
    seen: dict[str, Tensor] = {}
    entered: list[nn.Module] = []
    hooks = []
    inside = [name for name, module in stage.named_modules() if any(module in set(b.modules()) for b in stage.blocks)]
    for name in inside:

        def watch(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(first, Tensor):
                seen.setdefault(name, first.detach())

        hooks.append(stage.get_submodule(name).register_forward_hook(watch))
        hooks.append(stage.get_submodule(name).register_forward_pre_hook(lambda module, args: entered.append(module)))
    try:
        output = stage(**stage.pick(batch))
    except Exception as error:
        raise _Failed(f"{part_name(stage, entered[-1])}: {format_error(error)}" if entered else str(error)) from error
    finally:
        for hook in hooks:
            hook.remove()
    return list(output) if isinstance(output, tuple) else [output], seen


def _are_close(parts: Sequence[Tensor], whole: Tensor, real: Tensor) -> bool:
    """Whether (rows, tokens, ...) of all processes equal those of whole rows, where tokens are not padding."""
    joined = SequenceParts(0, len(parts)).join(parts, 1)[:, : whole.shape[1]]
    keep = real.bool()
    return is_close(joined[keep], whole[keep])


def _name_mixer(small: HFStage, seen: dict[str, Tensor], found: Sequence[Any], real: Tensor) -> str | None:
    """The part of a layer whose output differs first, by name."""
    for name, whole in seen.items():
        parts = [modules.get(name, whole) for _, modules in found]
        shape = (real.shape[0], found[0][0][0].shape[1])
        if whole.shape[:2] != real.shape or any(part.shape[:2] != shape for part in parts):
            continue
        if not _are_close(parts, whole, real):
            part = part_name(small, small.get_submodule(name))
            return f"{part} mixes or counts tokens outside of transformers' attention interface"
    return None


def part_name(stage: HFStage, module: nn.Module) -> str:
    """The class of the part of a layer that a module is in."""
    block = next(one for one in stage.blocks if module in set(one.modules()))
    return type(next((one for one in block.children() if module in set(one.modules())), block)).__name__


def _compare_gradients(small: HFStage, copies: Sequence[HFStage]) -> str | None:
    """The first parameter whose gradients of all parts do not add up to that of the whole, in words."""
    rounded = rounding_error(parameter.grad for parameter in small.parameters())
    for name, parameter in small.named_parameters():
        gradients = [part.get_parameter(name).grad for part in copies]
        present = [gradient for gradient in gradients if gradient is not None]
        total = torch.stack(present).sum(0) if present else None
        if not is_close(total, parameter.grad, rounded):
            return f"it gives another gradient of {small.full_names()[name]}"
    return None
