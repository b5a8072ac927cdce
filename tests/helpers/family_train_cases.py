"""Random configs of model types, and random runs of them: what test_train_families.py trains."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from family_models import TABLE, tiny
from train_runs import VOCABULARY, run_config
from transformers import AutoConfig

from zeropipe.engine import hf_model
from zeropipe.engine.run.job import DTYPES
from zeropipe.engine.stages.skeleton import build_on_meta, find_decoder_config
from zeropipe.engine.stages.verify import find_family
from zeropipe.engine.transformers_private import causal_class
from zeropipe.train.config.tables import RunConfig

SWITCHES = ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "bias", "norm_topk_prob", "use_qk_norm", "qk_norm")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
LAYOUTS = (
    ({"pp": 2}, "zbv"), ({"pp": 2}, "zb-h1"), ({"pp": 2}, "interleaved"), ({"pp": 2}, "dualpipev"), ({"pp": 2}, "1f1b"),
    ({"dp_shard": 2}, "1f1b"), ({"pp": 2, "dp_shard": 2}, "1f1b"), ({"pp": 2, "dp_shard": 2}, "zbv"),
    ({"pp": 2, "dp_replicate": 2}, "zb-h1"), ({"pp": 4}, "1f1b"),
)  # fmt: skip
SEQUENCE = 16
# Plain transformers cannot run these in float64.
FLOAT32 = {
    "prophetnet",  # 0 * the smallest float64 in a float32 mask of padding: all losses are NaN
    "xglm",  # puts the smallest float64 into a float32 scalar: RuntimeError
    "xlnet",  # the weights of its attention are float32, whatever dtype it is loaded with: RuntimeError
}


def load_plain(config: RunConfig, *, noise: bool = False) -> Any:
    """The model of a run as transformers loads it; its grouped product of experts has no float64.

    With `noise` its weights are changed by a billionth (in float32 a millionth), so that float32 is rounded otherwise.
    """
    kind, dtype = causal_class(AutoConfig.from_pretrained(config.model.path)), DTYPES[config.model.dtype]
    model = kind.from_pretrained(config.model.path, dtype=dtype, experts_implementation="eager").train()
    if noise:
        generator, size = torch.Generator().manual_seed(1), 1e-9 if dtype == torch.float64 else 1e-6
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def find_refusal(config: RunConfig) -> str | None:
    """The line that a run is refused with, as a pattern; None for a run that is not."""
    try:
        found = AutoConfig.from_pretrained(config.model.path)
    except Exception:  # of any type: some versions of transformers cannot read what they have saved
        return r"cannot read .*config\.json: "
    if not config.data.packing:
        return None
    family = find_family(build_on_meta(find_decoder_config(found), torch.float32))
    if not family.can_pack:
        return rf"data\.packing=true: model_type='{found.model_type}' does not separate packed samples"
    if family.max_packed_row is not None and family.max_packed_row < SEQUENCE:
        return rf"data\.sequence={SEQUENCE}: .* packed samples in rows of at most {family.max_packed_row} tokens"
    return None


def draw(model_type: str, seed: int, folder: Path) -> RunConfig:
    """A random run of a random model of this type, whose directory is written."""
    chance, row = random.Random(f"{model_type} {seed}"), TABLE[model_type]
    changes: dict[str, Any] = {}
    if row.tied == "yes":
        changes["tie_word_embeddings"] = chance.random() < 0.5
    if row.routers == "yes":
        changes["output_router_logits"] = chance.random() < 0.5
    number = chance.choice((4, 5, 6))
    usual = tiny(model_type, number)
    for name in SWITCHES:
        if isinstance(getattr(usual, name, None), bool) and chance.random() < 0.5:
            changes[name] = not getattr(usual, name)
    for name in ACTIVATIONS:
        if isinstance(getattr(usual, name, None), str) and chance.random() < 0.5:
            changes[name] = chance.choice(("silu", "gelu_pytorch_tanh", "relu"))
    for name in EPSILONS:
        if isinstance(getattr(usual, name, None), float):
            changes[name] = chance.choice((1e-6, 1e-3))
    dtype = "float32" if model_type in FLOAT32 else "float64"
    _save_model(model_type, number, changes, DTYPES[dtype], folder / "model")
    _save_documents(chance, folder / "documents.npy")
    mesh, schedule = chance.choice(LAYOUTS)
    is_packed = not changes.get("output_router_logits") and chance.random() < 0.5
    return run_config(
        folder / "out", folder / "model", model={"dtype": dtype}, mesh=mesh, schedule={"name": schedule},
        engine={
            "ac": chance.choice(("none", "none", "full", "selective:2")),
            "shards": chance.choice(("keep", "regather")) if "dp_shard" in mesh else "keep",
            "dynamic_weights": chance.random() < 0.3,
        },
        data={
            "kind": "tokens", "path": [str(folder / "documents.npy")], "sequence": SEQUENCE, "batch": 8,
            "microbatch": chance.choice((1, 2)), "packing": is_packed,
        },
        optimizer={"weight_decay": 0.0}, train={"steps": 4}, checkpoint={"export": False},
    )  # fmt: skip


def _save_model(model_type: str, number: int, changes: dict[str, Any], dtype: torch.dtype, path: Path) -> None:
    """With as many of the changes as transformers builds a model with."""
    while True:
        try:
            model = hf_model(tiny(model_type, number, **changes), dtype=dtype)
            with torch.no_grad():
                model(input_ids=torch.arange(5, 12)[None], use_cache=False)
            break
        except Exception:  # of any type: the type has no such combination
            if not changes:
                raise
            changes.popitem()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype), alpha=0.03)
    model.save_pretrained(path)


def _save_documents(chance: random.Random, path: Path) -> None:
    """Documents of 3 to 14 tokens, and where they begin."""
    lengths = [chance.randrange(3, SEQUENCE - 1) for _ in range(40)]
    ids = [chance.randrange(5, VOCABULARY) for _ in range(sum(lengths))]
    np.save(path, np.array(ids, dtype=np.int32))
    np.save(path.with_name("starts.npy"), np.cumsum([0, *lengths[:-1]]))
    path.with_name(f"{path.name}.json").write_text('{"offsets": "starts.npy"}')
