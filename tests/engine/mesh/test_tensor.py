"""Tensor parallelism: layers, vocabulary and sequences sharded over processes, equal to one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("transformers")

import aot
import tensor_cases as cases
import torch
import torch.distributed as dist
from engine_helpers import TOLERANCE, WIDTH, Block, largest, ranks
from family_models import models_table
from stage_models import lm_loss, plain_step, staged_step
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

import zeropipe as zp
from zeropipe.engine import (
    CausalLMLoss,
    LogProbabilities,
    WeightStore,
    defer,
    hf_model,
    hf_stages,
    module_stages,
    prepare_blocks,
    token_losses,
)
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.mesh.tensor_parallel import check_hf_stage, check_plain_stage, find_plan
from zeropipe.engine.mesh.tp_check import SimulatedTP, check_tp_plan
from zeropipe.engine.mesh.tp_collectives import TPGroup
from zeropipe.engine.mesh.tp_layers import ParameterShards
from zeropipe.engine.mesh.tp_stage import shard_stage
from zeropipe.engine.mesh.vocab_parallel import ShardedCrossEntropy, gather_logits
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.skeleton import build_on_meta, find_decoder_config
from zeropipe.engine.stages.verify import find_family
from zeropipe.engine.torch_private import compile as torch_compile
from zeropipe.errors import ConfigError, EngineError

SIZES = {"pp": 2, "tp": 2}
KINDS = (
    "llama", "qwen3", "gemma2", "cohere", "granite", "starcoder2", "olmo2", "qwen3_moe", "mixtral", "deepseek_v3",
    "llama4_text",
)  # fmt: skip
GATHERED = ("olmo2", "qwen3_moe", "mixtral", "deepseek_v3", "llama4_text")  # their blocks gather sequences inside
QUICK = ("qwen3", "starcoder2", "qwen3_moe", "deepseek_v3")  # with sequence parallelism; the others in `make test-full`


def stage_of(kind: str, **changes: Any) -> Any:
    return hf_stages(cases.config_of(kind, **changes), zp.build("1f1b", ranks=1, microbatches=1), 0)[0]


@pytest.mark.parametrize(
    "kind, sequence",
    [
        pytest.param(kind, sequence, marks=pytest.mark.full if sequence and kind not in QUICK else ())
        for kind in KINDS
        for sequence in (False, True)
    ],
)
def test_a_models_own_plan_is_right(kind, sequence):
    """Two threads beside the whole model: it is what parallelize() does before it spreads anything."""
    stage = stage_of(kind)
    check_hf_stage(stage, find_plan(stage), 2)
    check_tp_plan(stage, find_plan(stage), sequence)


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("qwen3", TOLERANCE), pytest.param("gemma2", 1e-6, marks=pytest.mark.full)]
)
def test_packed_rows_attend_by_kernels_on_fewer_heads(kind, tolerance):
    """With windows and a split backward. transformers' own attention of gemma2 computes shares in float32."""
    schedule = zp.build("zb-h1", ranks=2, microbatches=3)
    assert max(ranks(4).run(cases.packed_on_tp, schedule, SIZES, kind)) < tolerance


def without(plan: dict[str, str], *ends: str) -> dict[str, str]:
    return {name: style for name, style in plan.items() if not name.endswith(ends)}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda plan: without(plan, "q_norm"), "another gradient of model.layers.0.self_attn.q_norm.weight"),
        (lambda plan: without(plan, "down_proj"), "a small copy of it does not run"),
        (lambda plan: plan | {"model.layers.*.mlp.gate_proj": "colwise_gather_output"}, "does not run"),
        (lambda plan: plan | {"model.layers.*.input_layernorm": "replicated_with_grad_allreduce"}, "input_layernorm"),
    ],
)
def test_a_wrong_plan_is_refused(change, words):
    stage = stage_of("qwen3")
    with pytest.raises(ConfigError, match=words):
        check_tp_plan(stage, change(find_plan(stage)), False)


def test_what_cannot_be_spread_is_refused_by_name():
    with pytest.raises(ConfigError, match="num_key_value_heads=2: tp=4 must divide it"):
        check_hf_stage(stage_of("llama"), find_plan(stage_of("llama")), 4)
    with pytest.raises(ConfigError, match="has no tensor-parallel plan; leave out tp, or in Python pass"):
        find_plan(stage_of("gpt2", n_head=4, n_layer=1, n_embd=32))
    with pytest.raises(
        ConfigError, match=r"attention_dropout=0\.1: processes of tp would draw different random numbers"
    ):
        check_hf_stage(stage_of("llama", attention_dropout=0.1), find_plan(stage_of("llama")), 2)
    plan = {"model.layers.*.mlp.gate_proj": "sideways"}
    with pytest.raises(
        ConfigError, match=r"shards model.layers.\*.mlp.gate_proj by 'sideways', which is not supported"
    ):
        check_hf_stage(stage_of("llama"), plan, 2)
    experts = stage_of("qwen3_moe", num_experts=3)
    with pytest.raises(ConfigError, match="has 3 experts: tp=2 must divide it"):
        shard_stage(experts, find_plan(experts), ParameterShards(TPGroup("none", 0, 2), None), False)


