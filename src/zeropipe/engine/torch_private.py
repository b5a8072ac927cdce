"""Every private or undocumented call of torch, in one place: what to look at when torch changes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import _functional_collectives as collectives

from zeropipe.errors import EngineError

Result = TypeVar("Result")
COPY = "modify a copy (x = x + 1, not x.add_(1))"
MODIFIED = f"its input or its output gradient was modified in place while its weight gradient still needs it: {COPY}"
ABORT_TAG = 0x7E0  # no message of ours carries it
FOREVER = timedelta(days=365)
PIECE = 1 << 16  # numbers that are added up at once on the CPU
# Inside a compiled block, marks of checkpointing do not reach what autograd functions compute before torch 2.12: the
# results of deferred layers would be kept instead of being computed again.
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
MARKS_REACH_FUNCTIONS = _VERSION >= (2, 12)
# Where a compiled block gathers sequences for a part that hands its input to several layers, torch 2.11 computes other
# gradients than without compiling. Those of torch 2.13 are right.
COMPILES_GATHERED = _VERSION >= (2, 13)


def wake_gpu() -> None:
    """Make torch's state of the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.init()


def default_store() -> dist.Store:
    """The key-value store of the running torch.distributed job."""
    return dist.distributed_c10d._get_default_store()


def store_is_on_rank_0() -> bool:
    """Whether rank 0 hosts the job's store: where neither torchrun's agent nor another process does."""
    return "MASTER_ADDR" in os.environ and not store_outlives_ranks()


def store_outlives_ranks() -> bool:
    """Whether torchrun's agent has the job's store: it keeps what ranks wrote that were started before."""
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
    """The same store over a connection of its own: one that waits for a key keeps its other users waiting."""
    return store.clone()  # type: ignore[attr-defined,no-any-return]


def init_group(backend: str, patience: float, **where: Any) -> None:
    """`init_process_group` that ends after `patience` seconds where gloo cannot connect; later waits last as ever."""
    if backend != "gloo":
        dist.init_process_group(backend, **where)
        return
    dist.init_process_group(backend, timeout=timedelta(seconds=patience), **where)
    dist.distributed_c10d._set_pg_timeout(dist.distributed_c10d.default_pg_timeout)


def gloo_devices() -> list[Any]:
    """What gloo's groups send and receive with: a thread each, which wakes up a hundred times a second, used or not."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo
    return [make.create_device(interface=name) for name in interfaces] or [make.create_default_device()]


def gloo_group(store: dist.Store, rank: int, size: int, timeout: float, devices: list[Any]) -> Any:
    """A gloo group outside torch's registry: only its members take part in making it."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._devices, options._threads = devices, 2 * len(devices)
    return dist.ProcessGroupGloo(store, rank, size, options)


def calm_gloo() -> None:
    """Let gloo's threads wake up without taking the core of a thread that sends.

    A sender holds a lock until its call of the kernel returns. What its message wakes may take its core before that,
    and answer: then the sender's own gloo thread asks for the lock again and again, on the core that the sender needs
    to let it go. On busy cores that took most of the processor time of messages.
    """
    if not hasattr(os, "SCHED_BATCH"):  # Linux has it
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
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a group is made
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def abort_gloo(group: Any) -> None:
    """Close a group's connections, also under a thread that waits on one; its peers' waits then fail at once.

    gloo's own `abort` leaves the sockets open. A receive that times out closes every pair of the group; one from a
    peer that is gone already fails before its time, so all peers are tried.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device="cpu")], peer, ABORT_TAG).wait(timedelta(milliseconds=1))


def abort_nccl(groups: Iterable[Any], patience: float = 20.0) -> None:
    """Stop the groups' kernels, so that streams waiting for them go on.

    All at once: an abort frees memory, for which CUDA waits until every kernel has ended, those of the other groups
    included. One after the other they would wait for each other.
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
    """Break groups of any kind; `patience`: seconds for those of NCCL."""
    slow = []
    for group in groups:
        if isinstance(group, dist.ProcessGroupGloo):
            abort_gloo(group)
        else:
            slow.append(group)
    abort_nccl(slow, patience)


def backends(group: dist.ProcessGroup) -> list[Any]:
    """What does a group's work: one for each kind of device, or one for all."""
    found = [group._get_backend(device) for device in group._device_types]
    return list({id(backend): backend for backend in found}.values())


def wait(work: Any) -> None:
    """Wait for a gloo message for as long as it takes; not for NCCL's, where a time-out makes the host wait."""
    work.wait(FOREVER)


def allgather_bytes(group: Any, size: int, mine: Tensor) -> list[Tensor]:
    """Everybody's `mine`, all of the same shape."""
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
    """Everybody gets the root's `tensor`, in place."""
    options = dist.distributed_c10d.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, FOREVER
    group.broadcast([tensor], options).wait()


# Collectives that may stand in a compiled graph: a group is known by its name. The two that move pieces have new names
# since torch 2.13.
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


