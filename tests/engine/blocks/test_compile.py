"""Compiled blocks and activation checkpointing under the split backward."""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import aot
import family_models
import pytest
import torch
from autograd_split import AutogradSplit
from compile_cases import Toy
from full_marker import mark_rest_full
from split_modules import Changing, Count, GroupedExperts
from stage_models import CONFIGS, assert_same_gradients, lm_loss, microbatches, plain_step, staged_step
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

import zeropipe as zp
from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.engine.backward import ops
from zeropipe.engine.backward.linear import defer, find_deferred, update_hooks
from zeropipe.engine.backward.stacks import expert_linear
from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.blocks.compiling import prepare_blocks, warn_once
from zeropipe.engine.stages.build import hf_model, hf_stages, module_stages
from zeropipe.engine.torch_private import compile as torch_compile
from zeropipe.errors import ConfigError

AC_MODES = ["none", "full", "selective:2", "selective:op", "memory_budget:0.5"]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(compile_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compile_cache))
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    warn_once.cache_clear()
    yield
    torch._dynamo.reset()


def tiny(family, layers=2, **kwargs):
    config = CONFIGS[family](num_hidden_layers=layers, **kwargs)
    return hf_model(config, dtype=torch.float64, seed=1)


def stages_of(model, num_stages=2, *, split=True, **prepare):
    schedule = zp.build("1f1b", ranks=num_stages, microbatches=num_stages)
    stages = [hf_stages(model, schedule, rank)[rank] for rank in range(num_stages)]
    for stage in stages:
        if split:
            defer(stage)
        prepare_blocks(stage, **prepare)
    return stages


def check_step(model, stages, batches, rtol=1e-6):
    """transformers computes norms in float32: a fused norm differs in the last places of those."""
    if all(p.grad is None for p in model.parameters()):
        plain_step(model, batches)
    staged_step(stages, batches, WeightStore())
    assert_same_gradients(stages, model, rtol)


# Inductor takes a compiler run for each kernel of a model: one mode of Llama here, and the toy below with others; all
# modes and Qwen3 in `make test-full`.
COMMON = {
    ("llama", "eager"): AC_MODES,
    ("llama", "inductor"): ["none"],
    ("qwen3", "eager"): ["full"],
    ("qwen3", "inductor"): [],
}
PRODUCT = mark_rest_full([(*way, ac) for way in COMMON for ac in AC_MODES], lambda it: it[2] in COMMON[it[:2]])


@pytest.mark.filterwarnings("ignore:memory_budget")
@pytest.mark.parametrize(("family", "backend", "ac"), PRODUCT)
def test_gradients_equal_the_plain_model(family, backend, ac):
    model, batches = tiny(family), microbatches((9, 9))
    prepare = {"compile": backend == "inductor", "ac": ac}
    check_step(model, stages_of(model, **prepare), batches)
    if backend == "inductor":
        kinds = 2 if ac == "selective:2" else 1
        assert counters["stats"]["unique_graphs"] == kinds  # for all blocks, stages and microbatches
        assert not counters["graph_break"]
    if backend == "inductor" and ac == "full":  # again, from the compile cache
        torch._dynamo.reset()
        counters.clear()
        check_step(model, stages_of(model, **prepare), batches)
        hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        assert hits > 0


def toy_error(prepare=prepare_blocks, **ways):
    torch.manual_seed(0)
    plain = nn.ModuleList(Toy() for _ in range(2)).double()
    y = x = torch.randn(8, 16).double().requires_grad_()
    for block in plain:
        y = block(y)
    y.square().sum().backward()
    (stage,) = module_stages(copy.deepcopy(plain), zp.build("1f1b", ranks=1, microbatches=1), 0).values()
    defer(stage)
    prepare(stage, compile=True, **ways)
    staged_step([stage], [{"inputs": x}], WeightStore(), loss_fn=lambda out, _: out.square().sum())
    return max((p.grad - q.grad).norm() / q.grad.norm() for p, q in zip(stage.parameters(), plain.parameters()))


