"""Losses by microbatch, scaled so that the step equals the un-pipelined full batch."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isclose
from typing import Any, ClassVar

from torch import Tensor

from zeropipe.engine.backward.gradients import GradientStash
from zeropipe.engine.mesh.vocabulary import shown_to, token_losses
from zeropipe.engine.torch_private import autograd as torch_autograd
from zeropipe.engine.torch_private import tensors as torch_tensors
from zeropipe.errors import ConfigError

LossFn = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class CausalLMLoss:
    """Next-token cross entropy of Hugging Face causal models: a sum over tokens, and how many there were.

    The output is the logits, or (logits, a loss to be added to the tokens' mean): that of the routers of a mixture of
    experts. So a step's loss is the mean of what the model's own loss is for each microbatch, weighed by its tokens.

    The microbatch holds `labels`, not shifted; `ignore` marks tokens without loss. Because `count` tells the number of
    tokens before the step, microbatches with unequal numbers weigh as they do in one big batch.

    Where tensor parallelism spreads the head over the vocabulary, the loss is computed from pieces: logits are never
    put together.
    """

    labels: str = "labels"
    ignore: int = -100
    takes_pieces: ClassVar[bool] = True

    def count(self, microbatch: Mapping[str, Any]) -> int:
        """The number of tokens with a loss."""
        if self.labels not in microbatch:
            raise ConfigError(f"a microbatch has {sorted(microbatch)}: CausalLMLoss needs {self.labels!r}")
        labels = microbatch[self.labels]
        if not isinstance(labels, Tensor):
            raise ConfigError(f"a microbatch has {self.labels} that are a {type(labels).__name__}: give a Tensor")
        return int((labels[..., 1:] != self.ignore).sum())

    def __call__(
        self, output: Tensor | tuple[Tensor, Tensor], microbatch: Mapping[str, Any]
    ) -> tuple[Tensor, int | Tensor]:
        logits, more = output if isinstance(output, tuple) else (output, None)
        labels = _labels(logits, microbatch, self.labels)
        total = token_losses(logits[..., :-1, :], labels, self.ignore).sum()
        count = (labels != self.ignore).sum()
        return total if more is None else total + more * count.to(more.device), count


@dataclass(frozen=True)
class LogProbabilities:
    """The log-probability of each label of a microbatch, (batch, tokens - 1): 0 where the label is `ignore`.

    For `Engine.forward(post=LogProbabilities())`: logits that are spread over the vocabulary are never put together.
    In a loss of your own, `token_losses(logits, labels)` is its negative for labels that you have shifted yourself;
    with `takes_pieces = True` on the loss it is given logits as they are, else they are put together for it.
    """

    labels: str = "labels"
    ignore: int = -100
    takes_pieces: ClassVar[bool] = True

    def __call__(self, output: Tensor | tuple[Tensor, Tensor], microbatch: Mapping[str, Any]) -> Tensor:
        logits = output[0] if isinstance(output, tuple) else output
        return -token_losses(logits[..., :-1, :], _labels(logits, microbatch, self.labels), self.ignore)


def _labels(logits: Tensor, microbatch: Mapping[str, Any], name: str) -> Tensor:
    """Those of all tokens but the first: what each token before is to predict."""
    labels = microbatch[name]
    if labels.shape != logits.shape[:-1]:
        raise ConfigError(
            f"a microbatch has {name} of {tuple(labels.shape)} for logits of {tuple(logits.shape[:-1])} tokens: give a "
            "label for each token, not shifted"
        )
    return labels[..., 1:]


@dataclass
class Tally:
    """The losses of one step on a rank with the last stage.

    A loss function returns a scalar (the mean of its microbatch; all weigh the same), or `(sum, count)`, or
    `(sum, count, metrics)` with metrics summed over the step. With a `count(microbatch)` attribute the total is known
    before the first backward; without one, gradients are divided at the end of the step (`late`): those of the stages,
    and those of `outside`, leaves that are no parameters of a stage.
    """

    loss_fn: LossFn
    num_microbatches: int  # of all pipelines
    stash: GradientStash = field(default_factory=GradientStash)
    own: Container[int] = ()  # ids of the stages' parameters
    total: float | None = None  # the step's count, if the loss function tells it beforehand
    late: bool = False
    outside: dict[int, Tensor] = field(default_factory=dict)
    not_leaf: bool = False  # a gradient left for a graph of the caller's, where it cannot be divided later
    _seen: dict[int, tuple[Tensor, Any, Mapping[str, Any]]] = field(default_factory=dict)

    def root(self, output: Any, microbatch: Mapping[str, Any], index: int) -> Tensor:
        """Compute the loss of one microbatch; returns what backward starts from."""
        if not callable(self.loss_fn):
            raise TypeError(
                f"loss_fn is a {type(self.loss_fn).__name__}: give a function (output, microbatch) on every rank that "
                "has the last stage"
            )
        value = self.loss_fn(shown_to(self.loss_fn, output), microbatch)
        _check_loss(value, output)
        if isinstance(value, Tensor):
            self._seen[index] = (_own(value), 1, {})
            return value / self.num_microbatches
        loss, count, *rest = value
        metrics = {name: _own(amount) for name, amount in (rest[0] if rest else {}).items()}
        self._seen[index] = (_own(loss), _own(count), metrics)
        if self.total is None:
            self.late = True
            for leaf in torch_autograd.leaves_between(loss, output):
                self.see(leaf)
            return loss
        return loss / (self.total or 1.0)

    def see(self, tensor: Tensor) -> None:
        """A tensor outside the stages, before a gradient of this step reaches it."""
        if not tensor.is_leaf:
            self.not_leaf = True
        elif id(tensor) not in self.outside and id(tensor) not in self.own:
            self.outside[id(tensor)] = tensor
            self.stash.stash([tensor])

    def sums(self) -> Sums:
        """Loss, count and metrics, summed over this rank's microbatches."""
        metrics: dict[str, float] = {}
        loss = count = 0.0
        for index in sorted(self._seen):
            value, number, extra = self._seen[index]
            loss, count = loss + float(value), count + number_of(number)
            for name, amount in extra.items():
                metrics[name] = metrics.get(name, 0.0) + float(amount)
        return loss, count, metrics, self.late


def _own(number: Any) -> Any:
    """A number that keeps neither the graph it came from alive nor changes with a tensor that the loss goes on with."""
    return number.detach().clone() if isinstance(number, Tensor) else number


def _numbers(rest: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """What a loss gives beside itself."""
    if rest:
        yield "the count", rest[0]
    if len(rest) == 2:
        if not isinstance(rest[1], Mapping):
            raise TypeError(f"the metrics of the loss are a {type(rest[1]).__name__}: give a dict of numbers")
        yield from ((f"the metric {name!r}", number) for name, number in rest[1].items())


def number_of(count: Any) -> float:
    """A count as a number; ConfigError for one that nothing can be divided by in earnest."""
    number = float(count)
    if not 0 <= number < inf:
        raise ConfigError(f"the count of the loss is {number:g}: give a number from 0 on")
    return number


def require_counted(result: StepResult, total: float | None) -> None:
    """ConfigError where a loss counts otherwise than its `count()` said: gradients would be those of another loss."""
    if total is not None and not isclose(result.count, total, rel_tol=1e-4):
        raise ConfigError(
            f"the loss counted {result.count:g} in this step, its count() said {total:g} before: let both give the "
            "same, and let a loss with a count() return (sum, count)"
        )


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__")


def require_gradient(loss: Tensor, output: Any) -> None:
    """TypeError for a loss that teaches nothing, though its output could learn."""
    needs_grad = any(one.requires_grad for one in torch_tensors.tensors_in(output))
    # a plain 0 is fine: that of a microbatch in which nothing has a loss
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
            raise TypeError(f"{what} of the loss is a {type(number).__name__}{shape}: give a number")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        require_gradient(loss, output)
        return
    what = f"a Tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise TypeError(f"the loss is {what}: return a scalar Tensor (a mean), (sum, count), or (sum, count, metrics)")


@dataclass(frozen=True)
class StepResult:
    """What a step gave, the same on every rank."""

    loss: float  # per count: the full batch's loss
    count: float  # tokens, or microbatches where the loss function returns a mean
    metrics: Mapping[str, float]  # summed over microbatches


Sums = tuple[float, float, dict[str, float], bool]


def combine(everyone: Sequence[Sums | None]) -> tuple[StepResult, bool]:
    """One result from all ranks' sums (None: not to be counted), and whether gradients are still to be divided."""
    parts = [sums for sums in everyone if sums is not None]
    metrics: dict[str, float] = {}
    for _, _, extra, _ in parts:
        for name, amount in extra.items():
            metrics[name] = metrics.get(name, 0.0) + amount
    count = sum(part[1] for part in parts)
    return StepResult(sum(part[0] for part in parts) / (count or 1.0), count, metrics), any(p[3] for p in parts)
