"""Load-balancing losses of routers over all stages: the plain model's total loss and gradients."""

from __future__ import annotations

import pytest
import torch
from family_models import tiny
from full_marker import mark_rest_full
from stage_models import assert_same_gradients, microbatches, staged_step
from weights_cases import all_stages

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, hf_model
from zeropipe.engine.backward.linear import defer
from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.blocks.compiling import prepare_blocks

TYPES = ["mixtral", "qwen3_moe", "gpt_oss", "jamba", "jetmoe", "granitemoe"]


def model_of(model_type, **changes):
    config = tiny(model_type, output_router_logits=True, **changes)
    model = hf_model(config, dtype=torch.float64, seed=2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that routers choose
    return model


def batches_of(model):
    batches = microbatches(vocabulary=model.config.vocab_size)
    batches[1]["attention_mask"] = torch.ones_like(batches[1]["input_ids"])
    batches[1]["attention_mask"][0, 5:] = 0
    batches[2]["labels"] = batches[2]["labels"].clone()
    batches[2]["labels"][:, :4] = -100
    return batches


def plain_step(model, batches):
    """The model's own loss of each microbatch, weighed by its tokens."""
    count = CausalLMLoss().count
    total, value = sum(map(count, batches)), 0.0
    for batch in batches:
        loss = model(**batch, use_cache=False).loss * count(batch) / total
        loss.backward()
        value += float(loss.detach())
    return value


@pytest.mark.parametrize(
    "model_type",
    mark_rest_full(TYPES, ["mixtral", "gpt_oss"]),
)
def test_the_loss_of_routers_is_summed_over_stages(model_type):
    torch.manual_seed(0)
    model = model_of(model_type)
    batches = batches_of(model)
    without = model_of(model_type)
    without.load_state_dict(model.state_dict())
    without.config.output_router_logits = False
    assert plain_step(without, batches) < plain_step(model, batches) - 0.1, "the routers' part must be seen"
    model.zero_grad()
    wanted = plain_step(model, batches)

    loss_fn, total = CausalLMLoss(), sum(map(CausalLMLoss().count, batches))
    stages = all_stages(model, zp.build("1f1b", ranks=4, microbatches=4))
    for stage in stages:
        defer(stage)
    found = staged_step(stages, batches, WeightStore(), loss_fn=lambda output, batch: loss_fn(output, batch)[0] / total)
    assert found == pytest.approx(wanted, rel=1e-6)  # transformers sums routers in float32
    assert_same_gradients(stages, model, rtol=1e-5)


def test_dense_layers_and_bare_ends_add_nothing():
    """Stages without any router hand the sums on."""
    torch.manual_seed(0)
    model = model_of("qwen3_moe", mlp_only_layers=[0, 1])
    batches = batches_of(model)
    wanted = plain_step(model, batches)
    loss_fn, total = CausalLMLoss(), sum(map(CausalLMLoss().count, batches))
    stages = all_stages(model, zp.build("1f1b", ranks=5, microbatches=5), layers=[0, 2, 1, 1, 0])
    found = staged_step(stages, batches, None, loss_fn=lambda output, batch: loss_fn(output, batch)[0] / total)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert_same_gradients(stages, model, rtol=1e-5)


def test_without_the_flag_there_are_only_logits():
    stages = all_stages(tiny("mixtral"), zp.build("1f1b", ranks=2, microbatches=2))
    hidden = stages[0](**stages[0].pick(microbatches()[0]))
    assert isinstance(hidden, torch.Tensor)
    assert isinstance(stages[1](hidden, **stages[1].pick(microbatches()[0])), torch.Tensor)


@pytest.mark.parametrize(
    "ways",
    mark_rest_full(
        [{"ac": "full"}, {"ac": "selective:op"}, {"compile": True, "backend": "aot_eager"}], lambda it: "ac" in it
    ),
    ids=str,
)
def test_checkpointed_and_compiled_layers_hand_on_their_routers(ways, recwarn):
    """Layers that run again in the backward are caught once."""
    torch.manual_seed(0)
    model = model_of("mixtral")
    batches = batches_of(model)[:1]
    wanted = plain_step(model, batches)
    loss_fn, total = CausalLMLoss(), CausalLMLoss().count(batches[0])
    stages = all_stages(model, zp.build("1f1b", ranks=2, microbatches=2))
    for stage in stages:
        defer(stage)
        prepare_blocks(stage, **ways)
    found = staged_step(stages, batches, WeightStore(), loss_fn=lambda output, batch: loss_fn(output, batch)[0] / total)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert_same_gradients(stages, model, rtol=1e-5)
    assert not [warning for warning in recwarn if "runs uncompiled" in str(warning.message)]
