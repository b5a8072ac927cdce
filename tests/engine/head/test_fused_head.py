"""The fused head of every model type is the plain one: losses, entropies and gradients, in chunks of a few tokens."""

from __future__ import annotations

import pytest
import torch
from family_models import EXACT, Float64, tiny, whole_of
from weights_cases import all_stages

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, LogProbabilities
from zeropipe.engine.backward.linear import defer
from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.head import cross_entropy
from zeropipe.engine.head.fused import find_rule, fuse_head
from zeropipe.engine.head.logits import LogitsRule
from zeropipe.engine.head.passes import PLAIN

ONE = zp.build("1f1b", ranks=1, microbatches=1)
RULES = {"gemma2": LogitsRule(softcap=30.0), "cohere": LogitsRule(scale=0.0625)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", 5)
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_NUMBERS", 1)


def one_stage(model_type, **changes):
    model = whole_of(model_type, seed=1, dtype=torch.float64, **changes).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model, all_stages(model, ONE)[0]


def batch_of(model):
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(5, size, (2, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


def plain_losses(model, batch):
    """By torch alone: losses, entropies."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch["labels"][:, 1:], ignore_index=-100, reduction="none"
    )
    return losses, torch.distributions.Categorical(logits=logits.detach()).entropy()


def assert_fused(model_type, how, **changes):
    model, stage = one_stage(model_type, **changes)
    assert fuse_head(stage, PLAIN, in_forward=how == "F") is None
    batch, store = batch_of(model), WeightStore()
    with Float64():
        losses, entropies = plain_losses(model, batch)
        (losses.sum() / 8).backward()
        if how == "W":
            defer(stage)
        probabilities = LogProbabilities(entropies=True)
        with torch.no_grad():
            output = stage(**stage.pick(batch), targets=probabilities.targets(batch))
            found, found_entropies = probabilities(output, batch)
        targets = CausalLMLoss().targets(batch)._replace(factor=1 / 8)
        total, count = CausalLMLoss()(stage(**stage.pick(batch), targets=targets), batch)
        with store.collect(0, 0):
            (total / 8).backward()
        store.flush(0, 0)
    assert count == (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(found, -losses.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found_entropies, entropies, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(total.detach(), losses.detach().sum(), rtol=1e-10, atol=0)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(gradient.abs().max() for gradient in wanted.values() if gradient is not None)
    for name, parameter in stage.named_parameters():
        gradient = wanted[stage.full_name(name)]
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-11 * float(largest), msg=name)


SAMPLE = ("gemma2", "gpt2", "cohere", "qwen3_moe")


@pytest.mark.parametrize("model_type", SAMPLE)
def test_some_types(model_type):
    """By turns with weight gradients in F and in W; the test below has both, of all types."""
    assert_fused(model_type, "FW"[SAMPLE.index(model_type) % 2])


@pytest.mark.full
@pytest.mark.parametrize("how", ["F", "W"])
@pytest.mark.parametrize("model_type", EXACT)
def test_every_type(model_type, how):
    reason = find_rule(all_stages(tiny(model_type), ONE)[0])
    if isinstance(reason, str):
        pytest.skip(reason)
    assert_fused(model_type, how)


@pytest.mark.parametrize("model_type", RULES)
def test_what_is_done_to_the_products_is_found(model_type):
    assert find_rule(all_stages(tiny(model_type), ONE)[0]) == RULES[model_type]
