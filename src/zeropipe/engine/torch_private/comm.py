"""Private calls of torch.distributed: the store, process groups and collectives."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

ABORT_TAG = 0x7E0  # no message of ours carries it
FOREVER = timedelta(days=365)


def default_store() -> dist.Store:
    """The key-value store of the running torch.distributed job."""
    return dist.distributed_c10d._get_default_store()


def store_is_on_rank_0() -> bool:
    """Whether rank 0 hosts the job's store: where neither torchrun's agent nor another process does."""
    return "MASTER_ADDR" in os.environ and not store_outlives_ranks()


def store_outlives_ranks() -> bool:
    """Whether torchrun's agent hosts the job's store, which then has the keys of ranks that were started earlier."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_host_of(store: dist.Store) -> bool:
    """Whether the process that serves a store is on this machine: whether its address is one of ours."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return False
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(store.host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as tried, contextlib.suppress(OSError):
                tried.bind(address)
                return True
    return False


def clone(store: dist.Store) -> dist.Store:
    """The same store over another connection: a request that waits for a key blocks all others of its connection."""
    return store.clone()  # type: ignore[attr-defined,no-any-return]


def init_group(backend: str, patience: float, **where: Any) -> None:
    """`init_process_group`; gloo has `patience` seconds to connect, and its default timeout afterwards."""
    if backend != "gloo":
        dist.init_process_group(backend, **where)
        return
    dist.init_process_group(backend, timeout=timedelta(seconds=patience), **where)
    dist.distributed_c10d._set_pg_timeout(dist.distributed_c10d.default_pg_timeout)


def gloo_devices() -> list[Any]:
    """The devices of gloo's groups. Each has a thread that wakes up a hundred times a second, so groups share them."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo
    return [make.create_device(interface=name) for name in interfaces] or [make.create_default_device()]


def gloo_group(store: dist.Store, rank: int, size: int, timeout: float, devices: list[Any]) -> Any:
    """A gloo group outside torch's registry: only its members create it."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._devices, options._threads = devices, 2 * len(devices)
    return dist.ProcessGroupGloo(store, rank, size, options)


def lower_gloo_priority() -> None:
    """Schedule gloo's threads as SCHED_BATCH: when they wake up, they do not preempt a thread that sends.

    A sender holds a lock until its system call returns. The process that its message wakes up may preempt it, and
    answer. Then the sender's own gloo thread spins for the lock, on the core that the sender needs to release it. On
    busy cores that took most of the processor time of messages.
    """
    if not hasattr(os, "SCHED_BATCH"):  # only Linux has it
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended, or may not be changed
            with open(f"/proc/self/task/{thread}/comm") as file:
                name = file.read().strip()
            if name == "gloo_tcp_loop":
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def nccl_group(store: dist.Store, rank: int, size: int) -> Any:
    """An NCCL group outside torch's registry, whose errors do not end the process: the watchdog stops all ranks."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a group is created
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def abort_gloo(group: Any) -> None:
    """Close a group's connections, also while a thread waits on one; its peers' waits then fail at once.

    gloo's own `abort` leaves the sockets open. A receive that times out closes all connections of the group; one from
    a peer that is gone fails before its timeout, so all peers are tried.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device="cpu")], peer, ABORT_TAG).wait(timedelta(milliseconds=1))


def abort_nccl(groups: Iterable[Any], patience: float = 20.0) -> None:
    """Stop the groups' kernels, so that streams that wait for them continue.

    All groups in parallel: an abort frees memory, for which CUDA waits until every kernel has ended, also those of
    other groups. One after the other would be a deadlock.
    """

    def abort(group: Any) -> None:
        with contextlib.suppress(RuntimeError):
            group.abort()

    threads = [threading.Thread(target=abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def abort(groups: Iterable[Any], patience: float) -> None:
    """Abort groups of any kind; `patience`: seconds for those of NCCL."""
    slow = []
    for group in groups:
        if isinstance(group, dist.ProcessGroupGloo):
            abort_gloo(group)
        else:
            slow.append(group)
    abort_nccl(slow, patience)


def backends(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group: one for each type of device, or one for all."""
    found = [group._get_backend(device) for device in group._device_types]
    return list({id(backend): backend for backend in found}.values())


def wait(work: Any) -> None:
    """Wait for a gloo message without a timeout. Not for NCCL, where passing a timeout blocks the host."""
    work.wait(FOREVER)


def allgather_bytes(group: Any, size: int, mine: Tensor) -> list[Tensor]:
    """The tensors `mine` of all ranks, which have equal shapes."""
    out = [torch.empty_like(mine) for _ in range(size)]
    options = dist.distributed_c10d.AllgatherOptions()
    options.timeout = FOREVER
    group.allgather([out], [mine], options).wait()
    return out


def allreduce_sum(group: Any, tensor: Tensor) -> None:
    """Sum `tensor` over the group, in place."""
    options = dist.distributed_c10d.AllreduceOptions()
    options.timeout = FOREVER
    group.allreduce([tensor], options).wait()


def broadcast(group: Any, tensor: Tensor, root: int) -> None:
    """Copy the root's `tensor` into that of every rank."""
    options = dist.distributed_c10d.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, FOREVER
    group.broadcast([tensor], options).wait()


# Collectives that compiled graphs may contain: groups are given by name. Two have other names since torch 2.13.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def start_reduce(x: Tensor, operation: str, group: str) -> Tensor:
    """The "sum" or "max" of x over all ranks, after `finish`."""
    return collectives.all_reduce(x.contiguous(), operation, group)


def start_gather(x: Tensor, group: str) -> Tensor:
    """x of all ranks, concatenated along the first dimension, after `finish`."""
    return _all_gather(x.contiguous(), 0, group)


def start_sum_scatter(x: Tensor, group: str) -> Tensor:
    """This rank's part, along the first dimension, of the sum of x over all ranks, after `finish`."""
    return _reduce_scatter(x.contiguous(), "sum", 0, group)


def start_exchange(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """The rows that each process sends to this one, after `finish`.

    sent[i] rows of x go to process i, received[i] come from it.
    """
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), received, sent, group)  # type: ignore[no-any-return]


def finish(pending: Tensor) -> Tensor:
    """The result of a collective that was started; on NCCL the current stream waits for it, not the host."""
    return collectives.wait_tensor(pending)


def unflatten(mesh: Any, name: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """The mesh with several dimensions in place of one, which share the other dimensions' groups."""
    return mesh._unflatten(mesh.mesh_dim_names.index(name), sizes, names)  # torch 2.11 takes no name


def flatten(mesh: Any, names: tuple[str, ...], name: str) -> Any:
    """The mesh of one dimension in place of several ones of a mesh. The second time it is the same mesh."""
    return mesh[names]._flatten(name)


def concatenate(*meshes: Any) -> Any:
    """The mesh of the dimensions of several parts of one mesh, in this order."""
    return dist.device_mesh.DeviceMesh._concatenate(list(meshes))
