"""Private calls of torch.compile, and what its versions get wrong."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.torch_private.tensors import memory_of, tensors_in
from zeropipe.errors import EngineError

# Inside a compiled block, marks of checkpointing do not reach what autograd functions compute before torch 2.12: the
# results of deferred layers would be kept instead of being computed again.
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
MARKS_REACH_FUNCTIONS = _VERSION >= (2, 12)
# Where a compiled block gathers sequences for a part that hands its input to several layers, torch 2.11 computes other
# gradients than without compiling. Those of torch 2.13 are right.
COMPILES_GATHERED = _VERSION >= (2, 13)


@functools.cache
def keep_inputs_from_reuse(op: Any) -> None:
    """Tell inductor that `op` holds on to its inputs: their buffers are never given to another tensor.

    Without it the compiled backward writes other results over tensors that wait for W, and gradients are silently
    wrong. The protection is part of the generated code, so it is also there when that code comes from a cache.
    And `op` runs even if nothing reads its result, as is so for one without elements.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler, register_lowering
    from torch._inductor.virtualized import V

    fall_back = fallback_handler(op, add_to_fallback_set=False)

    @register_lowering(op, type_promotion_kind=None)
    def lower(*args: Any) -> Any:
        out = node = fall_back(*args)
        while isinstance(node, ir.MutableBox):
            node = node.data
        (kernel,) = node.inputs if isinstance(node, ir.MultiOutput) else (node,)
        for held in kernel.inputs:
            V.graph.never_reuse_buffers.add(held.get_name())
        kernel.has_side_effects = lambda: True
        return out


_uses: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


def use_number() -> int:
    """While a graph is traced: 0, 1, 2, ... A constant that keeps the compiler from merging equal operators.

    A layer used twice with the same input must leave two products. Counting starts anew with each graph, so that
    equal blocks make equal graphs.
    """
    from torch._guards import TracingContext

    return next(_uses.setdefault(TracingContext.get(), itertools.count()))


# as torch.compiler.assume_constant_result does, which first imports the whole compiler: seconds for every process
use_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def inductor_backend(memory_budget: float | None = None) -> Callable[..., Any]:
    """inductor, with the share of activations the partitioner may save."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    mend_attention()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with config.patch(activation_memory_budget=memory_budget):
            return compile_fx(graph, inputs)

    return backend if memory_budget is not None else compile_fx


def careful(backend: Any) -> Callable[..., Any]:
    """A compiler that refuses what it would get wrong: the refusal is an error of torch.compile."""
    if isinstance(backend, str):
        from torch._dynamo import lookup_backend

        backend = lookup_backend(backend)

    def compile(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        names = _modified_and_read(graph)
        if names and torch.is_grad_enabled():
            raise EngineError(
                f"it modifies {', '.join(names)} in place and reads it; torch.compile computes wrong gradients for that"
            )
        return backend(graph, inputs)

    return compile


def _modified_and_read(graph: torch.fx.GraphModule) -> list[str]:
    """The inputs of a graph (buffers) that it modifies in place and that its backward may need.

    torch 2.13 computes in the backward again what it made of such an input, from the input as it is by then.
    """
    names = []
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, Tensor) and value._version > 0:  # as it was traced
            memory = memory_of(value)
            uses = (each for each in graph.graph.nodes if any(_has_memory(a, memory) for a in each.all_input_nodes))
            if any(_may_be_needed(use, memory) for use in uses):
                names.append(getattr(getattr(node, "_dynamo_source", None), "name", node.name))
    return names


def _has_memory(node: Any, memory: int) -> bool:
    return any(memory_of(tensor) == memory for tensor in tensors_in(node.meta.get("example_value")))


def _may_be_needed(use: Any, memory: int) -> bool:
    """Whether a node makes a new tensor of what it reads, or one that needs a gradient."""
    made = tensors_in(use.meta.get("example_value"))
    return any(memory_of(tensor) != memory or tensor.requires_grad for tensor in made)


@functools.cache
def mend_attention() -> None:
    """Let the compiler know the dtype of the sums that float64 attention on a CPU keeps for its backward.

    Before torch 2.13 it takes them for float32 and makes such copies of them, which the backward refuses.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    probe = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    if attention(probe, probe, probe)[1].dtype == torch.float64:
        return
    key = torch._C.DispatchKey.Meta
    shapes = attention.py_kernels.pop(key)

    def right(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output, sums = shapes(query, *args, **kwargs)
        return output, sums.double() if query.dtype == torch.float64 else sums

    attention.py_impl(key)(right)
    torch._subclasses.FakeTensorMode.cache_clear()  # of what was traced before


def compiling() -> bool:
    """Whether torch.compile is at work in this process, in whatever thread."""
    module = sys.modules.get("torch._dynamo.callback")  # not there: nothing was compiled yet
    handler = getattr(module, "callback_handler", None)
    return getattr(handler, "_CompilationCallbackHandler__pending_callbacks_counter", 0) > 0


def is_compile_error(error: Exception) -> bool:
    """Whether torch.compile could not capture or compile something; errors of the model itself are others.

    On a CPU, torch 2.13 mixes up what a block computes again keeps, where one of its biases is spread over `tp`; it
    notices before anything else has happened.
    """
    from torch._dynamo import exc

    if isinstance(error, exc.TorchDynamoException | exc.FailOnRecompileLimitHit):
        return True
    return isinstance(error, AssertionError) and "tensors_saved_with_vc_check" in str(error)
