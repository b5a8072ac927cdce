"""The weight-gradient store against the plain backward."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from autograd_split import AutogradSplit
from full_marker import mark_rest_full
from split_modules import Changing, Count, GroupedExperts
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import pytorch_utils
from transformers.models.falcon import modeling_falcon

from zeropipe.engine.backward.gradients import main_gradients
from zeropipe.engine.backward.linear import DeferredLinear, defer
from zeropipe.engine.backward.products import Product
from zeropipe.engine.backward.stacks import expert_linear
from zeropipe.engine.backward.store import WeightStore, divide_into_parts
from zeropipe.engine.torch_private.autograd import ProductError
from zeropipe.errors import EngineError
from zeropipe.integrations import experts  # noqa: F401


def mlp(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, bias), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3, bias)).double()


def run(module, x, store=None, key=(0, 0)):
    y = module(x)
    if store is None:
        y.square().sum().backward()
    else:
        with store.collect(*key):
            y.square().sum().backward()


def grads(module):
    return {name: p.grad for name, p in module.named_parameters()}


def assert_equal(module, plain):
    torch.testing.assert_close(grads(module), grads(plain), rtol=1e-12, atol=1e-14)


def deferred(plain):
    module = copy.deepcopy(plain)
    defer(module)
    return module


def test_i_frees_the_hooks_on_saved_tensors():
    """Those of checkpointing hold the input of a block and the results that it keeps."""

    class Hooks:
        def pack(self, tensor):
            return tensor

        def unpack(self, tensor):
            return tensor

    module, hooks = deferred(mlp()), Hooks()
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        y = module(torch.ones(2, 5, dtype=torch.float64))
    alive = weakref.ref(hooks)
    del hooks
    with WeightStore().collect(0, 0):
        y.sum().backward(retain_graph=True)
    assert alive() is not None
    with WeightStore().collect(0, 0):
        y.sum().backward()
    assert alive() is None
    assert y.grad_fn is not None  # which has the graph


def test_w_in_any_order_and_b_mixed_in():
    plain = mlp()
    module, store = deferred(plain), WeightStore()
    inputs = [torch.randn(4, 5).double().requires_grad_() for _ in range(4)]
    for x in inputs:
        run(plain, x)
    plain_dx = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    run(module, inputs[0], store, (0, 0))
    run(module, inputs[1], store, (0, 1))
    run(module, inputs[2])
    store.flush(0, 1)
    run(module, inputs[3], store, (0, 3))
    store.flush(0, 3)
    store.flush(0, 0)
    assert_equal(module, plain)
    torch.testing.assert_close([x.grad for x in inputs], plain_dx)
    assert store.pending_bytes() == 0


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (5,)])
def test_layers_without_entries(shape):
    """A layer of width 0, as some sizes of a family make them."""
    plain = nn.Sequential(nn.Linear(5, 0), nn.Linear(0, 3), nn.Linear(3, 2)).double()
    module, store, x = deferred(plain), WeightStore(), torch.randn(shape).double()
    run(plain, x)
    run(module, x, store)
    store.flush(0, 0)
    assert_equal(module, plain)


def test_i_leaves_weights_to_w_and_does_the_rest():
    module, store = deferred(mlp()), WeightStore()
    run(module, torch.randn(4, 5).double(), store)
    assert {name for name, grad in grads(module).items() if grad is None} == {"0.weight", "3.weight"}
    store.flush(0, 0)
    assert all(grad is not None for grad in grads(module).values())


def test_split_does_the_same_products_as_a_whole_backward():
    plain = mlp()
    module, store, x = deferred(plain), WeightStore(), torch.randn(4, 5).double().requires_grad_()
    with Count() as whole:
        run(plain, x)
    with Count() as split:
        run(module, x, store)
        before = split.products
        store.flush(0, 0)
    assert split.products == whole.products
    assert split.products - before == 2


class Storages(TorchDispatchMode):
    """Remembers every storage made, weakly, so that one held by the autograd graph alone is seen too."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 1:
                self.made.add(StorageWeakRef(tensor.untyped_storage()))
        return out

    def alive(self):
        gc.collect()
        return {ref for ref in self.made if not ref.expired()}


def refs(tensors):
    return {StorageWeakRef(t.untyped_storage()) for t in tensors if t is not None}


