"""A stage cut from a Hugging Face decoder model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.contract import Microbatch, Targets, TokenLosses
from zeropipe.engine.stages.cut import StageEnd, StageStart, ZeroWeights, cut_layers
from zeropipe.engine.stages.families import Family
from zeropipe.engine.stages.packed_attention import PackedAttention, Samples
from zeropipe.engine.stages.packing import Packing, require_packable
from zeropipe.engine.stages.router_loss import RouterLoss
from zeropipe.errors import ConfigError, EngineError

# inputs that every stage takes from a microbatch: each makes its own masks and rotary embeddings
_INPUTS = (
    "input_ids", "attention_mask", "position_ids", "token_type_ids",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip


class HFStage(nn.Module):
    """Some layers of a model; the first stage embeds `input_ids`, the last returns logits (or scores).

    With `output_router_logits=True` in its config, the last stage of a mixture of experts returns (logits, its
    load-balancing loss), which CausalLMLoss adds to the mean loss of the tokens.

    Called with the outputs of the previous stage (nothing for the first) and what `pick` takes from the microbatch.
    Its modules have the names, and its layers the indices, that they have in the full model.
    """

    sequence_shards = 1  # number of processes of tp that share each sequence
    # computes the losses of `targets` by running the model up to its head; set by the engine
    fused_head: Callable[[Callable[[], Tensor], Targets], TokenLosses] | None = None
    autocast: torch.dtype | None = None  # of F; set by a trainer whose adapters are wider than the model
    slices: Any = None  # in a schedule with slices, what they keep (stages.slices.StageSlices)
    context: Any = None  # with cp, this process's part of every sequence (mesh.cp_stage.ContextPart)

    def __init__(
        self,
        lm: nn.Module,
        family: Family,
        cut: tuple[range, ...],
        stage: int,
        head: str = "lm",
        attention: PackedAttention | None = None,
    ) -> None:
        super().__init__()
        self.lm, self.family, self.full_config = lm, family, lm.config
        self.cut, self.stage, self.head = cut, stage, head
        self.is_first, self.is_last = stage == 0, stage == len(cut) - 1
        self.tied_pairs: tuple[tuple[str, int, str], ...] = ()
        self._start, self._zero_weights = StageStart(family.carried), ZeroWeights()
        self._embedding, self._head = (
            _weight_name(lm, end()) for end in (lm.get_input_embeddings, lm.get_output_embeddings)
        )
        parameters = dict(lm.named_parameters(remove_duplicate=False))
        self._num_tokens = len(parameters[self._embedding])
        self.has_tied_ends = head == "lm" and parameters.get(self._head) is parameters[self._embedding]
        all_layers = list(lm.get_submodule(family.layers).children())
        self.blocks = [all_layers[index] for index in self.layers]
        self._remove_other_stages(parameters)
        self._packing = Packing(lm, attention)
        self._router_loss = RouterLoss(lm, self._base, self.blocks) if family.has_router_loss and head == "lm" else None
        if self.is_last and head == "score":
            weight = next(lm.parameters())
            size = lm.config.get_text_config().hidden_size
            self.score = nn.Linear(size, lm.config.num_labels, bias=False, device=weight.device, dtype=weight.dtype)
        self.copied_buffers = self._find_copied_buffers(parameters)
        embedding = self.tied_names[0]
        self._shared = [
            names for names in find_shared_parameters(self, embedding) if self.is_first or names[0] != embedding
        ]

    def _remove_other_stages(self, parameters: dict[str, nn.Parameter]) -> None:
        """Keep the layers and parameters of this stage only."""
        family, cut = self.family, self.cut
        if len(cut) > 1 and not family.allows_empty_ends and not (cut[0] and cut[-1]):
            raise ConfigError(
                f"layers={[len(layers) for layers in cut]}: the first and the last stage must have a layer with "
                f"model_type={self.lm.config.model_type!r}"
            )
        cut_layers(
            self.lm.get_submodule(family.layers),
            self.layers,
            self._start,
            carried=family.carried,
            output_length=family.output_length,
            is_first=self.is_first,
            is_last=self.is_last,
        )
        base = f"{family.base}."
        for name in parameters:
            if name.startswith(f"{family.layers}."):
                continue
            is_kept = family.stage_of(name, cut) == self.stage and (self.head == "lm" or name.startswith(base))
            # A tied head is filled as the embedding: `tie` removes the embedding afterwards.
            if not is_kept and not (self.is_tied and name == self._embedding):
                self._zero_weights.replace(self.lm, name)

    def _find_copied_buffers(self, parameters: Iterable[str]) -> frozenset[str]:
        """Buffers outside the layers that belong to another stage: copies, which are not saved."""
        layers = f"{self.family.layers}."
        outside = [name for name in parameters if not name.startswith(layers)]
        buffers = [name for name, _ in self.lm.named_buffers(remove_duplicate=False) if not name.startswith(layers)]
        return frozenset(f"lm.{name}" for name in buffers if self._stage_of_buffer(name, outside) != self.stage)

    def _stage_of_buffer(self, buffer: str, parameters: Sequence[str]) -> int:
        """The stage that a buffer belongs to: that of the parameters in the innermost module around it."""
        near, module = parameters, buffer
        while module:
            module = module.rpartition(".")[0]
            near = [name for name in parameters if name.startswith(f"{module}.")]
            if near:
                break
        return min((self.family.stage_of(name, self.cut) for name in near or parameters), default=0)

    @contextmanager
    def own_layers_only(self) -> Iterator[None]:
        """Hide the placeholders for the layers of other stages."""
        layers = self.lm.get_submodule(self.family.layers)
        modules = layers._modules
        layers._modules = {name: layer for name, layer in modules.items() if int(name) in self.layers}
        try:
            yield
        finally:
            layers._modules = modules

    @property
    def _base(self) -> nn.Module:
        """The model without its head."""
        return self.lm.get_submodule(self.family.base)

    @property
    def packing(self) -> Packing:
        """How it keeps packed samples apart."""
        return self._packing

    @property
    def layers(self) -> range:
        """The indices of its layers in the full model."""
        return self.cut[self.stage]

    @property
    def is_tied(self) -> bool:
        """Whether this stage has a head that is tied to the embedding."""
        return self.is_last and self.has_tied_ends

    def tie(self, embedding: nn.Parameter | None = None) -> None:
        """Tie the parameters that are one in the full model, after they were given memory and values.

        `embedding` is the first stage's, if that stage is on this rank.
        """
        for first, *others in self._shared:
            for name in others:
                _set_parameter(self, name, self.get_parameter(first))
        if not self.is_tied or self.is_first:
            return
        own, head = self.tied_names
        _set_parameter(self, head, self.get_parameter(own) if embedding is None else embedding)
        if self._embedding in dict(self.lm.named_parameters(remove_duplicate=False)):
            self._zero_weights.replace(self.lm, self._embedding)

    @property
    def tied_names(self) -> tuple[str, str]:
        """Names of the embedding's weight in the first stage, and of the head's in the last."""
        return f"lm.{self._embedding}", f"lm.{self._head}"

    @property
    def embedding(self) -> nn.Parameter | None:
        """The embedding's weight, on the first stage."""
        return self.lm.get_parameter(self._embedding) if self.is_first else None

    def pick(self, microbatch: Microbatch) -> dict[str, Any]:
        """The inputs that this stage takes from a microbatch."""
        inputs = {key: microbatch[key] for key in _INPUTS if microbatch.get(key) is not None}
        cu_seqlens = microbatch.get("cu_seqlens")
        if cu_seqlens is not None:
            require_packable(self.family, self.lm.config, microbatch)
            inputs |= self._packing.inputs(cu_seqlens, inputs.get("position_ids"))
        if self.slices is not None:
            return self.slices.pick(inputs, microbatch.get("slice"))
        return inputs if self.context is None else self.context.pick(inputs)

    def refusal(self, microbatch: Microbatch) -> str | None:
        """Why this stage cannot run a microbatch; None if it can."""
        if microbatch.get("input_ids") is None:
            return f"a microbatch has the keys {sorted(microbatch)}: must have 'input_ids' for a Hugging Face model"
        if self.is_first and (reason := _check_tokens(microbatch, self._num_tokens)) is not None:
            return reason  # raised on all ranks, so that the others need not check
        if self.slices is not None:
            return self.slices.refusal(microbatch)
        if self.context is not None:
            return self.context.refusal(microbatch)
        length = microbatch["input_ids"].shape[-1] if self.sequence_shards > 1 else 0
        if length % self.sequence_shards == 0:
            return None
        return (
            f"a microbatch has sequences of {length} tokens: must be a multiple of tp={self.sequence_shards} with "
            "sequence_parallel; pad them (attention_mask, labels of -100)"
        )

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Any:
        router_loss = self._router_loss
        mask = kwargs.pop("token_mask", kwargs.get("attention_mask"))
        if router_loss is None:
            return self._forward(inputs, **kwargs)
        *states, sums = (*inputs, router_loss.zeros(kwargs["input_ids"].device)) if self.is_first else inputs
        router_loss.start()
        try:
            output = self._forward(states, **kwargs)
        finally:
            logits = router_loss.stop()
        sums = router_loss.add(sums, logits, mask)
        outputs = output if type(output) is tuple else (output,)
        if not self.is_last:
            return (*outputs, sums)
        return (*outputs, router_loss.loss(sums if self.context is None else self.context.sum(sums)))

    @property
    def running_state(self) -> Any:
        """What its forward has collected, while it runs."""
        return None if self._router_loss is None else self._router_loss.running_state

    @running_state.setter
    def running_state(self, state: Any) -> None:
        if self._router_loss is not None:
            self._router_loss.running_state = state

    def _forward(
        self,
        inputs: Sequence[Tensor],
        *,
        is_packed: bool = False,
        sample_lengths: Tensor | None = None,
        samples: Samples | None = None,
        row_positions: Tensor | None = None,
        row_length: int = 0,
        part: Any = None,
        **kwargs: Any,
    ) -> Tensor | TokenLosses | tuple[Tensor, ...]:
        if not self.is_first:
            if not self.layers and not self.is_last:
                return tuple(inputs) if len(inputs) > 1 else inputs[0]
            self._start.received = inputs
            self._zero_weights.match(inputs[0])
        try:
            if self.slices is not None:
                rows = self.slices.rows(part, row_length, row_positions, is_packed, sample_lengths)
            elif self.context is not None:
                length = kwargs["input_ids"].shape[-1]
                rows = self.context.whole_rows(length, row_positions, is_packed, sample_lengths, samples)
            else:
                rows = self._packing.separate_samples(kwargs.get("position_ids"), is_packed, sample_lengths, samples)
            with rows:
                output = self._run(kwargs)
        except StageEnd as end:
            return end.values if len(end.values) > 1 else end.values[0]
        finally:
            self._start.clear()
        if not self.is_last:
            raise EngineError(f"stage {self.stage} ran past its end: layer {self.layers.stop} was never called")
        return output

    def _run(self, kwargs: dict[str, Any]) -> Tensor | TokenLosses:
        if self.autocast is None:
            return self._run_model(kwargs)
        with torch.autocast(kwargs["input_ids"].device.type, self.autocast):
            return self._run_model(kwargs)

    def _run_model(self, kwargs: dict[str, Any]) -> Tensor | TokenLosses:
        if getattr(self.lm.config, "output_router_logits", False):
            kwargs["output_router_logits"] = False  # RouterLoss collects them on every stage
        if self.head == "lm":
            targets: Targets | None = kwargs.pop("targets", None)
            run = partial(self._logits, kwargs)
            return run() if targets is None or self.fused_head is None else self.fused_head(run, targets)
        hidden = self._base(use_cache=False, **kwargs).last_hidden_state
        return self.score(hidden) if self.is_last else hidden

    def _logits(self, kwargs: dict[str, Any]) -> Tensor:
        return self.lm(use_cache=False, **kwargs).logits

    def full_name(self, name: str) -> str:
        """The name of one of this stage's parameters (or modules) in the full model."""
        return name.removeprefix("lm.")

    def full_names(self) -> dict[str, str]:
        """Parameter name in this stage -> name in the full model."""
        return {name: self.full_name(name) for name, _ in self.named_parameters(remove_duplicate=False)}


