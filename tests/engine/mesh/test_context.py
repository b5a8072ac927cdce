"""Context parallelism: parts of sequences on several processes, equal to one process."""

from __future__ import annotations

import re
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers")

import aot
import context_cases as cases
import torch
import torch.distributed as dist
from engine_helpers import TOLERANCE, largest, ranks
from family_models import IS_OF_TABLE, TABLE, models_table, tiny
from full_marker import mark_rest_full
from paths import DOCS
from stage_models import lm_loss, plain_step, staged_step
from tensor_cases import config_of, tokens
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

import zeropipe as zp
from zeropipe.core.model import cp_exchange
from zeropipe.engine import WeightStore, defer, hf_model, hf_stages, parallelize, prepare_blocks
from zeropipe.engine.layout import Layout
from zeropipe.engine.mesh import context_parallel
from zeropipe.engine.mesh.context_parallel import find_exchange
from zeropipe.engine.mesh.cp_attention import has_copied_keys, require_exchange
from zeropipe.engine.mesh.cp_check import check_parts
from zeropipe.engine.mesh.cp_stage import split_stage
from zeropipe.engine.mesh.tp_collectives import TPGroup
from zeropipe.engine.stages.sequence_parts import SequenceParts
from zeropipe.engine.stages.skeleton import build_on_meta, find_decoder_config
from zeropipe.engine.stages.verify import find_family
from zeropipe.engine.torch_private import partial_attention
from zeropipe.errors import ConfigError
from zeropipe.estimating.model import open_model as open_shapes
from zeropipe.estimating.shapes import read_config