@pytest.mark.parametrize("how", ["plain", "checkpointed"])
def test_nothing_else_stays_alive_between_i_and_w(how):
    """After I: gradients, and each linear's input and output gradient. After W: gradients."""
    module, store = deferred(mlp()), WeightStore()
    x = torch.randn(4, 5).double().requires_grad_()
    given = refs([x, *module.parameters()])
    forward = module if how == "plain" else lambda x: checkpoint(module, x, use_reentrant=False)
    with Storages() as storages:
        run(forward, x, store)
    stash = refs(t for p in store.products() for t in p.tensors())
    assert len(stash) == 4  # inputs (the first is x itself) and output gradients of two linears
    assert storages.alive() - given == (stash - given) | refs([*grads(module).values(), x.grad])
    assert store.pending_bytes() == 8 * (4 * 5 + 4 * 7 + 4 * 7 + 4 * 3)
    with storages:
        store.flush(0, 0)
    assert storages.alive() - given == refs([*grads(module).values(), x.grad])


class Behind(nn.Module):
    """A parameter behind a linear layer, whose gradient is a view of the layer's output gradient."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(5, 5), nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        return torch.tanh(self.linear(x) + self.table.view(1, 4, 5))


@pytest.mark.parametrize(
    "how", mark_rest_full(["plain", "checkpointed", "aot_eager", "inductor"], lambda it: it != "inductor")
)
def test_a_gradient_that_shares_memory_with_what_waits(how):
    """Autograd adds the second microbatch's gradient to the memory of the first one's output gradient."""
    torch.manual_seed(0)
    plain = Behind().double()
    module, store = deferred(plain), WeightStore()
    forward = module
    if how == "checkpointed":
        forward = functools.partial(checkpoint, module, use_reentrant=False)
    elif how != "plain":
        forward = torch.compile(module, backend=how, fullgraph=True)
    inputs = [torch.randn(1, 4, 5).double().requires_grad_() for _ in range(3)]
    for number, x in enumerate(inputs):
        run(plain, x)
        run(forward, x, store, (0, number))
    for number in range(3):
        store.flush(0, number)
    assert_equal(module, plain)


class Buffered(nn.Module):
    """A layer that reads a buffer: itself, or a view of it."""

    def __init__(self, view):
        super().__init__()
        self.linear, self.view = nn.Linear(5, 5).double(), view
        self.register_buffer("seen", torch.ones(4, 5).double())

    def forward(self, x):
        self.seen.mul_(0.9)
        return x + self.linear(self.seen[1:] if self.view else self.seen)[:3]


@pytest.mark.parametrize("view", [False, True])
def test_an_input_that_is_modified_before_w(view):
    torch.manual_seed(0)
    plain = Buffered(view)
    module, store = deferred(plain), WeightStore()
    for number in range(3):
        run(plain, torch.ones(3, 5).double())
        run(module, torch.ones(3, 5).double(), store, (0, number))
    for number in range(3):
        store.flush(0, number)
    assert_equal(module, plain)


def test_a_tensor_that_cannot_be_copied_in_time_is_refused():
    """Another holder of the very tensor modifies it, or a hook does in the middle of I."""
    module, store = deferred(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))), WeightStore()
    hidden = module[0](torch.randn(4, 5))
    y = module[1](hidden)
    with store.collect(0, 0):
        y.sum().backward()
    next(iter(store.products())).x.mul_(2)
    with pytest.raises(ProductError) as caught:
        store.flush(0, 0)
    assert caught.value.parameter is module[1].weight
    views, y = [], module[1](module[0](torch.randn(4, 5)))
    y.register_hook(lambda gradient: views.append(gradient.view(-1)))
    with store.collect(0, 1, copy_shared=False):
        y.square().sum().backward()
    views[0].mul_(2)
    with pytest.raises(ProductError):
        store.copy_shared(0, 1)


def test_a_stack_of_experts_owns_what_waits():
    """A parameter behind the experts takes a view of their output gradient."""
    torch.manual_seed(0)
    weight, table = (torch.randn(shape).double() for shape in ((2, 5, 5), (4, 5)))
    offsets, inputs = torch.tensor([1, 4], dtype=torch.int32), [torch.randn(4, 5).double() for _ in range(3)]
    parameters = [nn.Parameter(weight.clone()), nn.Parameter(table.clone())]
    store = WeightStore()
    for number, x in enumerate(inputs):
        layer = _Experts(parameters[0])
        with store.collect(0, number):
            y = expert_linear(layer, 0, x.clone().requires_grad_(), offsets) + parameters[1].view(4, 5)
            y.square().sum().backward()
    for number in range(3):
        store.flush(0, number)
    wanted = [nn.Parameter(weight.clone()), nn.Parameter(table.clone())]
    for x in inputs:
        y = torch.cat([x[:1] @ wanted[0][0].t(), x[1:] @ wanted[0][1].t()]) + wanted[1]
        y.square().sum().backward()
    torch.testing.assert_close([p.grad for p in parameters], [p.grad for p in wanted])


class _Experts(nn.Module):
    """One stack of two experts, as `product` wants it."""

    defers, has_hooks, is_transposed = ("stack",), False, False

    def __init__(self, stack):
        super().__init__()
        self.stack, self.adapters = stack, {}


def test_a_shared_input_counts_once():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5, False), nn.Linear(5, 5, False)

        def forward(self, x):
            x = x.sin()
            return self.a(x) * self.b(x)

    module, store = Fork(), WeightStore()
    defer(module)
    run(module, torch.randn(4, 5, requires_grad=True), store)
    assert store.pending_bytes() == 4 * 3 * 4 * 5


def test_complex_layers_do_their_whole_backward_in_i():
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(torch.complex128)
    module, x, store = deferred(plain), torch.randn(2, 4, dtype=torch.complex128), WeightStore()
    plain(x).abs().sum().backward()
    y = module(x).abs().sum()
    with store.collect(0, 0):
        y.backward()
    store.flush(0, 0)
    assert_equal(module, plain)


def test_a_weight_used_twice_accumulates_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 5)
            self.other = nn.Linear(5, 5)
            self.other.weight = self.lin.weight

        def forward(self, x):
            return self.other(self.lin(self.lin(x).tanh()))

    torch.manual_seed(0)
    plain = Twice().double()
    module, store, x = deferred(plain), WeightStore(), torch.randn(4, 5).double()
    assert module.lin.weight is module.other.weight
    run(plain, x)
    run(module, x, store)
    store.flush(0, 0)
    assert_equal(module, plain)


def test_frozen_weights_make_no_product():
    plain = mlp()
    plain[0].weight.requires_grad_(False)
    module, store, x = deferred(plain), WeightStore(), torch.randn(4, 5).double().requires_grad_()
    run(plain, x)
    run(module, x, store)
    assert [tuple(p.parameter.shape) for p in store.products()] == [(3, 7)]
    store.flush(0, 0)
    assert_equal(module, plain)


def test_lora_adapters():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(6, 6).requires_grad_(False)
            self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    torch.manual_seed(0)
    plain = nn.Sequential(Lora(), nn.Tanh(), Lora()).double()
    module, store, x = deferred(plain), WeightStore(), torch.randn(4, 6).double()
    run(plain, x)
    run(module, x, store)
    assert len(list(store.products())) == 4
    assert module[0].base.weight.grad is None
    store.flush(0, 0)
    assert_equal(module, plain)


def test_bf16_accumulates_in_float32():
    """256 equal small steps: bf16 gradients stop growing, float32 main gradients do not."""
    module, store = nn.Linear(4, 4).bfloat16(), WeightStore()
    defer(module)
    main_gradients(module, torch.float32)
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    for m in range(400):
        with store.collect(0, m):
            module(x).sum().backward()
    for m in range(400):
        store.flush(0, m)
    assert module.weight.grad.dtype == module.bias.grad.dtype == torch.float32
    assert torch.all(module.weight.grad == 400)
    assert torch.all(module.bias.grad == 400)
    sum_in_bf16 = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(400):
        sum_in_bf16 += 1
    assert sum_in_bf16 == 256


def test_autocast():
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    module, store, x = deferred(plain), WeightStore(), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        run(plain, x)
        run(module, x, store)
    store.flush(0, 0)
    torch.testing.assert_close(grads(module), grads(plain), rtol=2e-2, atol=1e-2)


def test_checkpoint_recomputes_once_in_i():
    """Gradients are not lost on an alias of the parameter, and W recomputes nothing."""
    plain = mlp()
    module, store, x = deferred(plain), WeightStore(), torch.randn(4, 5).double().requires_grad_()
    calls = []
    module[0].register_forward_hook(lambda *_: calls.append(1))
    run(plain, x)
    run(lambda x: checkpoint(module, x, use_reentrant=False), x, store)
    assert len(calls) == 2
    store.flush(0, 0)
    assert len(calls) == 2
    assert_equal(module, plain)


def test_w_in_pieces():
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(7))).double()
    module, store, x = deferred(plain), WeightStore(), torch.randn(4, 6).double().requires_grad_()
    run(plain, x)
    run(module, x, store)
    sizes = []
    for part in (2, 0, 1):
        before = len(list(store.products()))
        store.flush(0, 0, part, parts=3)
        sizes.append(before - len(list(store.products())))
    assert sorted(sizes) == [2, 2, 3]
    assert_equal(module, plain)
    with pytest.raises(EngineError, match="0W0 part 0 of 3"):
        store.flush(0, 0, 0, parts=3)


def test_pieces_have_about_equal_work():
    w = nn.Parameter(torch.empty(1, 1))
    products = [Product(w, torch.empty(1, n), torch.empty(1, 1)) for n in (8, 1, 1, 1, 1, 4)]
    pieces = divide_into_parts(products, 2)
    assert [sum(p.flops for p in piece) for piece in pieces.values()] == [16, 16]


def test_misuse_is_named():
    module, store = deferred(mlp()), WeightStore()
    x = torch.randn(4, 5).double()
    with pytest.raises(EngineError, match="2W1"):
        store.flush(2, 1)
    run(module, x, store)
    with pytest.raises(EngineError, match="0I0 ran twice"):
        run(module, x, store)
    with pytest.raises(EngineError, match="run one I at a time"), store.collect(0, 1), store.collect(0, 2):
        pass
    run(module, x, store, (0, 5))  # a failed I leaves the store usable


def test_defer_leaves_other_layers_and_names_alone():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    module = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.EmbeddingBag(4, 4), nn.Conv1d(4, 4, 1))
    names = list(module.state_dict())
    assert defer(module) == 1
    assert defer(module) == 1
    assert list(module.state_dict()) == names
    assert [type(m) for m in module] == [DeferredLinear, Own, nn.EmbeddingBag, nn.Conv1d]


@pytest.mark.parametrize("make", [pytorch_utils.Conv1D, lambda y, x: modeling_falcon.FalconLinear(x, y, bias=False)])
def test_linear_layers_of_transformers(make):
    """GPT-2's and Falcon's."""
    torch.manual_seed(0)
    plain = nn.Sequential(make(7, 5), nn.GELU(), make(3, 7)).double()
    module, store, x = deferred(plain), WeightStore(), torch.randn(2, 4, 5).double().requires_grad_()
    assert defer(module) == 2
    run(plain, x)
    run(module, x, store)
    assert module[0].weight.grad is None
    store.flush(0, 0)
    assert_equal(module, plain)


def test_a_result_that_a_model_changes_in_place():
    """With a bias and rows of rows the product is a view, which torch lets no autograd function return for that."""
    torch.manual_seed(0)
    plain = Changing(bias=True).double()
    module, store, x = deferred(plain), WeightStore(), torch.randn(2, 4, 8).double().requires_grad_()
    run(plain, x)
    wanted, x.grad = x.grad, None
    run(module, x, store)
    store.flush(0, 0)
    assert_equal(module, plain)
    torch.testing.assert_close(x.grad, wanted, rtol=1e-12, atol=1e-14)


def test_no_grad_and_eval_keep_nothing():
    module, store = deferred(mlp()), WeightStore()
    with torch.no_grad():
        assert not module(torch.randn(4, 5).double()).requires_grad
    assert store.pending_bytes() == 0


def test_a_weight_that_a_hook_makes_is_left_alone():
    """torch's older spectral_norm computes the weight in a pre-forward hook: there is no parameter to add to."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    nn.utils.spectral_norm(module[1])
    assert defer(module) == 1


