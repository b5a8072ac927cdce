"""Models whose layers are counted: against shapes that are written down, transformers' own models, and refusals."""

import json

import pytest
from paths import DOCS

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.model.configs import CONFIGS_BY_COUNT, COUNTED_PARAMETERS
from zeropipe.errors import ConfigError
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import estimate, num_parameters
from zeropipe.estimating.families import FAMILIES
from zeropipe.estimating.gpus import find_gpu
from zeropipe.estimating.head import fuse
from zeropipe.estimating.model import ShapedModel, open_model
from zeropipe.estimating.operators import Sizes
from zeropipe.estimating.price import Pricing, price_layer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from family_models import IS_OF_TABLE, TABLE, VERSION, models_table  # noqa: E402

SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED = {
    **CHOSEN, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    **ROUTED, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 8, "head_dim": 16,
}  # fmt: skip
MORE = {
    "mixtral": LOCAL, "minimax_m2": LOCAL, "granitemoe": LOCAL, "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {**CHOSEN, "num_experts": 8, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {**CHOSEN, "num_experts": 8}, "solar_open": {**ROUTED, "first_k_dense_replace": 0}, "dots1": ROUTED,
    "glm4_moe": ROUTED, "deepseek_v2": LATENT, "deepseek_v3": LATENT, "kimi_k2": LATENT,
    "gemma3_text": {"sliding_window": 64}, "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}  # fmt: skip
# Values are a part of a larger product, all of which stays for them: shapes do not say so. Nor do they have the order
# of rows by expert.
NEAR = {"phi3": 0.175, "deepseek_v3": 0.1251}
EXACT = [kind for kind, row in TABLE.items() if row.cut == "exact"]
# they ask their tensors for values, or have kinds of layers only where their ends are
REFUSED = (
    "bart", "biogpt", "blenderbot", "blenderbot-small", "dbrx", "hy_v4", "jetmoe", "longcat_flash", "marian", "mbart",
    "megatron-bert", "pegasus", "plbart", "qwen4_exp_text", "rembert", "xlnet", "zaya",
)  # fmt: skip
# each has something that no other of them has: experts, windows, gathered attention, latent attention
TYPICAL = ("gemma3_text", "phi3", "deepseek_v3")
# of the others transformers has no decoder of its own
TEXTS = tuple(kind for kind in FAMILIES if "_vl_" not in kind and kind != "kimi_k2")


def costs(model, at, mode="none", compile=True):
    pricing = Pricing(find_gpu("h200"), "bf16", compile, at.tp)
    return {
        kind: price_layer(
            ops, pricing, model.message_bytes(at), Checkpointing.parse(mode), is_block=kind in model.layers
        )
        for kind, ops in [*model.layer_operators(at).items(), ("head-full", fused_head(model, at))]
    }


def fused_head(model, at):
    return fuse(model.fused_head(at), at, True)["head-full"]


@pytest.mark.parametrize(
    "kind", [kind if kind in TYPICAL else pytest.param(kind, marks=pytest.mark.full) for kind in TEXTS]
)
def test_what_is_counted_is_what_shapes_say(kind):
    config = {"model_type": kind, **SMALL, **MORE.get(kind, {})}
    shaped, counted = open_model(config), CountedModel(kind, config, "")
    assert isinstance(shaped, ShapedModel)
    assert shaped.tied == counted.tied
    biases = 8 * FAMILIES[kind].scoring_bias * sum("experts" in name for name in counted.layers)  # no parameters there
    assert shaped.num_parameters() == tuple(number + biases for number in counted.num_parameters())
    assert shaped.allows_tp(2) == counted.allows_tp(2)
    for tp in (1, 2) if shaped.allows_tp(2) else (1,):
        at = Sizes(1024, 512, 2, tp)
        for mode in ("none", "selective:op", "full"):
            known, found = costs(shaped, at, mode), costs(counted, at, mode)
            for one, other in zip(shaped.layers, counted.layers):
                one, other = known[one], found[other]
                assert other.message == one.message
                assert other.flops == pytest.approx(one.flops, rel=0.005)
                assert other.activation == pytest.approx(one.activation, rel=NEAR.get(kind, 0.125))
                assert other.stash == pytest.approx(one.stash, rel=0.01)
                assert other.workspace == pytest.approx(one.workspace, rel=NEAR.get(kind, 0.125))
            for end in ("embedding", "head", "loss", "head-full"):
                assert found[end].parameters == known[end].parameters
                assert found[end].flops == pytest.approx(known[end].flops, abs=1e5)  # rotary ones
                assert found[end].activation == pytest.approx(known[end].activation, rel=0.01, abs=1e5)


@pytest.mark.parametrize(
    "name", ["gpt-oss-20b", *(pytest.param(name, marks=pytest.mark.full) for name in CONFIGS_BY_COUNT)]
)
def test_names_that_are_counted_have_their_parameters(name):
    assert num_parameters(name) == COUNTED_PARAMETERS[name]


def test_every_name_that_is_counted_says_how_many_parameters():
    assert CONFIGS_BY_COUNT.keys() == COUNTED_PARAMETERS.keys()


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 96},
        *(
            pytest.param(config, marks=pytest.mark.full)
            for config in (
                {"model_type": "llama4_text", **SMALL, "num_local_experts": 4, "intermediate_size_mlp": 384},
                {"model_type": "gemma2", **SMALL},
            )
        ),
    ],
    ids=lambda config: config["model_type"],
)
def test_parameters_are_those_of_transformers(config, tmp_path):
    data = dict(config)
    made = transformers.AutoConfig.for_model(data.pop("model_type"), **data)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    made.save_pretrained(tmp_path)
    assert num_parameters(str(tmp_path))[0] == sum(weight.numel() for weight in model.parameters())
    assert num_parameters(made.to_dict()) == num_parameters(str(tmp_path))  # whose labels have numbers as keys
    found = estimate(str(tmp_path), sequence=64, microbatch_size=[1, 2], ac=["none", "full"])
    assert len(found.settings) == 4
    assert len(found.layers) == made.num_hidden_layers
    kinds = found.settings[0].kinds
    total = sum(kinds[kind].parameters for kind in (*found.layers, *found.before, *found.after))
    assert total - found.tied * made.vocab_size * made.hidden_size == num_parameters(str(tmp_path))[0]


