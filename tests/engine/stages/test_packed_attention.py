"""Packed rows without a dense mask: the tables are the masks, and the kernels compute attention within samples."""

from __future__ import annotations

import gc
import warnings
from itertools import product

import pytest
import torch
from full_marker import mark_rest_full
from stage_models import CONFIGS
from torch._dynamo.utils import counters
from transformers import masking_utils
from weights_cases import all_stages

import zeropipe as zp
from zeropipe.engine import hf_stages
from zeropipe.engine.blocks.compiling import prepare_blocks
from zeropipe.engine.stages import packed_attention
from zeropipe.engine.stages.build import open_model
from zeropipe.engine.stages.packed_attention import PackedAttention, Samples, find_samples, resolve_attention
from zeropipe.engine.torch_private import attention as torch_attention
from zeropipe.engine.torch_private.attention import attend_blocks, attend_varlen
from zeropipe.engine.transformers_private import Reach, read_reach
from zeropipe.errors import ConfigError

CPU = torch.device("cpu")
CUT = zp.build("1f1b", ranks=2, microbatches=2)
REACHES = [Reach(), Reach(window=50), Reach(chunk=40), Reach(window=1), Reach(window=1000), Reach(window=20, chunk=30)]


def samples_of(lengths, rows=1):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Samples(ends, rows, int(ends[-1]) // rows)


def dense_mask(lengths, rows, reach):
    """(rows, tokens, tokens), one pair after the other."""
    tokens = sum(lengths) // rows
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(rows, tokens)
    position = torch.cat([torch.arange(length) for length in lengths]).view(rows, tokens)
    query, key = position[:, :, None], position[:, None, :]
    mask = (owner[:, :, None] == owner[:, None, :]) & (key <= query)
    if reach.window:
        mask &= query - key < reach.window
    return mask & (query // reach.chunk == key // reach.chunk) if reach.chunk else mask


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "rows"),
    [((7,), 1), ((130, 1, 2, 300, 95), 1), ((128, 256, 128), 1), ((100, 60, 3, 157), 2), ((700,), 1)],
    ids=str,
)
def test_the_blocks_of_a_table_are_those_of_the_mask(lengths, rows, reach):
    """Each block of scores is left out, is whole, or is partial, as in the mask; in both orders."""
    table = samples_of(lengths, rows).table("flex", reach, CPU)
    mask, tokens = dense_mask(lengths, rows, reach), sum(lengths) // rows
    index = torch.arange(tokens)
    assert torch.equal((index[None, None] >= table.first[..., None]) & (index <= index[:, None]), mask)
    number, size = table.kv_indices.shape[-1], torch_attention.BLOCK
    padded = torch.nn.functional.pad(mask, (0, number * size - tokens) * 2)
    blocks = padded.view(rows, number, size, number, size).transpose(2, 3).flatten(3)
    partial, full = listed(table[1:3]), listed(table[3:5])
    assert torch.equal(partial | full, blocks.any(-1))
    assert not (partial & full).any()
    assert blocks.all(-1)[full].all()
    assert torch.equal(listed(table[5:7]), partial.mT)
    assert torch.equal(listed(table[7:9]), full.mT)


def listed(pair):
    """Lists of blocks as a matrix."""
    counts, indices = (each[:, 0] for each in pair)
    used = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), used)


@pytest.mark.parametrize("case", ["plain", "window", "chunk", "softcap", "sinks", "all"])
@pytest.mark.parametrize(("lengths", "rows"), [((9, 4, 1, 16), 1), ((140, 30, 70, 100), 2)])
def test_blocks_attend_as_the_formula_says(case, lengths, rows):
    reach = {"window": Reach(window=5), "chunk": Reach(chunk=6), "all": Reach(window=5)}.get(case, Reach())
    softcap = 2.0 if case in ("softcap", "all") else None
    tokens = sum(lengths) // rows
    query, key, value, sinks = states = drawn(rows, tokens)
    given = {"scale": 0.4, "softcap": softcap, "sinks": sinks if case in ("sinks", "all") else None}
    out = attend_blocks(query, key, value, samples_of(lengths, rows).table("flex", reach, CPU), **given)
    scores = (query @ key.repeat_interleave(2, 1).mT) * 0.4
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    scores = scores.masked_fill(~dense_mask(lengths, rows, reach)[:, None], -torch.inf)
    if given["sinks"] is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(rows, -1, tokens, 1)], -1)
    wanted = scores.softmax(-1)[..., :tokens] @ value.repeat_interleave(2, 1)
    used = states if given["sinks"] is not None else states[:3]
    assert_same(out, wanted, used)


@pytest.mark.parametrize("window", [0, 1, 5, 1000])
@pytest.mark.parametrize(("lengths", "rows"), [((9, 4, 1, 16), 1), ((14, 3, 7, 10), 2)])
def test_both_kernels_attend_alike(lengths, rows, window):
    query, key, value, _ = drawn(rows, sum(lengths) // rows)
    samples = samples_of(lengths, rows)
    blocks = attend_blocks(query, key, value, samples.table("flex", Reach(window), CPU))
    varlen = attend_varlen(query, key, value, samples.table("varlen", Reach(window), CPU))
    assert_same(varlen, blocks, (query, key, value))


def drawn(rows, tokens):
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, 4, tokens, 8), (rows, 2, tokens, 8), (rows, 2, tokens, 6), (4,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def assert_same(one, other, inputs):
    grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(1), dtype=one.dtype)
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    found = [torch.autograd.grad(output, inputs, grad, retain_graph=True) for output in (one, other)]
    for mine, wanted in zip(*found):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-11)


