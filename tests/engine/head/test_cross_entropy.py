"""Losses in chunks: their memory, compiled passes, adapters on the head, hooks, and what is refused."""

from __future__ import annotations

import pytest
import torch
from full_marker import mark_rest_full
from stage_models import CONFIGS
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, LogProbabilities, hf_model, hf_stages
from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.head import cross_entropy
from zeropipe.engine.head.cross_entropy import ChunkedCrossEntropy, HeadCall
from zeropipe.engine.head.fused import fuse_head
from zeropipe.engine.head.logits import LogitsRule
from zeropipe.engine.head.passes import PLAIN, compiled_passes
from zeropipe.engine.step.losses import find_targets
from zeropipe.errors import EngineError

ONE = zp.build("1f1b", ranks=1, microbatches=1)
RULES = {"plain": LogitsRule(), "softcap": LogitsRule(softcap=3.0), "scale": LogitsRule(0.5)}


def make(tokens, dtype=torch.float64, hidden=6, vocabulary=23, requires_grad=True):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, dtype=dtype, generator=generator).requires_grad_(requires_grad)
    weight = torch.nn.Parameter(torch.randn(vocabulary, hidden, dtype=dtype, generator=generator))
    labels = torch.randint(-1, vocabulary, (tokens,), generator=generator)
    return x, weight, labels


def wanted(x, weight, labels, rule, factors):
    logits = rule.apply(x @ weight.t())
    losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
    return losses.detach(), torch.autograd.grad((losses * factors).sum(), [x, weight])


def losses_of(x, weight, labels, **options):
    call = HeadCall(options.pop("rule", LogitsRule()), options.pop("passes", PLAIN), (weight,), **options)
    return ChunkedCrossEntropy.apply(call, labels, None, x, weight)[0]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", 4)
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_NUMBERS", 1)


@pytest.mark.parametrize("rule", RULES)
def test_losses_that_are_weighted_token_by_token(rule, small_chunks):
    """The factors are known in backward only, as in losses of reinforcement learning."""
    x, weight, labels = make(11)
    factors = torch.linspace(-1, 2, 11, dtype=torch.float64)
    losses, gradients = wanted(x, weight, labels, RULES[rule], factors)
    found = losses_of(x, weight, labels, rule=RULES[rule])
    (found * factors).sum().backward()
    torch.testing.assert_close(found.detach(), losses)
    torch.testing.assert_close([x.grad, weight.grad], list(gradients))


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return made


def test_logits_are_never_whole_where_f_adds_the_weight_gradient(small_chunks):
    x, weight, labels = make(64, hidden=2, vocabulary=40)
    with LargestTensor() as largest:
        (losses_of(x, weight, labels, factor=0.5, in_forward=True) * 0.5).sum().backward()
    assert largest.size == 4 * 40  # of 64 tokens, 4 at a time
    _, gradients = wanted(x, weight, labels, LogitsRule(), 0.5)
    torch.testing.assert_close([x.grad, weight.grad], list(gradients))


def test_gradients_of_16_bit_weights_add_up_in_float32(small_chunks):
    x, weight, labels = make(32, torch.bfloat16)
    weight.grad_dtype = torch.float32
    (losses_of(x, weight, labels, factor=0.1, in_forward=True) * 0.1).sum().backward()
    _, (_, exact) = wanted(x.double(), weight.double(), labels, LogitsRule(), 0.1)
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad.double(), exact, rtol=0, atol=0.01 * float(exact.abs().max()))


@pytest.mark.parametrize("rule", mark_rest_full(RULES, ["softcap"]))
def test_new_numbers_of_tokens_compile_nothing(rule, small_chunks):
    torch._dynamo.reset()
    passes = compiled_passes("aot_eager")
    graphs = None
    for tokens in (9, 14, 7, 31, 22):
        x, weight, labels = make(tokens)
        losses, gradients = wanted(x, weight, labels, RULES[rule], 0.25)
        found = losses_of(x, weight, labels, rule=RULES[rule], passes=passes, factor=0.25, in_forward=True)
        (found * 0.25).sum().backward()
        torch.testing.assert_close(found.detach(), losses)
        torch.testing.assert_close([x.grad, weight.grad], list(gradients))
        graphs = graphs or counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_a_loss_that_is_scaled_afterwards_is_refused():
    x, weight, labels = make(9)
    losses = losses_of(x, weight, labels, factor=0.5, in_forward=True)
    with pytest.raises(IndexError, match="was scaled after"):
        losses.sum().backward()


