"""Logits sharded over the vocabulary, and losses that take the shards: the full logits are never gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zeropipe.engine.mesh.tp_collectives import Gather, TPGroup, all_reduce, all_reduce_max
from zeropipe.engine.stages.contract import TokenLosses
from zeropipe.engine.torch_private.tensors import require_on_device


@functools.cache
def create_logits_hook(mesh: DeviceMesh) -> Callable[..., Any]:
    """A hook of a last stage that makes its logits, of which this process has some columns, a DTensor."""

    def hook(stage: nn.Module, args: Any, output: Any) -> Any:
        logits, *rest = output if type(output) is tuple else (output,)
        if isinstance(logits, TokenLosses):
            return output
        sharded = shard_logits(logits, mesh)
        return (sharded, *rest) if rest else sharded

    return hook


def shard_logits(logits: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Logits of which this process has some columns as a DTensor; without a mesh as they are."""
    if mesh is None:
        return logits
    shape = (*logits.shape[:-1], logits.shape[-1] * mesh.size())
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(logits, mesh, (Shard(-1),), run_check=False, shape=shape, stride=stride)


def prepare_output(function: Any, output: Any) -> Any:
    """A last stage's output for a loss or another function: full logits, unless it has `takes_pieces = True`."""
    if getattr(function, "takes_pieces", False):
        return output
    if isinstance(output, tuple):
        return tuple(map(gather_logits, output))
    return gather_logits(output)


def gather_logits(tensor: Any) -> Any:
    """The full tensor of a DTensor that is sharded over its last dimension; any other value as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return Gather.apply(tensor.to_local(), -1, TPGroup.from_mesh(tensor.device_mesh))


def token_losses(logits: Tensor, labels: Tensor, ignore: int = -100) -> Tensor:
    """The cross entropy of each token, of full logits or of a DTensor sharded over the vocabulary.

    `logits` is (..., vocabulary), `labels` and the result are (...); 0 where the label is `ignore`. Computed in float32
    at least.
    """
    shard = logits.to_local() if isinstance(logits, DTensor) else logits
    if shard.dtype in (torch.bfloat16, torch.float16):
        shard = shard.float()
    flat, targets = shard.reshape(-1, shard.shape[-1]), labels.reshape(-1).to(shard.device)
    if isinstance(logits, DTensor):
        losses = ShardedCrossEntropy.apply(flat, targets, ignore, TPGroup.from_mesh(logits.device_mesh))
    else:
        losses = nn.functional.cross_entropy(flat, targets, ignore_index=ignore, reduction="none")
    return losses.view(labels.shape)


def token_entropies(logits: Tensor) -> Tensor:
    """The entropy of each token's distribution, without a gradient; of full logits or a DTensor like `token_losses`."""
    shard = (logits.to_local() if isinstance(logits, DTensor) else logits).detach()
    if shard.dtype in (torch.bfloat16, torch.float16):
        shard = shard.float()
    maximum = shard.amax(-1, keepdim=True)
    group = TPGroup.from_mesh(logits.device_mesh) if isinstance(logits, DTensor) else None
    maximum = maximum if group is None else all_reduce_max(maximum, group)
    exponentials = (shard - maximum).exp()
    weighted = torch.where(exponentials > 0, exponentials * shard, 0)  # 0 * -inf has no value
    sums = torch.stack([exponentials.sum(-1), weighted.sum(-1)])
    total, mean = sums if group is None else all_reduce(sums, group)
    return maximum[..., 0] + total.log() - mean / total


class ShardedCrossEntropy(torch.autograd.Function):
    """The cross entropy of each row of (tokens, local columns).

    Three numbers per token are reduced over ranks: the maximum, the sum of exponentials and the label's logit.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore: int, group: TPGroup) -> Tensor:
        num_columns = logits.shape[-1]
        is_counted = labels != ignore
        require_on_device(
            (~is_counted | ((labels >= 0) & (labels < num_columns * group.size))).all(),
            f"a label is outside of the vocabulary of {num_columns * group.size} tokens",
        )
        column = labels - num_columns * group.rank
        is_local = is_counted & (column >= 0) & (column < num_columns)
        column = torch.where(is_local, column, 0)[:, None]
        shifted = logits - all_reduce_max(logits.detach().amax(-1), group)[:, None]
        target = torch.where(is_local, shifted.gather(-1, column)[:, 0], 0)
        exponentials = shifted.exp_()
        sums, target = all_reduce(torch.stack([exponentials.sum(-1), target]), group)
        ctx.save_for_backward(exponentials.div_(sums[:, None]), column, is_local, is_counted)
        return torch.where(is_counted, sums.log() - target, 0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, is_local, is_counted = ctx.saved_tensors
        dy = torch.where(is_counted, dy, 0)[:, None]
        gradient = probabilities * dy
        gradient.scatter_add_(-1, column, torch.where(is_local[:, None], -dy, 0))
        return gradient, None, None, None
