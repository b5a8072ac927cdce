"""Every private or undocumented call of torch that the executor makes, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

ABORT_TAG = 0x7E0  # no message of ours carries it


def default_store() -> dist.Store:
    """The key-value store of the running torch.distributed job."""
    return dist.distributed_c10d._get_default_store()


def gloo_group(store: dist.Store, rank: int, size: int, timeout: float) -> Any:
    """A gloo group outside torch's registry: only its members take part in making it."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


def nccl_group(store: dist.Store, rank: int, size: int, timeout: float) -> Any:
    """An NCCL group outside torch's registry."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def abort_gloo(group: Any) -> None:
    """Close a group's connections, also under a thread that waits on one; its peers' waits then fail at once.

    gloo's own `abort` leaves the sockets open. A receive that times out closes every pair of the group; one from a
    peer that is gone already fails before its time, so all peers are tried.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))


def abort_nccl(group: Any) -> None:
    """Stop a group's kernels, so that streams waiting for them go on."""
    with contextlib.suppress(RuntimeError):
        group.abort()


def allgather_bytes(group: Any, size: int, mine: Tensor) -> list[Tensor]:
    """Everybody's `mine`, all of the same shape."""
    out = [torch.empty_like(mine) for _ in range(size)]
    group.allgather([out], [mine]).wait()
    return out


def allreduce_sum(group: Any, tensor: Tensor) -> None:
    """Sum `tensor` over the group, in place."""
    group.allreduce([tensor]).wait()


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """What backward needs of an output, without its data."""
    return get_gradient_edge(tensor)


def backward(roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor] | None) -> None:
    """One ordinary backward pass."""
    torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]


def quiet_streams() -> None:
    """A parameter's gradient may come from either of the two streams of an Overlap: they are joined after each step."""
    graph = torch.autograd.graph
    if hasattr(graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        graph.set_warn_on_accumulate_grad_stream_mismatch(False)


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """The sum of all squares, in float64."""
    norms = torch._foreach_norm(list(tensors), 2)
    return float(torch.stack([norm.double() for norm in norms]).square().sum())


def multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Scale tensors in place."""
    torch._foreach_mul_(list(tensors), factor)
