"""Private calls of torch.autograd: graphs, saved tensors, selective checkpointing, the profiler."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeropipe.engine.torch_private.tensors import storage_id, tensors_in
from zeropipe.errors import EngineError

Result = TypeVar("Result")
COPY = "modify a copy (x = x + 1, not x.add_(1))"
MODIFIED = f"its input or its output gradient was modified in place while its weight gradient still needs it: {COPY}"


def without_autocast(call: Callable[..., Result], *args: Any) -> Result:
    """`call(*args)` in the dtypes its tensors have, whatever autocast around the step says."""
    if not torch._C._is_any_autocast_enabled():  # asked for every product: the guard takes seven times as long
        return call(*args)
    with torch._C._DisableAutocast():
        return call(*args)


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """What backward needs of an output, without its data."""
    return get_gradient_edge(tensor)


def backward(roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor] | None) -> None:
    """One ordinary backward pass."""
    torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]


def leaves_between(loss: Tensor, output: Any) -> list[Tensor]:
    """The leaves that a loss reaches without passing through `output`: parameters of the loss itself."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    return _leaves_behind([loss.grad_fn], {tensor.grad_fn for tensor in tensors_in(output)})


def _leaves_behind(nodes: Sequence[Any], seen: set[Any]) -> list[Tensor]:
    """The leaves of a graph that `nodes` reach without passing through those `seen` already."""
    waiting, leaves = list(nodes), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


def quiet_streams() -> None:
    """A parameter's gradient may come from either of the two streams of an Overlap: they are joined after each step."""
    graph = torch.autograd.graph
    if hasattr(graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        graph.set_warn_on_accumulate_grad_stream_mismatch(False)


def save(ctx: Any, *tensors: Tensor) -> None:
    """ctx.save_for_backward, at once: a recomputation that needs no more than these stops here, before the product."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        ctx.save_for_backward(*tensors)
        ctx.packed = None
    else:
        pack, ctx.unpack = hooks
        ctx.packed = [pack(tensor) for tensor in tensors]


def saved(ctx: Any) -> Sequence[Tensor]:
    """ctx.saved_tensors of `save`; what was packed is let go, unless the caller keeps the graph."""
    if ctx.packed is None:
        try:
            return ctx.saved_tensors
        except RuntimeError as error:
            if is_modified(error):
                raise ProductError(ctx.parameter) from None
            raise
    packed = ctx.packed
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.packed = ()
    tensors = [ctx.unpack(item) for item in packed]
    needed = zip(tensors, ctx.needs_input_grad)  # inputs are saved in their order
    if torch.is_grad_enabled() and any(need and not tensor.requires_grad for tensor, need in needed):
        raise EngineError(  # checkpointing unpacks tensors without their history, so the result would have none either
            "gradients of gradients (create_graph=True) cannot be had in a checkpointed block whose backward is split: "
            "take activation checkpointing off there, or give split='whole'"
        )
    return tensors


class ProductError(Exception):
    """A weight gradient cannot be computed any more; the message says why, the engine adds the layer's name."""

    def __init__(self, parameter: Tensor, why: str = MODIFIED) -> None:
        super().__init__(why)
        self.parameter = parameter  # the layer's weight


def has_grad_hooks(parameter: Tensor | None) -> bool:
    """Whether hooks wait for the gradient of a parameter: they would run before W."""
    return bool(parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks))


def is_modified(error: BaseException) -> bool:
    """Whether autograd says that a tensor it saved was modified in place."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def modified_tensor(error: BaseException) -> str:
    """The type and the shape of that tensor in parentheses, as autograd names them."""
    found = re.search(r"\[torch\.(?:cuda\.)?(\w+) \[([\d, ]*)\]\]", str(error))
    return f"({found[1]} of shape [{found[2]}]) " if found else ""


def is_summed(ctx: Any, number: int) -> bool:
    """Whether the backward pass at work adds the gradient of input `number` to a `.grad`.

    One of `torch.autograd.grad` does not: it gives gradients to whoever called it, maybe in the middle of a forward.
    """
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[number][0])
    except RuntimeError:  # it is asked for by that call, which this function of torch does not answer
        return False


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) runs: it takes no autograd.Function of the older form."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_profiling() -> bool:
    """Whether torch.profiler is at work."""
    return torch.autograd.profiler._is_profiler_enabled


def tell_profiler(key: str, json: str) -> None:
    """A field of the trace that torch.profiler is writing."""
    torch.autograd._add_metadata_json(key, json)  # type: ignore[attr-defined]


# selective checkpointing keeps results in a place of its own, which no hook on saved tensors sees
_caches: list[Any] | None = None


def selective_contexts(policy: Callable[..., Any]) -> Any:
    """What runs around a block whose expensive results are kept and whose others are computed again."""
    forward, again = torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)
    forward.__class__ = _careful(type(forward))
    if _caches is not None:
        _caches.append(forward.storage)
    return forward, again


@functools.cache
def _careful(mode: type[Any]) -> type[Any]:
    """A mode that keeps results, as they are before they are changed in place."""

    class Careful(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
                _keep_unchanged(self.storage, func, args, kwargs or {})
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Careful


def _keep_unchanged(cache: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Before an operator changes a result in place that was kept: keep a copy, to which the change is made again.

    torch sees such changes by a tensor's version. A product of rows of rows is another tensor with the same memory.
    """
    given = {a.name: value for a, value in zip(op._schema.arguments, args)} | kwargs
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    changed = {storage_id(t.untyped_storage()) for name in written for t in tensors_in(given.get(name))}
    for entry in _entries(cache):
        if storage_id(entry.val.untyped_storage()) in changed:
            entry.val = entry.val.clone()
            entry.version = entry.val._version


@contextlib.contextmanager
def selective_caches() -> Iterator[list[Any]]:
    """Gets the places where the blocks that run inside keep results."""
    global _caches
    before, _caches = _caches, []
    try:
        yield _caches
    finally:
        _caches = before


def cached_tensors(cache: Any) -> Iterator[Tensor]:
    """The results in such a place."""
    return (entry.val for entry in _entries(cache))


def _entries(cache: Any) -> Iterator[Any]:
    """What holds the results; not those that only stand for some while a block is compiled."""
    from torch._subclasses.fake_tensor import is_fake

    if isinstance(cache, dict):
        cache = cache.values()
    elif not isinstance(cache, (list, tuple)):
        value = getattr(cache, "val", None)
        if isinstance(value, Tensor) and not is_fake(value):
            yield cache
        return
    for entry in cache:
        yield from _entries(entry)
