"""Logits spread over the vocabulary: losses that take pieces, so that nobody ever holds them whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zeropipe.engine.mesh.talk import Join, Peers, largest, total
from zeropipe.engine.torch_private.tensors import require_on_device


@functools.cache
def as_pieces(mesh: DeviceMesh) -> Callable[..., Any]:
    """A hook of a last stage: its logits, of which this process has some columns, as a DTensor."""

    def hook(stage: nn.Module, args: Any, output: Any) -> Any:
        logits, *rest = output if isinstance(output, tuple) else (output,)
        shape = (*logits.shape[:-1], logits.shape[-1] * mesh.size())
        stride = torch.empty(shape, device="meta").stride()
        spread = DTensor.from_local(logits, mesh, (Shard(-1),), run_check=False, shape=shape, stride=stride)
        return (spread, *rest) if rest else spread

    return hook


def shown_to(function: Any, output: Any) -> Any:
    """A last stage's output as a function wants it: logits whole, unless it says that it takes pieces."""
    if getattr(function, "takes_pieces", False):
        return output
    if isinstance(output, tuple):
        return tuple(map(whole, output))
    return whole(output)


def whole(tensor: Any) -> Any:
    """All of a tensor that is spread over its last dimension; anything else as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return Join.apply(tensor.to_local(), -1, Peers.of(tensor.device_mesh))


def token_losses(logits: Tensor, labels: Tensor, ignore: int = -100) -> Tensor:
    """The cross entropy of each token, of logits that are whole or a DTensor spread over the vocabulary.

    `logits` is (..., vocabulary), `labels` and the result are (...); 0 where the label is `ignore`. Computed in float32
    at least.
    """
    pieces = logits.to_local() if isinstance(logits, DTensor) else logits
    if pieces.dtype in (torch.bfloat16, torch.float16):
        pieces = pieces.float()
    flat, targets = pieces.reshape(-1, pieces.shape[-1]), labels.reshape(-1).to(pieces.device)
    if isinstance(logits, DTensor):
        losses = TokenLosses.apply(flat, targets, ignore, Peers.of(logits.device_mesh))
    else:
        losses = nn.functional.cross_entropy(flat, targets, ignore_index=ignore, reduction="none")
    return losses.view(labels.shape)


class TokenLosses(torch.autograd.Function):
    """The cross entropy of each row of (tokens, own columns): the largest logit, the sum of exponentials and the
    target's logit are put together, three numbers per token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore: int, peers: Peers) -> Tensor:
        columns = logits.shape[-1]
        counts = labels != ignore
        require_on_device(
            (~counts | ((labels >= 0) & (labels < columns * peers.number))).all(),
            f"a label is outside of the vocabulary of {columns * peers.number} tokens",
        )
        place = labels - columns * peers.place
        is_mine = counts & (place >= 0) & (place < columns)
        place = torch.where(is_mine, place, 0)[:, None]
        top = largest(logits.detach().amax(-1), peers)
        shifted = logits - top[:, None]
        target = torch.where(is_mine, shifted.gather(-1, place)[:, 0], 0)
        powers = shifted.exp_()
        sums, target = total(torch.stack([powers.sum(-1), target]), peers)
        ctx.save_for_backward(powers.div_(sums[:, None]), place, is_mine, counts)
        return torch.where(counts, sums.log() - target, 0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, place, is_mine, counts = ctx.saved_tensors
        dy = torch.where(counts, dy, 0)[:, None]
        gradient = probabilities * dy
        gradient.scatter_add_(-1, place, torch.where(is_mine[:, None], -dy, 0))
        return gradient, None, None, None
