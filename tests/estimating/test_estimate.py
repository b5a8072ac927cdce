"""Estimates against published totals, formulas, transformers' own models and a real GPU."""

import json
import re
from contextlib import suppress
from dataclasses import replace

import pytest
from paths import DOCS

import zeropipe as zp
from zeropipe.core.model.configs import CONFIGS_BY_SHAPE
from zeropipe.errors import ConfigError
from zeropipe.estimating.estimate import estimate, num_parameters
from zeropipe.estimating.families import FAMILIES
from zeropipe.estimating.gpus import GPUS
from zeropipe.estimating.shapes import read_shape
from zeropipe.sim.layer_file import from_layer_data, to_layer_json

# billions of parameters as their makers state them: all, and those that a token meets
PUBLISHED = {
    "llama-3.2-1b": (1.24, 1.24), "llama-3.2-3b": (3.21, 3.21), "llama-3-8b": (8.03, 8.03), "llama-3-70b": (70.6, 70.6),
    "llama-3.1-405b": (406, 406), "qwen2.5-7b": (7.61, 7.61), "qwen2.5-72b": (72.7, 72.7), "qwen3-0.6b": (0.6, 0.6),
    "qwen3-1.7b": (1.7, 1.7), "qwen3-4b": (4.0, 4.0), "qwen3-8b": (8.2, 8.2), "qwen3-14b": (14.8, 14.8),
    "qwen3-32b": (32.8, 32.8), "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22), "mistral-7b": (7.25, 7.25),
    "mistral-nemo-12b": (12.2, 12.2), "mistral-small-24b": (23.6, 23.6), "mistral-large-123b": (123, 123),
    "mixtral-8x7b": (46.7, 12.9), "gemma-7b": (8.54, 8.54), "gemma-3-1b": (1.0, 1.0), "gemma-3-12b": (11.8, 11.8),
    "gemma-3-27b": (27.0, 27.0), "deepseek-v3": (671, 37), "kimi-k2": (1040, 32.6),
    "glm-4.5-air": (106, 12 + 1.24), "glm-4.5": (355, 32 + 1.55),  # the tokens' without embedding and head
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3-8b", "deepseek-v3", "gpt-oss-20b"])
def test_packed_samples_cost_what_rows_of_their_length_cost(name):
    """Attention within them; with windows less, because no mask computes all pairs of tokens."""
    packed = estimate(name, sequence=4096, sample=512, microbatch_size=2)
    apart = estimate(name, sequence=512, microbatch_size=16)
    whole = estimate(name, sequence=4096, microbatch_size=2)
    for one, other, long in zip(packed.settings, apart.settings, whole.settings, strict=True):
        for kind, cost in one.kinds.items():
            wanted = other.kinds[kind]
            assert cost.f <= wanted.f * 1.001
            assert cost.f == pytest.approx(wanted.f) or "sliding" in kind
            assert cost.flops == pytest.approx(wanted.flops)
            if kind in packed.layers:
                assert cost.f < long.kinds[kind].f
    assert packed.sequence == 4096
    assert from_layer_data(json.loads(to_layer_json(packed))) == packed
    assert packed.sample == 512


def test_a_sample_is_part_of_a_sequence():
    with pytest.raises(ConfigError, match="sample=4097: packed samples must be at most as long as a sequence, 4096"):
        estimate("qwen3-8b", sample=4097)
    costs = estimate("qwen3-8b", sample=512)
    with pytest.raises(ConfigError, match="sample=256: the costs have samples of 512 tokens; create costs with"):
        zp.plan(costs, gpus=8, batch=64, sample=256)


@pytest.mark.parametrize("name", CONFIGS_BY_SHAPE)
def test_parameters_are_the_published_ones(name):
    total, active = num_parameters(name)
    assert total / 1e9 == pytest.approx(PUBLISHED[name][0], rel=0.015)
    assert active / 1e9 == pytest.approx(PUBLISHED[name][1], rel=0.025)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-32b", "mixtral-8x7b", "deepseek-v3"])
def test_flops_are_two_per_parameter_and_token_and_those_of_attention(name):
    shape, found = read_shape(name), estimate(name, sequence=2048)
    kinds = found.settings[0].kinds
    flops = sum(kinds[kind].flops for kind in (*found.layers, *found.before, *found.after))
    active = num_parameters(name)[1] - shape.vocabulary * shape.hidden  # a lookup computes nothing
    sizes = (shape.head_dim, shape.head_dim) if shape.latent is None else (128 + 64, 128)
    attention = shape.num_layers * shape.heads * sum(sizes) * 2048**2
    assert flops == pytest.approx(2 * active * 2048 + attention, rel=0.003)


def test_the_parts_of_a_model_add_up_to_all_its_parameters():
    for name in CONFIGS_BY_SHAPE:
        found = estimate(name)
        kinds = found.settings[0].kinds
        total = sum(kinds[kind].parameters for kind in (*found.layers, *found.before, *found.after))
        shape = read_shape(name)
        assert total - shape.tied * shape.vocabulary * shape.hidden == num_parameters(name)[0]


# what has no default
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral": {"head_dim": 16},
}
CODE = {"kimi_k2": "deepseek_v3"}  # types whose code is another one's