PP_CP, CP4 = {"pp": 2, "cp": 2}, {"pp": 1, "cp": 4}
WIDE = ({"pp": 2, "cp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2, "cp": 2}, {"pp": 2, "dp_replicate": 2, "cp": 2})
BATCHES: dict[str, dict[str, Any]] = {"plain": {}, "packed": {"packed": True}, "padded": {"padded": True}}
QUICK = [(PP_CP, "zbv", "packed", "heads"), (CP4, "1f1b", "padded", "gather"), (PP_CP, "1f1b", "packed", "ring")]
STEPS = [
    pytest.param(*job, marks=() if job in QUICK else pytest.mark.full)
    for job in product((PP_CP, CP4, *WIDE), ("1f1b", "zbv", "dualpipev"), BATCHES, ("heads", "gather", "ring"))
]
OPTIONS: list[dict[str, Any]] = [
    {"ac": "full", "dynamic_weights": True}, {"ac": "selective:op"}, {"compile": True}, {"compile": True, "ac": "full"},
]  # fmt: skip


def build(name: str, sizes: dict[str, int]) -> Any:
    return zp.build(name, ranks=sizes["pp"], microbatches=4)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_all_tokens_and_cost_the_same(size):
    x = torch.arange(24)[None]
    parts = [SequenceParts(rank, size) for rank in range(size)]
    taken = [part.take(x, 1) for part in parts]
    assert torch.equal(parts[0].join(taken, 1), x)
    assert all(torch.equal(one, other) for one, other in zip(parts[0].cut(x, 1), taken))
    assert len({int((part + 1).sum()) for part in taken}) == 1  # how many tokens all tokens of a part attend to
    assert parts[0].padded(23, 2) % (4 * size) == 0
    assert parts[0].padded(4 * size, 2) == 4 * size


@pytest.mark.parametrize("sizes, name, batches, exchange", STEPS)
def test_steps_equal_one_process(sizes, name, batches, exchange):
    """With cp=4 two processes get the same of two key heads."""
    changes, spreading = {"tie_word_embeddings": True, "num_hidden_layers": 4}, {"cp_exchange": exchange}
    job = (cases.train_on_cp, build(name, sizes), sizes, "qwen3", changes, BATCHES[batches], spreading, {}, 5)
    if exchange == "heads" and sizes.get("tp", 1) * sizes["cp"] > 4:
        pytest.skip("it has 4 heads")
    seen = largest(ranks(prod(sizes.values())).run(*job, timeout=280))
    assert max(seen.values()) < TOLERANCE, seen


SHARDED = [
    ({"pp": 2, "cp": 2}, "zbv", {}, {}),
    *(pytest.param(*job, marks=pytest.mark.full) for job in (
        ({"pp": 2, "dp_shard": 2, "cp": 2}, "dualpipev", {}, {}), ({"dp_replicate": 2, "cp": 2}, "1f1b", {}, {}),
        ({"cp": 2, "tp": 2}, "1f1b", {}, {"regather": True}),
        ({"pp": 1, "dp_shard": 2, "cp": 2}, "1f1b", {"packed": True}, {}),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, "1f1b", {}, {}),
        ({"dp_shard": 2, "cp": 2, "tp": 2}, "1f1b", {}, {"ac": "full"}),
    )),
]  # fmt: skip


@pytest.mark.parametrize("sizes, name, batches, options", SHARDED)
def test_weights_are_sharded_over_cp_too(sizes, name, batches, options):
    changes = {"tie_word_embeddings": True, "num_hidden_layers": 4}
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    job = (cases.train_on_cp, schedule, sizes, "qwen3", changes, batches, {"shard_cp": True}, options, 5)
    seen = largest(ranks(prod(sizes.values())).run(*job, timeout=280))
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.parametrize(
    "sizes, name, exchange, ac",
    [
        ({"pp": 1, "cp": 2}, "1f1b-overlap", "heads", "none"),
        *(
            pytest.param(sizes, name, exchange, ac, marks=pytest.mark.full)
            for sizes, name in (
                ({"pp": 1, "cp": 2}, "1f1b-overlap"),
                (PP_CP, "dualpipev"),
                (PP_CP, "interleaved-overlap"),
            )
            for exchange in ("heads", "gather")
            for ac in ("none", "full", "selective:op")
        ),
    ],
)
def test_forward_and_backward_take_turns_at_exchanges_of_attention(sizes, name, exchange, ac):
    schedule = zp.build(name, ranks=sizes["pp"], microbatches=4)
    options = {"overlap": "turns", "ac": ac}
    job = (schedule, sizes, "qwen3", {"num_hidden_layers": 4}, {}, {"cp_exchange": exchange}, options, 2)
    found = ranks(prod(sizes.values())).run(cases.train_in_turns, *job, timeout=280)
    assert all(seen.pop("changes") > 0 for seen in found)
    assert max(largest(found).values()) < TOLERANCE, found


@pytest.mark.parametrize(
    "name, mesh, spreading, ac, backend",
    mark_rest_full(
        [
            (*run, ac, backend)
            for backend in ("aot_eager", None)
            for ac in ("none", "full", "selective:op")
            for run in (
                ("1f1b-overlap", {"pp": 1, "cp": 2}, {"cp_exchange": "heads"}),
                ("1f1b-overlap", {"pp": 1, "cp": 2}, {"cp_exchange": "gather"}),
                ("dualpipev", {"pp": 1, "tp": 2}, {}),
                ("dualpipev", PP_CP, {"cp_exchange": "heads"}),
            )
        ],
        lambda case: case[1:] == ({"pp": 1, "cp": 2}, {"cp_exchange": "heads"}, "full", "aot_eager"),
    ),
    ids=str,
)  # None: inductor
def test_compiled_blocks_take_turns(name, mesh, spreading, ac, backend):
    """A collective is one operator of a block's graph, which lets the other side run."""
    schedule = zp.build(name, ranks=mesh["pp"], microbatches=4)
    options = {"overlap": "turns", "ac": ac, "compile": True}
    job = (schedule, mesh, "qwen3", {"num_hidden_layers": 4}, {}, spreading, options, 2)
    found = ranks(prod(mesh.values())).run(cases.train_in_compiled_turns, backend, *job, timeout=280)
    assert all(seen.pop("changes") > 0 for seen in found)
    assert max(largest(found).values()) < 1e-3, found  # norms compute in float32, in another order


@pytest.mark.parametrize("exchange", ["heads", pytest.param("gather", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["mixtral", *(pytest.param(k, marks=pytest.mark.full) for k in ("gpt_oss", "gemma2"))])
def test_families(kind, exchange):
    """Losses of routers, windows, sinks, soft-caps."""
    changes = {"output_router_logits": True} if kind == "mixtral" else {}
    job = (cases.train_on_cp, build("1f1b", PP_CP), PP_CP, kind, changes, {}, {"cp_exchange": exchange}, {}, 2)
    seen = largest(ranks(4).run(*job))
    assert max(seen.values()) < (1e-5 if changes else TOLERANCE), seen  # routers' losses are computed in float32


@pytest.mark.parametrize("exchange", ["heads", pytest.param("gather", marks=pytest.mark.full)])
def test_kernels_for_packed_rows_see_whole_rows(exchange):
    spreading = {"cp_exchange": exchange, "attention": "flex"}
    job = (
        cases.train_on_cp,
        build("1f1b", PP_CP),
        PP_CP,
        "qwen3",
        {"head_dim": 16},
        {"packed": True},
        spreading,
        {},
        2,
    )
    seen = largest(ranks(4).run(*job, timeout=280))
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.full
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("exchange", ["heads", "gather"])
def test_options(options, exchange):
    job = (cases.train_on_cp, build("zbv", PP_CP), PP_CP, "qwen3", {}, {}, {"cp_exchange": exchange}, options, 2)
    seen = largest(ranks(4).run(*job, timeout=280))
    # norms compute in float32, which the compiler rounds in another order
    assert max(seen.values()) < (1e-3 if options.get("compile") else TOLERANCE), seen


def test_outputs_and_losses_of_whole_rows():
    seen = largest(ranks(4).run(cases.outputs_on_cp, build("1f1b", PP_CP), PP_CP, "llama"))
    assert max(seen.values()) < TOLERANCE, seen


def stage_of(kind: str, **changes: Any) -> Any:
    return hf_stages(config_of(kind, **changes), zp.build("1f1b", ranks=1, microbatches=1), 0)[0]


@pytest.mark.parametrize(
    "exchange, collectives",
    [("heads", {"all_to_all_single"}), pytest.param("gather", {"gather", "scatter"}, marks=pytest.mark.full)],
)
def test_one_graph_for_all_blocks(exchange, collectives):
    torch._dynamo.reset()
    counters.clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        model = hf_model(config_of("qwen3", num_hidden_layers=2))
        (stage,) = hf_stages(model, zp.build("1f1b", ranks=1, microbatches=1), 0).values()
        split_stage(stage, TPGroup.from_mesh(mesh), exchange)
        defer(stage)
        graphs = aot.Graphs()
        prepare_blocks(stage, compile=True, backend=graphs)
        batches = tokens(2, 0, (8,))
        plain_step(model, batches)
        staged_step([stage], batches, WeightStore(), loss_fn=lm_loss)
    finally:
        dist.destroy_process_group()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert all(any(word in name for name in graphs.collectives) for word in collectives), graphs.collectives
    for name, parameter in stage.named_parameters():
        wanted = model.get_parameter(stage.full_name(name)).grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "kind, exchange, copies",
    [
        *product(["llama", "gpt_oss"], ["heads"], [False, True]), *product(["llama", "gpt_oss"], ["gather"], [False]),
        ("llama", "ring", False), ("qwen3", "ring", False), ("mistral", "ring", False),
    ],
)  # fmt: skip
def test_a_small_copy_proves_it(kind, exchange, copies):
    check_parts(stage_of(kind), exchange, copies)


@pytest.mark.parametrize(
    "kind, words",
    [
        ("mamba", "its forward takes no position_ids"),
        ("qwen3_next", "Qwen3NextGatedDeltaNet mixes or counts tokens outside of"),
        ("gptj", "its attention is not called through transformers' attention interface"),
    ],
)
def test_what_cannot_run_in_parts_is_refused_by_name(kind, words):
    stage = hf_stages(tiny(kind), zp.build("1f1b", ranks=1, microbatches=1), 0)[0]
    with pytest.raises(ConfigError, match=rf"model_type='{kind}' cannot run with cp: {words}.*; leave out cp"):
        check_parts(stage, "gather")


EXACT = re.findall(
    r"`([\w-]+)`", (DOCS / "long-sequences.md").read_text().partition(" are exact:")[2].partition("The others")[0]
)


@pytest.mark.full
@pytest.mark.skipif(not IS_OF_TABLE, reason="the page is about another transformers")
@pytest.mark.parametrize("kind", [kind for kind, row in TABLE.items() if row.cut == "exact"])
def test_the_page_says_which_types_are_exact(kind):
    config = find_decoder_config(AutoConfig.for_model(kind, **models_table.EXAMPLES.get(kind, {})))
    model = build_on_meta(config, torch.float32)
    stage = SimpleNamespace(full_config=model.config, family=find_family(model))
    for exchange in ("heads", "gather"):
        if kind in EXACT:
            check_parts(stage, exchange)
        else:
            with pytest.raises(ConfigError, match=f"model_type={kind!r} cannot run with cp: "):
                check_parts(stage, exchange)


@pytest.mark.parametrize("kind, words", [("gpt_oss", "sinks"), ("gemma2", "soft-caps")])
def test_what_a_ring_cannot_do_is_refused_by_name(kind, words):
    with pytest.raises(ConfigError, match=f"model_type={kind!r} cannot run with cp: .*cp_exchange='ring'.*{words}"):
        check_parts(stage_of(kind), "ring")


@pytest.mark.parametrize("size", [1, 2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4))])
@pytest.mark.parametrize("masked", [None, "alike", "by head"])
@pytest.mark.parametrize("blocks", [True, False])
def test_a_ring_equals_attention_to_all_keys(size, masked, blocks, monkeypatch):
    """With fewer key heads; masked, some tokens of a part attend to no key of another; in blocks of two queries."""
    if blocks:
        monkeypatch.setattr(partial_attention, "MAX_SCORES", 2 * 4 * 2 * 8)
        monkeypatch.setattr(partial_attention, "_has_kernel", lambda *_: False)
    seen = cases.ring_differences(size, masked)
    assert max(seen.values()) < 1e-13, seen


