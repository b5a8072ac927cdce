"""Expert parallelism: experts divided over processes, equal to one process."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest

pytest.importorskip("transformers")

import expert_cases as cases
import torch
from checkpoint_chain import chain
from engine_helpers import PRELOAD, TOLERANCE, largest, ranks
from full_marker import mark_rest_full
from transformers import AutoModelForCausalLM

import zeropipe as zp
from zeropipe.core.mesh import num_processes, parse_mesh, refuse_ep
from zeropipe.engine import hf_model, hf_stages
from zeropipe.engine.checkpoint.convert import convert
from zeropipe.engine.mesh import ep_check
from zeropipe.errors import ConfigError

SHARDED, REPLICATED = {"pp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2}
TWICE, HYBRID = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}
KINDS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe", "glm4_moe")
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "dualpipe")
LAYOUTS = [
    *((name, sizes, 2) for sizes in (SHARDED, REPLICATED) for name in SCHEDULES),
    *(("1f1b", sizes, ep) for sizes, ep in ((TWICE, 2), (TWICE, 4), (HYBRID, 2), ({"dp_replicate": 4}, 2))),
]
QUICK = ("dualpipev", REPLICATED, 2, "qwen3_moe", "selective:op")


def differences(name, sizes, ep, kind, options, *more):
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    number = math.prod(sizes.values())
    return largest(ranks(number).run(cases.train_with_ep, schedule, sizes, ep, kind, options, *more))


@pytest.mark.parametrize(
    "name, sizes, ep, kind, ac",
    mark_rest_full(
        [(*layout, kind, ac) for layout in LAYOUTS for kind in KINDS for ac in ("none", "full", "selective:op")],
        lambda it: it == QUICK,
    ),
    ids=str,
)
def test_training_equals_one_process(name, sizes, ep, kind, ac):
    seen = differences(name, sizes, ep, kind, {"ac": ac})
    kept, _ = seen.pop("kept"), seen.pop("idle")
    assert max(seen.values()) < TOLERANCE, seen
    assert kept == 4 // sizes.get("dp_shard", ep)  # the rest of dp_shard shards them too


WITH_TP_PLAN = [kind for kind in KINDS if kind != "gpt_oss"]
BESIDE_TP = [
    ("1f1b", {"dp_shard": 2, "tp": 2}, "deepseek_v3", {}, False),
    ("1f1b", {"tp": 2, "dp_replicate": 2}, "qwen3_moe", {}, False),
    *product(
        ("1f1b", "zbv", "dualpipev"),
        ({"pp": 2, "dp_shard": 2, "tp": 2}, {"pp": 2, "dp_replicate": 2, "tp": 2}, {"dp_shard": 4, "tp": 2}),
        WITH_TP_PLAN, ({}, {"ac": "selective:op"}), (False,),
    ),
    *product(("1f1b",), ({"tp": 2, "dp_shard": 4},), WITH_TP_PLAN, ({"ac": "full"},), (False, True)),
    ("1f1b", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, "qwen3_moe", {}, True),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, sizes, kind, options, sequence", mark_rest_full(BESIDE_TP, lambda it: it == BESIDE_TP[1]), ids=str
)
def test_experts_that_tp_divides_too(name, sizes, kind, options, sequence):
    """A process has the experts of its part of `ep`, of those of its part of `tp`."""
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    args = (schedule, sizes, 2, kind, options, 2, {}, False, sequence)
    seen = largest(ranks(math.prod(sizes.values())).run(cases.train_with_ep, *args))
    assert seen.pop("kept") == 1
    assert max(seen[key] for key in seen.keys() - {"idle"}) < TOLERANCE, seen


@pytest.mark.parametrize(
    "name, sizes, kind, options",
    mark_rest_full(
        [
            ("1f1b", {"dp_shard": 2}, "gpt_oss", {"regather": True, "ac": "full"}),
            ("1f1b", TWICE, "gpt_oss", {"regather": True, "ac": "full"}),
            ("1f1b", TWICE, "qwen3_moe", {"regather": True}),
            ("zbv", SHARDED, "qwen3_moe", {"dynamic_weights": True}),
            ("zbv", REPLICATED, "qwen3_moe", {"split": "whole"}),
            ("zb-h1", SHARDED, "qwen3_moe", {"check_equal": True}),
        ],
        lambda it: it[1] == {"dp_shard": 2},
    ),
    ids=str,
)
def test_options(name, sizes, kind, options):
    seen = differences(name, sizes, 2, kind, options)
    assert max(seen[key] for key in seen.keys() - {"kept", "idle"}) < TOLERANCE, seen


@pytest.mark.parametrize(
    "name, sizes, ep, kind, options",
    mark_rest_full(
        [
            ("1f1b", {"dp_shard": 2}, 2, "gpt_oss", {"ac": "full"}),
            ("1f1b", TWICE, 4, "qwen3_moe", {}), ("dualpipev", SHARDED, 2, "deepseek_v3", {"overlap": "turns"}),
            ("zbv", REPLICATED, 2, "gpt_oss", {"ac": "full"}), ("zb-h1", SHARDED, 2, "mixtral", {"ac": "selective:op"}),
            ("1f1b", HYBRID, 2, "glm4_moe", {}), ("1f1b", {"dp_shard": 2, "tp": 2}, 2, "qwen2_moe", {}),
        ],
        lambda it: it[1] == {"dp_shard": 2},
    ),
    ids=str,
)  # fmt: skip
def test_tokens_that_are_sent_once_to_each_process(name, sizes, ep, kind, options):
    seen = differences(name, sizes, ep, kind, options | {"dispatch": "process"})
    assert max(seen[key] for key in seen.keys() - {"kept", "idle"}) < TOLERANCE, seen


def test_fewer_rows_are_sent_once_to_each_process():
    """Two of four experts for each token: mostly on both processes, sometimes on one of them."""
    schedule = zp.build("1f1b", ranks=1, microbatches=2)
    sent = {
        dispatch: ranks(2).run(cases.list_exchanges, schedule, {}, dispatch)[0] for dispatch in ("expert", "process")
    }
    by_expert, by_process = (sum(sent[dispatch]) for dispatch in ("expert", "process"))
    assert len(sent["expert"]) == len(sent["process"]) == 4 * 2 * 5
    assert by_expert / 2 < by_process < by_expert


def test_five_steps_with_experts_that_get_no_token():
    """Tokens are nearly equal, so most experts get none, and some processes no row at all."""
    changes = {"num_experts_per_tok": 1, "num_hidden_layers": 2}
    seen = differences("1f1b", {"dp_replicate": 2}, 2, "mixtral", {}, 5, changes, True)
    assert max(seen[key] for key in seen.keys() - {"kept", "idle"}) < TOLERANCE, seen
    assert seen["idle"] > 0


def test_what_is_kept_by_operator_is_not_sent_again():
    """In F counts, rows and results are exchanged, in the backward two gradients: 5 for each layer and microbatch."""
    schedule = zp.build("1f1b", ranks=1, microbatches=2)
    number = {ac: max(ranks(2).run(cases.count_exchanges, schedule, {"ac": ac})) for ac in ("none", "selective:op")}
    assert number == {"none": 4 * 2 * 5, "selective:op": 4 * 2 * 5}


def test_pipelines_with_other_numbers_of_microbatches_are_refused():
    for said, without, error in ranks(2).run(cases.other_numbers, zp.build("1f1b", ranks=1, microbatches=2)):
        assert said == (
            "pipelines pass [2, 3] microbatches: with ep=2 they exchange tokens in each, so all must pass the same "
            "number; or leave out ep"
        )
        assert without == "experts are divided over ep: pass the Engine the mesh that parallelize() got"
        assert error < TOLERANCE


@pytest.mark.parametrize(
    "sizes, ep, kind, options, words",
    [
        ({"dp_replicate": 2}, 0, "mixtral", {}, "ep=0: must be a positive integer"),
        ({"dp_replicate": 2}, 2, "mixtral", {"dispatch": "token"}, "dispatch='token': must be 'expert' or 'process'"),
        ({"dp_shard": 2}, 3, "mixtral", {}, "ep=3: must divide dp_shard=2"),
        ({"pp": 2}, 2, "mixtral", {}, "ep=2 divides experts over data-parallel processes; use dp_shard of at least 2"),
        ({"dp_replicate": 2}, 2, "qwen3", {}, "model_type='qwen3' cannot run with ep: it has no experts with"),
        ({"dp_replicate": 2}, 2, "llama4_text", {}, "model_type='llama4_text' cannot run with ep: it has no experts"),
        ({"dp_shard": 2}, 2, "mixtral", {"offload": True}, "offload=True with ep=dp_shard: experts are not sharded"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(sizes, ep, kind, options, words):
    schedule = zp.build("1f1b", ranks=sizes.get("pp", 1), microbatches=2)
    for said in ranks(2).run(cases.refused, schedule, sizes, ep, kind, options):
        assert said.startswith(words)


COMPILED = [
    ("1f1b", {"dp_replicate": 2}, "selective:op", "aot_eager", 1),
    *product(
        ("1f1b", "zbv", "dualpipev"), (SHARDED, TWICE), ("none", "full", "selective:op"), ("aot_eager", None), (2,)
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name, sizes, ac, backend, microbatches", mark_rest_full(COMPILED, lambda it: it == COMPILED[0]), ids=str
)
def test_compiled_blocks_are_one_graph_around_the_exchange(name, sizes, ac, backend, microbatches):
    """None: inductor. Microbatches have different lengths, and experts without a token are among them."""
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=microbatches * sizes.get("pp", 1))
    options, changes = {"compile": True, "ac": ac}, {"num_hidden_layers": schedule.num_stages}
    changes["output_router_logits"] = False
    args = (schedule, sizes, 2, backend, options, 1 if backend else 2, changes, True)
    group = ranks(math.prod(sizes.values()), PRELOAD if backend else (*PRELOAD, "torch._inductor.compile_fx"))
    seen = largest(group.run(cases.train_compiled_with_ep, *args, timeout=550))
    assert max(seen[key] for key in seen.keys() - {"kept", "idle"}) < TOLERANCE, seen


def test_a_memory_budget_with_ep_is_refused():
    words = "ac='memory_budget:0.5' with experts divided over ep: the compiler may recompute exchanges"
    for said in ranks(2).run(cases.budgeted, zp.build("1f1b", ranks=1, microbatches=2)):
        assert words in said


@pytest.mark.full
def test_replicas_of_shards_of_divided_experts():
    """On 8 processes: the experts of a process are sharded over 2 others, and replicated."""
    schedule = zp.build("1f1b", ranks=1, microbatches=2)
    args = (schedule, {"dp_replicate": 2, "dp_shard": 4}, 2, "qwen3_moe", {}, 2, {"num_hidden_layers": 2})
    seen = largest(ranks(8).run(cases.train_with_ep, *args))
    assert max(seen[key] for key in seen.keys() - {"kept", "idle"}) < TOLERANCE, seen
    assert seen["kept"] == 1


def test_experts_are_divided_once():
    said = set(ranks(2).run(cases.divided_twice, zp.build("1f1b", ranks=1, microbatches=2)))
    assert said == {"the experts of a stage are already divided over ep; call parallelize() once"}


def test_text_of_a_mesh():
    mesh = parse_mesh("ep=2,pp=2,dp_shard=4")
    assert mesh == (("pp", 2), ("dp_shard", 4), ("ep", 2))
    assert num_processes(mesh) == 8
    for text, words in (
        ("dp_shard=4,ep=3", "mesh 'dp_shard=4,ep=3': ep=3: must divide dp_shard=4"),
        ("pp=2,ep=2", "mesh 'pp=2,ep=2': ep=2 divides experts over data-parallel processes"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            parse_mesh(text)
    assert refuse_ep({"dp_replicate": 4, "ep": 2}) is refuse_ep({"pp": 2, "ep": 1}) is None


def stage_of(kind, **changes):
    return hf_stages(cases.config_of(kind, **changes), zp.build("1f1b", ranks=1, microbatches=1), 0)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_copy_is_right_with_divided_experts(kind):
    for once_per_process in (False, True):
        ep_check.check_divided_experts(stage_of(kind), once_per_process)


@pytest.mark.parametrize(
    "name, words",
    [("forward", "it gives other logits"), ("backward", r"it gives another gradient of model\.")],
)
def test_a_model_that_computes_something_else_with_divided_experts_is_refused(monkeypatch, name, words):
    right = getattr(ep_check._SimulatedExchange, name)

    def wrong(*args):
        found = right(*args)
        return 1.01 * found if name == "forward" else (1.01 * found[0], *found[1:])

    monkeypatch.setattr(ep_check._SimulatedExchange, name, staticmethod(wrong))
    monkeypatch.setattr(ep_check, "_cache", {})
    with pytest.raises(ConfigError, match=words):
        ep_check.check_divided_experts(stage_of("qwen3_moe"))


# checkpoints


@pytest.mark.parametrize("chosen", [(0, 2), pytest.param(range(6), marks=pytest.mark.full)], ids=["some", "all"])
def test_checkpoints_of_any_layout(tmp_path, chosen):
    layouts = [
        ("zbv", {"pp": 2, "dp_shard": 2}), ("1f1b", {"dp_shard": 4}), ("1f1b", {"dp_shard": 2, "tp": 2}),
        ("1f1b", {"pp": 2, "tp": 2}), ("1f1b", {"dp_replicate": 2, "dp_shard": 2}), ("1f1b", {"pp": 4}),
    ]  # fmt: skip
    ep = dict(zip((tuple(sizes.items()) for _, sizes in layouts), (2, 2, 2, 1, 2, 1)))
    seen = chain(tmp_path, cases.ExpertModel(ep), [layouts[number] for number in chosen])
    assert max(seen) < TOLERANCE, seen


@pytest.mark.full
def test_checkpoints_of_experts_that_tp_divides_too(tmp_path):
    layouts = [
        ("1f1b", {"dp_shard": 4, "tp": 2}), ("dualpipev", {"pp": 2, "dp_shard": 2, "tp": 2}), ("1f1b", {"dp_shard": 2}),
        ("1f1b", {"tp": 2, "dp_shard": 4}), ("1f1b", {"pp": 2}),
    ]  # fmt: skip
    ep = dict(zip((tuple(sizes.items()) for _, sizes in layouts), (2, 2, 2, 2, 1)))
    seen = chain(tmp_path, cases.ExpertModel(ep), layouts)
    assert max(seen) < TOLERANCE, seen


@pytest.mark.parametrize(
    "sizes", mark_rest_full([SHARDED, TWICE, {"dp_shard": 2, "tp": 2}], lambda sizes: "tp" in sizes), ids=str
)
def test_full_weights_are_streamed(sizes):
    schedule = zp.build("1f1b", ranks=sizes.get("pp", 1), microbatches=4)
    model = cases.ExpertModel({tuple(sizes.items()): 2})
    for number, error, _ in ranks(4).run(cases.checkpoint_cases.weights_of, schedule, sizes, model, None):
        assert number == len(model.plain()[0].state_dict())
        assert error == 0


def test_a_checkpoint_becomes_a_directory_for_transformers(tmp_path):
    path, schedule = tmp_path / "checkpoint", zp.build("zbv", ranks=2, microbatches=4)
    ranks(4).run(cases.exported, schedule, SHARDED, 2, "qwen3_moe", str(path))
    convert(path, tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64).state_dict()
    wanted = hf_model(cases.config_of("qwen3_moe"), seed=4).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