def transformers_model(config):
    """A config as transformers completes it, and how many weights its model has."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = dict(config)
    kind = config.pop("model_type")
    sees = kind.endswith(("_vl_text", "_vl_moe_text"))
    config = {"text_config": config, "vision_config": {"depth": 1}} if sees else config
    made = transformers.AutoConfig.for_model(CODE.get(kind, kind.removesuffix("_text") if sees else kind), **config)
    classes = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = classes.from_config(made)
    assert model._supports_sdpa, "estimates are of that kernel"
    weights = sum(weight.numel() for name, weight in model.named_parameters() if "visual" not in name)
    biases = sum(bias.numel() for name, bias in model.named_buffers() if "e_score_correction_bias" in name)
    return made.get_text_config(), weights + biases


@pytest.mark.parametrize("kind", FAMILIES)
def test_weights_are_those_of_transformers(kind):
    config = next((dict(facts) for facts in CONFIGS_BY_SHAPE.values() if facts["model_type"] == kind), None)
    config = config or {**CONFIGS_BY_SHAPE["llama-3-8b"], "model_type": kind, "pad_token_id": 0}
    config |= {"num_hidden_layers": 4, **NEEDED.get(kind, {})}
    config.pop("sliding_window_pattern", None)
    made, wanted = transformers_model(config)
    assert num_parameters({**json.loads(made.to_json_string()), "model_type": kind})[0] == wanted


def test_the_guide_lists_all_types():
    text = (DOCS / "plan.md").read_text()
    listed = re.search(r"a config file will do as\s+well \(([^;]*);", text)[1]
    assert set(re.findall(r"\w*[a-z]\d?\w*", listed)) - {"the", "text", "of", "and"} == {
        kind.removesuffix("_text") for kind in FAMILIES
    }


FEW = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
FOREIGN = {"attention_bias": True, "mlp_bias": True, "use_qk_norm": True, "decoder_sparse_step": 2}  # of other types
LEFT_OUT = {
    **{kind: {"model_type": kind, **FEW, **NEEDED.get(kind, {})} for kind in FAMILIES},
    "norms of glm4_moe": {"model_type": "glm4_moe", **FEW, "attention_bias": True, "use_qk_norm": True},
    "biases of seed_oss": {"model_type": "seed_oss", **FEW, "attention_bias": False, "attention_out_bias": True},
    "windows of qwen2": {"model_type": "qwen2", **FEW, **WINDOWS},
    "windows of qwen3": {"model_type": "qwen3", **FEW, **WINDOWS},
    "windows of qwen3_moe": {"model_type": "qwen3_moe", **FEW, **WINDOWS},
    "windows of qwen2_moe": {"model_type": "qwen2_moe", **FEW, **WINDOWS},
    "windows of smollm3": {"model_type": "smollm3", **FEW, **WINDOWS, "pad_token_id": 0},
    "windows of a default size": {"model_type": "qwen3", **FEW, "use_sliding_window": True, "max_window_layers": 1},
    "foreign fields of qwen2": {"model_type": "qwen2", **FEW, **FOREIGN},
    "foreign fields of mixtral": {"model_type": "mixtral", **FEW, **FOREIGN},
    "foreign fields of qwen3": {"model_type": "qwen3", **FEW, **FOREIGN, "attention_bias": False},
    "experts by another name": {"model_type": "qwen3_moe", **FEW, "num_local_experts": 12},
    "no windows": {"model_type": "mistral", **FEW, "sliding_window": None},
    "biases": {"model_type": "deepseek_v3", **FEW, "attention_bias": True},
    "text of gemma-3-4b": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind):
    """Published configs leave out what the model's class has by default: of gemma-3-4b, the numbers of heads."""
    made, wanted = transformers_model({**LEFT_OUT[kind], "pad_token_id": 0})
    assert num_parameters(LEFT_OUT[kind])[0] == wanted
    window = getattr(made, "sliding_window", None)
    types = getattr(made, "layer_types", None) or ["sliding_attention"] * made.num_hidden_layers
    windows = [window if one == "sliding_attention" else None for one in types]
    assert [layer.window for layer in read_shape(LEFT_OUT[kind]).layers] == windows


