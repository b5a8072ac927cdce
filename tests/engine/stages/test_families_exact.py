"""Model types cut into stages with a split backward are the plain model: tied or not, padded and packed."""

from __future__ import annotations

import pytest
import torch
from family_models import EXACT, PROMISED, TABLE, Float64, tiny, whole_of
from full_marker import mark_rest_full
from stage_models import assert_same_gradients, staged_step
from weights_cases import all_stages

import zeropipe as zp
from zeropipe.engine import CausalLMLoss, hf_stages
from zeropipe.engine.backward.linear import defer
from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.stages.packed_attention import find_samples
from zeropipe.engine.stages.skeleton import named_tensors
from zeropipe.errors import ConfigError

CUTS = {"1f1b": zp.build("1f1b", ranks=3, microbatches=3), "zbv": zp.build("zbv", ranks=2, microbatches=4)}
LENGTHS = (6, 2, 7)


def loss_of(output, batch):
    return CausalLMLoss()(output, batch)[0]


def batches_of(vocabulary, packs):
    """A plain, a padded and, where the model keeps them apart, a packed microbatch."""
    generator = torch.Generator().manual_seed(0)
    plain, padded = (torch.randint(5, vocabulary, (2, length), generator=generator) for length in (9, 12))
    mask = torch.ones_like(padded)
    mask[0, 10:] = 0  # shorter than a window: in float64 a row that sees nothing is no number
    labels = padded.masked_fill(mask == 0, -100)
    batches = [{"input_ids": plain, "labels": plain}, {"input_ids": padded, "labels": labels, "attention_mask": mask}]
    if packs:
        row = torch.randint(5, vocabulary, (1, sum(LENGTHS)), generator=generator)
        starts = torch.tensor([0, *LENGTHS]).cumsum(0)
        labels = row.clone()
        labels[:, starts[:-1]] = -100  # the first token of a sequence follows on none
        batches.append({"input_ids": row, "labels": labels, "cu_seqlens": starts})
    return batches


def plain_step(model, batches):
    """The whole model; packed sequences one by one."""
    total = 0.0
    for batch in batches:
        parts = [batch]
        if "cu_seqlens" in batch:
            pairs = zip(batch["input_ids"].split(LENGTHS, 1), batch["labels"].split(LENGTHS, 1))
            parts = [{"input_ids": ids, "labels": labels} for ids, labels in pairs]
        for part in parts:
            inputs = {key: value for key, value in part.items() if key != "labels"}
            loss = loss_of(model(**inputs, use_cache=False).logits, part)
            loss.backward()
            total += float(loss.detach())
    return total


def assert_exact(model_type, name, tied, attention="auto", **changes):
    model = whole_of(model_type, seed=1, dtype=torch.float64, tie_word_embeddings=tied, **changes).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    stages = all_stages(model, CUTS[name], attention=attention)
    assert all(stage.has_tied_ends == tied for stage in stages)
    batches = batches_of(model.config.get_text_config().vocab_size, stages[0].family.can_pack)
    for stage in stages:
        defer(stage)
    with Float64():
        wanted = plain_step(model, batches)
        assert staged_step(stages, batches, WeightStore(), loss_fn=loss_of) == pytest.approx(wanted, rel=1e-9)
    assert_same_gradients(stages, model, rtol=1e-8)
    if "cu_seqlens" in batches[-1]:
        assert find_samples(batches[-1]["cu_seqlens"], 1, sum(LENGTHS)).is_used == (attention != "auto")


@pytest.mark.parametrize("model_type", mark_rest_full(PROMISED, PROMISED[::2]))
def test_promised_types(model_type):
    """By turns tied as zbv cuts it, with both ends on one rank, and untied as 1f1b does; the test below has both."""
    tied = TABLE[model_type].tied == "yes" and PROMISED.index(model_type) % 2 == 0
    assert_exact(model_type, "zbv" if tied else "1f1b", tied)


# windows and chunks, scores with a bound, attention sinks, fewer heads for keys, heads of two sizes
PACKED = (
    ("flex", "qwen3"), ("flex", "gemma2"), ("flex", "gemma3_text"), ("flex", "gpt_oss"), ("flex", "llama4_text"),
    ("flex", "deepseek_v3"), ("flex", "cohere2"), ("varlen", "qwen3"), ("varlen", "mistral"), ("varlen", "gemma3_text"),
)  # fmt: skip


@pytest.mark.parametrize(("attention", "model_type"), mark_rest_full(PACKED, [PACKED[3], PACKED[5], PACKED[9]]))
def test_packed_rows_without_a_dense_mask(attention, model_type):
    limits = {"attention_chunk_size": 16, "floor_scale": 20} if model_type == "llama4_text" else {}
    assert_exact(model_type, "1f1b", False, attention, **limits)


@pytest.mark.full
@pytest.mark.parametrize("attention", ["flex", "varlen"])
@pytest.mark.parametrize("model_type", EXACT)
def test_packed_rows_of_every_type(attention, model_type):
    try:
        hf_stages(tiny(model_type), CUTS["zbv"], 0, attention=attention)
    except ConfigError as refusal:
        pytest.skip(str(refusal))
    assert_exact(model_type, "zbv", False, attention)


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("model_type", EXACT)
def test_every_type(model_type, name, tied):
    if tied and TABLE[model_type].tied != "yes":
        pytest.skip("its head is never tied")
    assert_exact(model_type, name, tied)


@pytest.mark.full
@pytest.mark.parametrize("model_type", EXACT)
def test_seeded_weights_of_every_type_do_not_depend_on_the_cut(model_type):
    """And buffers are those that transformers computes."""
    whole = whole_of(model_type, seed=4)
    config = tiny(model_type)
    made = dict(type(whole)._from_config(config).named_buffers())
    wanted = named_tensors(whole)
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffer, made[name]), name
    for stage in all_stages(config, CUTS["1f1b"], seed=4):
        for name, tensor in named_tensors(stage).items():
            full = stage.full_name(name)
            assert torch.equal(tensor, wanted[full]), full