@pytest.mark.parametrize("ac", ["none", "full", "selective:op"])
@pytest.mark.parametrize("bias", [False, True])
def test_results_that_a_block_changes_in_place(bias, ac):
    """What selective checkpointing keeps of such a result is what it was before."""
    torch.manual_seed(0)
    plain = nn.ModuleList(Changing(bias) for _ in range(2)).double()
    x = torch.randn(2, 4, 8).double().requires_grad_()
    plain[1](plain[0](x)).square().sum().backward()
    (stage,) = module_stages(copy.deepcopy(plain), zp.build("1f1b", ranks=1, microbatches=1), 0).values()
    stage.zero_grad()
    defer(stage)
    prepare_blocks(stage, ac=ac)
    staged_step([stage], [{"inputs": x}], WeightStore(), loss_fn=lambda out, _: out.square().sum())
    for found, wanted in zip(stage.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=0.0)


def unprotected(monkeypatch):
    from torch._inductor.lowering import lowerings

    monkeypatch.setattr(ops, "keep_inputs_from_reuse", lambda op: None)
    monkeypatch.delitem(lowerings, ops.linear_i, raising=False)


def test_protection_is_needed_and_enough(monkeypatch):
    """Without it a stashed tensor is overwritten and nobody says so."""
    from torch._inductor import config as inductor_config

    assert toy_error() < 1e-12
    torch._dynamo.reset()
    unprotected(monkeypatch)
    with inductor_config.patch(fx_graph_cache=False):  # nor is it taken from there
        assert toy_error() > 1e-3


def test_blocks_of_which_inductor_computes_a_part_again():
    """Whole blocks are computed again in test_compile_schedules.py."""
    assert toy_error(ac="selective:op") < 1e-12
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_protection_is_part_of_cached_code(monkeypatch):
    """A warm cache gives back protected code, whatever the flags were when it was made."""
    assert toy_error() < 1e-12
    for donated in (False, True):
        torch._dynamo.reset()
        with functorch_config.patch(donated_buffer=donated):
            assert toy_error() < 1e-12
    torch._dynamo.reset()
    counters.clear()
    unprotected(monkeypatch)  # nothing is compiled any more, so nothing can go wrong
    assert toy_error() < 1e-12
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0


def test_a_users_own_compile_is_protected_too():
    def by_hand(stage, compile):
        for block in stage.blocks:
            block.compile()

    assert toy_error(prepare=by_hand) < 1e-12


def test_no_recompile_per_microbatch_and_few_for_lengths():
    model = tiny("llama")
    batches = microbatches((9, 9, 9, 9))
    stages = stages_of(model, compile=True, backend="aot_eager")
    check_step(model, stages, batches)
    assert counters["stats"]["unique_graphs"] == 1
    model.zero_grad()
    for stage in stages:
        stage.zero_grad()
    batches = microbatches((5, 6, 7, 9, 11, 12, 13, 14, 17))
    plain_step(model, batches)
    check_step(model, stages, batches)
    assert counters["stats"]["unique_graphs"] <= 3