def test_outside_a_step_autograd_has_the_weight_gradient():
    """Whoever differentiates inside a stage, or asks for a weight's gradient, gets what a plain layer gives."""
    plain = mlp()
    module, x = deferred(plain), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for inputs in (lambda m: [x], lambda m: [m[0].weight, m[3].weight]):
        wanted = torch.autograd.grad(plain(x).square().sum(), inputs(plain))
        found = torch.autograd.grad(module(x).square().sum(), inputs(module))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert all(p.grad is None for p in module.parameters())


class Slope(nn.Module):
    """A block that adds the slope of its own energy, by its input or by a weight, as force fields do."""

    def __init__(self, wanted: str, create_graph: bool) -> None:
        super().__init__()
        self.inner, self.wanted, self.create_graph = mlp(), wanted, create_graph

    def forward(self, x):
        with torch.enable_grad():
            inner_x = x if self.create_graph else x.detach().requires_grad_()
            by = inner_x if self.wanted == "input" else self.inner[0].weight
            (slope,) = torch.autograd.grad(self.inner(inner_x).square().sum(), by, create_graph=self.create_graph)
        return self.inner(x) * slope.square().sum()


@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("wanted", ["input", "weight"])
def test_a_block_that_differentiates_itself(wanted, create_graph, checkpointed):
    """Its own autograd.grad leaves nothing to W, also where checkpointing runs it again within I."""
    plain, store = Slope(wanted, create_graph), WeightStore()
    module, x = deferred(plain), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    run(plain, x)
    again = {} if checkpointed is None else {"use_reentrant": checkpointed}

    def split():
        y = checkpoint(module, x, **again) if again else module(x)
        with store.collect(0, 0):
            y.square().sum().backward()
        store.flush(0, 0)

    if create_graph and checkpointed is False:
        with pytest.raises(EngineError, match=r"use ac=.none., or split=.whole."):
            split()
    else:
        split()
        assert_equal(module, plain)


