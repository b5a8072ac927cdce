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