def test_a_second_backward_is_refused():
    x, weight, labels = make(9)
    losses = losses_of(x, weight, labels)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(EngineError, match="ran twice"):
        losses.sum().backward()


def test_invalid_labels_are_refused():
    for label in (61, -7):
        batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.full((1, 4), label)}
        stage = stage_of(CONFIGS["llama"]())
        with pytest.raises(IndexError, match="outside of the vocabulary of 61"):
            stage(**stage.pick(batch), targets=CausalLMLoss().targets(batch))


def stage_of(config, in_forward=False, **options):
    stage = hf_stages(config, ONE, 0, dtype=torch.float64, **options)[0]
    assert fuse_head(stage, PLAIN, in_forward=in_forward) is None
    return stage


def batch_of(tokens=9):
    ids = torch.randint(61, (2, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 4 == 0, -100)}


def step(stage, batch, targets, store=None):
    total = CausalLMLoss()(stage(**stage.pick(batch), targets=targets), batch)[0] / 7
    store = store or WeightStore()
    with store.collect(0, 0):
        total.backward()
    store.flush(0, 0)
    gradients = {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
    stage.zero_grad()
    return total.detach(), gradients


ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "elsewhere": {"target_modules": ["v_proj"]},
}


@pytest.mark.parametrize("in_forward", [False, True], ids=["W", "F"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_on_the_head(name, in_forward, small_chunks):
    """Beside whole logits of the same stage, whose adapters test_adapters.py compares with peft's."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **ADAPTERS[name])
    stage = stage_of(CONFIGS["llama"](), in_forward, adapter=adapter)
    batch = batch_of()
    found = step(stage, batch, CausalLMLoss().targets(batch)._replace(factor=1 / 7))
    expected = step(stage, batch, None)
    assert found[1].keys() == expected[1].keys()
    assert all("lora" in name or "modules_to_save" in name for name in found[1])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def test_hooks_keep_logits_whole():
    """Gradient hooks of the head's weight fire, and so do forward hooks on the head."""
    stage, batch = stage_of(CONFIGS["llama"]()), batch_of()
    expected, seen = step(stage, batch, None), []
    handle = stage.lm.lm_head.weight.register_hook(seen.append)
    torch.testing.assert_close(step(stage, batch, CausalLMLoss().targets(batch)), expected)
    assert len(seen) == 1
    handle.remove()
    stage.lm.lm_head.register_forward_hook(lambda head, args, output: seen.append(output))
    torch.testing.assert_close(step(stage, batch, CausalLMLoss().targets(batch)), expected)
    assert seen[1].shape == (2, 9, 61)


def test_a_loss_with_a_call_of_its_own_gets_logits():
    class Mine(CausalLMLoss):
        def __call__(self, output, microbatch):
            return output.mean()

    class Counted(CausalLMLoss):
        def count(self, microbatch):
            return 1

    assert [find_targets(loss) for loss in (Mine(), None, lambda output, microbatch: 0)] == [None] * 3
    assert all(map(find_targets, (Counted(), LogProbabilities())))


def test_under_autocast():
    model = hf_model(CONFIGS["llama"](), dtype=torch.float32)
    stage = hf_stages(model, ONE, 0)[0]
    assert fuse_head(stage, PLAIN, in_forward=False) is None
    batch = batch_of()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (step(stage, batch, targets) for targets in (CausalLMLoss().targets(batch), None))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_chunks_have_equal_sizes():
    assert [rows.stop - rows.start for rows in cross_entropy.chunks(4096, 151_936, 5 * 2**26)] == [2048, 2048]
    assert [rows.stop - rows.start for rows in cross_entropy.chunks(10, 100, 2000)] == [10]
    assert sum(rows.stop - rows.start for rows in cross_entropy.chunks(4097, 151_936, 2**27)) == 4097
    assert list(cross_entropy.chunks(0, 100, 2000)) == []


def test_a_score_head_is_left_alone():
    stage = hf_stages(CONFIGS["llama"](), ONE, 0, head="score")[0]
    assert fuse_head(stage, PLAIN, in_forward=False) is None
    assert stage.fused_head is None