def test_kernels_for_parts_are_compared_with_products(monkeypatch):
    is_right = partial_attention.is_kernel_right.__wrapped__  # without its cache
    for dtype in (torch.float32, torch.bfloat16):
        assert is_right(torch.device("cpu"), dtype, 16)
    kernel = partial_attention._run_kernel_backward
    monkeypatch.setattr(partial_attention, "_run_kernel_backward", lambda *args: [1.1 * x for x in kernel(*args)])
    with pytest.warns(UserWarning, match=r"flash kernel differs for torch\.float32 on cpu: not used for parts"):
        assert not is_right(torch.device("cpu"), torch.float32, 16)


def test_a_ring_keeps_less_than_gathered_keys():
    """The most bytes at a time of what attention makes, of four processes in threads."""
    ring, gathered = (cases.attention_memory(exchange, 4) for exchange in ("ring", "gather"))
    assert ring < 0.75 * gathered


@pytest.mark.parametrize(
    "name, sizes, kind, batches, options",
    [
        ("1f1b", {"pp": 1, "cp": 2}, "qwen3", "packed", {}),
        *(pytest.param(*job, marks=pytest.mark.full) for job in (
            ("zbv", PP_CP, "llama", "plain", {"ac": "full"}), ("dualpipev", PP_CP, "qwen3", "padded", {}),
            ("1f1b-overlap", {"pp": 1, "cp": 2}, "qwen3", "plain", {"overlap": "turns"}),
            ("1f1b", {"pp": 1, "cp": 2, "tp": 2}, "llama", "plain", {"ac": "selective:2"}),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_compiled_steps_round_a_ring(name, sizes, kind, batches, options):
    """Blocks are compiled around attention: before it, after it, and the rest."""
    spreading, schedule = {"cp_exchange": "ring"}, build(name, sizes)
    job = (cases.train_compiled, schedule, sizes, kind, {}, BATCHES[batches], spreading, options, 2)
    results = ranks(prod(sizes.values())).run(*job, timeout=280)
    seen = largest([found for found, _ in results])
    assert max(seen.values()) < TOLERANCE, seen
    assert all(4 <= graphs <= 16 for _, graphs in results), results


def test_sharding_over_cp_needs_cp():
    mesh = SimpleNamespace(mesh_dim_names=("pp",))
    layout = Layout((0,), 0, (0,), {"pp": 1}, {"pp": 0})
    patched = mock.patch.object(Layout, "from_mesh", return_value=layout)
    with patched, pytest.raises(ConfigError, match="shard_cp=True shards weights over cp, without ep; use a mesh"):
        parallelize({}, mesh, shard_cp=True)


def test_the_exchange_is_chosen_by_heads():
    config = config_of("llama")  # 4 heads, of keys 2
    assert [require_exchange("auto", config, tp, cp).name for tp, cp in ((1, 2), (2, 2), (1, 3), (4, 2))] == [
        "heads", "heads", "gather", "gather",
    ]  # fmt: skip
    assert [has_copied_keys(config, tp, cp) for tp, cp in ((1, 2), (1, 4), (2, 2))] == [False, True, True]
    with pytest.raises(ConfigError, match="cp_exchange='heads': cp=3 x tp=1 must divide num_attention_heads=4"):
        require_exchange("heads", config, 1, 3)
    with pytest.raises(ConfigError, match="cp_exchange='rings': must be auto, heads, gather or ring"):
        require_exchange("rings", config, 1, 2)
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match="attn_implementation='flash_attention_2' with cp=3: its heads cannot be"):
        require_exchange("auto", config, 1, 3)


@pytest.mark.parametrize("name", ["llama-3-70b", "qwen3-32b", "deepseek-v3", "mistral-7b", "gemma-3-1b"])
def test_the_engine_chooses_as_the_estimate(name):
    _, data = read_config(name)
    config = AutoConfig.for_model(**data)
    config._attn_implementation = "sdpa"
    shapes = open_shapes(name)
    for cp, sequence, crosses in product((8, 48, 128), (8192, 65536, 2**20), (False, True)):
        wanted = require_exchange("auto", config, 1, cp, sequence, crosses=crosses).name
        assert shapes.choose_exchange("auto", cp, 1, sequence, crosses, "") == wanted, (cp, sequence, crosses)


def test_long_sequences_go_round_a_ring(monkeypatch):
    """Where heads do not divide; a model that cannot have a ring gathers its keys, with a warning that says why."""
    monkeypatch.setattr(cp_exchange, "LARGE_KEYS", 2**10)
    assert find_exchange(stage_of("llama"), "auto", 1, 2, 4096) == "heads"
    assert find_exchange(stage_of("llama"), "auto", 1, 3, None) == "gather"
    assert find_exchange(stage_of("llama"), "auto", 1, 3, 4096) == "ring"
    assert find_exchange(stage_of("mistral", sliding_window=None), "auto", 1, 3, 4096) == "ring"
    for kind, changes, words in (
        ("gpt_oss", {"sliding_window": 8192}, r"attention has sinks \(s_aux\)"),
        ("mistral", {"sliding_window": 64}, "attention has windows of 64 tokens"),
        ("llama", {"attention_dropout": 0.1}, r"attention has dropout \(attention_dropout=0.1\)"),
    ):
        message = rf"model_type='{kind}': keys and values of cp=3 are gathered, not passed round a ring: .*{words}"
        with pytest.warns(UserWarning, match=message):
            assert find_exchange(stage_of(kind, **changes), "auto", 1, 3, 4096) == "gather"


def test_a_ring_between_machines_hides_messages_behind_attention(monkeypatch):
    """65,536 tokens over 16 processes in two machines; in one machine its keys are gathered."""
    config = config_of("llama", num_attention_heads=8, num_key_value_heads=1)
    stage = SimpleNamespace(full_config=config)
    monkeypatch.setattr(context_parallel, "explain_refusal", lambda *_: "")
    monkeypatch.setattr(context_parallel, "check_parts", lambda *_: None)
    found = []
    for size in ("16", "8"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
        found.append(find_exchange(stage, "auto", 1, 16, 2**16))
    assert found == ["gather", "ring"]