def test_twelve_layers_share_one_graph():
    model = tiny("qwen3", layers=12)
    check_step(model, stages_of(model, compile=True, backend="aot_eager"), microbatches((9,)))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("family", "ac"),
    [
        pytest.param("gemma3", "selective:op", marks=pytest.mark.full),
        pytest.param("qwen3-moe", "none", marks=pytest.mark.full),
        pytest.param("qwen3-moe", "selective:op", marks=pytest.mark.full),
        pytest.param("gemma3", "none", marks=pytest.mark.full),
    ],
)
def test_other_families_compile_whole(family, ac):
    types = {"layer_types": ["full_attention", "sliding_attention"]} if family == "gemma3" else {}
    model = tiny(family, **types)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be compiled")
        check_step(model, stages_of(model, compile=True, ac=ac, backend="aot_eager"), microbatches((9, 9)))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "kind, compiled",
    [
        *((kind, False) for kind in ("qwen3_moe", "gpt_oss", "llama4_text", "nemotron_h")),
        *((kind, True) for kind in ("gpt_oss", "llama4_text")),
        pytest.param("nemotron_h", True, marks=pytest.mark.full),
    ],
)
def test_experts_wait_for_w(kind, compiled):
    """Gated ones, with biases, of which each takes all tokens, and without a gate."""
    config = family_models.tiny(kind, 2, **({"layers_block_type": ["mamba", "moe"]} if kind == "nemotron_h" else {}))
    model = hf_model(config, dtype=torch.float64, seed=1)
    split, store = copy.deepcopy(model), WeightStore()
    defer(split)
    stacks = [layer for layer in find_deferred(split) if hasattr(layer, "defers_experts")]
    for layer in stacks if compiled else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    batch = microbatches((9,), vocabulary=config.vocab_size)[0]["input_ids"]
    model(batch, use_cache=False).logits.square().mean().backward()
    with store.collect(0, 0):
        split(batch, use_cache=False).logits.square().mean().backward()
    experts = [layer._parameters[name] for layer in stacks for name in layer.defers]
    assert len(experts) >= 2
    assert all(parameter.grad is None for parameter in experts)
    store.flush(0, 0)
    for (name, whole), own in zip(model.named_parameters(), split.parameters()):
        assert (own.grad - whole.grad).abs().max() <= 1e-5 * whole.grad.abs().max(), name  # norms are float32


def test_hooks_on_experts_see_their_gradients():
    model, batches = tiny("qwen3-moe", mlp_only_layers=[]), microbatches((9,))
    stages = stages_of(model, 1)
    check_step(model, stages, batches)
    for module in (model, *stages):
        module.zero_grad()
        for name, parameter in module.named_parameters():
            if ".experts." in name:
                parameter.register_hook(lambda gradient: gradient * 3)
    update_hooks(find_deferred(stages[0]))
    check_step(model, stages, batches)


@pytest.mark.parametrize("ac", AC_MODES[:4])
def test_products_and_block_forwards_equal_the_whole_backwards(ac):
    """Recompute happens once, in I; W is its products and nothing else."""
    model, (batch,) = tiny("llama"), microbatches((9,))
    counts = {}
    for split in (False, True):
        stages = stages_of(model, 2, split=split, ac=ac)
        forwards: list[nn.Module] = []
        for stage in stages:
            for block in stage.blocks:
                block.mlp.register_forward_pre_hook(lambda module, _, seen=forwards: seen.append(module))
        with Count() as count:
            staged_step(stages, [batch], WeightStore() if split else None)
        counts[split] = count.products, len(forwards)
    assert counts[True] == counts[False]
    assert counts[True][1] == {"none": 2, "full": 4, "selective:2": 3, "selective:op": 4}[ac]


@pytest.mark.parametrize("ac", mark_rest_full(AC_MODES, ["full"]))
def test_compiled_products_equal_the_compiled_whole_backwards(ac):
    """Counted in the graphs that run: matrix products of F and I, and those of W, against F and B."""
    model, (batch,) = tiny("llama"), microbatches((9,))
    counts = {}
    for split in (False, True):
        torch._dynamo.reset()
        backend = CountingBackend(Checkpointing.parse(ac).budget)
        stages = stages_of(model, 2, split=split, compile=True, ac=ac, backend=backend)
        staged_step(stages, [batch], WeightStore() if split else None)
        # each kind of block once in the graphs; every deferred product runs once more, in W
        counts[split] = backend.products + backend.deferred
    assert counts[True] == counts[False]


def test_full_computes_blocks_again_where_marks_do_not_reach_functions(monkeypatch):
    """As on torch 2.11: checkpointing is around the compiled block there, and not inside."""
    model, (batch,) = tiny("llama"), microbatches((9,))
    monkeypatch.setattr(torch_compile, "MARKS_REACH_FUNCTIONS", False)
    plain_step(model, [batch])
    runs = {}
    for ac in ("none", "full"):
        backend = RunningBackend()
        stages = stages_of(model, 2, compile=True, ac=ac, backend=backend)
        staged_step(stages, [batch], WeightStore())
        assert_same_gradients(stages, model, 1e-6)
        runs[ac] = backend.runs
    assert runs == {"none": 4, "full": 6}  # two blocks forward, forward again, backward