def reduced(x: Tensor, operation: str, group: str) -> Tensor:
    """The "sum" or "max" of everybody's x."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), operation, group))


def gathered(x: Tensor, group: str) -> Tensor:
    """Everybody's x, one after the other in the first dimension."""
    return collectives.wait_tensor(_all_gather(x.contiguous(), 0, group))


def sum_scattered(x: Tensor, group: str) -> Tensor:
    """This process's part, in the first dimension, of the sum of everybody's x."""
    return collectives.wait_tensor(_reduce_scatter(x.contiguous(), "sum", 0, group))


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


def like(parameter: Any, piece: Tensor) -> Tensor:
    """A DTensor spread as `parameter` is, of which this process has `piece`."""
    from torch.distributed.tensor import DTensor

    spread: Any = DTensor.from_local(
        piece, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
    spread._local_tensor = piece  # not the view that torch made of it: as `is_shared` sees it, that has two holders
    return spread


def ends_of_spread(x: Any, weight: Any, has_bias: bool) -> tuple[list[Any], list[Any]] | None:
    """How a product of pieces is spread, if it is one: the input's gradient, and the output.

    A weight spread by its rows with a whole input; or by its columns, with an input that is spread alike.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if x.device_mesh != weight.device_mesh or len(weight.placements) != 1:
        return None
    (rows,), (columns,) = weight.placements, x.placements
    if any(size % weight.device_mesh.size() for size in weight.shape):  # the last process has a smaller piece
        return None
    if rows == Shard(0) and columns == Replicate():
        return [Partial()], [Shard(x.dim() - 1)]
    if rows == Shard(1) and columns == Shard(x.dim() - 1) and not has_bias:  # a bias would be added by every process
        return [columns], [Partial()]
    return None


def from_local(piece: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """The tensor of which every process of `mesh` has a piece."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(piece, mesh, placements, run_check=False)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a nested value."""
    return (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nested value with other tensors in it."""
    return torch.utils._pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def settled(tensor: Tensor) -> Tensor:
    """A plain tensor; one that a collective is still working on is waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def quiet_streams() -> None:
    """A parameter's gradient may come from either of the two streams of an Overlap: they are joined after each step."""
    graph = torch.autograd.graph
    if hasattr(graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        graph.set_warn_on_accumulate_grad_stream_mismatch(False)


def require_on_device(condition: Tensor, text: str) -> None:
    """IndexError if a condition does not hold; a GPU tells it later, by an assertion, so that nobody waits for it."""
    if condition.is_cuda:
        torch._assert_async(condition, text)
    elif not bool(condition):
        raise IndexError(text)


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """The sum of all squares, in float64.

    On a GPU 16-bit tensors' norms are in float32, which float16 would overflow. torch's norm on the CPU adds up in
    float32 one by one, and is 12% off for 50 million numbers: there, products of short pieces in float64 are added.
    """
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    on_cpu = [piece for t in tensors if t.is_cpu for piece in t.reshape(-1).split(PIECE)]
    total = sum((float(torch.dot(wide, wide)) for wide in map(Tensor.double, on_cpu)), 0.0)
    others = [t for t in tensors if not t.is_cpu]
    norms: list[Tensor] = []
    if halves := [t for t in others if t.dtype in (torch.float16, torch.bfloat16)]:
        norms += torch._foreach_norm(halves, 2, dtype=torch.float32)
    if wides := [t for t in others if t.dtype not in (torch.float16, torch.bfloat16)]:
        norms += torch._foreach_norm(wides, 2)
    return total + (float(torch.stack([norm.double() for norm in norms]).square().sum()) if norms else 0.0)


def multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Scale tensors in place."""
    torch._foreach_mul_(list(tensors), factor)


def divide(tensors: Sequence[Tensor], number: float) -> None:
    """Divide tensors in place."""
    torch._foreach_div_(list(tensors), number)


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


def is_modified(error: BaseException) -> bool:
    """Whether autograd says that a tensor it saved was modified in place."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def modified_tensor(error: BaseException) -> str:
    """The type and the shape of that tensor in parentheses, as autograd names them."""
    found = re.search(r"\[torch\.(?:cuda\.)?(\w+) \[([\d, ]*)\]\]", str(error))
    return f"({found[1]} of shape [{found[2]}]) " if found else ""


def num_aliases(tensor: Tensor) -> int:
    """The number of tensors that share the memory of `tensor`, itself included.

    Counted by the storage, so views without a common version counter are seen, too: those that compiled code makes.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # the storage object made here has one


def has_memory(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is there: FSDP frees that of whole weights, whoever shares it."""
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def is_shared(tensor: Any) -> bool:
    """Whether another tensor has the memory of a dense tensor, too; of a DTensor, that of this process's piece."""
    piece = settled(getattr(tensor, "_local_tensor", tensor))  # to_local() may make another alias
    return piece.layout is torch.strided and num_aliases(piece) > 1


def versions(tensors: Iterable[Tensor]) -> int:
    """A number that grows with every write in place to one of the tensors; those made in inference mode count none."""
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())


def is_summed(ctx: Any, number: int) -> bool:
    """Whether the backward pass at work adds the gradient of input `number` to a `.grad`.

    One of `torch.autograd.grad` does not: it gives gradients to whoever called it, maybe in the middle of a forward.
    """
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[number][0])
    except RuntimeError:  # it is asked for by that call, which this function of torch does not answer
        return False


def owned(tensor: Tensor) -> Tensor:
    """The same values as no view: what an autograd function returns as a view may not be changed in place."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if tensor._is_view() else tensor


_uses: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


def in_transform() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) runs: it takes no autograd.Function of the older form."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def use_number() -> int:
    """While a graph is traced: 0, 1, 2, ... A constant that keeps the compiler from merging equal operators.

    A layer used twice with the same input must leave two products. Counting starts anew with each graph, so that
    equal blocks make equal graphs.
    """
    from torch._guards import TracingContext

    return next(_uses.setdefault(TracingContext.get(), itertools.count()))


# as torch.compiler.assume_constant_result does, which first imports the whole compiler: seconds for every process
use_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Allocations:
    """How much memory was alive on a GPU during some time, without touching the allocator's own peaks.

    From the allocator's history of its events. Where the caller records one already, that one is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._ours = device, False

    def begin(self) -> None:
        """Record from here on; what was recorded before is forgotten, if it was ours."""
        if self._ours or not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._record_memory_history("all", context=None, max_entries=2_000_000)
            self._ours = True

    def mark(self) -> tuple[int, int]:
        """A moment: the number of events so far, and the bytes alive now."""
        stats = torch._C._cuda_memoryStats(self._device.index)
        number = stats["allocation"]["all"]
        return number["allocated"] + number["freed"], stats["allocated_bytes"]["all"]["current"]

    def end(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """The most bytes that were alive between two moments, for each span of event numbers."""
        last, now = self.mark()
        trace = torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]
        if self._ours:
            torch.cuda.memory._record_memory_history(None)
            self._ours = False
        changes = [e["size"] if e["action"] == "alloc" else -e["size"] for e in trace if e["action"] in _CHANGES]
        levels = list(itertools.accumulate(changes, initial=0))
        first, ground = last - len(changes), now - levels[-1]
        return [
            ground + max(levels[max(0, begin - first) : max(0, end - first) + 1], default=0) for begin, end in spans
        ]


_CHANGES = ("alloc", "free_requested")


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


class _Root(GradientEdge):
    """The gradient edge of an output, for torch's own I, which asks it what it would ask the output.

    torch cuts outputs off from their graph afterwards, in place. That cannot be done to a view, and an input that the
    stage returns as it is would lose its gradient.
    """

    requires_grad = True

    @property
    def grad_fn(self) -> Any:
        return self.node

    def detach_(self) -> None: ...


def stage_backward_input(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: list[Tensor], weights: Iterator[nn.Parameter]
) -> tuple[Sequence[Tensor | None], list[dict[str, Any]]]:
    """torch's own I: keeps the graph alive for `stage_backward_weight`."""
    from torch.distributed.pipelining._backward import stage_backward_input as run

    return run([_Root(*root) for root in roots], list(gradients), inputs, weights)  # type: ignore[misc]


def passed_over(roots: Sequence[GradientEdge], groups: list[dict[str, Any]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves behind `roots` that get a gradient neither by torch's own I nor by its W."""
    known = {id(node.variable) for group in groups for node in group["params"]} | {id(tensor) for tensor in inputs}
    return [leaf for leaf in _leaves_behind([root.node for root in roots], set()) if id(leaf) not in known]


def begins_in_python(groups: list[dict[str, Any]]) -> bool:
    """Whether torch's own W starts at the backward of an `autograd.Function`, which does not keep itself alive."""
    return any(isinstance(node, torch._C._FunctionBase) for group in groups for node in group["intermediates"])


def stage_backward_weight(weights: Iterable[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """torch's own W: one autograd.grad per parameter."""
    from torch.distributed.pipelining._backward import stage_backward_weight as run

    run(weights, groups)


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


def is_profiling() -> bool:
    """Whether torch.profiler is at work."""
    return torch.autograd.profiler._is_profiler_enabled


def tell_profiler(key: str, json: str) -> None:
    """A field of the trace that torch.profiler is writing."""
    torch.autograd._add_metadata_json(key, json)  # type: ignore[attr-defined]


def storage_id(storage: torch.UntypedStorage) -> int:
    """What tells storages apart; unlike the address of their data it stays when they are resized."""
    return storage._cdata


def memory_of(tensor: Any) -> int:
    """What tells the memory of tensors apart; of a DTensor, that of this process's piece. 0: it has none of its own."""
    try:
        return storage_id(getattr(tensor, "_local_tensor", tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):  # a sparse tensor
        return 0


# --- selective checkpointing keeps results in a place of its own, which no hook on saved tensors sees

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
