"""Stages cut from models give the plain model's loss and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from full_marker import mark_rest_full
from stage_models import CONFIGS, assert_same_gradients, microbatches, plain_step, staged_step
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM
from weights_cases import all_stages

import zeropipe as zp
from zeropipe.engine.backward.linear import defer
from zeropipe.engine.backward.store import WeightStore
from zeropipe.engine.stages.build import hf_model, hf_stages, module_stages
from zeropipe.engine.stages.contract import describe_stage
from zeropipe.engine.stages.save import save_stages
from zeropipe.errors import ConfigError


@pytest.mark.parametrize(
    "family, split",
    mark_rest_full(
        [(family, split) for family in CONFIGS for split in (False, True)],
        lambda it: it[1] or it[0] == "gpt2",
    ),
)
def test_stages_equal_the_plain_model(family, split):
    model = hf_model(CONFIGS[family](), dtype=torch.float64, seed=3)
    schedule = zp.build("1f1b", ranks=3, microbatches=4)
    stages = all_stages(model, schedule, layers=[1, 2, 1])
    if split:
        assert all(defer(stage) for stage in stages)
    batches = microbatches()
    loss = plain_step(model, batches)
    assert staged_step(stages, batches, WeightStore() if split else None) == pytest.approx(loss, rel=1e-10)
    assert_same_gradients(stages, model)


@pytest.mark.parametrize("kernel", [None, "grouped_mm"])
def test_experts_in_float64_run_where_torch_has_no_grouped_product(kernel, tmp_path):
    config = CONFIGS["qwen3-moe"]()
    hf_model(config, dtype=torch.float64, seed=3).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    config._experts_implementation = kernel
    stages = all_stages(config, zp.build("1f1b", ranks=2, microbatches=4), dtype=torch.float64, seed=3)
    loss = plain_step(plain.train(), microbatches())
    assert staged_step(stages, microbatches(), None) == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize("family", CONFIGS)
def test_seeded_weights_do_not_depend_on_the_cut(family):
    config = CONFIGS[family]()
    whole = dict(hf_model(config, seed=7).named_parameters())
    assert whole.keys() == {n for n, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
    for stage in all_stages(config, zp.build("1f1b", ranks=4, microbatches=4), seed=7):
        for name, parameter in stage.named_parameters():
            full = stage.full_names()[name]
            full = full if full in whole else stage.full_name(stage.tied_names[0])
            assert torch.equal(parameter, whole[full]), full


def test_another_seed_gives_other_weights():
    config = CONFIGS["llama"]()
    one, two = (hf_model(config, seed=s).model.layers[1].mlp.up_proj.weight for s in (0, 1))
    assert not torch.equal(one, two)
    model = hf_model(config)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


def test_first_values_leave_everybodys_random_numbers_alone(monkeypatch):
    """Also those of GPUs, which torch.manual_seed would seed."""
    seeds, before = [], torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    hf_model(CONFIGS["llama"](), device="cpu")
    assert not seeds
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma3", "gpt-neox"])
def test_directory_round_trip(family, tmp_path):
    """transformers writes, stages read only their own tensors, stages write, transformers reads."""
    model = hf_model(CONFIGS[family](), seed=5)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    batch = microbatches()[0]
    want = model(batch["input_ids"]).logits
    for rank in range(2):
        stages = hf_stages(tmp_path / "in", schedule, rank)
        save_stages(stages, schedule.placement, rank, tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(back(batch["input_ids"]).logits, want)
    stages = all_stages(tmp_path / "in", schedule)
    hidden = ()
    for stage in stages:
        hidden = (stage(*hidden, **stage.pick(batch)),)
    torch.testing.assert_close(hidden[0], want)


def test_a_stage_reads_no_other_stage(tmp_path):
    """Files of other stages may be missing."""
    model = hf_model(CONFIGS["llama"]())
    schedule = zp.build("1f1b", ranks=4, microbatches=4)
    for rank in range(4):
        save_stages(hf_stages(model, schedule, rank), schedule.placement, rank, tmp_path)
    for file in tmp_path.glob("model-*"):
        if "00003" not in file.name:
            file.unlink()
    (stage,) = hf_stages(tmp_path, schedule, rank=2).values()
    assert torch.equal(stage.blocks[0].mlp.up_proj.weight, model.model.layers[2].mlp.up_proj.weight)
    with pytest.raises(Exception, match="model-00002"):
        hf_stages(tmp_path, schedule, rank=1)


def test_only_this_ranks_layers_get_memory():
    config = CONFIGS["llama"](hidden_size=512, intermediate_size=1024, vocab_size=1000)
    (stage,) = hf_stages(config, zp.build("1f1b", ranks=4, microbatches=4), rank=1).values()
    whole = AutoModelForCausalLM.from_config(config)
    layer = sum(p.numel() for p in whole.model.layers[1].parameters())
    assert sum(p.numel() for p in stage.parameters()) == layer
    assert not any(p.is_meta for p in [*stage.parameters(), *stage.buffers()])


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_tied_embeddings(name):
    config = CONFIGS["llama"](tie_word_embeddings=True)
    model = hf_model(config, dtype=torch.float64)
    schedule = zp.build(name, ranks=2, microbatches=4)
    stages = all_stages(model, schedule)
    for stage in stages:
        defer(stage)
    first, last = stages[0], stages[-1]
    shared = first.embedding is last.lm.lm_head.weight
    assert shared == all(table[0] == table[-1] for table in schedule.placement.copies)
    assert first.tied_pairs == (("lm.model.embed_tokens.weight", len(stages) - 1, "lm.lm_head.weight"),)
    assert last.tied_pairs == (("lm.lm_head.weight", 0, "lm.model.embed_tokens.weight"),)
    assert torch.equal(first.embedding, last.lm.lm_head.weight)
    batches = microbatches()
    loss = plain_step(model, batches)
    assert staged_step(stages, batches, WeightStore()) == pytest.approx(loss, rel=1e-10)
    assert_same_gradients(stages, model)


def test_mirrored_copies_are_equal():
    schedule = zp.build("dualpipe", ranks=2, microbatches=4)
    config = CONFIGS["qwen3"]()
    ranks = [hf_stages(config, schedule, rank) for rank in range(2)]
    assert [sorted(stages) for stages in ranks] == [[0, 1], [0, 1]]
    for stage in (0, 1):
        for a, b in zip(ranks[0][stage].parameters(), ranks[1][stage].parameters()):
            assert torch.equal(a, b)
            assert a is not b


def test_packed_sequences_do_not_see_each_other():
    """cu_seqlens gives each stage the positions and masks of separate sequences."""
    model = hf_model(CONFIGS["qwen3-mixed"](), dtype=torch.float64)
    stages = all_stages(model, zp.build("1f1b", ranks=2, microbatches=2))
    tokens = torch.randint(61, (1, 15))
    batch = {"input_ids": tokens, "cu_seqlens": torch.tensor([0, 6, 8, 15])}
    hidden = ()
    for stage in stages:
        hidden = (stage(*hidden, **stage.pick(batch)),)
    alone = [model(tokens[:, a:b]).logits for a, b in ((0, 6), (6, 8), (8, 15))]
    torch.testing.assert_close(hidden[0], torch.cat(alone, 1))


def test_padding_masks_reach_every_stage():
    model = hf_model(CONFIGS["llama"](), dtype=torch.float64)
    stages = all_stages(model, zp.build("1f1b", ranks=4, microbatches=4))
    tokens = torch.randint(61, (2, 8))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    batch = {"input_ids": tokens, "attention_mask": mask}
    hidden = ()
    for stage in stages:
        hidden = (stage(*hidden, **stage.pick(batch)),)
    want = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(hidden[0][mask.bool()], want[mask.bool()])


def test_score_head_gives_one_number_per_token():
    stages = all_stages(CONFIGS["qwen3"](), zp.build("1f1b", ranks=2, microbatches=2), head="score")
    batch = microbatches()[0]
    hidden = ()
    for stage in stages:
        hidden = (stage(*hidden, **stage.pick(batch)),)
    assert hidden[0].shape == (2, 9, 1)
    assert not any("lm_head" in name for name in stages[-1].full_names().values())
    whole = hf_model(CONFIGS["qwen3"](), head="score")
    torch.testing.assert_close(hidden[0], whole(**whole.pick(batch)))


@pytest.mark.parametrize(
    "change,error",
    [
        ({"layers": [1, 1]}, "2 entries"),
        ({"layers": [1, 1, 1, 2]}, "adds up to 5"),
        ({"head": "logits"}, "head='logits'"),
        ({"layers_per_stage": 2}, "makes 2 stages|cannot share"),
    ],
)
def test_wrong_cuts_are_named(change, error):
    with pytest.raises(ConfigError, match=error):
        hf_stages(CONFIGS["llama"](), zp.build("1f1b", ranks=4, microbatches=4), 0, **change)


class Pair(nn.Module):
    """Two inputs, two outputs, and a key of the microbatch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y, scale=1.0):
        return self.a(x + y).tanh() * scale, self.b(y)