class RunningBackend:
    """AOT autograd that counts how often a graph is run."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, inputs):
        return aot.compiled(graph, inputs, self.counted)

    def counted(self, graph, inputs):
        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


class CountingBackend:
    """AOT autograd with inductor's partitioner; counts products in the graphs instead of compiling them."""

    def __init__(self, budget):
        self.budget = budget
        self.products = self.deferred = 0

    def __call__(self, graph, inputs):
        with functorch_config.patch(activation_memory_budget=self.budget or 1.0):
            return aot.compiled(graph, inputs, self.count, self.count)

    def count(self, graph, inputs):
        for node in graph.graph.nodes:
            name = getattr(node.target, "__name__", "")
            self.deferred += name == "linear_i.default"
            self.products += name in ("mm.default", "addmm.default", "linear_i.default")
        return graph.forward


def test_the_compiled_stash_is_the_eager_stash():
    """Same inputs and output gradients, and nothing more."""
    model, (batch,) = tiny("llama"), microbatches((9,))
    found = []
    for compile in (False, True):
        (stage,) = stages_of(model, 1, compile=compile, backend="aot_eager")
        store = WeightStore()
        with store.collect(0, 0):
            lm_loss(stage(**stage.pick(batch)), batch).backward()
        sizes = sorted((p.x.numel(), p.x.shape[-1], p.dy.numel(), p.dy.shape[-1]) for p in store.products())
        found.append((sizes, store.pending_bytes()))
    assert found[0] == found[1]


def test_a_weight_used_twice_with_one_input_compiled():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x) + self.lin(x)

    plain = Twice()
    (stage,) = module_stages([copy.deepcopy(plain)], zp.build("1f1b", ranks=1, microbatches=1), 0).values()
    defer(stage)
    prepare_blocks(stage, compile=True, backend="aot_eager_decomp_partition")
    x = torch.randn(3, 4, requires_grad=True)
    plain(x).sum().backward()
    staged_step([stage], [{"inputs": x}], WeightStore(), loss_fn=lambda out, _: out.sum())
    torch.testing.assert_close(stage.blocks[0].lin.weight.grad, plain.lin.weight.grad)


def test_an_input_without_gradient_loses_nothing_compiled():
    """The first linear of a model on raw data: its weight gradient is computed in I."""
    plain = nn.Linear(4, 4)
    (stage,) = module_stages([copy.deepcopy(plain)], zp.build("1f1b", ranks=1, microbatches=1), 0).values()
    defer(stage)
    prepare_blocks(stage, compile=True, backend="aot_eager")
    x = torch.randn(3, 4)
    plain(x).square().sum().backward()
    staged_step([stage], [{"inputs": x}], WeightStore(), loss_fn=lambda out, _: out.square().sum())
    torch.testing.assert_close(stage.blocks[0].weight.grad, plain.weight.grad)


def test_an_input_gradient_that_nobody_wants_loses_nothing_compiled():
    """The way back ends at a rounding: what the layer after it leaves to W must not be optimised away."""
    plain, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    layer, store = copy.deepcopy(plain), WeightStore()
    defer(layer)
    rounded = torch.compile(lambda x: x + layer(x.round()), fullgraph=True, backend="aot_eager_decomp_partition")
    (x + plain(x.round())).square().sum().backward()
    with store.collect(0, 0):
        rounded(x).square().sum().backward()
    store.flush(0, 0)
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)