def gpu_run(compile, ac, f, i, w):
    """Milliseconds on one H200 of 4 layers of Qwen3-8B's size, 4096 tokens: the table in docs/split-backward.md."""
    return pytest.param(compile, ac, f, i, w, id=f"{'compiled' if compile else 'eager'}-{ac}")


@pytest.mark.parametrize(
    "compile,ac,f,i,w",
    [
        gpu_run(True, "none", 12.14, 14.01, 8.75),
        gpu_run(True, "selective:op", 12.16, 14.29, 8.53),
        gpu_run(True, "memory_budget:0.5", 12.08, 16.49, 8.64),
        gpu_run(False, "none", 15.88, 22.41, 8.16),
        gpu_run(False, "full", 16.48, 34.62, 8.15),
        gpu_run(False, "selective:op", 25.56, 31.43, 8.10),
    ],
)
def test_times_are_near_a_real_gpus(compile, ac, f, i, w):
    cost = estimate("qwen3-8b", gpu="h200", ac=ac, compile=compile).settings[0].kinds["dense"]
    for found, measured in ((cost.f, f), (cost.i, i), (cost.w, w), (cost.f + cost.i + cost.w, f + i + w)):
        assert 4e3 * found == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "compile,ac,peak",
    [
        (False, "none", 3591), (True, "none", 2423), (False, "full", 1163), (True, "full", 923),
        (True, "selective:op", 1789), (True, "memory_budget:0.5", 1596), (False, "selective:op", 2205),
    ],
)  # fmt: skip
def test_memory_is_near_a_real_gpus(compile, ac, peak):
    """MiB at the peak of a whole backward of those 4 layers; and what waits for W, the same in every mode."""
    cost = estimate("qwen3-8b", gpu="h200", ac=ac, compile=compile).settings[0].kinds["dense"]
    assert (4 * cost.activation + cost.workspace) / 2**20 == pytest.approx(peak, rel=0.1)
    assert 4 * cost.stash / 2**20 == pytest.approx(1984, rel=0.02)


def test_a_checkpointed_forward_makes_what_it_does_not_keep():
    """Of the MLP of a Llama: its input, gate, up and their product, and eagerly the activation."""
    tokens, hidden, width = 4096, 4096, 14336
    for compile, mlp in ((False, hidden + 4 * width), (True, hidden + 3 * width)):
        modes = ["none", "full", "selective:op", "memory_budget:0.75"]
        found = estimate("llama-3-8b", ac=modes, compile=compile, sequence=tokens).settings
        none, full, op, budget = (setting.kinds["dense"].f_workspace for setting in found)
        assert (none, full) == (0, 2 * tokens * mlp)
        assert 0 < op < full
        assert budget == (full / 4 if compile else op)