def test_transforms_of_torch_func_inside_a_stage():
    plain, store = mlp(), WeightStore()
    module, x = deferred(plain), torch.randn(4, 5, dtype=torch.float64)
    for use in (torch.func.vmap, lambda m: torch.func.vmap(torch.func.grad(lambda v: m(v).square().sum()))):
        use(plain)(x).square().sum().backward()
        y = use(module)(x)
        with store.collect(0, 0):
            y.square().sum().backward()
        store.flush(0, 0)
        assert_equal(module, plain)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_weight_with_a_hook_is_left_alone(register):
    module, seen, store = mlp(), [], WeightStore()
    getattr(module[0].weight, register)(lambda _: seen.append(module[0].weight.grad is None))
    assert defer(module) == 1
    run(module, torch.randn(4, 5, dtype=torch.float64), store)
    assert len(seen) == 1
    assert module[0].weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_around_a_whole_step(dtype):
    plain = mlp().to(dtype)
    module, store = deferred(plain), WeightStore()
    x = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        run(module, x, store)
        store.flush(0, 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = plain(x).square().sum()
    loss.backward()
    for name, p in module.named_parameters():
        assert p.grad.dtype == dtype
        torch.testing.assert_close(p.grad, plain.get_parameter(name).grad, rtol=0.05, atol=0.05)


def test_subclasses_that_compute_as_linear_layers_do_are_deferred():
    class Named(nn.Linear):
        """A model's own class with torch's forward."""

        def reset(self):
            return "reset"

    plain = nn.Sequential(Named(5, 7), nn.Tanh(), Named(7, 3, bias=False)).double()
    module = copy.deepcopy(plain)
    assert defer(module) == 2
    assert isinstance(module[0], Named)
    assert (module[0].reset(), type(module[0]), type(module[2])) == ("reset", type(module[2]), type(module[0]))
    assert defer(module) == 2  # again changes nothing
    x, store = torch.randn(4, 5, dtype=torch.float64), WeightStore()
    with store.collect(0, 0):
        module(x).square().sum().backward()
    assert module[0].weight.grad is None
    store.flush(0, 0)
    plain(x).square().sum().backward()
    for mine, theirs in zip(module.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad)


def _run_experts_for_loop(w1, w2, w3, x, counts):
    made = []
    for e, rows in enumerate(x[: counts.sum()].split(counts.tolist())):
        hidden = nn.functional.silu(torch.matmul(rows, w1[e].t())) * torch.matmul(rows, w3[e].t())
        made.append(torch.matmul(hidden, w2[e].t()))
    return torch.cat([*made, x.new_zeros(len(x) - counts.sum(), x.shape[-1])])


def _run_experts_grouped_mm(w1, w2, w3, x, counts):
    offsets, given = counts.cumsum(0, dtype=torch.int32), x.bfloat16()
    w1, w2, w3 = (w.bfloat16().transpose(1, 2) for w in (w1, w2, w3))
    hidden = nn.functional.silu(torch._grouped_mm(given, w1, offs=offsets))
    hidden = hidden * torch._grouped_mm(given, w3, offs=offsets)
    return torch._grouped_mm(hidden, w2, offs=offsets).type_as(x)


class ArchonExperts(GroupedExperts):
    """As Archon has it, of the same name."""

    __module__ = "areal.experimental.models.archon.moe.grouped_experts"
    names, use_grouped_mm = ("w1", "w2", "w3"), False

    def forward(self, x, counts):
        run = _run_experts_grouped_mm if self.use_grouped_mm else _run_experts_for_loop
        return run(self.w1, self.w2, self.w3, x, counts)


class GroupedArchonExperts(ArchonExperts):
    __module__, use_grouped_mm = ArchonExperts.__module__, True


ArchonExperts.__name__ = GroupedArchonExperts.__name__ = "GroupedExperts"
gated_experts = pytest.mark.parametrize(
    "kind, within, rows",
    [(GroupedExperts, 0.02, 7), (ArchonExperts, 1e-6, 9), (GroupedArchonExperts, 0.02, 7)],
    ids=["torchtitan", "archon", "archon grouped"],
)


@gated_experts
def test_experts_of_trainers_leave_their_weight_gradients_to_w(kind, within, rows):
    """Also where rows of padding follow those of the last expert."""
    torch.manual_seed(0)
    plain, counts = kind(), torch.tensor([2, 0, 5])
    module = deferred(plain)
    assert defer(module) == 3  # again changes nothing
    x, store = torch.randn(rows, 8, requires_grad=True), WeightStore()
    torch.testing.assert_close(module(x, counts), plain(x, counts), rtol=within, atol=within)
    with torch.no_grad():
        assert not module(x, counts).requires_grad
    with store.collect(0, 0):
        copy.deepcopy(module)(x, counts).sum().backward()
        module(x, counts).sum().backward()
    assert set(grads(module).values()) == {None}
    store.flush(0, 0)
    plain(x, counts).sum().backward()
    torch.testing.assert_close(grads(module), grads(plain), rtol=within, atol=within)
    assert not grads(module)[kind.names[0]][1].any()


@gated_experts
def test_experts_of_a_trainer_that_computes_in_another_way_stay_as_they_are(monkeypatch, kind, within, rows):
    monkeypatch.setattr(kind, "forward", lambda self, x, counts: x)
    assert defer(kind()) == 0


@pytest.mark.parametrize("name", ["_run_experts_for_loop", "_run_experts_grouped_mm"])
def test_experts_of_an_archon_with_other_functions_stay_as_they_are(monkeypatch, name):
    """Archon compiles the second one: what it was is found."""
    theirs = globals()[name]
    monkeypatch.setitem(globals(), name, functools.wraps(theirs)(lambda *args: theirs(*args)))
    assert defer(ArchonExperts()) == 3
    monkeypatch.setitem(globals(), name, lambda *args: theirs(*args))  # with a name for a dynamic length around it
    assert defer(ArchonExperts()) == 3
    monkeypatch.setitem(globals(), name, lambda w1, w2, w3, x, counts: x)
    assert defer(ArchonExperts()) == 0


def test_named_tuples_stay_what_they_are_on_another_device():
    from collections import namedtuple

    from zeropipe.engine.step.cell_runner import to_device

    Bounds = namedtuple("Bounds", "starts longest")
    got = to_device({"bounds": [Bounds(torch.ones(2), 3)]}, torch.device("meta"))
    assert type(got["bounds"][0]) is Bounds
    assert (got["bounds"][0].starts.device.type, got["bounds"][0].longest) == ("meta", 3)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return _Scaled.apply(x, self.scale)


def test_torchs_own_split_takes_functions_written_in_python():
    """Their nodes are owned by the graph, which I lets go of."""
    module = nn.Sequential(nn.Linear(4, 4), _Scale(), nn.Linear(4, 4))
    x, gradient = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    wanted = torch.autograd.grad(module(x), list(module.parameters()), gradient)
    split = AutogradSplit()
    split.backward_input(0, 0, module, [module(x)], [gradient], [x])
    split.flush(0, 0)
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], list(wanted))


def test_torchs_own_split_takes_views_and_inputs_that_are_returned():
    """torch would cut them off in place: an error for a view, no gradient for an input that a stage hands on."""
    module, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    y, gradient = module(x).t(), torch.randn(3, 4)
    wanted = torch.autograd.grad([y, x], [x, *module.parameters()], [gradient.t(), gradient], retain_graph=True)
    split = AutogradSplit()
    split.backward_input(0, 0, module, [y, x], [gradient.t(), gradient], [x])
    split.flush(0, 0)
    assert x.requires_grad
    torch.testing.assert_close([x.grad, *(parameter.grad for parameter in module.parameters())], list(wanted))
