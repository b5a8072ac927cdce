"""A stage cut from a Hugging Face decoder model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.contract import Tied
from zeropipe.engine.stages.families import Family, family_of, sliced_config
from zeropipe.errors import MissingExtra

# Given to every stage of a model; masks and rotary embeddings are made anew on each.
_KEYS = ("attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class HFStage(nn.Module):
    """Some layers of a model; the first stage embeds `input_ids`, the last returns logits (or scores).

    Called with the hidden states of the stage before (none for the first) and what `pick` takes from the microbatch.
    """

    def __init__(self, lm: nn.Module, cut: tuple[range, ...], stage: int, head: str = "lm") -> None:
        super().__init__()
        self.lm = lm
        self.cut, self.stage, self.head = cut, stage, head
        self.is_first, self.is_last = is_first, is_last = stage == 0, stage == len(cut) - 1
        self.tied_pairs: tuple[Tied, ...] = ()
        self.whole_config = lm.config
        self.family = family_of(lm.config)
        # A tied head is filled as the embedding it is tied to: `tie` drops the embedding afterwards.
        self.is_tied = is_last and head == "lm" and lm.config.tie_word_embeddings
        _trim(
            lm,
            self.family,
            cut[stage],
            is_first=is_first,
            embeds=is_first or self.is_tied,
            norms=is_last,
            heads=is_last and head == "lm",
        )
        if is_last and head == "score":
            weight = next(lm.parameters())
            self.score = nn.Linear(lm.config.hidden_size, 1, bias=False, device=weight.device, dtype=weight.dtype)

    @property
    def layers(self) -> range:
        """Which layers of the whole model these are."""
        return self.cut[self.stage]

    @property
    def base(self) -> nn.Module:
        """The model without its head."""
        return getattr(self.lm, self.family.base)

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, for compilation and checkpointing."""
        return getattr(self.base, self.family.layers)

    def tie(self, embedding: nn.Parameter | None = None) -> None:
        """Make head and embedding one tensor: of this stage, or the one given (of the first stage on this rank)."""
        if not self.is_tied:
            return
        if embedding is None:
            embedding = getattr(self.base, self.family.embedding).weight
        self.lm.lm_head.weight = embedding
        if not self.is_first:
            setattr(self.base, self.family.embedding, None)

    @property
    def tied_names(self) -> tuple[str, str]:
        """What the embedding's and the head's weight are called in the first and in the last stage."""
        return f"lm.{self.family.base}.{self.family.embedding}.weight", "lm.lm_head.weight"

    @property
    def embedding(self) -> nn.Parameter | None:
        """The embedding's weight, on the first stage."""
        return getattr(self.base, self.family.embedding).weight if self.is_first else None

    def pick(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        """What this stage needs of a microbatch."""
        picked = {key: microbatch[key] for key in _KEYS if microbatch.get(key) is not None}
        if self.is_first:
            picked["input_ids"] = microbatch["input_ids"]
        cu_seqlens = microbatch.get("cu_seqlens")
        if cu_seqlens is not None:
            picked.setdefault("position_ids", positions(cu_seqlens))
            if "flash" in self.lm.config._attn_implementation:
                longest = int(cu_seqlens.diff().max())
                picked |= {f"cu_seq_lens_{side}": cu_seqlens for side in "qk"}
                picked |= {f"max_length_{side}": longest for side in "qk"}
        return picked

    def forward(self, *inputs: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        hidden = getattr(self.base, self.family.embedding)(input_ids) if self.is_first else inputs[0]
        with nothing_packed() if "position_ids" not in kwargs else nullcontext():
            return self._run(hidden, kwargs)

    def _run(self, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if self.is_last and self.head == "lm":
            return self.lm(inputs_embeds=hidden, use_cache=False, **kwargs).logits
        hidden = self.base(inputs_embeds=hidden, use_cache=False, **kwargs).last_hidden_state
        return self.score(hidden) if self.is_last else hidden

    def full_name(self, name: str) -> str:
        """The name of one of this stage's parameters (or modules) in the whole model."""
        prefix = f"{self.family.base}.{self.family.layers}."
        shift = self.layers.start
        return re.sub(rf"^{re.escape(prefix)}(\d+)", lambda m: f"{prefix}{int(m[1]) + shift}", name.removeprefix("lm."))

    def full_names(self) -> dict[str, str]:
        """This stage's parameters, by their name here: their name in the whole model."""
        return {name: self.full_name(name) for name, _ in self.named_parameters(remove_duplicate=False)}


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Without position ids there are no packed sequences; transformers would ask the device, and wait for it."""
    from transformers import masking_utils

    asked = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asked


def positions(cu_seqlens: Tensor) -> Tensor:
    """Position ids of packed sequences (1, tokens): counting starts anew where a sequence starts."""
    lengths = cu_seqlens.diff()
    starts = torch.repeat_interleave(cu_seqlens[:-1], lengths)
    return (torch.arange(len(starts), device=cu_seqlens.device) - starts)[None]


def meta_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """The whole model without memory."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise MissingExtra("transformers", "engine") from None
    config = copy.deepcopy(config)
    family_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=config._attn_implementation,
            experts_implementation=config._experts_implementation,
        )
    return model.train()


def _trim(
    lm: nn.Module, family: Family, layers: range, *, is_first: bool, embeds: bool, norms: bool, heads: bool
) -> None:
    """Keep only this stage's parts; each layer stays built for its place in the whole model."""
    base = getattr(lm, family.base)
    kept = getattr(base, family.layers)
    setattr(base, family.layers, nn.ModuleList(kept[i] for i in layers))
    lm.config = base.config = sliced_config(lm.config, layers)
    if not embeds:
        setattr(base, family.embedding, None)
    if not is_first:
        for name in family.first_only:
            setattr(base, name, nn.Identity())
    if not norms:
        setattr(base, family.norm, nn.Identity())
    if not heads:
        lm.lm_head = None
