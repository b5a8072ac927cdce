"""Packed sequences: several samples in one row, kept apart as if each were in a row of its own.

A microbatch with `cu_seqlens` is packed. Three things keep its samples apart, all of them in this file:

position ids       start at 0 with each sample (`position_ids`)
attention masks    kernels that take the borders of the samples have no mask (`packed_attention`; `Packing.inputs` for
                   the package flash-attn); dense masks are made from the position ids by functions of transformers
                   (`Packing.separate_samples`). A model type with mask functions of its own names them in
                   `families.QUIRKS`.
rotary embeddings  whose factors depend on the length of a sequence take the length of each sample
                   (`Packing.separate_samples`)

Whether that is enough for a model is tested on a small copy of it (`keeps_apart`, called by `verify`); if not, as with
recurrent layers, `require_packable` refuses cu_seqlens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.contract import Microbatch
from zeropipe.engine.stages.families import Family, quirk_of
from zeropipe.engine.stages.packed_attention import PackedAttention, Samples, attend_within, find_samples, use
from zeropipe.engine.transformers_private import (
    forward_parameters,
    masks_from_positions,
    packed_masks,
    uses_flash,
)
from zeropipe.errors import ConfigError

Equal = Callable[[Tensor, Tensor], bool]


def require_packable(family: Family, config: Any, microbatch: Microbatch) -> None:
    """ConfigError for a microbatch whose packed sequences the model would not keep apart."""
    if not family.can_pack:
        raise ConfigError(
            f"cu_seqlens: model_type={config.model_type!r} does not keep packed sequences apart; pad them instead "
            "(attention_mask)"
        )
    limit, ids = family.max_packed_row, microbatch.get("input_ids")
    if limit is not None and isinstance(ids, Tensor) and ids.shape[-1] > limit:
        raise ConfigError(
            f"cu_seqlens with rows of {ids.shape[-1]} tokens: must be at most {limit}, up to which "
            f"model_type={config.model_type!r} keeps packed sequences apart; use shorter rows, or pad (attention_mask)"
        )


def position_ids(cu_seqlens: Tensor) -> Tensor:
    """Position ids of packed samples, (1, tokens): each sample starts at 0."""
    lengths = cu_seqlens.diff()
    starts = torch.repeat_interleave(cu_seqlens[:-1], lengths)
    return (torch.arange(len(starts), device=cu_seqlens.device) - starts)[None]


def sample_lengths(cu_seqlens: Tensor, positions: Tensor) -> Tensor:
    """The length of each token's sample, in the shape of the rows: its last position plus one."""
    lengths = cu_seqlens.diff()
    index = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    last = torch.zeros(len(lengths), dtype=positions.dtype, device=lengths.device)
    last.scatter_reduce_(0, index, positions.reshape(-1, len(index)).amax(0), "amax")
    return (last[index] + 1).view(positions.shape[-2:])


class Packing:
    """How one model, or one stage of it, keeps packed samples apart."""

    def __init__(self, lm: nn.Module, attention: PackedAttention | None = None) -> None:
        self._config, self.rotary, self.attention = lm.config, _length_dependent_rotary(lm), attention
        if attention is not None and attention.is_possible:
            use(lm)

    def inputs(self, cu_seqlens: Tensor, positions: Tensor | None) -> dict[str, Any]:
        """The inputs of HFStage.forward for packed rows; `positions` are the microbatch's own position ids."""
        positions = position_ids(cu_seqlens) if positions is None else positions
        inputs: dict[str, Any] = {"position_ids": positions, "is_packed": True}
        if self.rotary:
            inputs["sample_lengths"] = sample_lengths(cu_seqlens, positions)
        if self.attention is not None and not self.attention.is_possible:
            self.attention.warn()
        elif self.attention is not None:
            inputs["samples"] = find_samples(cu_seqlens, *positions.shape[-2:])
        if uses_flash(self._config):
            longest = int(cu_seqlens.diff().max())
            inputs |= {f"cu_seq_lens_{side}": cu_seqlens for side in "qk"}
            inputs |= {f"max_length_{side}": longest for side in "qk"}
        return inputs

    @contextmanager
    def separate_samples(
        self,
        positions: Tensor | None,
        is_packed: bool,
        lengths: Tensor | None = None,
        samples: Samples | None = None,
    ) -> Iterator[None]:
        """Run a forward with masks and rotary embeddings that keep packed samples apart."""
        with ExitStack() as stack:
            if positions is None:
                stack.enter_context(packed_masks(False))
            elif is_packed:
                stack.enter_context(masks_from_positions(positions, quirk_of(self._config).mask_functions))
                if samples is not None:
                    stack.enter_context(packed_masks(samples.are_packed))
            if samples is not None and self.attention is not None:
                stack.enter_context(attend_within(samples, self.attention))
            if lengths is not None:
                stack.enter_context(rotary_per_sample(self.rotary, lengths))
            yield