def plain_stage(*more: Any) -> Any:
    return module_stages([Block(0), *more], zp.build("1f1b", ranks=1, microbatches=1), 0)[0]


def test_a_plan_of_own_modules():
    plan = {"*.up": "colwise", "0.down": "rowwise"}
    stage = plain_stage(Block(1))
    check_plain_stage(stage, plan, False)
    shard_stage(stage, plan, ParameterShards(TPGroup("none", 0, 2), None), False)
    assert [tuple(block.up.weight.shape) for block in stage.blocks] == [(WIDTH, WIDTH)] * 2
    assert [tuple(block.down.weight.shape) for block in stage.blocks] == [(WIDTH, WIDTH), (WIDTH, 2 * WIDTH)]


@pytest.mark.parametrize(
    "stage, plan, words",
    [
        (lambda: Block(0), {}, r"a Block without full_names\(\), which a plan needs"),
        (plain_stage, {"*.up": "sideways"}, r"shards \*.up by 'sideways', which is not supported"),
        (plain_stage, {"*.up": "mla_kv_a_proj"}, "which is not supported"),
        (lambda: plain_stage(torch.nn.Dropout(0.1)), {}, r"blocks.1 has p=0.1: processes of tp would draw different"),
    ],
)
def test_what_cannot_be_done_with_own_modules_is_refused(stage, plan, words):
    with pytest.raises(ConfigError, match=words):
        check_plain_stage(stage(), plan, False)


@pytest.mark.full
def test_every_model_type_is_spread_right_or_refused():
    """All types that can be cut and bring a plan: the proof holds, or one line says why not."""
    spread, refused = [], []
    for model_type in models_table.CAUSAL_TYPES:
        try:
            config = AutoConfig.for_model(model_type, **models_table.EXAMPLES.get(model_type, {}))
        except Exception:  # transformers' own default does not hold
            continue
        try:
            model = build_on_meta(find_decoder_config(config), torch.float32)
            family = find_family(model)
            stage = HFStage(model, family, (range(family.num_layers),), 0)
            plan = find_plan(stage)
        except (ConfigError, ImportError):
            continue
        try:
            check_hf_stage(stage, plan, 2)
            check_tp_plan(stage, plan, False)
            spread.append(model_type)
        except ConfigError as error:
            refused.append(str(error))
    assert {*KINDS, "gemma", "gemma3_text", "glm4", "olmo3", "phi3", "qwen2", "qwen2_moe", "smollm3"} <= {*spread}
    assert len(spread) > 3 * len(refused), refused
    assert not [text for text in refused if "\n" in text]