def test_checkpointing_trades_time_for_memory():
    kinds = estimate("llama-3-8b", ac=["none", "selective:op", "full", "memory_budget:1", "memory_budget:0"]).settings
    none, op, full, all_of_it, nothing = (setting.kinds["dense"] for setting in kinds)
    assert none.activation > op.activation > full.activation == none.message
    assert none.i < op.i < full.i < none.i + none.f
    assert len({cost.stash for cost in (none, op, full)}) == 1
    assert (all_of_it.activation, all_of_it.i) == pytest.approx((none.activation, none.i))
    assert (nothing.activation, nothing.i) == pytest.approx((full.activation, full.i))


def test_tensor_parallelism_cuts_weights_and_work_and_adds_sums():
    one, two = (estimate("llama-3-70b", tp=tp).settings[0].kinds["dense"] for tp in (1, 2))
    norms = 2 * 8192
    assert two.parameters - norms == (one.parameters - norms) / 2
    assert two.flops == pytest.approx(one.flops / 2)
    assert one.f / 2 < two.f < one.f
    assert two.message == one.message


def test_a_window_is_less_work_for_the_model_and_not_for_the_kernel():
    found = estimate("gemma-3-12b", sequence=8192)
    assert found.layers[:6] == ("dense-sliding",) * 5 + ("dense",)
    kinds = found.settings[0].kinds
    assert kinds["dense-sliding"].flops < kinds["dense"].flops
    assert kinds["dense-sliding"].f > kinds["dense"].f


def test_faster_gpus_and_better_use_take_less_time():
    times = {gpu: estimate("llama-3-8b", gpu=gpu).settings[0].kinds["dense"].f for gpu in ("b200", "h200", "a100")}
    assert times["b200"] < times["h200"] < times["a100"]
    better = estimate("llama-3-8b", gpu="a100", efficiency={"matmul": 0.9}).settings[0].kinds["dense"].f
    assert better < times["a100"]
    for gpu in GPUS:
        assert zp.estimate("qwen3-0.6b", gpu=gpu).machine["gpu"] == gpu


def test_it_is_marked_as_an_estimate_and_makes_a_round_trip(tmp_path):
    found = estimate("qwen3-30b-a3b", gpu="h200", ac=["none", "full"], microbatch_size=[1, 2], tp=[1, 2])
    assert found.source == "estimate"
    assert len(found.settings) == 8
    assert from_layer_data(json.loads(to_layer_json(found))) == found


def test_text_fields_beside_those_of_the_vision_are_read():
    text = {
        **CONFIGS_BY_SHAPE["qwen2.5-7b"],
        "model_type": "qwen2_5_vl",
        "vision_config": {"depth": 32, "hidden_size": 1280},
    }
    assert num_parameters(text) == num_parameters("qwen2.5-7b")
    assert read_shape(text).layers == read_shape("qwen2.5-7b").layers


def test_a_config_file_and_a_directory_are_the_known_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS_BY_SHAPE["qwen3-8b"]))
    (tmp_path / "other.json").write_text(
        json.dumps({"model_type": "some_vlm", "text_config": CONFIGS_BY_SHAPE["qwen3-8b"]})
    )
    known = estimate("qwen3-8b")
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "other.json"):
        assert replace(estimate(str(path)), model="qwen3-8b") == known


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": None}, "model has no model_type; use a model's config.json, or for `plan` costs"),
        ({"hidden_size": "x"}, "hidden_size='x': must be an integer"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"layer_types": ["full_attention"]}, "must have one type for each of 36 layers"),
    ],
)
def test_configs_that_cannot_be_estimated_are_refused(change, message):
    with pytest.raises(ConfigError) as error:
        estimate({**CONFIGS_BY_SHAPE["qwen3-8b"], **change})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gemma-3-1b"])
def test_a_config_with_anything_in_it_is_estimated_or_refused(name):
    more = ("layer_types", "mlp_only_layers", "decoder_sparse_step", "sliding_window", "text_config", "head_dim")
    for key in {*CONFIGS_BY_SHAPE[name], *more}:
        for junk in (None, -1, 1.5, "x", [1], {"a": 1}, True, 10**30, 2**31):
            with suppress(ConfigError):  # anything else fails
                estimate({**CONFIGS_BY_SHAPE[name], key: junk})


