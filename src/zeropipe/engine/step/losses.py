"""Losses by microbatch, scaled so that the step equals the un-pipelined full batch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isclose
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.gradients import GradientStash
from zeropipe.engine.mesh.cp_stage import ContextPart
from zeropipe.engine.mesh.vocab_parallel import prepare_output, token_entropies, token_losses
from zeropipe.engine.stages.contract import Targets, TokenLosses
from zeropipe.engine.stages.slices import SLICE
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.errors import ConfigError

NO_TOKEN = 2**62  # a label outside of every vocabulary
LossFn = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class CausalLMLoss:
    """Next-token cross entropy of Hugging Face causal models: (sum over tokens, number of tokens).

    The output is the logits, or (logits, a loss that is added to the tokens' mean, like the router loss of a mixture of
    experts). So a step's loss is the mean of the model's own loss over microbatches, weighted by their tokens.

    The microbatch holds `labels`, not shifted; `ignore` marks tokens without loss. `count` returns the number of tokens
    before the step, so microbatches with unequal numbers are weighted as in one large batch.

    Where tensor parallelism shards the head over the vocabulary, the loss is computed from shards of the logits, which
    are never gathered.
    """

    labels: str = "labels"
    ignore: int = -100
    takes_pieces: ClassVar[bool] = True
    takes_parts: ClassVar[bool] = True

    def count(self, microbatch: Mapping[str, Any]) -> int:
        """The number of tokens with a loss."""
        if self.labels not in microbatch:
            raise ConfigError(f"a microbatch has {sorted(microbatch)}: CausalLMLoss needs {self.labels!r}")
        labels = microbatch[self.labels]
        if not isinstance(labels, Tensor):
            raise ConfigError(f"a microbatch has {self.labels} that are a {type(labels).__name__}: must be a Tensor")
        return int((labels[..., 1:] != self.ignore).sum())

    def targets(self, microbatch: Mapping[str, Any]) -> Targets:
        """What a fused head computes losses of."""
        return Targets(_next_tokens(microbatch, self.labels, self.ignore))

    def __call__(
        self, output: Any, microbatch: Mapping[str, Any], part: ContextPart | None = None
    ) -> tuple[Tensor, int | Tensor]:
        found, extra = output if type(output) is tuple else (output, None)
        losses = _losses(found, microbatch, self.labels, self.ignore, part=part).losses
        labels = microbatch[self.labels]
        count = ((labels[..., 1:] if part is None else part.next_labels(labels, self.ignore)) != self.ignore).sum()
        total = losses.sum()
        return total if extra is None else total + extra * count.to(extra.device), count


@dataclass(frozen=True)
class LogProbabilities:
    """The log-probability of each label of a microbatch, (batch, tokens - 1): 0 where the label is `ignore`.

    For `Engine.forward(post=LogProbabilities())`: logits that are sharded over the vocabulary are never gathered. With
    `entropies` the result is (log-probabilities, the entropy of each token's distribution). In a loss of your own,
    `token_losses(logits, labels)` is its negative for labels that you have shifted yourself; a loss with
    `takes_pieces = True` gets sharded logits, any other gets full ones.
    """

    labels: str = "labels"
    ignore: int = -100
    entropies: bool = False
    takes_pieces: ClassVar[bool] = True
    takes_parts: ClassVar[bool] = True

    def targets(self, microbatch: Mapping[str, Any]) -> Targets:
        """What a fused head computes losses of."""
        return Targets(_next_tokens(microbatch, self.labels, self.ignore), entropies=self.entropies)

    def __call__(self, output: Any, microbatch: Mapping[str, Any], part: ContextPart | None = None) -> Any:
        found = output[0] if type(output) is tuple else output
        losses, entropies = _losses(found, microbatch, self.labels, self.ignore, self.entropies, part)
        if part is not None:
            length = microbatch[self.labels].shape[-1]
            losses = part.gather(losses, length)[:, :-1]
            entropies = None if entropies is None else part.gather(entropies, length)[:, :-1]
        return -losses if entropies is None else (-losses, entropies)


def _losses(
    found: Tensor | TokenLosses,
    microbatch: Mapping[str, Any],
    name: str,
    ignore: int,
    entropies: bool = False,
    part: ContextPart | None = None,
) -> TokenLosses:
    """The losses of all tokens but the last of each row, or of a part of the tokens: of a fused head, or of logits."""
    if isinstance(found, TokenLosses):
        return found
    if part is not None:
        labels = _require_shape(part.next_labels(microbatch[name], ignore), found.shape[:-1], name, "logits")
        return TokenLosses(token_losses(found, labels, ignore), token_entropies(found) if entropies else None)
    labels, logits = _labels(found, microbatch, name), found[..., :-1, :]
    return TokenLosses(token_losses(logits, labels, ignore), token_entropies(logits) if entropies else None)


def _labels(logits: Tensor, microbatch: Mapping[str, Any], name: str) -> Tensor:
    """The labels of all tokens but the first: the targets of the tokens before them."""
    return _require_shape(microbatch[name], logits.shape[:-1], name, "logits")[..., 1:]


def _require_shape(labels: Tensor, shape: Sequence[int], name: str, of: str) -> Tensor:
    if tuple(labels.shape) != tuple(shape):
        raise ConfigError(
            f"a microbatch has {name} of {tuple(labels.shape)} for {of} of {tuple(shape)} tokens: must have a label "
            "for each token, not shifted"
        )
    return labels


def _next_tokens(microbatch: Mapping[str, Any], name: str, ignore: int) -> Tensor:
    """The label of the token after each one, -1 for none; an invalid label stays outside of every vocabulary."""
    labels = _require_shape(microbatch[name], microbatch["input_ids"].shape, name, "input_ids").long()
    valid = torch.where(labels < 0, NO_TOKEN, labels)
    following = torch.where(labels == ignore, -1, valid)[..., 1:]
    return nn.functional.pad(following, (0, 1), value=-1)


def find_targets(loss_fn: Any) -> Callable[[Mapping[str, Any]], Targets] | None:
    """The function that says what a fused head computes; None for a loss of logits, also one that inherits it."""
    for kind in type(loss_fn).__mro__:
        if "__call__" in vars(kind):
            return loss_fn.targets if "targets" in vars(kind) else None
    return None


def call_on_output(function: Any, output: Any, microbatch: Mapping[str, Any], part: ContextPart | None) -> Any:
    """Call a loss, or another function, with a last stage's output, in the form that it takes.

    That is full logits, unless it has `takes_pieces = True` (see `prepare_output`). With cp a process has the logits of
    a `part` of the tokens: a function with `takes_parts = True` gets these, and the part as a third argument.
    """
    output = prepare_output(function, output)
    part = microbatch.get(SLICE, part)
    if part is None:
        return function(output, microbatch)
    if takes_parts(function):
        return function(output, microbatch, part)
    return function(part.gather_output(output, microbatch["input_ids"].shape[-1]), microbatch)


def takes_parts(function: Any) -> bool:
    """Whether a loss takes the logits of a part of the tokens."""
    return bool(getattr(function, "takes_parts", False))


@dataclass
class LossAccumulator:
    """The losses of one step on a rank with the last stage.

    A loss function returns a scalar (the mean of its microbatch; all have the same weight), or `(sum, count)`, or
    `(sum, count, metrics)` with metrics summed over the step. With a `count(microbatch)` attribute the total is known
    before the first backward. Without one, gradients are divided at the end of the step (`divides_late`): those of the
    stages, and those of `other_leaves`, which are no parameters of a stage.
    """

    loss_fn: LossFn
    num_microbatches: int  # of all pipelines
    stash: GradientStash = field(default_factory=GradientStash)
    stage_parameters: Container[int] = ()  # ids
    total_count: float | None = None  # of the step, if the loss function has a count()
    part: ContextPart | None = None  # with cp, this process's part of the tokens
    divides_late: bool = False
    other_leaves: dict[int, Tensor] = field(default_factory=dict)
    has_outer_graph: bool = False  # a gradient flowed into a graph of the caller, where it cannot be divided later
    _losses: dict[int, tuple[Tensor, Any, Mapping[str, Any]]] = field(default_factory=dict)

    def add(self, output: Any, microbatch: Mapping[str, Any], index: int) -> Tensor:
        """Compute the loss of one microbatch; returns the scaled loss that backward starts from."""
        if not callable(self.loss_fn):
            raise TypeError(
                f"loss_fn is a {type(self.loss_fn).__name__}: must be a function (output, microbatch) on every rank "
                "that has the last stage"
            )
        value = call_on_output(self.loss_fn, output, microbatch, self.part)
        _check_loss(value, output)
        if isinstance(value, Tensor):
            self._losses[index] = (_detach(value), 1, {})
            return value / self.num_microbatches
        loss, count, *rest = value
        metrics = {name: _detach(amount) for name, amount in (rest[0] if rest else {}).items()}
        self._losses[index] = (_detach(loss), _detach(count), metrics)
        if self.total_count is None:
            self.divides_late = True
            for leaf in torch_autograd.find_loss_leaves(loss, output):
                self.add_input(leaf)
            return loss
        return loss / (self.total_count or 1.0)

    def targets(self, microbatch: Mapping[str, Any]) -> Targets | None:
        """What a fused head computes of a microbatch; None where the loss is of logits."""
        find = find_targets(self.loss_fn)
        if find is None:
            return None
        found = find(microbatch)._replace(factor=1 / self.total_count if self.total_count else None)
        part = microbatch.get(SLICE)
        return found if part is None else found._replace(labels=part.take(found.labels, -1), is_slice=True)

    def add_input(self, tensor: Tensor) -> None:
        """Register a tensor that is no parameter of a stage, before a gradient of this step reaches it."""
        if not tensor.is_leaf:
            self.has_outer_graph = True
        elif id(tensor) not in self.other_leaves and id(tensor) not in self.stage_parameters:
            self.other_leaves[id(tensor)] = tensor
            self.stash.stash([tensor])

    def sums(self) -> LossSums:
        """Loss, count and metrics, summed over this rank's microbatches."""
        metrics: dict[str, float] = {}
        loss = count = 0.0
        for index in sorted(self._losses):
            value, number, extra = self._losses[index]
            loss, count = loss + float(value), count + to_count(number)
            for name, amount in extra.items():
                metrics[name] = metrics.get(name, 0.0) + float(amount)
        return loss, count, metrics, self.divides_late


def _detach(number: Any) -> Any:
    """A copy of a number: without its graph, and unchanged if the loss modifies its tensor later."""
    return number.detach().clone() if isinstance(number, Tensor) else number


def _numbers(rest: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The count and the metrics of a loss, with their names."""
    if rest:
        yield "the count", rest[0]
    if len(rest) == 2:
        if not isinstance(rest[1], Mapping):
            raise TypeError(f"the metrics of the loss are a {type(rest[1]).__name__}: must be a dict of numbers")
        yield from ((f"the metric {name!r}", number) for name, number in rest[1].items())


def to_count(count: Any) -> float:
    """A count as a float; ConfigError unless it is finite and not negative."""
    number = float(count)
    if not 0 <= number < inf:
        raise ConfigError(f"the count of the loss is {number:g}: must be a non-negative number")
    return number


def require_counted(result: StepResult, total: float | None) -> None:
    """ConfigError where a loss counts another number than its `count()`: gradients would be scaled wrongly."""
    if total is not None and not isclose(result.count, total, rel_tol=1e-4):
        raise ConfigError(
            f"the loss counted {result.count:g} in this step, its count() returned {total:g} before: both must "
            "be the same, and a loss with a count() must return (sum, count)"
        )


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__")


def require_gradient(loss: Tensor, output: Any) -> None:
    """TypeError for a loss without a gradient whose output has one: it would train nothing."""
    needs_grad = any(one.requires_grad for one in torch_tensors.tensors_in(output))
    # a plain 0 is valid: the loss of a microbatch in which no token has one
    if needs_grad and not loss.requires_grad and float(loss) != 0:
        raise TypeError(
            "the loss has no gradient, so that nothing would learn: make it of the stage's output, without detach(), "
            "item() or no_grad()"
        )


def _check_loss(value: Any, output: Any) -> None:
    loss, *rest = value if isinstance(value, tuple) and len(value) in (2, 3) else (value,)
    for what, number in _numbers(rest):
        if not _is_number(number):
            shape = f" of shape {list(number.shape)}" if isinstance(number, Tensor) else ""
            raise TypeError(f"{what} of the loss is a {type(number).__name__}{shape}: must be a number")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        require_gradient(loss, output)
        return
    what = f"a Tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise TypeError(f"the loss is {what}: return a scalar Tensor (a mean), (sum, count), or (sum, count, metrics)")


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank."""

    loss: float  # per count: the full batch's loss
    count: float  # tokens, or microbatches where the loss function returns a mean
    metrics: Mapping[str, float]  # summed over microbatches


LossSums = tuple[float, float, dict[str, float], bool]  # loss, count, metrics, divides_late


def combine_losses(everyone: Sequence[LossSums | None]) -> tuple[StepResult, bool]:
    """The result from all ranks' sums (None: not counted), and whether gradients have to be divided by the count."""
    parts = [sums for sums in everyone if sums is not None]
    metrics: dict[str, float] = {}
    for _, _, extra, _ in parts:
        for name, amount in extra.items():
            metrics[name] = metrics.get(name, 0.0) + amount
    count = sum(part[1] for part in parts)
    return StepResult(sum(part[0] for part in parts) / (count or 1.0), count, metrics), any(p[3] for p in parts)
