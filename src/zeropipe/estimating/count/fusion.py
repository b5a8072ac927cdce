"""Fusion: bytes that a compiled layer moves and saves, compared with an eager one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeropipe.estimating.count.record import Call

UNALIGNED_SLOWDOWN = 3.0  # of a kernel with unaligned rows, on one H200
# operators that are neither recomputed nor fused: they sort, draw random numbers, or write by index
_UNFUSED = (
    "sort", "topk", "dropout", "rand", "bernoulli", "multinomial", "index_put", "scatter", "index_add", "embedding",
)  # fmt: skip


def moved_bytes(calls: Sequence[Call], outputs: set[int]) -> tuple[float, float]:
    """Bytes that all calls except products read and write: eager, and with fused kernels.

    `outputs` are the storages that are used after the layer.
    """
    rest = [index for index, call in enumerate(calls) if not call.flops and not call.summed]
    eager = sum(sum(calls[index].reads.values()) + sum(calls[index].writes.values()) for index in rest)
    readers: dict[int, set[int]] = {}
    for index, call in enumerate(calls):
        for storage in call.reads:
            readers.setdefault(storage, set()).add(index)
    compiled = 0.0
    for kernel in _fuse(calls, rest):
        reads: dict[int, float] = {}
        writes: dict[int, float] = {}
        for index in kernel:
            reads |= calls[index].reads
            writes |= calls[index].writes
        size = sum(size for storage, size in reads.items() if storage not in writes)
        size += sum(
            size for storage, size in writes.items() if storage in outputs or readers.get(storage, set()) - kernel
        )
        compiled += size * (UNALIGNED_SLOWDOWN if any(calls[index].is_unaligned for index in kernel) else 1.0)
    return eager, compiled


def count_kernels(calls: Sequence[Call]) -> int:
    """The kernels that a compiled layer launches."""
    rest = [index for index, call in enumerate(calls) if not call.flops]
    return len(calls) - len(rest) + len(_fuse(calls, rest))


def _fuse(calls: Sequence[Call], indices: Sequence[int]) -> list[set[int]]:
    """Group the calls with these indices into kernels: a compiler fuses a call with those whose results it reads."""
    group = {index: index for index in indices}  # a union-find forest

    def root(index: int) -> int:
        while group[index] != index:
            group[index] = index = group[group[index]]
        return index

    writer: dict[int, int] = {}
    for index in indices:
        call, is_fused = calls[index], not _is_unfused(calls[index])
        for storage in call.reads:
            if storage in writer and is_fused:
                group[root(writer[storage])] = root(index)
        for storage in call.writes:
            if is_fused:
                writer[storage] = index
            else:
                writer.pop(storage, None)
    kernels: dict[int, set[int]] = {}
    for index in indices:
        kernels.setdefault(root(index), set()).add(index)
    return list(kernels.values())


def minimize_saved(calls: Sequence[Call], saved: dict[int, float], inputs: set[int]) -> dict[int, float]:
    """What a compiler saves for the backward: the fewest bytes from which all of `saved` can be recomputed.

    A minimum cut. Products and `_UNFUSED` operators are not recomputed, and what products read is saved as it is.
    `inputs` may be saved; parameters and buffers exist anyway.
    """
    import networkx

    sizes: dict[int, float] = {}
    for call in calls:
        for storage, size in (call.reads | call.writes).items():
            sizes[storage] = max(size, sizes.get(storage, 0.0), saved.get(storage, 0.0))
    counted = inputs | {storage for call in calls for storage in call.writes}
    read = {storage for call in calls if call.flops for storage in call.reads}
    graph: Any = networkx.DiGraph()
    graph.add_nodes_from(("begin", "end"))
    for storage in counted & sizes.keys():
        graph.add_edge((storage, "in"), (storage, "out"), capacity=sizes[storage])
        if storage in inputs or storage in read:
            graph.add_edge("begin", (storage, "in"))
        if storage in saved:
            graph.add_edge((storage, "out"), "end")
    for call in calls:
        for storage in call.writes:
            if call.flops or _is_unfused(call):
                graph.add_edge("begin", (storage, "in"))
            for source in (call.reads.keys() & counted) - {storage}:
                if not call.flops and not _is_unfused(call):
                    graph.add_edge((source, "out"), (storage, "in"))
    _, (before, _) = networkx.minimum_cut(graph, "begin", "end")
    cut = [
        storage for storage in counted & sizes.keys() if (storage, "in") in before and (storage, "out") not in before
    ]
    return {storage: sizes[storage] for storage in cut}


def _is_unfused(call: Call) -> bool:
    return bool(call.summed) or any(name in call.name for name in _UNFUSED)