@pytest.mark.parametrize(
    "wish,message",
    [
        ({"gpu": "tpu"}, "gpu='tpu': must be one of h200"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"tp": 3}, "tp=3: qwen3-8b has num_attention_heads=32"),
        ({"ac": "some"}, "activation checkpointing 'some'"),
        ({"sequence": 0}, "sequence=0"),
        ({"microbatch_size": [1, 0.5]}, "microbatch_size=0.5"),
        ({"efficiency": {"matmul": 2}}, "efficiency matmul=2: must be above 0 and at most 1"),
        ({"efficiency": {"luck": 1}}, "efficiency 'luck'"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(wish, message):
    with pytest.raises(ConfigError) as error:
        estimate("qwen3-8b", **wish)
    assert message in str(error.value)


def test_a_shared_expert_is_cut_evenly_or_not_at_all():
    odd = {**LEFT_OUT["qwen2_moe"], "num_key_value_heads": 4, "shared_expert_intermediate_size": 90}
    with pytest.raises(ConfigError, match="tp=4: qwen2_moe has shared_expert_intermediate_size=90"):
        estimate(odd, tp=4)
    made = zp.plan(odd, gpus=4, batch=4, sequence=16, search_seconds=0, schedules="1f1b", ac="none", workers=1)
    assert {row.candidate.layout.tp for row in made.rows} == {1, 2}


def test_unknown_names_are_told_with_the_known_ones():
    with pytest.raises(ConfigError, match="model 'qwen9': must be a directory"):
        estimate("qwen9")


def test_the_command_prints_a_table_and_writes_the_file(tmp_path, capsys, monkeypatch):
    from zeropipe.cli import main

    monkeypatch.setenv("COLUMNS", "120")
    file = tmp_path / "costs.json"
    main(["estimate", "qwen3-8b", "--gpu", "h200", "--ac", "none,full", "--tp", "1,2", "--compile", "-o", str(file)])
    out = capsys.readouterr().out
    assert out.count("an estimate") == 5, "each table and the last line say it"
    assert from_layer_data(json.loads(file.read_text())) == estimate(
        "qwen3-8b", gpu="h200", ac=["none", "full"], tp=[1, 2]
    )
    main(["estimate", "qwen3-8b", "--json"])
    assert json.loads(capsys.readouterr().out)["source"] == "estimate"
    main(["estimate", "--known", "--json"])
    assert json.loads(capsys.readouterr().out)["models"]["qwen3-8b"]["parameters"] == num_parameters("qwen3-8b")[0]


@pytest.mark.parametrize(
    "args",
    [[], ["qwen9"], ["qwen3-8b", "-o", "x.csv"], ["qwen3-8b", "--efficiency", "matmul"], ["qwen3-8b", "--tp", "0"]],
)
def test_mistakes_on_the_command_line_are_told_in_one_line(args, capsys):
    from zeropipe.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["estimate", *args])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_memory_is_what_the_engine_was_seen_to_hold():
    """Bytes per token that `zeropipe profile` recorded on a CPU, bfloat16, eager: up to the norms' inverse roots."""
    shape = {
        **CONFIGS_BY_SHAPE["qwen3-8b"],
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 8,
        "head_dim": 32,
    }
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048}
    found = estimate(shape, sequence=256, compile=False, ac=["none", "full"], fused_head=False)
    none, full = (setting.kinds for setting in found.settings)
    assert none["dense"].activation / 256 == pytest.approx(7088, rel=0.005)
    assert full["dense"].activation / 256 == 256
    assert none["dense"].stash / 256 == full["dense"].stash / 256 == 4096
    assert (none["head"].activation + none["loss"].activation) / 256 == pytest.approx(9196, rel=0.005)
    assert (none["head"].stash + none["loss"].stash) / 256 == 4352


