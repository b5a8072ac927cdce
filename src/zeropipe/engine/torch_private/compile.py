"""Private calls of torch.compile, and workarounds for bugs of its versions."""

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

# Before torch 2.12, marks of checkpointing in a compiled block do not apply inside autograd functions: results of
# deferred layers would be kept, not recomputed.
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
MARKS_REACH_FUNCTIONS = _VERSION >= (2, 12)
# torch 2.11 computes wrong gradients for a compiled block that gathers sequences for a module that passes its input to
# several layers. torch 2.13 computes the right ones.
COMPILES_GATHERED = _VERSION >= (2, 13)


@functools.cache
def keep_inputs_from_reuse(op: Any) -> None:
    """Make inductor never reuse the buffers of the inputs of `op`, which `op` stores for W.

    Otherwise the compiled backward would overwrite tensors that wait for W, and gradients would be silently wrong. The
    rule is part of the generated code, so it also holds when that code comes from a cache. `op` is also marked as
    having side effects: it runs even if its result is not used, or has no elements.
    """

    def keep(kernel: Any, graph: Any) -> None:
        for held in kernel.inputs:
            graph.never_reuse_buffers.add(held.get_name())
        kernel.has_side_effects = lambda: True

    _lower(op, keep)


@functools.cache
def align_result(op: Any) -> None:
    """Let inductor know that the result of `op` is new memory."""
    _lower(op, lambda kernel, graph: None)


def _lower(op: Any, mark: Callable[[Any, Any], None]) -> None:
    """Register inductor's lowering of an operator with a layer's slot; `mark` gets its kernel and the graph.

    Its result is new memory. inductor takes it for one at any address, because an input is on the CPU (the slot);
    kernels that read it, like the backward of attention, would take up to 1.4 times as long.
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
        V.graph.unaligned_buffers.discard(node.get_name())
        mark(kernel, V.graph)
        return out


_uses: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


def use_number() -> int:
    """Return 0, 1, 2, ... while a graph is traced: a constant that keeps the compiler from merging equal operators.

    A layer used twice with the same input must store two products. Each graph counts from 0, so that equal blocks
    have equal graphs.
    """
    from torch._guards import TracingContext

    return next(_uses.setdefault(TracingContext.get(), itertools.count()))


# as torch.compiler.assume_constant_result does, which imports the compiler: seconds in every process
use_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def inductor_backend(memory_budget: float | None = None) -> Callable[..., Any]:
    """inductor; `memory_budget` is the fraction of activations that its partitioner may save."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    _fix_attention_dtype()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with config.patch(activation_memory_budget=memory_budget):
            return compile_fx(graph, inputs)

    return backend if memory_budget is not None else compile_fx


def checked_backend(backend: Any) -> Callable[..., Any]:
    """A compiler backend that raises EngineError for a graph whose gradients it would compute wrongly."""
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

    torch 2.13 recomputes results of such an input in the backward, from the values that the input has then.
    """
    names = []
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, Tensor) and value._version > 0:  # modified in the trace
            memory = memory_of(value)
            uses = (each for each in graph.graph.nodes if any(_has_memory(a, memory) for a in each.all_input_nodes))
            if any(_may_be_needed(use, memory) for use in uses):
                names.append(getattr(getattr(node, "_dynamo_source", None), "name", node.name))
    return names


def _has_memory(node: Any, memory: int) -> bool:
    return any(memory_of(tensor) == memory for tensor in tensors_in(node.meta.get("example_value")))


def _may_be_needed(use: Any, memory: int) -> bool:
    """Whether a node returns a tensor with memory of its own, or one that needs a gradient."""
    made = tensors_in(use.meta.get("example_value"))
    return any(memory_of(tensor) != memory or tensor.requires_grad for tensor in made)


@functools.cache
def _fix_attention_dtype() -> None:
    """Correct the dtype that the compiler assumes for the sums of float64 attention on a CPU.

    Before torch 2.13 it assumes float32 and converts them, which the backward of the attention rejects.
    """
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    probe = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    if attention(probe, probe, probe)[1].dtype == torch.float64:
        return
    key = torch._C.DispatchKey.Meta
    shapes = attention.py_kernels.pop(key)

    def fixed(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output, sums = shapes(query, *args, **kwargs)
        return output, sums.double() if query.dtype == torch.float64 else sums

    attention.py_impl(key)(fixed)
    torch._subclasses.FakeTensorMode.cache_clear()  # of earlier traces


class GraphBreak:
    """A function that the compiler leaves as it is, once `enable` was called: a graph ends before each call of it.

    Not from the start: that would import the compiler, which takes seconds in every process.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._run = self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def enable(self) -> None:
        """Compile no call of the function from now on; code that calls it is several graphs."""
        if self._run is self._function:
            self._run = torch.compiler.disable(self._function)


def mark_dynamic_rows(*tensors: Tensor) -> None:
    """Let a compiled function run with any number of rows of these tensors, without a graph for each."""
    from torch._dynamo import maybe_mark_dynamic

    for tensor in tensors:
        if len(tensor) > 1:  # a number of 1 has a graph of its own
            maybe_mark_dynamic(tensor, 0)


def is_compiling() -> bool:
    """Whether torch.compile runs in this process, in any thread."""
    module = sys.modules.get("torch._dynamo.callback")  # missing: nothing was compiled yet
    handler = getattr(module, "callback_handler", None)
    return getattr(handler, "_CompilationCallbackHandler__pending_callbacks_counter", 0) > 0


def is_compile_error(error: Exception) -> bool:
    """Whether torch.compile could not capture or compile something; False for errors of the model itself.

    On a CPU, torch 2.13 confuses the tensors that a checkpointed block saves if one of its biases is sharded over
    `tp`. It raises an AssertionError then, before the block has run.
    """
    from torch._dynamo import exc

    if isinstance(error, exc.TorchDynamoException | exc.FailOnRecompileLimitHit):
        return True
    return isinstance(error, AssertionError) and "tensors_saved_with_vc_check" in str(error)