def test_module_list_with_tuples_and_named_keys():
    torch.manual_seed(0)
    modules = nn.ModuleList([nn.Linear(6, 6), Fork(), Pair(), Pair(), Join()]).double()
    plain = copy.deepcopy(modules)
    schedule = zp.build("1f1b", ranks=3, microbatches=3)
    stages = [
        stage
        for rank in range(3)
        for stage in module_stages([lambda m=m: m for m in modules], schedule, rank, layers=[2, 1, 2]).values()
    ]
    for stage in stages:
        defer(stage)
    batches = [{"inputs": torch.randn(3, 6).double(), "scale": torch.tensor(s).double()} for s in (1.0, 0.5)]
    for batch in batches:
        x, y = plain[1](plain[0](batch["inputs"]))
        for pair in plain[2:4]:
            x, y = pair(x, y, batch["scale"])
        plain[4](x, y).sum().backward()
    staged_step(stages, batches, WeightStore(), loss_fn=lambda out, batch: out.sum())
    assert_same_gradients(stages, plain)


def _put_before(module):
    """Another forward on the object itself, as tools that watch or move modules put it there."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return module


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), checkpoint_wrapper, _put_before])
def test_modules_in_wrappers_get_the_keys_they_name(wrap):
    schedule = zp.build("1f1b", ranks=1, microbatches=1)
    (stage,) = module_stages([Fork(), wrap(Pair())], schedule, 0).values()
    assert "scale" in stage.pick({"inputs": torch.ones(2), "scale": 2.0, "labels": None})


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2))])
def test_modules_of_torchscript(make):
    schedule = zp.build("1f1b", ranks=1, microbatches=1)
    (stage,) = module_stages([nn.Tanh(), make(nn.Sequential(nn.Tanh(), nn.Tanh()))], schedule, 0).values()
    inputs = torch.randn(2)
    assert torch.equal(stage(**stage.pick({"inputs": inputs})), inputs.tanh().tanh().tanh())


@pytest.mark.parametrize(
    ("blocks", "found"),
    [(nn.ModuleDict({"0": nn.Tanh()}), 1), (nn.ModuleList([nn.Tanh()] * 2), 2), ([], 0), (3, None), ("abc", None)],
)
def test_a_module_may_have_blocks_and_layers_of_its_own(blocks, found):
    module = nn.Tanh()
    module.blocks, module.layers = blocks, nn.ModuleList([nn.Tanh()])
    info = describe_stage(0, module)
    assert (None if info.blocks is None else len(info.blocks), info.first_layer) == (found, 0)


class Fork(nn.Module):
    def forward(self, x):
        return x.sin(), x.cos()


class Join(nn.Module):
    def forward(self, x, y):
        return x * y


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        (
            torch.tanh,
            r"^modules\[1\]=<.*>: must be a module, or a function .*; it raised TypeError: tanh\(\) missing 1 ",
        ),
        (lambda: 3, r"^modules\[1\]=<.*>: must be a module, or a function without arguments .*; it returned 3$"),
    ],
)
def test_an_entry_that_is_no_module_is_named(entry, line):
    with pytest.raises(ConfigError, match=line):
        module_stages([nn.Tanh(), entry], zp.build("1f1b", ranks=2, microbatches=2), 1)


def test_only_this_ranks_modules_are_built():
    built = []
    makers = [lambda i=i: built.append(i) or nn.Linear(2, 2) for i in range(8)]
    module_stages(makers, zp.build("zbv", ranks=2, microbatches=4), rank=0)
    assert built == [0, 1, 6, 7]


def test_the_device_is_asked_for_packed_sequences_only_where_there_may_be_some(monkeypatch):
    """transformers' question waits for the device; without position ids the answer is known."""
    from transformers import masking_utils

    stage = all_stages(CONFIGS["llama"](), zp.build("1f1b", ranks=2, microbatches=2))[0]
    asked = []
    original = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda ids: asked.append(ids) or original(ids))
    tokens = torch.randint(61, (1, 8))
    stage(**stage.pick({"input_ids": tokens}))
    assert not asked
    stage(**stage.pick({"input_ids": tokens, "cu_seqlens": torch.tensor([0, 3, 8])}))
    assert len(asked) == 1