def _check_tokens(microbatch: Microbatch, vocabulary_size: int) -> str | None:
    """What is wrong with the tokens of a microbatch. Token ids on a GPU are not read: that would wait for it."""
    ids, mask = microbatch["input_ids"], microbatch.get("attention_mask")
    if not isinstance(ids, Tensor):
        return f"a microbatch has input_ids of type {type(ids).__name__}: must be an integer Tensor (sequences, tokens)"
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.dim() != 2 or not ids.numel():
        return (
            f"a microbatch has input_ids of {ids.dtype} and shape {tuple(ids.shape)}: must be an integer Tensor "
            "(sequences, tokens)"
        )
    if mask is not None and mask.dim() == 2 and mask.shape != ids.shape:
        return (
            f"a microbatch has an attention_mask of shape {tuple(mask.shape)}: must have the shape of input_ids, "
            f"{tuple(ids.shape)}"
        )
    if ids.device.type != "cpu":
        return None
    smallest, largest = (int(end) for end in ids.aminmax())
    worst = smallest if smallest < 0 else largest
    return (
        None
        if 0 <= worst < vocabulary_size
        else f"a microbatch has token id {worst}: must be from 0 to {vocabulary_size - 1}, the model's vocabulary"
    )


def _weight_name(lm: nn.Module, module: nn.Module | None) -> str:
    """The name of a module's weight; empty if there is no such module."""
    own = next((name for name, other in lm.named_modules() if other is module), None)
    return "" if own is None else f"{own}.weight"


def find_shared_parameters(module: nn.Module, first: str = "") -> list[list[str]]:
    """Groups of names of one parameter each; `first` comes first in its group."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(names, key=lambda name: name != first) for names in groups.values() if len(names) > 1]


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
