"""AOT autograd with inductor's partitioner and compilers of a test's own.

Imported when it is used: torch's compiler takes seconds, and every worker imports every test.
"""

from __future__ import annotations

from typing import Any


def compiled(graph: Any, inputs: Any, *compilers: Any) -> Any:
    """The graph with its backward, each given to a compiler."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_module_simplified(graph, inputs, *compilers, partition_fn=min_cut_rematerialization_partition)


def as_it_is(graph: Any) -> Any:
    """What a compiler returns that changes nothing."""
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(graph.forward)


class Graphs:
    """A compiler that runs graphs as they are, and keeps the names of the collectives in them."""

    def __init__(self) -> None:
        self.collectives: set[str] = set()

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return compiled(graph, inputs, self.look, self.look)

    def look(self, graph: Any, inputs: Any) -> Any:
        self.collectives |= {str(node.target).split(".")[1] for node in graph.graph.nodes if "c10d" in str(node.target)}
        return as_it_is(graph)
