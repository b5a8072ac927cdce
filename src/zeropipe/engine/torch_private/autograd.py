"""Private calls of torch.autograd: graphs, saved tensors, selective checkpointing, the profiler."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._higher_order_ops.utils import redirect_to_mode
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeropipe.engine.torch_private.tensors import storage_id, tensors_in
from zeropipe.errors import EngineError

Result = TypeVar("Result")
COPY = "modify a copy (x = x + 1, not x.add_(1))"
MODIFIED = f"its input or its output gradient was modified in place while its weight gradient still needs it: {COPY}"


def without_autocast(call: Callable[..., Result], *args: Any) -> Result:
    """Return `call(*args)` in the dtypes of its tensors, also under autocast."""
    if not torch._C._is_any_autocast_enabled():  # runs for every product: the guard takes seven times as long
        return call(*args)
    with torch._C._DisableAutocast():
        return call(*args)


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """What a backward pass needs of an output: its edge in the graph, without its data."""
    return get_gradient_edge(tensor)


def backward(roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor] | None) -> None:
    """Run one ordinary backward pass."""
    torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]


def find_loss_leaves(loss: Tensor, output: Any) -> list[Tensor]:
    """The leaves that a loss reaches without passing through `output`: parameters of the loss itself."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    return _find_leaves([loss.grad_fn], {tensor.grad_fn for tensor in tensors_in(output)})


def _find_leaves(nodes: Sequence[Any], seen: set[Any]) -> list[Tensor]:
    """The leaves that `nodes` reach in a graph without passing through a node in `seen`."""
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


def silence_stream_warning() -> None:
    """Silence torch's warning that gradients of a parameter come from two streams, those of an Overlap.

    The streams are joined after each step.
    """
    graph = torch.autograd.graph
    if hasattr(graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        graph.set_warn_on_accumulate_grad_stream_mismatch(False)


def save(ctx: Any, *tensors: Tensor) -> None:
    """Call ctx.save_for_backward at once, not after the forward.

    Recomputation stops when it has all tensors that were saved: so it stops before the product.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        ctx.save_for_backward(*tensors)
        ctx.packed = None
    else:
        pack, ctx.unpack = hooks
        ctx.packed = [pack(tensor) for tensor in tensors]


def saved(ctx: Any) -> Sequence[Tensor]:
    """The tensors of `save`; what was packed is released, unless the caller keeps the graph.

    So are the hooks, which hold the inputs of a checkpointed block and the results that it keeps.
    """
    if ctx.packed is None:
        try:
            return ctx.saved_tensors
        except RuntimeError as error:
            if is_modified(error):
                raise ProductError(ctx.parameter) from None
            raise
    packed, unpack = ctx.packed, ctx.unpack
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.packed, ctx.unpack = (), None
    tensors = [unpack(item) for item in packed]
    needed = zip(tensors, ctx.needs_input_grad)  # inputs are saved in their order
    if torch.is_grad_enabled() and any(need and not tensor.requires_grad for tensor, need in needed):
        raise EngineError(  # checkpointing unpacks tensors without their history, so the result would have none either
            "create_graph=True cannot run in a checkpointed block whose backward is split: use ac='none', or "
            "split='whole'"
        )
    return tensors


class ProductError(Exception):
    """A weight gradient cannot be computed any more. The message has the reason; the engine adds the layer's name."""

    def __init__(self, parameter: Tensor, why: str = MODIFIED) -> None:
        super().__init__(why)
        self.parameter = parameter  # the layer's weight


def has_grad_hooks(parameter: Tensor | None) -> bool:
    """Whether a parameter has hooks on its gradient, which would run before W."""
    return bool(parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks))


