"""F of a stage under autocast: adapters in float32 on a model in bfloat16."""

from __future__ import annotations

from itertools import product

import peft
import pytest
import torch
from full_marker import mark_rest_full
from peft import LoraConfig
from stage_models import CONFIGS
from transformers import set_seed

import zeropipe as zp
from zeropipe.engine import defer, hf_model, hf_stages
from zeropipe.engine.blocks.compiling import prepare_blocks
from zeropipe.engine.stages.adapters import compute_adapters_in

CUT = zp.build("1f1b", ranks=1, microbatches=2)
LORA = LoraConfig(r=3, lora_alpha=7, target_modules="all-linear")
TOKENS = torch.arange(5, 17)[None]


def stage_and_plain(attention="auto"):
    """A stage with deferred layers, and peft's own model, with the same weights; no adapter is zero."""
    base = hf_model(CONFIGS["qwen3"](), dtype=torch.bfloat16)
    stage = hf_stages(base, CUT, 0, adapter=LORA, attention=attention)[0]
    plain = peft.get_peft_model(base, LORA)
    set_seed(0)
    weights = {name: torch.randn_like(p) / 4 for name, p in plain.named_parameters() if "lora_" in name}
    plain.load_state_dict(weights, strict=False)
    own = {
        name: weights[f"base_model.model.{stage.full_name(name)}"]
        for name in dict(stage.named_parameters())
        if "lora_" in name
    }
    stage.load_state_dict(own, strict=False)
    defer(stage)
    compute_adapters_in(stage, torch.bfloat16)
    return stage, plain


@pytest.mark.parametrize(
    "compiled, ac", mark_rest_full(product((False, True), ("none", "full")), [(False, "none"), (True, "full")])
)
def test_logits_and_gradients_are_those_of_peft_under_autocast(compiled, ac):
    stage, plain = stage_and_plain()
    prepare_blocks(stage, compile=compiled, ac=ac, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = plain(input_ids=TOKENS, use_cache=False).logits
    found = stage(**stage.pick({"input_ids": TOKENS}))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * float(wanted.detach().abs().max()))
    assert not torch.is_autocast_enabled("cpu")
    for logits in (found, wanted):
        logits.float().square().sum().backward()
    theirs = {name.removeprefix("base_model.model."): p.grad for name, p in plain.named_parameters() if p.requires_grad}
    ours = {stage.full_name(name): p.grad for name, p in stage.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():  # peft's are rounded to bfloat16
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, theirs[name], rtol=0.02, atol=0.02 * float(theirs[name].abs().max()))


def test_products_of_adapters_run_in_16_bits():
    stage, _ = stage_and_plain()
    seen = set()
    for name, module in stage.named_modules():
        if name.endswith(("lora_A.default", "lora_B.default")):
            module.register_forward_hook(lambda module, args, output: seen.add(
                (module.weight.dtype, args[0].dtype, output.dtype)
            ))  # fmt: skip
    stage(**stage.pick({"input_ids": TOKENS}))
    assert seen == {(torch.float32, torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("attention", ["varlen", "flex"])
def test_packed_rows_are_as_exact_as_samples_alone(attention):
    stage, plain = stage_and_plain(attention)
    parts = TOKENS.split([5, 7], dim=1)
    found = stage(**stage.pick({"input_ids": TOKENS, "cu_seqlens": torch.tensor([0, 5, 12])}))
    with torch.autocast("cpu", torch.bfloat16):
        alone = torch.cat([plain(input_ids=part, use_cache=False).logits for part in parts], 1)
    plain.float()
    exact = torch.cat([plain(input_ids=part, use_cache=False).logits for part in parts], 1)
    assert (found - exact).abs().max() <= 1.5 * (alone - exact).abs().max()
    found.float().square().sum().backward()
