"""Weights come from where they should, or are refused: the oracle is transformers' own from_pretrained."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from engine_helpers import ranks
from safetensors.torch import load_file, save_file
from stage_models import CONFIGS, microbatches
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    FineGrainedFP8Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from weights_cases import (
    all_stages,
    run,
    save_all_stages,
    seeded,
    train_with_empty_stages,
    wrapped_for_data_parallelism,
)

import zeropipe as zp
from zeropipe.engine import LocalRanks, hf_model, hf_stages, module_stages
from zeropipe.engine.stages import reader
from zeropipe.errors import ConfigError

TWO = zp.build("1f1b", ranks=2, microbatches=2)
FOUR = zp.build("1f1b", ranks=4, microbatches=4)
BATCH = microbatches()[0]


def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(BATCH["input_ids"]).logits


def refuses(source, match: str, schedule=TWO, **options) -> None:
    """Every rank refuses, in one line."""
    for rank in range(schedule.num_ranks):
        with pytest.raises(ConfigError, match=match) as raised:
            hf_stages(source, schedule, rank, **options)
        assert "\n" not in str(raised.value)


# --- a model in memory ---


@pytest.mark.parametrize("wrap", ["compile", "compiled blocks", "data parallel", "both"])
def test_wrapped_models_are_unwrapped(wrap):
    model = hf_model(CONFIGS["llama"](), seed=1)
    want = logits(model)
    if wrap == "compiled blocks":
        model.model.layers[2] = torch.compile(model.model.layers[2])
    if wrap in ("data parallel", "both"):
        model = nn.DataParallel(model)
    if wrap in ("compile", "both"):
        model = torch.compile(model)
    torch.testing.assert_close(run(all_stages(model, TWO), BATCH), want)


def test_models_of_data_parallelism_are_unwrapped_or_refused():
    replicated, sharded = zip(*ranks().run(wrapped_for_data_parallelism, CONFIGS["llama"]()))
    assert max(replicated) == 0
    assert all("is sharded: must be a full tensor" in told for told in sharded)


def test_ranks_that_are_not_there_are_refused():
    for rank in (-1, 2, "0"):
        with pytest.raises(ConfigError, match=f"rank={rank!r}: must be from 0 to 1, the ranks of the schedule"):
            hf_stages(CONFIGS["llama"](), TWO, rank)
        with pytest.raises(ConfigError, match=f"rank={rank!r}"):
            module_stages([nn.Linear(2, 2)] * 2, TWO, rank)
    with pytest.raises(ConfigError, match="num_ranks=0: must be a positive integer"):
        LocalRanks(0)


def test_devices_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda:0': torch finds no GPU on this machine; use 'cpu'"):
        hf_stages(CONFIGS["llama"](), TWO, 0, device="cuda:0")
    with pytest.raises(ConfigError, match="device='quantum': must be a torch device"):
        hf_stages(CONFIGS["llama"](), TWO, 0, device="quantum")


def test_a_model_that_is_not_whole_is_refused():
    model = hf_model(CONFIGS["llama"]())
    refuses(model.model, "LlamaModel in memory has no lm_head.weight")
    del model.model.layers[3]
    refuses(model, r"has no model.layers.3.input_layernorm.weight \(and 8 more\)")


def test_a_base_model_is_enough_where_no_head_is_needed():
    tied = hf_model(CONFIGS["llama"](tie_word_embeddings=True))
    torch.testing.assert_close(run(all_stages(tied.model, TWO), BATCH), logits(tied))
    model = hf_model(CONFIGS["llama"]())
    stages = all_stages(model.model, TWO, head="score")
    torch.testing.assert_close(run(stages, BATCH), run(all_stages(model, TWO, head="score"), BATCH))


def test_tensors_that_no_stage_would_use_are_refused():
    model = hf_model(CONFIGS["llama"]())
    model.model.layers[1].mlp.extra = nn.Linear(2, 2)
    refuses(model, r"has model.layers.1.mlp.extra.bias \(and 1 more\), which no stage would use")
    classifier = AutoModelForSequenceClassification.from_config(CONFIGS["llama"](tie_word_embeddings=True))
    refuses(classifier, "score.weight, which no stage would use")


def test_a_pruned_model_is_refused_by_every_rank():
    model = hf_model(CONFIGS["llama"]())
    model.model.layers[3].mlp.up_proj = nn.Linear(32, 40, bias=False)
    refuses(model, r"layers.3.mlp.up_proj.weight has shape \(40, 32\) in the LlamaForCausalLM.*\(48, 32\)")


@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifiers_score_is_taken(labels):
    model = seeded(AutoModelForSequenceClassification.from_config(CONFIGS["qwen3"](num_labels=labels)))
    stages = all_stages(model, TWO, head="score")
    assert torch.equal(stages[-1].score.weight, model.score.weight)


def test_what_is_frozen_stays_frozen():
    model = hf_model(CONFIGS["qwen3"]())
    model.requires_grad_(False)
    model.model.layers[2].mlp.up_proj.weight.requires_grad_(True)
    stages = all_stages(model, TWO)
    trainable = [s.full_name(name) for s in stages for name, p in s.named_parameters() if p.requires_grad]
    assert trainable == ["model.layers.2.mlp.up_proj.weight"]


def test_each_tensor_keeps_its_dtype():
    model = hf_model(CONFIGS["llama"](), dtype=torch.bfloat16)
    model.model.layers[3].post_attention_layernorm.float()
    kept = {s.full_name(n): p.dtype for s in all_stages(model, TWO) for n, p in s.named_parameters()}
    assert kept == {name: p.dtype for name, p in model.named_parameters()}
    cast = {p.dtype for s in all_stages(model, TWO, dtype=torch.float64) for p in s.parameters()}
    assert cast == {torch.float64}


def test_one_tensor_is_one_and_two_are_two_whatever_the_config_says():
    tied = hf_model(CONFIGS["llama"](tie_word_embeddings=False))
    tied.lm_head.weight = tied.model.embed_tokens.weight
    assert all_stages(tied, TWO)[0].tied_pairs
    apart = hf_model(CONFIGS["llama"](tie_word_embeddings=True))
    apart.lm_head.weight = nn.Parameter(apart.lm_head.weight.detach() * 2)
    stages = all_stages(apart, TWO)
    assert not stages[0].tied_pairs
    torch.testing.assert_close(run(stages, BATCH), logits(apart))


def test_models_without_values_are_refused():
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    refuses(model, "must have values")


@pytest.mark.parametrize("source", [None, 3, nn.Linear(2, 2), {"a": 1}, "no/such/directory", []], ids=repr)
def test_what_is_no_model_is_refused(source):
    refuses(source, "^model=.*: must be a directory|not a Hugging Face model|not a model directory")


@pytest.mark.parametrize("dtype", ["bf16", torch.int8, torch.float8_e4m3fn, 16])
def test_a_dtype_that_is_none_is_refused(dtype):
    refuses(CONFIGS["llama"](), "dtype=", dtype=dtype)


# --- a directory ---


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    model, directory = seeded(hf_model(CONFIGS["qwen3-moe"]())), tmp_path_factory.mktemp("saved")
    model.save_pretrained(directory, max_shard_size="20KB")
    return model, directory


@pytest.fixture
def saved(saved_once, tmp_path):
    """A small model, saved by transformers in several files, which a test may change."""
    model, directory = saved_once
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    return model, tmp_path


def rewrite(directory: Path, change) -> None:
    """Change the tensors of a checkpoint; it becomes one file."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(
        {n: t.contiguous() for n, t in change(tensors).items()}, directory / "model.safetensors", {"format": "pt"}
    )