def is_modified(error: BaseException) -> bool:
    """Whether this is autograd's error for a saved tensor that was modified in place."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def modified_tensor(error: BaseException) -> str:
    """Type and shape of the modified tensor of such an error, in parentheses; empty if the error lacks them."""
    found = re.search(r"\[torch\.(?:cuda\.)?(\w+) \[([\d, ]*)\]\]", str(error))
    return f"({found[1]} of shape [{found[2]}]) " if found else ""


def is_summed(ctx: Any, number: int) -> bool:
    """Whether the running backward pass adds the gradient of input `number` to a `.grad`.

    That of `torch.autograd.grad` does not: it returns gradients to its caller, which may be inside a forward.
    """
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[number][0])
    except RuntimeError:  # in torch.autograd.grad with this input: torch's function does not support it
        return False


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) runs: it rejects an old-style autograd.Function."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def in_backward() -> bool:
    """Whether this thread runs a backward pass, which recomputes what was checkpointed."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_profiling() -> bool:
    """Whether torch.profiler runs."""
    return torch.autograd.profiler._is_profiler_enabled


def add_profiler_metadata(key: str, json: str) -> None:
    """Add a field to the trace that torch.profiler is writing."""
    torch.autograd._add_metadata_json(key, json)  # type: ignore[attr-defined]


# caches of selective checkpointing, whose tensors no hook on saved tensors receives; None: not collected
_caches: list[Any] | None = None


def selective_contexts(policy: Callable[..., Any]) -> Any:
    """The contexts of a checkpointed block, for its forward and its recomputation. `policy` chooses what is kept."""
    forward, recompute = torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)
    forward.__class__ = _copying_mode(type(forward))
    recompute.__class__ = _recomputing_mode(type(recompute))
    recompute.policy = policy
    if _caches is not None:
        _caches.append(forward.storage)
    return forward, recompute


@functools.cache
def _copying_mode(mode: type[Any]) -> type[Any]:
    """A caching mode that copies a cached result before it is modified in place."""

    class CopyingMode(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
                _copy_modified(self.storage, func, args, kwargs or {})
            return super().__torch_dispatch__(func, types, args, kwargs)

    redirect_to_mode(torch.ops.higher_order.flex_attention, CopyingMode)  # torch does so for its own modes only
    return CopyingMode


@functools.cache
def _recomputing_mode(mode: type[Any]) -> type[Any]:
    """A mode for the recomputation that expects the operators of the forward only where their results are kept.

    torch 2.13 expects all of them; the hooks of an FSDP unit inside a block run others when it is recomputed.
    """

    class RecomputingMode(mode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            context = torch.utils.checkpoint.SelectiveCheckpointContext(is_recompute=True)
            policy = self.policy(context, func, *args, **(kwargs or {}))
            if policy == torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE:
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    redirect_to_mode(torch.ops.higher_order.flex_attention, RecomputingMode)
    return RecomputingMode


def _copy_modified(cache: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Replace the cached results that `op` is about to modify in place by copies; recomputation modifies the copies.

    torch detects a modification by the version of a tensor, and so misses one through another tensor with the same
    memory: a product of a tensor with more than two dimensions returns such a tensor.
    """
    given = {a.name: value for a, value in zip(op._schema.arguments, args)} | kwargs
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    changed = {storage_id(t.untyped_storage()) for name in written for t in tensors_in(given.get(name))}
    for entry in cache_entries(cache):
        if storage_id(entry.val.untyped_storage()) in changed:
            entry.val = entry.val.clone()
            entry.version = entry.val._version


@contextlib.contextmanager
def selective_caches() -> Iterator[list[Any]]:
    """Context manager: yields a list that gets the caches of the blocks that run inside."""
    global _caches
    before, _caches = _caches, []
    try:
        yield _caches
    finally:
        _caches = before


def cached_tensors(cache: Any) -> Iterator[Tensor]:
    """The tensors in a cache of `selective_caches`."""
    return (entry.val for entry in cache_entries(cache))


def cache_entries(cache: Any) -> Iterator[Any]:
    """The entries of a cache with a tensor, without the fake tensors that exist while a block is compiled."""
    from torch._subclasses.fake_tensor import is_fake

    if isinstance(cache, dict):
        cache = cache.values()
    elif not isinstance(cache, (list, tuple)):
        value = getattr(cache, "val", None)
        if isinstance(value, Tensor) and not is_fake(value):
            yield cache
        return
    for entry in cache:
        yield from cache_entries(entry)
