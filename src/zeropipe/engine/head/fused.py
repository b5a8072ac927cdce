"""The head of a stage whose losses are computed in chunks, and how that is verified on a small copy of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.head.cross_entropy import ChunkedCrossEntropy, HeadCall
from zeropipe.engine.head.logits import LogitsRule
from zeropipe.engine.head.passes import PLAIN, ChunkPasses
from zeropipe.engine.head.terms import head_terms, own_layer, refuse_head
from zeropipe.engine.mesh.tp_collectives import TPGroup
from zeropipe.engine.mesh.vocab_parallel import shard_logits, token_entropies, token_losses
from zeropipe.engine.stages.contract import Targets, TokenLosses
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.verify import build_small_stage, is_close, isolated_torch_state, rounding_error
from zeropipe.engine.torch_private.autograd import has_grad_hooks

RunModel = Callable[[], Tensor]  # the model of a stage from its first layer to its logits


class _HeadReached(Exception):
    """Raised where a model calls its head, to leave its forward."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the head of a model")
        self.hidden = hidden


class FusedHead:
    """The losses of a last stage: its model runs up to the head, whose logits are made and used in chunks.

    `in_forward`: F makes the weight gradients, too, wherever the loss says beforehand how it uses each token's.
    """

    def __init__(self, lm: Any, rule: LogitsRule, passes: ChunkPasses = PLAIN, *, in_forward: bool = False) -> None:
        self._lm, self._head = lm, lm.get_output_embeddings()
        self._rule, self._passes, self._in_forward = rule, passes, in_forward
        self._is_running = False
        # after the hooks that gather the input or sum its gradient: a hook runs after those registered before it
        self._hook = self._head.register_forward_pre_hook(self._leave, with_kwargs=True)

    def close(self) -> None:
        """Remove the hook of the head."""
        self._hook.remove()

    def _leave(self, head: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_running:
            raise _HeadReached(args[0] if args else next(iter(kwargs.values())))

    def __call__(self, run: RunModel, targets: Targets) -> TokenLosses:
        """The losses of all tokens but the last of each row."""
        layer: Any = own_layer(self._head)
        group = _vocabulary_mesh(layer)
        has_hooks = self._head._forward_hooks or self._lm._forward_hooks
        if has_hooks or any(map(has_grad_hooks, self._head.parameters())):
            return _whole_losses(shard_logits(run(), group), targets)
        self._is_running = True
        try:
            run()
        except _HeadReached as reached:
            hidden = reached.hidden
        finally:
            self._is_running = False
        return self._losses(hidden, targets, None if group is None else TPGroup.from_mesh(group))

    def _losses(self, hidden: Tensor, targets: Targets, group: TPGroup | None) -> TokenLosses:
        if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        terms, bias = head_terms(self._head, hidden.flatten(0, -2))
        call = HeadCall(
            self._rule, self._passes, tuple(term.parameter for term in terms), group, targets.entropies,
            targets.factor, self._in_forward and targets.factor is not None, torch.is_grad_enabled(),
        )  # fmt: skip
        losses, entropies = ChunkedCrossEntropy.apply(
            call, targets.labels.flatten(), None if bias is None else to_local(bias),
            *(term.x for term in terms), *(to_local(term.parameter) for term in terms),
        )  # fmt: skip
        shape, end = targets.labels.shape, None if targets.is_slice else -1
        found = losses.view(shape)[:, :end].clone()  # FSDP2 warns of views
        return TokenLosses(found, None if entropies is None else entropies.view(shape)[:, :end].clone())


def _vocabulary_mesh(layer: Any) -> Any:
    """The mesh over which the rows of a head's weight are sharded; None if they are not."""
    weight = layer._parameters.get("weight")
    return weight.device_mesh if isinstance(weight, DTensor) else None


def _whole_losses(logits: Tensor, targets: Targets) -> TokenLosses:
    """The same of whole logits."""
    end = None if targets.is_slice else -1
    logits, labels = logits[..., :end, :], targets.labels[:, :end]
    return TokenLosses(token_losses(logits, labels, -1), token_entropies(logits) if targets.entropies else None)


# how it is found out whether a model's head can be fused

_cache: dict[str, LogitsRule | str] = {}  # by config: a rule, or why there is none
PROBE_LIMIT, PROBE_TOLERANCE = 60.0, 1e-5


def find_rule(stage: HFStage) -> LogitsRule | str:
    """What the model of a stage does to the products of its head, verified; or why its logits stay whole."""
    reason = refuse_head(stage.lm.get_output_embeddings())
    if reason is not None:
        return reason
    key = json.dumps(stage.full_config.to_dict(), sort_keys=True, default=str)
    if key not in _cache:
        try:
            _cache[key] = _verified_rule(stage)
        except Exception as error:
            _cache[key] = f"a small copy of it does not run without its head ({type(error).__name__})"
    return _cache[key]


def _verified_rule(stage: HFStage) -> LogitsRule | str:
    small = build_small_stage(stage.full_config, stage.family, 1)
    with isolated_torch_state():
        reason = refuse_head(small.lm.get_output_embeddings())
        if reason is not None:
            return reason
        rule = _detect_rule(small, stage.full_config)
        if rule is None:
            return "its logits are another function of the products of its head"
        return rule if _has_same_losses(small, rule) else "losses in chunks differ from those of its logits"


def _batch(stage: HFStage) -> dict[str, Tensor]:
    size = stage.lm.get_input_embeddings().weight.shape[0]
    ids = torch.randint(min(5, size - 1), size, (2, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids}


def _detect_rule(stage: HFStage, config: Any) -> LogitsRule | None:
    """Replace the output of the head by known numbers: the rule that makes the logits of them."""
    calls: list[Tensor] = []

    def replace(head: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(torch.linspace(-PROBE_LIMIT, PROBE_LIMIT, output.numel()).view_as(output).to(output))
        return calls[-1]

    hook = stage.lm.get_output_embeddings().register_forward_hook(replace)
    try:
        with torch.no_grad():
            logits = stage(**stage.pick(_batch(stage)))
    finally:
        hook.remove()
    logits = logits[0] if isinstance(logits, tuple) else logits
    if len(calls) != 1 or logits.shape != calls[0].shape:
        return None
    for rule in _candidates(stage.full_config, config):
        error = (rule.apply(calls[0]) - logits).abs().max()
        if error <= PROBE_TOLERANCE * logits.abs().max():
            return rule
    return None


def _candidates(small: Any, full: Any) -> Iterator[LogitsRule]:
    """Scales and soft-caps that a config has; only fields that do not depend on the size of the copy."""
    fields, full_fields = small.get_text_config().to_dict(), full.get_text_config().to_dict()
    numbers = {
        name: float(value)
        for name, value in fields.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        and full_fields.get(name) == value
    }  # fmt: skip
    caps = [None, *dict.fromkeys(value for name, value in numbers.items() if "cap" in name)]
    scales = dict.fromkeys(scale for value in numbers.values() for scale in (value, 1 / value))
    for cap in caps:
        for scale in (1.0, *scales):
            yield LogitsRule(scale, cap)


def _has_same_losses(stage: HFStage, rule: LogitsRule) -> bool:
    """Whether losses, entropies and gradients in chunks are those of whole logits."""
    ids = _batch(stage)["input_ids"]
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
    labels[0, 2] = -1
    targets = Targets(labels, factor=None, entropies=True)
    results = []
    for fused in (None, FusedHead(stage.lm, rule)):
        stage.zero_grad()
        stage.fused_head = fused or (lambda run, targets: _whole_losses(run(), targets))
        output = stage(**stage.pick({"input_ids": ids}), targets=targets)
        found: TokenLosses = output if isinstance(output, TokenLosses) else output[0]
        assert found.entropies is not None
        weights = torch.linspace(0.5, 2.0, found.losses.numel()).view_as(found.losses)
        (found.losses * weights).sum().backward()
        gradients = [parameter.grad for parameter in stage.parameters()]
        results.append((found.losses.detach(), found.entropies.detach(), gradients))
        if fused is not None:
            fused.close()
    stage.fused_head = None
    (losses, entropies, wanted), (own_losses, own_entropies, gradients) = results
    zero = rounding_error(wanted)
    return (
        is_close(own_losses, losses) and is_close(own_entropies, entropies)
        and all(is_close(one, other, zero) for one, other in zip(gradients, wanted))
    )  # fmt: skip


def fuse_head(stage: nn.Module, passes: ChunkPasses, *, in_forward: bool) -> str | None:
    """Let a last stage compute its losses in chunks; returns why it cannot, or None."""
    if not isinstance(stage, HFStage) or not stage.is_last or stage.head != "lm":
        return None
    found = find_rule(stage)
    if isinstance(found, str):
        return found
    if isinstance(stage.fused_head, FusedHead):
        stage.fused_head.close()
    stage.fused_head = FusedHead(stage.lm, found, passes, in_forward=in_forward)
    return None