@pytest.mark.parametrize("original", [True, False], ids=["published", "stacked"])
def test_both_forms_of_experts_load(tmp_path, original):
    seeded(hf_model(CONFIGS["qwen3-moe"]())).save_pretrained(tmp_path, save_original_format=original)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert ("model.layers.0.mlp.experts.0.up_proj.weight" in names) == original
    want = logits(AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager"))
    torch.testing.assert_close(run(all_stages(tmp_path, TWO), BATCH), want)


def test_only_what_a_stage_needs_is_read_and_each_file_opened_once(saved, monkeypatch):
    import safetensors

    model, directory = saved
    opened, read = [], []

    class Spy:
        def __init__(self, path, **options):
            opened.append(Path(path).name)
            self.file = original(path, **options)

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

        def __getattr__(self, name):
            return getattr(self.file, name)

    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Spy)
    (stage,) = hf_stages(directory, FOUR, rank=2).values()
    files = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(read) == sorted(name for name in files if name.startswith("model.layers.2."))
    assert sorted(opened) == sorted({files[name] for name in read})
    assert len(opened) > 2
    assert torch.equal(stage.blocks[0].mlp.experts.down_proj, model.model.layers[2].mlp.experts.down_proj)


def test_few_files_are_open_at_once(saved, monkeypatch):
    _, directory = saved
    monkeypatch.setattr(reader, "MAX_OPEN_FILES", 2)
    found = reader.SafetensorsReader(directory)
    for name in found.names:
        found.read(name)
    assert len(found._open) == 2