def test_what_transformers_masks_are_made_of():
    window, chunk = (
        masking_utils.sliding_window_causal_mask_function(7),
        masking_utils.chunked_causal_mask_function(9, torch.zeros(1)),
    )
    assert read_reach(masking_utils.causal_mask_function) == Reach()
    assert read_reach(window) == Reach(window=7)
    assert read_reach(chunk) == Reach(chunk=9)
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert read_reach(masking_utils.packed_sequence_compatibility_function(window, ids, ids)) == Reach(window=7)
    assert read_reach(masking_utils.bidirectional_mask_function) is None
    assert read_reach(masking_utils.sliding_window_overlay(7)) is None  # it has no end
    blocks = masking_utils.blockwise_overlay(ids)
    assert read_reach(masking_utils.or_masks(masking_utils.causal_mask_function, blocks)) is None
    assert read_reach(masking_utils.and_masks(masking_utils.causal_mask_function, blocks)) is None


def microbatch(lengths, vocabulary=61):
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(vocabulary, (1, sum(lengths)), generator=generator)
    return {"input_ids": ids, "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}


def run(stages, batch):
    inputs = ()
    for stage in stages:
        output = stage(*inputs, **stage.pick(batch))
        inputs = output if isinstance(output, tuple) else (output,)
    return inputs[0]


def test_a_table_is_made_once_for_all_layers_and_stages(monkeypatch):
    made = []
    build = torch_attention.build_block_table
    monkeypatch.setattr(torch_attention, "build_block_table", lambda first: made.append(first) or build(first))
    stages = all_stages(CONFIGS["qwen3-mixed"](), CUT, attention="flex")
    made.clear()
    batch = microbatch((5, 9, 2))
    first = run(stages, batch)
    assert len(made) == 2  # whole samples and windows
    assert torch.equal(run(stages, batch), first)
    assert len(made) == 2
    batch["cu_seqlens"][1] += 1  # the same tensor with other samples
    assert not torch.allclose(run(stages, batch), first)
    assert len(made) == 4


def test_samples_are_forgotten_with_their_microbatch():
    batch = microbatch((5, 9, 2))
    find_samples(batch["cu_seqlens"], 1, 16)
    before = len(packed_attention._found)
    del batch
    assert len(packed_attention._found) == before - 1


@pytest.mark.full
def test_many_steps_leave_nothing_behind():
    """Tables, masks and graphs of 200 steps of ever new lengths."""
    stages = all_stages(CONFIGS["qwen3-mixed"](), CUT, attention="flex")
    generator, left = torch.Generator().manual_seed(0), []
    for step in range(200):
        ends = 1 + torch.randperm(31, generator=generator)[: step % 6].sort().values
        batch = {
            "input_ids": torch.arange(32)[None],
            "cu_seqlens": torch.cat([torch.tensor([0]), ends, ends.new_tensor([32])]),
        }
        run(stages, batch).sum().backward()
        for stage in stages:
            stage.zero_grad()
        if step in (9, 199):
            gc.collect()
            left.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    assert left[1] <= left[0]


def test_new_mixtures_of_lengths_compile_nothing():
    """Blocks with windows and without, compiled as one graph each: new samples are other values of the same tensors."""
    torch._dynamo.reset()
    counters.clear()
    graphs = set()
    stages = all_stages(CONFIGS["qwen3-mixed"](), CUT, attention="flex")
    plain = all_stages(CONFIGS["qwen3-mixed"](), CUT, attention="sdpa")
    mixtures = [(16,), (5, 9, 2), (1, 15), (4, 4, 4, 4), (2,) * 8, (3, 13), (1,) * 16, (6, 3, 7)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be compiled")
        for stage in stages:
            prepare_blocks(stage, compile=True, backend="aot_eager")
        for lengths in mixtures:
            batch = microbatch(lengths)
            found, wanted = run(stages, batch), run(plain, batch)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            found.sum().backward()
            graphs.add(counters["stats"]["unique_graphs"])
    assert len(graphs) == 1  # those of the first mixture
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "ac, compile",
    mark_rest_full(
        product(["full", "selective:op", "selective:2", "memory_budget:0.5"], [False, True]),
        lambda it: not it[1] or it[0] in ("full", "memory_budget:0.5"),
    ),
)
def test_checkpointed_blocks_have_the_same_gradients(ac, compile):
    if ac.startswith("memory") and not compile:
        pytest.skip("it is selective:op then")
    gradients, batch = [], microbatch((5, 9, 2))
    for options in ({}, {"ac": ac, "compile": compile}):
        stages = all_stages(CONFIGS["qwen3-mixed"](), CUT, attention="flex", seed=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*cannot be compiled")
            for stage in stages:
                prepare_blocks(stage, backend="aot_eager", **options)
            run(stages, batch).square().sum().backward()
        gradients.append([p.grad for stage in stages for p in stage.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_rows_that_are_not_packed_run_as_before():
    batch = {"input_ids": torch.arange(24).view(2, 12)}
    padded = batch | {"attention_mask": torch.ones(2, 12, dtype=torch.long)}
    padded["attention_mask"][0, 9:] = 0
    outputs = []
    for attention in ("sdpa", "flex"):
        stages = all_stages(CONFIGS["qwen3-mixed"](), CUT, attention=attention, seed=1)
        outputs.append((run(stages, batch), run(stages, padded)))
    for one, other in zip(*outputs):
        assert torch.equal(one, other)


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("dtype", "refusals", "sizes", "kernel"),
    [
        (torch.bfloat16, {}, {128}, "flex"),
        (torch.float16, {"varlen": "sinks"}, {128}, "flex"),
        (torch.bfloat16, {}, {192, 128}, "flex"),
        (torch.bfloat16, {}, {512}, "flex"),
        (torch.bfloat16, {}, {8}, "varlen"),
        (torch.float32, {}, {128}, None),
        (torch.bfloat16, {"flex": "dropout", "varlen": "dropout"}, {128}, None),
    ],
)
def test_the_kernel_that_auto_chooses_on_a_gpu(monkeypatch, dtype, refusals, sizes, kernel):
    monkeypatch.setattr(torch_attention, "HAS_VARLEN", True)
    attention = PackedAttention("auto", refusals, frozenset(sizes))
    if refusals.get("flex"):
        packed_attention._warn_of_mask.cache_clear()
        with pytest.warns(UserWarning, match="packed rows have a dense mask, as with attention='sdpa': dropout"):
            assert attention.choose(GPU, dtype) is None
    else:
        assert attention.choose(GPU, dtype) == kernel
    assert attention.choose(CPU, dtype) is None


def test_a_model_without_kernels_is_left_as_it_is_and_a_warning_says_so():
    """As with `auto` on a GPU: its rows that are not packed run its own functions."""
    from family_models import tiny

    opened = open_model(tiny("falcon", alibi=True), torch.float32, "lm", 0, None, "auto")
    assert opened.attention is not None
    stage = opened.build_stage((range(opened.family.num_layers),), 0, CPU)
    assert stage.lm.config._attn_implementation in ("sdpa", "eager")
    packed_attention._warn_of_mask.cache_clear()
    with pytest.warns(UserWarning, match=r"packed rows have a dense mask, as with attention='sdpa': \w+Error"):
        inputs = stage.pick(microbatch((5, 9, 2)))
    assert "samples" not in inputs
    assert stage(**inputs).isfinite().all()


def test_what_cannot_attend_so_is_refused():
    with pytest.raises(ConfigError, match="attention='fast': must be one of auto, sdpa, flex, varlen, flash"):
        hf_stages(CONFIGS["llama"](), CUT, 0, attention="fast")
    with pytest.raises(ConfigError, match="attention='flash': it runs on a GPU only; use 'auto'"):
        hf_stages(CONFIGS["llama"](), CUT, 0, attention="flash")
    with pytest.raises(ConfigError, match="attention='flash': the package flash-attn is missing; use 'auto'"):
        resolve_attention("flash", GPU)
    with pytest.raises(ConfigError, match=r"attention='flex': .* cannot pack .* dropout \(attention_dropout=0.1\)"):
        hf_stages(CONFIGS["llama"](attention_dropout=0.1), CUT, 0, attention="flex")


def test_kernels_that_a_model_cannot_have_are_refused():
    from family_models import tiny

    with pytest.raises(ConfigError, match=r"attention='varlen': model_type='gemma2' .* bounds scores, .*use 'flex'"):
        hf_stages(tiny("gemma2"), CUT, 0, attention="varlen")
    with pytest.raises(ConfigError, match=r"attention='flex': model_type='falcon' cannot pack with it: .*; use 'auto'"):
        hf_stages(tiny("falcon", alibi=True), CUT, 0, attention="flex")


@pytest.mark.parametrize("lengths", [(5, 7), (12,)], ids=str)
def test_the_device_is_not_asked_whether_rows_are_packed(lengths, monkeypatch):
    """As transformers does, which waits for the answer; the same logits as where it does."""
    schedule, asked = zp.build("1f1b", ranks=1, microbatches=2), []
    find = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda ids: asked.append(ids) or find(ids))
    batch = {"input_ids": torch.randint(5, 40, (1, 12)), "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    logits, weights = [], None
    for attention in ("varlen", "sdpa"):
        stage = hf_stages(CONFIGS["qwen3"](), schedule, 0, dtype=torch.float64, attention=attention)[0]
        weights = weights or stage.state_dict()
        stage.load_state_dict(weights)
        asked.clear()
        with torch.no_grad():
            logits.append(stage(**stage.pick(batch)))
        assert len(asked) == (attention == "sdpa")
    torch.testing.assert_close(*logits)