def seconds_of_head(name, tokens, **options):
    """Of the head beside its norm, in a step of a stage with full backwards, and with split ones."""
    norm = estimate(name, sequence=tokens, **options, fused_head=False).settings[0].kinds
    found = estimate(name, sequence=tokens, **options).settings[0].kinds
    assert norm.keys() - found.keys() == {"loss"}
    return [found[kind].f + found[kind].i + found[kind].w for kind in ("head-full", "head")]


@pytest.mark.parametrize(("tokens", "times"), [(4096, (0.5 * 47.3, 0.5 * 51.0)), (8192, (47.3, 51.0))])
def test_the_fused_head_takes_what_was_measured(tokens, times):
    """`bench/head.py` on an H200, hidden size 4,096, 151,936 logits: with the weight's gradient in F, and in W."""
    found = seconds_of_head("qwen3-8b", tokens, gpu="h200", compile=True)
    assert [1e3 * seconds for seconds in found] == pytest.approx(times, rel=0.1)
    eager, _ = seconds_of_head("qwen3-8b", tokens, gpu="h200", compile=False)
    assert 1e3 * eager == pytest.approx(89.9 * tokens / 8192, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "compile", "measured"), [("head-full", True, 2.96), ("head", True, 4.76), ("head-full", False, 4.59)]
)
def test_the_memory_of_the_fused_head_is_what_was_measured(kind, compile, measured):
    """GiB of `bench/head.py`, with the gradients of the hidden states and of the weight, in float32."""
    head = estimate("qwen3-8b", gpu="h200", sequence=8192, compile=compile).settings[0].kinds[kind]
    weight, hidden = 4 * 151_936 * 4096, 2 * 8192 * 4096
    norm, inputs = (hidden if compile else 3 * hidden), hidden  # the bench has no norm, and does not count its input
    assert (weight + head.activation + head.f_workspace - norm - inputs) / 2**30 == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("compile", [False, True])
def test_weight_gradients_of_a_fused_head_are_made_in_f_unless_a_w_makes_them(compile):
    costs = estimate("qwen3-8b", compile=compile)
    full, split, overlapped = (zp.build(name, ranks=2, microbatches=4) for name in ("1f1b", "zb-h1", "1f1b-overlap"))
    assert costs.for_schedule(full).after == ("head-full",)
    assert costs.for_schedule(split).after == costs.for_schedule(overlapped).after == ("head",)
    one, other = (costs.for_schedule(schedule).costs((18, 18)) for schedule in (full, split))
    assert one.f[1] > other.f[1]
    assert one.f[1] + one.b[1] == pytest.approx(other.f[1] + other.b[1])
    logits = 2 * 4096 * 151_936
    assert other.activation[1] - one.activation[1] == pytest.approx(logits, rel=0.05), "kept for W"
    assert (one.f[0], one.activation[0]) == (other.f[0], other.activation[0]), "only the last stage has a head"


def test_chunks_of_a_large_vocabulary_bound_the_memory_of_a_forward():
    head = estimate("qwen3-8b", sequence=65_536, compile=False).settings[0].kinds["head-full"]
    chunk, hidden = 2**27 * (2 + 4 + 3 * 4 + 1), 2 * 65_536 * 4096  # logits, and what uncompiled passes make of them
    assert 0.9 * chunk < head.f_workspace - hidden <= chunk


def test_a_frozen_head_makes_no_weight_gradients():
    costs = estimate("qwen3-8b", lora=8)
    assert (costs.after, costs.after_full) == (("head",), ())
    assert costs.settings[0].kinds["head"].w == costs.settings[0].kinds["head"].stash == 0


def test_a_narrow_terminal_folds_no_cell_of_an_estimate(monkeypatch, capsys):
    from zeropipe.cli.layer_table import print_costs

    monkeypatch.setenv("COLUMNS", "80")
    print_costs(zp.estimate("qwen3-8b"), "an estimate", None, as_json=False)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "dense 36 2.93 ms 3.89 ms 2.282 ms 562.6 MB 520.1 MB 192.9 M" in rows
    assert [row.split()[0] for row in rows if row.startswith("head")] == ["head", "head-full"]