def test_model_safetensors_wins_over_an_index_as_in_transformers(saved):
    _, directory = saved
    other = seeded(hf_model(CONFIGS["qwen3-moe"]()), seed=1)
    save_file({k: v.clone() for k, v in other.state_dict().items()}, directory / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(run(all_stages(directory, TWO), BATCH), logits(other))


@pytest.mark.parametrize(
    "change,match",
    [
        (lambda t: {n: x for n, x in t.items() if "layers.3.self_attn.q_proj" not in n}, "no tensor model.layers.3"),
        (lambda t: {n: x for n, x in t.items() if "lm_head" not in n}, "no tensor lm_head.weight"),
        (lambda t: t | {"model.layers.0.input_layernorm.weight": torch.ones(1)}, r"has shape \(1,\).*must be \(32,\)"),
        (lambda t: t | {"model.norm.weight": torch.ones(1, 32)}, r"has shape \(1, 32\)"),
        (lambda t: t | {"model.layers.1.mlp.up_proj.weight": torch.ones(1, 32)}, r"has shape \(1, 32\).*\(48, 32\)"),
        (lambda t: t | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "is int8"),
        (lambda t: t | {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "is float8_e4m3fn"),
        (
            lambda t: {n: x for n, x in t.items() if "layers.0.mlp.experts.3.up_proj" not in n},
            "no tensor model.layers.0.mlp.experts.3.up_proj.weight",
        ),
        (
            lambda t: {n: x for n, x in t.items() if "layers.0.mlp.experts.4." not in n},
            r"experts.\w+_proj has shape \(4, .* must be \(5, ",
        ),
        (
            lambda t: t | {"model.layers.0.mlp.experts.3.up_proj.weight": torch.ones(2, 2)},
            "cannot convert .* to model.layers.0.mlp.experts.gate_up_proj",
        ),
    ],
)  # fmt: skip
def test_broken_checkpoints_are_refused(saved, change, match):
    _, directory = saved
    rewrite(directory, change)
    one = zp.build("1f1b", ranks=1, microbatches=1)
    refuses(directory, match, schedule=one)


@pytest.mark.parametrize(
    "text,match",
    [
        ("{", "cannot read .*index.json: Expecting"),
        ("{}", "has no weight_map"),
        ("[]", "has no weight_map"),
        ('{"weight_map": 3}', "must map each tensor to a file"),
        ('{"weight_map": {"a": 3}}', "must map each tensor to a file"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "must map each tensor to a file"),
        ('{"weight_map": {}}', "no tensor"),
    ],
)
def test_broken_indices_are_refused(saved, text, match):
    _, directory = saved
    (directory / "model.safetensors.index.json").write_text(text)
    refuses(directory, match)


def test_broken_files_are_refused(saved):
    _, directory = saved
    one = zp.build("1f1b", ranks=1, microbatches=1)
    file = next(directory.glob("model-00001-*"))
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    refuses(directory, "cannot read .*model-00001", schedule=one)
    file.write_bytes(data[:4])
    refuses(directory, "cannot read .*model-00001", schedule=one)
    file.unlink()
    refuses(directory, "model-00001-.* is missing; copy all files of the model", schedule=one)
    (directory / "model.safetensors.index.json").unlink()
    refuses(directory, "has no model.safetensors", schedule=one)
    (directory / "config.json").write_text("{")
    refuses(directory, "cannot read .*config.json", schedule=one)


def test_a_tensor_that_its_file_does_not_hold_is_named(saved):
    _, directory = saved
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"cannot read model\.norm\.weight of"):
        hf_stages(directory, TWO, 1)


def test_tensors_of_no_use_are_mentioned(saved):
    _, directory = saved
    rewrite(directory, lambda tensors: tensors | {"vision.weight": torch.ones(3)})
    with pytest.warns(UserWarning, match="has vision.weight, which the model does not use"):
        hf_stages(directory, TWO, 0)
    with warnings.catch_warnings():  # by the first rank, for all
        warnings.simplefilter("error")
        hf_stages(directory, TWO, 1)


@pytest.mark.parametrize("stored_as", ["embedding", "head", "equal", "different"])
def test_ties_are_decided_as_transformers_does(tmp_path, stored_as):
    """The config says tied: it is what the checkpoint holds that counts."""
    model = hf_model(CONFIGS["llama"](tie_word_embeddings=True), seed=2)
    model.save_pretrained(tmp_path)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"

    def change(tensors):
        weight = tensors.pop(embedding)
        put = {
            "embedding": {embedding: weight},
            "head": {head: weight},
            "equal": {head: weight, embedding: weight.clone()},
            "different": {head: weight * 2, embedding: weight},
        }
        return tensors | put[stored_as]

    rewrite(tmp_path, change)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    stages = all_stages(tmp_path, TWO)
    torch.testing.assert_close(run(stages, BATCH), logits(theirs))
    is_tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert bool(stages[0].tied_pairs) == bool(stages[1].tied_pairs) == is_tied == (stored_as != "different")


def bert(directory: Path) -> nn.Module:
    """A model with another tie than that of head and embedding: two names of the head's bias."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING["bert"](**sizes, intermediate_size=48, is_decoder=True, hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob = 0.0
    model = seeded(AutoModelForCausalLM.from_config(config))
    model.save_pretrained(directory)
    return model


def test_ties_inside_a_stage(tmp_path):
    model = bert(tmp_path)
    want = logits(model)
    for source in (model, tmp_path):
        stages = all_stages(source, TWO)
        torch.testing.assert_close(run(stages, BATCH), want)
    save_all_stages(stages, TWO, tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), want)


def test_ties_inside_a_stage_that_are_none_are_refused(tmp_path):
    model = bert(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"cls.predictions.decoder.bias": torch.ones(61)})
    refuses(tmp_path, "differ in .*: must be equal by its config")
    model.cls.predictions.decoder.bias = nn.Parameter(torch.ones(61))
    refuses(model, "are two tensors: must be one by its config")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_on_a_gpu(saved, tmp_path_factory):
    model, directory = saved
    batch = {key: value.cuda() for key, value in BATCH.items()}
    for source in (model, directory, model.config):
        stages = all_stages(source, TWO, device="cuda")
        assert {tensor.device.type for stage in stages for tensor in stage.state_dict().values()} == {"cuda"}
    stages = all_stages(directory, TWO, device="cuda")
    out = tmp_path_factory.mktemp("out")
    save_all_stages(stages, TWO, out)
    back = AutoModelForCausalLM.from_pretrained(out, experts_implementation="eager").cuda().eval()
    torch.testing.assert_close(run(stages, batch), back(batch["input_ids"]).logits, rtol=1e-4, atol=1e-4)


# --- the text part of models of several kinds of input ---

_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@pytest.fixture(params=["gemma3", "mistral3"])
def multimodal(request):
    text = CONFIGS["gemma3" if request.param == "gemma3" else "mistral"]().to_dict()
    more = {"mm_tokens_per_image": 4, "boi_token_index": 1, "eoi_token_index": 2} if request.param == "gemma3" else {}
    tokens = {"image_token_index": 60, "image_token_id": 60} | more
    config = CONFIG_MAPPING[request.param](text_config=text, vision_config=_VISION, **tokens)
    return seeded(AutoModelForImageTextToText.from_config(config))


def test_the_text_part_is_loaded(multimodal, tmp_path):
    batch = {"input_ids": BATCH["input_ids"].clamp(3, 59)}
    want = multimodal.eval()(**batch).logits
    multimodal.save_pretrained(tmp_path)
    for source in (multimodal, tmp_path):
        torch.testing.assert_close(run(all_stages(source, TWO), batch), want)
    save_all_stages(all_stages(tmp_path, TWO), TWO, tmp_path / "text")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    torch.testing.assert_close(back.eval()(**batch).logits, want)
    with pytest.raises(ConfigError, match="has another model"):
        save_all_stages(all_stages(tmp_path, TWO), TWO, tmp_path)


# --- float8 ---


def quantise(tensors, block: int) -> dict[str, torch.Tensor]:
    """Matrices of layers as float8 with a scale per block, as DeepSeek-V3 and Qwen3 are published."""
    made = {}
    for name, tensor in tensors.items():
        if "_proj.weight" not in name:
            made[name] = tensor
            continue
        rows, columns = (-(-size // block) for size in tensor.shape)
        padded = nn.functional.pad(tensor, (0, columns * block - tensor.shape[1], 0, rows * block - tensor.shape[0]))
        blocks = padded.view(rows, block, columns, block)
        scale = blocks.abs().amax((1, 3)) / 448
        small = (blocks / scale[:, None, :, None]).view_as(padded)[: tensor.shape[0], : tensor.shape[1]]
        made[name], made[f"{name}_scale_inv"] = small.to(torch.float8_e4m3fn), scale
    return made


def say_quantised(directory: Path, **how) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = how
    (directory / "config.json").write_text(json.dumps(config))


FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic", "fmt": "e4m3"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_float8_blocks_are_read_as_transformers_reads_them(tmp_path, family):
    model = seeded(hf_model(CONFIGS[family](dtype=torch.bfloat16)))
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: quantise(tensors, 8))
    say_quantised(tmp_path, **FP8)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        experts_implementation="eager",
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8)),
    ).state_dict()
    stages = all_stages(tmp_path, TWO, dtype=torch.bfloat16)
    for stage in stages:
        for name, tensor in stage.state_dict().items():
            assert torch.equal(tensor, theirs[stage.full_name(name)]), name
        assert getattr(stage.full_config, "quantization_config", None) is None


def test_float8_blocks_at_the_edges_are_cut(tmp_path):
    """Blocks of 20 do not divide 48 and 32: transformers cannot read these, the reference code of DeepSeek-V3 can."""
    model = seeded(hf_model(CONFIGS["llama"]()))
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: quantise(tensors, 20))
    say_quantised(tmp_path, **FP8 | {"weight_block_size": [20, 20]})
    (tensors,) = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    name = "model.layers.0.mlp.up_proj.weight"
    small, scale = tensors[name].float(), tensors[f"{name}_scale_inv"]
    want = torch.tensor([[small[i, j] * scale[i // 20, j // 20] for j in range(32)] for i in range(48)])
    (stage, _) = all_stages(tmp_path, TWO)
    assert torch.equal(stage.blocks[0].mlp.up_proj.weight, want)


@pytest.mark.parametrize(
    "how",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        FP8 | {"weight_block_size": None},
        FP8 | {"weight_block_size": 128},
        FP8 | {"activation_scheme": "static"},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {},
    ],
    ids=str,
)
def test_other_quantised_directories_are_refused(saved, how):
    _, directory = saved
    say_quantised(directory, **how)
    refuses(directory, "is quantized .*must be fp8 in blocks, or mxfp4")


@pytest.mark.parametrize("broken", ["no scale", "wrong scale", "whole numbers"])
def test_float8_without_its_scales_is_refused(tmp_path, broken):
    hf_model(CONFIGS["llama"]()).save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"

    def change(tensors):
        tensors = quantise(tensors, 8)
        scale = tensors.pop(name)
        return (
            tensors | {"no scale": {}, "wrong scale": {name: scale[:1]}, "whole numbers": {name: scale.int()}}[broken]
        )

    rewrite(tmp_path, change)
    say_quantised(tmp_path, **FP8)
    with pytest.raises(ConfigError, match=name):
        hf_stages(tmp_path, TWO, 0)


# --- empty stages of plain modules ---


@pytest.mark.parametrize("layers", [[0, 2, 0, 2], [1, 0, 3, 0]], ids=str)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_stages_without_modules_hand_on_what_they_get(name, layers):
    schedule = zp.build(name, ranks=4, microbatches=2)
    assert max(ranks().run(train_with_empty_stages, schedule, layers)) < 1e-10


def test_only_the_first_stage_is_first():
    stages = [module_stages([nn.Linear(2, 2)] * 2, TWO, rank, layers=[0, 2])[rank] for rank in range(2)]
    assert [stage.is_first for stage in stages] == [True, False]
    inputs = torch.ones(1, 2)
    assert stages[0](**stages[0].pick({"inputs": inputs})) is inputs