@pytest.mark.parametrize(
    "name, kind, changes, spreading",
    [
        ("1f1b", "gemma2", {}, {}),  # tied, soft-capped, its embedding scaled
        # biases of row-wise layers, tied on one rank
        pytest.param("zbv", "starcoder2", {"tie_word_embeddings": True}, {}, marks=pytest.mark.full),
        ("zbv", "qwen3_moe", {}, {"sequence_parallel": True}),
        pytest.param("interleaved", "deepseek_v3", {}, {}, marks=pytest.mark.full),  # latent attention, shared experts
        ("dualpipe", "llama", {"vocab_size": 65}, {"sequence_parallel": True}),  # a vocabulary that stays whole
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_training_equals_one_process(name, kind, changes, spreading):
    schedule = zp.build(name, ranks=2, microbatches=2)
    changes = changes | {"num_hidden_layers": schedule.num_stages}
    seen = largest(ranks(4).run(cases.train_on_tp, schedule, SIZES, kind, changes, spreading, {}))
    assert max(seen.values()) < TOLERANCE, seen


@pytest.fixture
def group():
    """torch.distributed with this process alone: the collectives of a graph are all there."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "kind, sequence", [pytest.param("qwen3", False, marks=pytest.mark.full), ("qwen3_moe", True)], ids=str
)
def test_one_graph_for_all_blocks(group, kind, sequence, monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    changes = {"mlp_only_layers": []} if kind == "qwen3_moe" else {}
    model = hf_model(cases.config_of(kind, num_hidden_layers=2, **changes))
    (stage,) = hf_stages(model, zp.build("1f1b", ranks=1, microbatches=1), 0).values()
    shard_stage(stage, find_plan(stage), ParameterShards(TPGroup.from_mesh(group), group), sequence)
    defer(stage)
    graphs = aot.Graphs()
    if sequence:
        with monkeypatch.context() as torch_2_11:
            torch_2_11.setattr(torch_compile, "COMPILES_GATHERED", False)
            with pytest.raises(ConfigError, match=r"compile=True with sequence_parallel: .*; leave out one of them"):
                prepare_blocks(stage, compile=True)
        if not torch_compile.COMPILES_GATHERED:
            return
    prepare_blocks(stage, compile=True, backend=graphs)
    batches = cases.tokens(2, 0, (6,))
    plain_step(model, batches)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be compiled")
        staged_step(
            [stage], batches, WeightStore(), loss_fn=lambda output, batch: lm_loss(gather_logits(output), batch)
        )
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    moving = {name for name in graphs.collectives if "gather" in name or "scatter" in name}
    assert graphs.collectives - moving == {"all_reduce", "wait_tensor"}
    assert len(moving) == (2 if sequence else 0)
    for name, parameter in stage.named_parameters():
        wanted = model.get_parameter(stage.full_name(name)).grad
        torch.testing.assert_close(to_local(parameter.grad), wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


@pytest.mark.full
@pytest.mark.parametrize("ac", ["none", "full"])
@pytest.mark.parametrize("spreading", [{}, {"sequence_parallel": True}], ids=["", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_by_inductor(kind, spreading, ac):
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    options, job = {"compile": True, "ac": ac}, (cases.train_on_tp, schedule, SIZES, kind, {"num_hidden_layers": 4})
    if spreading and kind in GATHERED and not torch_compile.COMPILES_GATHERED:
        with pytest.raises(EngineError, match=r"compile=True with sequence_parallel: .*; leave out one of them"):
            ranks(4).run(*job, spreading, options, 1)
        return
    seen = largest(ranks(4).run(*job, spreading, options, 1, timeout=1200))
    kinds = dict.fromkeys(("qwen3_moe", "deepseek_v3", "gemma2", "llama4_text"), 2)
    assert seen.pop("graphs") <= kinds.get(kind, 1)
    # norms compute in float32, which the compiler rounds in another order
    assert max(seen.values()) < 1e-3, seen


def test_logits_are_never_put_together():
    """Not for CausalLMLoss, and not for LogProbabilities; other losses and callers get whole ones."""
    schedule = zp.build("1f1b", ranks=2, microbatches=2)
    seen = largest(ranks(4).run(cases.losses_on_tp, schedule, SIZES, "llama"))
    assert seen.pop("last") == cases.VOCABULARY // 2
    assert max(seen.values()) < TOLERANCE, seen


@pytest.mark.parametrize("function", [CausalLMLoss(), LogProbabilities()])
def test_labels_that_do_not_belong_to_the_tokens(function):
    with pytest.raises(ConfigError, match=r"labels of \(2, 2\) for logits of \(2, 3\) tokens: must have a label"):
        function(torch.zeros(2, 3, 5), {"labels": torch.ones(2, 2, dtype=torch.long)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_loss_over_pieces_is_the_loss(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (20 * torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(8, (3, 5), generator=generator)
    labels[0, 1:4] = labels[2] = -100
    slopes = torch.randn(15, generator=generator, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    wanted = token_losses(logits, labels).view(-1)
    wanted.backward(slopes)
    pieces = [piece.detach().requires_grad_() for piece in logits.chunk(2, -1)]
    with SimulatedTP() as simulated:

        def run(piece: torch.Tensor, group: TPGroup) -> torch.Tensor:
            flat = piece.reshape(15, 4).to(wanted.dtype)
            found = ShardedCrossEntropy.apply(flat, labels.view(-1), -100, group)
            found.backward(slopes)
            return found.detach()

        for found in simulated.run(run, list(zip(pieces, simulated.groups))):
            torch.testing.assert_close(found, wanted.detach())
        torch.testing.assert_close(torch.cat([piece.grad for piece in pieces], -1), logits.grad)
        labels[1, 1] = 8
        with pytest.raises(IndexError, match="outside of the vocabulary of 8 tokens"):
            simulated.run(run, list(zip(pieces, simulated.groups)))


def test_a_sequence_that_cannot_be_shared_is_refused():
    for text, loss in ranks(4).run(cases.odd_length, zp.build("1f1b", ranks=2, microbatches=2), SIZES):
        assert "a microbatch has sequences of 7 tokens: must be a multiple of tp=2 with sequence_parallel" in text
        assert loss > 0


def test_messages_between_stages_are_parts_of_sequences():
    schedule, config = zp.build("1f1b", ranks=2, microbatches=2), cases.config_of("llama")

    def shape_of(stage: HFStage, group: TPGroup, sequence: bool) -> torch.Size:
        shard_stage(stage, find_plan(stage), ParameterShards(group, None), sequence)
        return stage(input_ids=torch.zeros(3, 8, dtype=torch.long), position_ids=torch.arange(8)[None]).shape

    with SimulatedTP() as simulated:
        for sequence, length in ((False, 8), (True, 4)):
            stages = [hf_stages(config, schedule, 0)[0] for _ in simulated.groups]
            shapes = simulated.run(shape_of, [(*pair, sequence) for pair in zip(stages, simulated.groups)])
            assert shapes == [(3, length, config.hidden_size)] * 2


def test_a_loss_without_tp_is_as_before():
    logits = torch.randn(2, 4, 8, dtype=torch.float64)
    labels = torch.tensor([[1, 2, -100, 3], [-100] * 4])
    total, count = CausalLMLoss()(logits, {"labels": labels})
    wanted = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    torch.testing.assert_close(total, wanted)
    assert count == 2