@contextmanager
def rotary_of_rows(
    rotary: Sequence[nn.Module], positions: Tensor, lengths: Tensor | None, take: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Let rotary embeddings that depend on the length of a row see all of it, and `take` some tokens of the result."""

    def use_rows(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        call.arguments["position_ids"] = positions.to(call.arguments["position_ids"].device)
        return call.args[1:], call.kwargs

    def take_own(module: Any, args: Any, output: Any) -> Any:
        return tuple(map(take, output)) if isinstance(output, tuple | list) else take(output)

    with ExitStack() as stack:
        for module in rotary:
            stack.callback(module.register_forward_pre_hook(use_rows, with_kwargs=True).remove)
        if lengths is not None:
            stack.enter_context(rotary_per_sample(rotary, lengths))
        for module in rotary:
            stack.callback(module.register_forward_hook(take_own).remove)
        yield


def keeps_apart(
    model: nn.Module,
    ids: Tensor,
    lengths: Sequence[int],
    is_equal: Equal,
    attention: PackedAttention | None = None,
) -> bool:
    """Whether a model's logits of samples packed in the row `ids` equal those of each sample alone.

    With `attention`, also whether its kernel was used.
    """
    if "position_ids" not in forward_parameters(model):
        return False
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    positions = position_ids(cu_seqlens)
    # rotary embeddings may cache the longest sequence so far: each sample gets a new copy of the model
    models = [copy.deepcopy(model) if _length_dependent_rotary(model) else model for _ in lengths]
    with torch.no_grad():
        alone = [one(input_ids=part, use_cache=False).logits for one, part in zip(models, ids.split(lengths, dim=1))]
        samples = None if attention is None else Samples(cu_seqlens, *ids.shape)
        packing = Packing(model, attention)
        with packing.separate_samples(positions, True, sample_lengths(cu_seqlens, positions), samples):
            packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return is_equal(packed, torch.cat(alone, 1)) and (samples is None or samples.is_used)


def _length_dependent_rotary(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of a model whose factors depend on the longest sequence of a batch."""
    found = []
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        types = types.values() if isinstance(types, dict) else [types]
        if any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in types):
            found.append(module)
    return found


@contextmanager
def rotary_per_sample(rotary: Iterable[nn.Module], lengths: Tensor) -> Iterator[None]:
    """Let such embeddings rotate each packed sample as if it were alone; `lengths` has one value per token."""
    hook = partial(_rotate_per_sample, lengths)
    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in rotary]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def _rotate_per_sample(lengths: Tensor, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a rotary embedding; `output` was computed with the length of the longest sample."""
    call = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    positions, layer_type = call.arguments["position_ids"], call.arguments.get("layer_type")
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]

    def run(mask: Tensor) -> Any:
        """The forward with the tokens outside of `mask` at position 0, so that they do not count as long."""
        call.arguments["position_ids"] = torch.where(mask, positions, 0)
        return type(module).forward(*call.args, **call.kwargs)

    if kind == "longrope":
        rope = module.config.rope_parameters
        is_long = lengths > (rope if layer_type is None else rope[layer_type])["original_max_position_embeddings"]
        return _select(is_long, output, run(~is_long))
    if "dynamic" not in kind:
        return None
    none, is_short = torch.zeros_like(lengths, dtype=torch.bool), lengths <= module.original_max_seq_len
    run(none)  # a short sequence resets the longest length that the module has cached
    output = run(is_short)
    for length in sorted(set(lengths[~is_short].tolist())):
        run(none)
        output = _select(lengths == length, run(lengths == length), output)
    run(none)
    return output


def _select(mask: Tensor, one: Any, other: Any) -> Any:
    """`one` for the tokens of the mask, `other` for the rest."""
    if isinstance(one, tuple | list):
        return tuple(_select(mask, first, second) for first, second in zip(one, other, strict=True))
    if not isinstance(one, Tensor) or one.shape[-3:-1] != mask.shape:
        raise ConfigError(
            "cu_seqlens: the rotary embeddings of this model have an unsupported shape; pad the sequences instead "
            "(attention_mask)"
        )
    return torch.where(mask[..., None], one, other)
