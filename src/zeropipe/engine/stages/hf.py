"""A stage cut from a Hugging Face decoder model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.balance import Balance, Gates
from zeropipe.engine.stages.contract import Microbatch
from zeropipe.engine.stages.cut import Blanks, Border, Reached, cut_layers
from zeropipe.engine.stages.families import Family
from zeropipe.engine.transformers_private import factors_per_sample, length_dependent, packed_masks, uses_flash
from zeropipe.errors import ConfigError, EngineError

# Given to every stage of a model: masks and rotary embeddings are made anew on each.
_KEYS = (
    "input_ids", "attention_mask", "position_ids", "token_type_ids",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip


class HFStage(nn.Module):
    """Some layers of a model; the first stage embeds `input_ids`, the last returns logits (or scores).

    With `output_router_logits=True` in its config, the last stage of a mixture of experts returns (logits, its
    load-balancing loss), which CausalLMLoss adds to the mean loss of the tokens.

    Called with what the stage before returned (nothing for the first) and what `pick` takes from the microbatch.
    Its modules have the names, and its layers the numbers, that they have in the whole model.
    """

    sequence_parts = 1  # how many processes share each sequence

    def __init__(self, lm: nn.Module, family: Family, cut: tuple[range, ...], stage: int, head: str = "lm") -> None:
        super().__init__()
        self.lm, self.family, self.whole_config = lm, family, lm.config
        self.cut, self.stage, self.head = cut, stage, head
        self.is_first, self.is_last = stage == 0, stage == len(cut) - 1
        self.tied_pairs: tuple[tuple[str, int, str], ...] = ()
        self._border, self._blanks = Border(family.carried), Blanks()
        self._embedding, self._head = (
            _weight(lm, end()) for end in (lm.get_input_embeddings, lm.get_output_embeddings)
        )
        parameters = dict(lm.named_parameters(remove_duplicate=False))
        self._num_tokens = len(parameters[self._embedding])
        self.has_tied_ends = head == "lm" and parameters.get(self._head) is parameters[self._embedding]
        every = list(lm.get_submodule(family.layers).children())
        self.blocks = [every[index] for index in self.layers]
        self._reduce(parameters)
        self._rotary = length_dependent(lm)
        self._balance = Balance.of(lm) if family.balances and head == "lm" else None
        self._gates = Gates(self._base, self.blocks if self._balance else ())
        if self.is_last and head == "score":
            weight = next(lm.parameters())
            size = lm.config.get_text_config().hidden_size
            self.score = nn.Linear(size, lm.config.num_labels, bias=False, device=weight.device, dtype=weight.dtype)
        self.copied_buffers = self._buffers_of_others(parameters)
        self._same = [
            names for names in same_names(self, self.tied_names[0]) if self.is_first or names[0] != self.tied_names[0]
        ]

    def _reduce(self, parameters: dict[str, nn.Parameter]) -> None:
        """Keep only this stage's part of the model."""
        family, cut = self.family, self.cut
        if len(cut) > 1 and not family.bare_ends and not (cut[0] and cut[-1]):
            raise ConfigError(
                f"layers={[len(layers) for layers in cut]}: with model_type={self.lm.config.model_type!r} the first "
                "and the last stage need a layer"
            )
        layers = self.lm.get_submodule(family.layers)
        cut_layers(layers, family, self.layers, self._border, is_first=self.is_first, is_last=self.is_last)
        base = f"{family.base}."
        for name in parameters:
            if name.startswith(f"{family.layers}."):
                continue
            is_kept = family.home(name, cut) == self.stage and (self.head == "lm" or name.startswith(base))
            # A tied head is filled as the embedding: `tie` drops the embedding afterwards.
            if not is_kept and not (self.is_tied and name == self._embedding):
                self._blanks.put(self.lm, name)

    def _buffers_of_others(self, parameters: Iterable[str]) -> frozenset[str]:
        """Buffers outside the layers that belong to another stage: this one has copies, which are not saved."""
        layers = f"{self.family.layers}."
        outside = [name for name in parameters if not name.startswith(layers)]
        buffers = [name for name, _ in self.lm.named_buffers(remove_duplicate=False) if not name.startswith(layers)]
        return frozenset(f"lm.{name}" for name in buffers if self._home(name, outside) != self.stage)

    def _home(self, buffer: str, parameters: Sequence[str]) -> int:
        """The stage that a buffer belongs to: that of the parameters nearest to it."""
        near, inside = parameters, buffer
        while inside:
            inside = inside.rpartition(".")[0]
            near = [name for name in parameters if name.startswith(f"{inside}.")]
            if near:
                break
        return min((self.family.home(name, self.cut) for name in near or parameters), default=0)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Without what stands for the layers of other stages."""
        layers = self.lm.get_submodule(self.family.layers)
        every = layers._modules
        layers._modules = {name: layer for name, layer in every.items() if int(name) in self.layers}
        try:
            yield
        finally:
            layers._modules = every

    @property
    def _base(self) -> nn.Module:
        """The model without its head."""
        return self.lm.get_submodule(self.family.base)

    @property
    def layers(self) -> range:
        """Which layers of the whole model these are."""
        return self.cut[self.stage]

    @property
    def is_tied(self) -> bool:
        """Whether this stage's head is the embedding."""
        return self.is_last and self.has_tied_ends

    def tie(self, embedding: nn.Parameter | None = None) -> None:
        """Make one tensor of those that are one in the whole model, after they were given memory and values.

        `embedding` is the first stage's, where that is on this rank.
        """
        for first, *others in self._same:
            for name in others:
                _set(self, name, self.get_parameter(first))
        if not self.is_tied or self.is_first:
            return
        _set(self, self.tied_names[1], self.get_parameter(self.tied_names[0]) if embedding is None else embedding)
        if self._embedding in dict(self.lm.named_parameters(remove_duplicate=False)):
            self._blanks.put(self.lm, self._embedding)

    @property
    def tied_names(self) -> tuple[str, str]:
        """What the embedding's and the head's weight are called in the first and in the last stage."""
        return f"lm.{self._embedding}", f"lm.{self._head}"

    @property
    def embedding(self) -> nn.Parameter | None:
        """The embedding's weight, on the first stage."""
        return self.lm.get_parameter(self._embedding) if self.is_first else None

    def pick(self, microbatch: Microbatch) -> dict[str, Any]:
        """What this stage needs of a microbatch."""
        picked = {key: microbatch[key] for key in _KEYS if microbatch.get(key) is not None}
        cu_seqlens = microbatch.get("cu_seqlens")
        if cu_seqlens is not None:
            if not self.family.packs:
                raise ConfigError(
                    f"cu_seqlens: model_type={self.lm.config.model_type!r} does not keep packed sequences apart; pad "
                    "them instead (attention_mask)"
                )
            self._require_short(microbatch)
            picked.setdefault("position_ids", positions(cu_seqlens))
            picked["is_packed"] = True
            if self._rotary:
                picked["sample_lengths"] = sample_lengths(cu_seqlens, picked["position_ids"])
            if uses_flash(self.lm.config):
                longest = int(cu_seqlens.diff().max())
                picked |= {f"cu_seq_lens_{side}": cu_seqlens for side in "qk"}
                picked |= {f"max_length_{side}": longest for side in "qk"}
        return picked

    def _require_short(self, microbatch: Microbatch) -> None:
        most, ids = self.family.packs_up_to, microbatch.get("input_ids")
        if most is not None and isinstance(ids, Tensor) and ids.shape[-1] > most:
            raise ConfigError(
                f"cu_seqlens in rows of {ids.shape[-1]} tokens: model_type={self.lm.config.model_type!r} keeps packed "
                f"sequences apart in rows of at most {most} tokens; take shorter rows, or pad them (attention_mask)"
            )

    def refusal(self, microbatch: Microbatch) -> str | None:
        """Why this stage cannot run a microbatch."""
        if microbatch.get("input_ids") is None:
            return f"a microbatch has {sorted(microbatch)}: every stage of a Hugging Face model needs 'input_ids'"
        if self.is_first and (reason := _wrong_tokens(microbatch, self._num_tokens)) is not None:
            return reason  # to all ranks: the others need not look
        length = microbatch["input_ids"].shape[-1] if self.sequence_parts > 1 else 0
        if length % self.sequence_parts == 0:
            return None
        return (
            f"a microbatch has sequences of {length} tokens: with sequence_parallel tp={self.sequence_parts} must "
            "divide that; pad them (attention_mask, labels of -100)"
        )

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        if self._balance is None:
            return self._forward(inputs, **kwargs)
        *states, sums = (*inputs, self._balance.start(kwargs["input_ids"].device)) if self.is_first else inputs
        self._gates.caught = []
        try:
            output = self._forward(states, **kwargs)
            sums = self._balance.add(sums, self._gates.caught, kwargs.get("attention_mask"))
        finally:
            self._gates.caught = None
        outputs = output if isinstance(output, tuple) else (output,)
        return (*outputs, self._balance.loss(sums) if self.is_last else sums)

    def _forward(
        self, inputs: Sequence[Tensor], *, is_packed: bool = False, sample_lengths: Tensor | None = None, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        if not self.is_first:
            if not self.layers and not self.is_last:
                return tuple(inputs) if len(inputs) > 1 else inputs[0]
            self._border.received = inputs
            self._blanks.match(inputs[0])
        try:
            ids = kwargs.get("position_ids")
            apart = nullcontext() if sample_lengths is None else factors_per_sample(self._rotary, sample_lengths)
            with packed_masks(ids) if is_packed or ids is None else nullcontext(), apart:
                output = self._run(kwargs)
        except Reached as end:
            return end.values if len(end.values) > 1 else end.values[0]
        finally:
            self._border.clear()
        if not self.is_last:
            raise EngineError(f"stage {self.stage} ran past its end: layer {self.layers.stop} was never called")
        return output

    def _run(self, kwargs: dict[str, Any]) -> Tensor:
        if getattr(self.lm.config, "output_router_logits", False):
            kwargs["output_router_logits"] = False  # they are caught on every stage, and the loss is made of all
        if self.head == "lm":
            return self.lm(use_cache=False, **kwargs).logits
        hidden = self._base(use_cache=False, **kwargs).last_hidden_state
        return self.score(hidden) if self.is_last else hidden

    def full_name(self, name: str) -> str:
        """The name of one of this stage's parameters (or modules) in the whole model."""
        return name.removeprefix("lm.")

    def full_names(self) -> dict[str, str]:
        """This stage's parameters, by their name here: their name in the whole model."""
        return {name: self.full_name(name) for name, _ in self.named_parameters(remove_duplicate=False)}


def positions(cu_seqlens: Tensor) -> Tensor:
    """Position ids of packed sequences (1, tokens): counting starts anew where a sequence starts."""
    lengths = cu_seqlens.diff()
    starts = torch.repeat_interleave(cu_seqlens[:-1], lengths)
    return (torch.arange(len(starts), device=cu_seqlens.device) - starts)[None]


def sample_lengths(cu_seqlens: Tensor, position_ids: Tensor) -> Tensor:
    """For each token of packed rows how long its sequence is: its last position, and one more."""
    lengths = cu_seqlens.diff()
    number = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    last = torch.zeros(len(lengths), dtype=position_ids.dtype, device=lengths.device)
    last.scatter_reduce_(0, number, position_ids.reshape(-1, len(number)).amax(0), "amax")
    return (last[number] + 1).view(position_ids.shape[-2:])


def _no_ids(ids: Any) -> str | None:
    """What token ids are, in words, where they are no table of whole numbers."""
    if not isinstance(ids, Tensor):
        return f"that are a {type(ids).__name__}"
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        return f"of {ids.dtype}"
    return None if ids.dim() == 2 and ids.numel() else f"of shape {tuple(ids.shape)}"


def _wrong_tokens(microbatch: Microbatch, number: int) -> str | None:
    """What is wrong with a microbatch for a model that knows so many tokens; on a GPU nobody waits to look."""
    ids, mask = microbatch["input_ids"], microbatch.get("attention_mask")
    if (seen := _no_ids(ids)) is not None:
        return f"a microbatch has input_ids {seen}: give a Tensor of whole numbers, (sequences, tokens)"
    if mask is not None and mask.dim() == 2 and mask.shape != ids.shape:
        return f"a microbatch has an attention_mask of {tuple(mask.shape)} and input_ids of {tuple(ids.shape)}"
    if ids.device.type != "cpu":
        return None
    least, most = (int(end) for end in ids.aminmax())
    wrong = least if least < 0 else most
    return None if 0 <= wrong < number else f"a microbatch has token id {wrong}: the model knows 0 to {number - 1}"


def _weight(lm: nn.Module, module: nn.Module | None) -> str:
    """The name of a module's weight; nothing if there is no such module."""
    own = next((name for name, other in lm.named_modules() if other is module), None)
    return "" if own is None else f"{own}.weight"


def same_names(module: nn.Module, first: str = "") -> list[list[str]]:
    """The names of parameters that are one, `first` before the others."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(names, key=lambda name: name != first) for names in groups.values() if len(names) > 1]


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