@pytest.mark.parametrize(
    "config,number,chosen",
    [
        ({"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2}, 8, 2),
        ({"model_type": "flex_olmo", "num_experts": 7, "num_experts_per_tok": 5}, 7, 5),
        (  # computes all experts for every token
            {"model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [0, 1, 2, 3]},
            4, 1,
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_experts_that_a_token_does_not_choose_are_not_met(config, number, chosen):
    model = open_model({**SMALL, **config})
    total, active = model.num_parameters()
    expert = 3 * 256 * 512
    assert total - active == 4 * (number - chosen) * expert
    ops = [op for kind in set(model.layers) for op in model.layer_operators(Sizes(64, 64, 2, 1))[kind]]
    stacks = [op for op in ops if op.parameters > number * expert / 4]
    assert sum(op.useful for op in stacks) == 2 * 64 * chosen * expert * len(set(model.layers))


def test_a_layer_of_which_nothing_waits_has_no_w():
    """Falcon's linear layers round before they add a bias, so that weight gradients are made in I."""
    config = {"model_type": "falcon", "bias": True, "hidden_size": 64, "num_attention_heads": 4}
    found = estimate(config, sequence=64).settings[0].kinds["dense"]
    assert (found.stash, found.w) == (0.0, 0.0)


def test_experts_of_float32_and_of_odd_sizes_are_counted():
    config = {
        "model_type": "gpt_oss",
        **SMALL,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 33,
    }
    found = {
        dtype: estimate(config, dtype=dtype, sequence=64).settings[0].kinds["experts"] for dtype in ("bf16", "float32")
    }
    assert found["float32"].flops == found["bf16"].flops
    assert found["float32"].stash == pytest.approx(2 * found["bf16"].stash, rel=1e-3)  # and where experts' rows end


def test_a_product_without_a_w_does_all_its_backward_in_i():
    """Falcon's linear layers add biases in a way of their own: they are not deferred, so their I has both products."""
    config = {name: value for name, value in SMALL.items() if name != "head_dim"}
    ops = open_model({"model_type": "falcon", "bias": True, **config}).layer_operators(Sizes(512, 512, 2, 1))["dense"]
    products = [op for op in ops if op.parameters and op.flops]
    assert len(products) == 4
    assert {(op.deferred, op.back, op.stash) for op in products} == {(False, 2.0, 0.0)}


def test_experts_with_biases_wait_for_w():
    config = {"model_type": "gpt_oss", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}
    ops = open_model(config).layer_operators(Sizes(512, 512, 2, 1))["experts"]
    assert sum(op.deferred for op in ops) == 6  # q, k, v, o, and the two of the experts


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "bert"}, "sequence=4096: must be at most 512, the number of positions"),
        ({"model_type": "gpt2"}, "sequence=4096: must be at most 1024"),
        ({"model_type": "t5"}, "model_type='t5' cannot be cut into stages"),
        ({"model_type": "nothing"}, "transformers cannot read this config"),
        (
            {"model_type": "dbrx", "num_hidden_layers": 2000},
            "num_hidden_layers=2000: models of type 'dbrx' are",
        ),
        ({"model_type": "gpt2", "n_layer": 2000}, "n_layer=2000: models of type 'gpt2' are"),
        (
            {"model_type": "llama4", "text_config": {"num_hidden_layers": 2000}},
            "num_hidden_layers=2000: models of type 'llama4' are",
        ),
        ({"model_type": "gpt_oss", "text_config": {"a": 1}}, "this type has no text part, but its config has a"),
        ({"model_type": "gpt_oss", "hidden_size": "big"}, "Field 'hidden_size' expected int, got str"),
        ({"model_type": "musicgen"}, "transformers cannot use this config (AttributeError"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        (
            {"model_type": "gpt_oss", "tp": 2},
            "tp=2: transformers has no tensor-parallel plan for gpt_oss; leave out tp",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused_in_one_line(change, message):
    with pytest.raises(ConfigError) as error:
        estimate({"model_type": "qwen3", **SMALL, **change}, tp=change.get("tp", 1))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_without_torch_it_says_what_is_missing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"gpt_oss: models of type 'gpt_oss' are .* pip install 'zeropipe\[engine\]'"):
        estimate({"model_type": "gpt_oss"})


def test_a_plan_of_a_counted_model(run, tmp_path):
    elsewhere = {"auto_map": {"AutoModelForCausalLM": "a/b--c.D"}, "attn_implementation": "a/kernel"}  # not looked at
    config = {"model_type": "gpt_oss", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2, **elsewhere}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, err = run(
        "plan", tmp_path, "--gpus", 4, "--batch", 8, "--sequence", 64, "--search-seconds", 0, "--ac", "none",
        "--microbatch-sizes", 1, "--schedules", "1f1b,zbv", "--json",
    )  # fmt: skip
    assert status == 0, err
    assert {row["tp"] for row in json.loads(out)["rows"]} == {1}  # experts with biases are not shared out


def test_the_page_counts_a_config_once_and_shows_its_rows_from_cached_costs(monkeypatch):
    pytest.importorskip("pydantic")
    from zeropipe.app import plan_calls

    config = {"model_type": "gpt_oss", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2}
    request = plan_calls.PlanRequest(model="config.json", file=json.dumps(config), gpus=1, batch=4, sequence=64)
    reply, costs = plan_calls.plan_call(request, 3, 3)
    answer = json.loads(reply.body)
    assert answer["parameters"] == open_model(config).num_parameters()[0]
    plan_calls.open_source.cache_clear()  # as in another process
    monkeypatch.setattr(CountedModel, "_create_counter", None)
    row = {name: answer["rows"][0][name] for name in plan_calls.RowRequest.model_fields if name != "plan"}
    shown = json.loads(plan_calls.row_call(plan_calls.RowRequest(plan=request, **row), costs).body)
    assert shown["viewer"]["timelines"][0]["makespan"] == pytest.approx(answer["rows"][0]["makespan"])
    assert 'path = "config.json"' in shown["run"]


@pytest.mark.skipif(not IS_OF_TABLE, reason=f"the list is about transformers {VERSION}")
def test_the_guide_says_how_many_types_are_counted():
    guide = (DOCS / "plan.md").read_text()
    assert f"Of the {len(EXACT)} types in [the table](models.md) {len(EXACT) - len(REFUSED)} are counted" in guide


@pytest.mark.full
@pytest.mark.skipif(not IS_OF_TABLE, reason=f"the list is about transformers {VERSION}")
@pytest.mark.parametrize("kind", EXACT)
def test_every_exact_type_is_counted_or_refused(kind):
    """With transformers' own number of parameters."""
    made = transformers.AutoConfig.for_model(kind, **models_table.EXAMPLES.get(kind, {}))
    counted = CountedModel(kind, {**made.to_dict(), "model_type": kind}, "")
    if kind in REFUSED:
        with pytest.raises(ConfigError) as error:
            counted.num_parameters()
        assert "\n" not in str(error.value)
        return
    whole = models_table.meta_model(models_table.decoder_config(made), torch.float32)
    assert counted.num_parameters()[0] == sum(weight.numel() for weight in whole.parameters())