def test_layers_without_rows_have_gradients_of_zeros():
    """As in the plain model. Inductor reads nothing of a tensor without elements, so nothing reads what gave it."""
    linear, experts, store = nn.Linear(8, 8, bias=False), GroupedExperts(), WeightStore()
    defer(nn.ModuleList([linear, experts]))
    compiled = torch.compile(lambda x, ends: expert_linear(experts, 0, 2 * linear(2 * x), ends), fullgraph=True)
    with store.collect(0, 0):
        compiled(torch.ones(0, 8, requires_grad=True), torch.zeros(3, dtype=torch.int32)).sum().backward()
    store.flush(0, 0)
    for weight in (linear.weight, experts.w1_EFD):
        assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_kernels_know_that_input_gradients_are_new_memory():
    """At an unknown address, kernels of a GPU that read them take up to 1.4 times as long."""
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering

    lowered = []

    def look(graph, *args, **kwargs):
        outputs = [each for each in graph.buffers if isinstance(each, ir.MultiOutput)]
        own = {each.get_name() for each in outputs if "linear_i" in str(each.inputs[0].op_overload)}
        lowered.append((own, own & graph.unaligned_buffers))
        return codegen(graph, *args, **kwargs)

    codegen = GraphLowering.codegen
    linear = nn.Linear(8, 8, bias=False)
    defer(linear)
    torch._dynamo.reset()
    with mock.patch.object(GraphLowering, "codegen", look), torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(lambda x: linear(2 * x).sin(), fullgraph=True)(
            torch.randn(3, 8, requires_grad=True)
        ).sum().backward()
    assert [len(own) for own, _ in lowered] == [0, 1]
    assert not any(unaligned for _, unaligned in lowered)


def test_copies_of_a_layer_keep_their_gradients_apart():
    one = nn.Linear(4, 4)
    defer(one)
    two = copy.deepcopy(one)
    torch.compile(two, fullgraph=True, backend="aot_eager")(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert one.weight.grad is None
    assert two.weight.grad is not None


def test_a_block_that_cannot_be_captured_is_reported_once_and_right():
    class Branchy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x) if x.sum() > 0 else -self.lin(x)

    plain = nn.ModuleList([Branchy(), Branchy()]).double()
    (stage,) = module_stages(copy.deepcopy(plain), zp.build("1f1b", ranks=1, microbatches=1), 0).values()
    defer(stage)
    prepare_blocks(stage, compile=True, backend="aot_eager")
    batches = [{"inputs": torch.randn(3, 4).double()} for _ in range(3)]
    for batch in batches:
        plain[1](plain[0](batch["inputs"])).sum().backward()
    with pytest.warns(UserWarning, match="Branchy cannot be compiled as one graph and runs uncompiled") as seen:
        staged_step([stage], batches, WeightStore(), loss_fn=lambda out, _: out.sum())
    assert len([w for w in seen if "Branchy" in str(w.message)]) == 1
    assert_same_gradients([stage], plain)


def test_memory_budget_without_compile_is_reported():
    with pytest.warns(UserWarning, match=r"ac='memory_budget:0\.5' has no effect without compile=True.*selective:op"):
        stages_of(tiny("llama"), ac="memory_budget:0.5")


@pytest.mark.parametrize("text", ["some", "selective", "selective:0", "selective:x", "memory_budget:2", "full:1"])
def test_wrong_checkpointing_is_named(text):
    with pytest.raises(ConfigError, match=f"checkpointing '{text}': must be none, full"):
        Checkpointing.parse(text)


def test_selective_counts_layers_of_the_whole_model():
    every_second = Checkpointing.parse("selective:2")
    assert [every_second.of_layer(i) for i in range(4)] == ["full", "none", "full", "none"]


@pytest.mark.parametrize("ac", ["none", "full"])
def test_torchs_own_split_gives_the_same_gradients(ac):
    model, (batch,) = tiny("qwen3"), microbatches((9,))
    plain_step(model, [batch])
    stages, split = stages_of(model, 2, split=False, ac=ac), AutogradSplit()
    hidden = stages[0](**stages[0].pick(batch))
    handed = hidden.detach().requires_grad_()
    loss = lm_loss(stages[1](handed, **stages[1].pick(batch)), batch)
    (grad,) = split.backward_input(1, 0, stages[1], [loss], None, [handed])
    split.backward_input(0, 0, stages[0], [hidden], [grad], [])
    split.flush(0, 0)
    split.flush(1, 0)
    assert_same_gradients(stages, model)
