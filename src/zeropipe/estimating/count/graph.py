"""What the operators of a layer move and keep together, one by one and compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeropipe.estimating.count.watch import Call

ODD = 3.0  # how much longer a kernel takes whose rows are not aligned, on one H200
# neither computed again in the backward nor made one kernel with others: they sort, draw, or write where an index says
_APART = (
    "sort", "topk", "dropout", "rand", "bernoulli", "multinomial", "index_put", "scatter", "index_add", "embedding",
)  # fmt: skip


def moved(calls: Sequence[Call], wanted: set[int]) -> tuple[float, float]:
    """Bytes that all but products read and write: one by one, and where neighbours are one kernel.

    `wanted` is needed when the layer has run.
    """
    rest = [number for number, call in enumerate(calls) if not call.flops and not call.summed]
    one_by_one = sum(sum(calls[at].reads.values()) + sum(calls[at].writes.values()) for at in rest)
    readers: dict[int, set[int]] = {}
    for number, call in enumerate(calls):
        for place in call.reads:
            readers.setdefault(place, set()).add(number)
    compiled = 0.0
    for kernel in _fused(calls, rest):
        reads: dict[int, float] = {}
        writes: dict[int, float] = {}
        for at in kernel:
            reads |= calls[at].reads
            writes |= calls[at].writes
        size = sum(size for place, size in reads.items() if place not in writes)
        size += sum(size for place, size in writes.items() if place in wanted or readers.get(place, set()) - kernel)
        compiled += size * (ODD if any(calls[at].is_odd for at in kernel) else 1.0)
    return one_by_one, compiled


def kernels(calls: Sequence[Call]) -> int:
    """How many a compiled layer starts."""
    rest = [number for number, call in enumerate(calls) if not call.flops]
    return len(calls) - len(rest) + len(_fused(calls, rest))


def _fused(calls: Sequence[Call], some: Sequence[int]) -> list[set[int]]:
    """Of some calls, by their numbers, those that a compiler makes one of: they hand something on to each other."""
    group = {number: number for number in some}

    def root(number: int) -> int:
        while group[number] != number:
            group[number] = number = group[group[number]]
        return number

    writer: dict[int, int] = {}
    for number in some:
        call, alone = calls[number], _is_apart(calls[number])
        for place in call.reads:
            if place in writer and not alone:
                group[root(writer[place])] = root(number)
        for place in call.writes:
            if alone:
                writer.pop(place, None)
            else:
                writer[place] = number
    found: dict[int, set[int]] = {}
    for number in some:
        found.setdefault(root(number), set()).add(number)
    return list(found.values())


def least_kept(calls: Sequence[Call], kept: dict[int, float], inputs: set[int]) -> dict[int, float]:
    """What a compiler keeps for the backward: the fewest bytes from which all of `kept` can be computed again.

    Products and what is `_APART` are not computed again, and what products read is kept as it is. What came in with
    `inputs` may be kept; all else that was there before is there anyhow.
    """
    import networkx

    sizes: dict[int, float] = {}
    for call in calls:
        for place, size in (call.reads | call.writes).items():
            sizes[place] = max(size, sizes.get(place, 0.0), kept.get(place, 0.0))
    counted = inputs | {place for call in calls for place in call.writes}
    read = {place for call in calls if call.flops for place in call.reads}
    graph: Any = networkx.DiGraph()
    graph.add_nodes_from(("begin", "end"))
    for place in counted & sizes.keys():
        graph.add_edge((place, "in"), (place, "out"), capacity=sizes[place])
        if place in inputs or place in read:
            graph.add_edge("begin", (place, "in"))
        if place in kept:
            graph.add_edge((place, "out"), "end")
    for call in calls:
        for place in call.writes:
            if call.flops or _is_apart(call):
                graph.add_edge("begin", (place, "in"))
            for source in (call.reads.keys() & counted) - {place}:
                if not call.flops and not _is_apart(call):
                    graph.add_edge((source, "out"), (place, "in"))
    _, (before, _) = networkx.minimum_cut(graph, "begin", "end")
    cut = [place for place in counted & sizes.keys() if (place, "in") in before and (place, "out") not in before]
    return {place: sizes[place] for place in cut}


def _is_apart(call: Call) -> bool:
    return bool(call.summed) or any(name in call.name for name in _APART)
