"""Writes the table in docs/models.md: `python docs/models.py [file]`."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_TYPES

from zeropipe.engine.backward.linear import defer
from zeropipe.engine.mesh.ep_check import explain_undivided
from zeropipe.engine.stages.families import Family
from zeropipe.engine.stages.skeleton import build_on_meta, find_decoder_config
from zeropipe.engine.stages.verify import find_family
from zeropipe.engine.transformers_private import tied_names
from zeropipe.errors import ConfigError

FILE = Path(__file__).parent / "models.md"
# where a config without arguments makes no model
EXAMPLES: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0}, "ffn_config": {"hidden_size": 2048}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 64},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
_REASON = "cannot be cut into stages: "


class Row(NamedTuple):
    """What the table says about a model type."""

    model_type: str
    cut: str
    tied: str = ""
    packed: str = ""
    routers: str = ""
    experts: str = ""
    divided: str = ""


def row(model_type: str, *, divides: bool = True) -> Row:
    """A model type with as much at once as it can have: a tied head, and the loss of its routers.

    `divides`: also try to divide its experts over processes, which takes seconds.
    """
    try:
        config = transformers.AutoConfig.for_model(model_type, **EXAMPLES.get(model_type, {}))
    except Exception as error:  # transformers' own default does not hold
        return Row(model_type, f"refused: transformers makes no config of it without arguments ({_short(error)})")
    try:
        part = find_decoder_config(config)
        if part.model_type != model_type and part.model_type in CAUSAL_TYPES:
            alias = type(part) is type(config)
            return Row(model_type, f"as {part.model_type}" if alias else f"its text part, as {part.model_type}")
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = True
        part = _tied(part)
        model = build_on_meta(part, torch.float32)
        family = find_family(model)
    except ConfigError as error:
        text = str(error)
        assert "\n" not in text
        return Row(model_type, f"refused: {text.partition(_REASON)[2].rpartition('; pass the model')[0] or text}")
    return Row(model_type, "exact", *_facts(model, family), _divided(part, family, model) if divides else "")


def _tied(config: Any) -> Any:
    """With a tied head, unless the type does not allow it."""
    try:
        return type(config).from_dict(config.to_dict() | {"tie_word_embeddings": True})
    except Exception:
        return config


def _facts(model: Any, family: Family) -> tuple[str, ...]:
    has_experts = any("experts" in name for name, _ in model.named_modules())
    if has_experts:
        defer(model)
    deferred = any(getattr(module, "defers_experts", False) for module in model.modules())
    return (
        "yes" if tied_names(model) else "never",
        _packed(family),
        "yes" if family.has_router_loss else "",
        ("in W" if deferred else "in I") if has_experts else "",
    )


def _divided(config: Any, family: Family, model: Any) -> str:
    """Whether experts may be divided over processes."""
    if not any("experts" in name for name, _ in model.named_modules()):
        return ""
    return "exact" if explain_undivided(config, family) is None else "refused"


def _packed(family: Family) -> str:
    """Whether packed sequences are kept apart, and in which rows."""
    if family.max_packed_row is not None:
        return f"rows up to {family.max_packed_row:,}"
    return "yes" if family.can_pack else "no"


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip().rstrip(".")


def table(rows: list[Row]) -> str:
    head = "| model type | cut into stages | tied head | packed | routers' loss | experts' weight gradients | ep |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def read(text: str) -> dict[str, Row]:
    """The rows of a table that was written."""
    cells = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in text.splitlines() if line.startswith("| ")]
    return {found[0]: Row(*found) for found in cells[1:]}


def version(text: str) -> str:
    """The version of transformers that a written table is about."""
    return re.search(r"of transformers (\S+) are exact", text)[1]


def write(file: Path) -> None:
    """Put the table into the file, below what is written by hand."""
    rows = [row(model_type) for model_type in sorted(CAUSAL_TYPES)]
    exact = sum(r.cut == "exact" for r in rows)
    text = FILE.read_text().partition("\n## The table\n")[0]
    experts = [r for r in rows if r.divided]
    divided = sum(r.divided == "exact" for r in experts)
    count = (
        f"{exact} of the {len(rows)} decoder types of transformers {transformers.__version__} are exact. "
        f"{len(experts)} of these have experts: {divided} are exact with experts divided over processes (`ep`), the "
        "others are refused in one line."
    )
    file.write_text(f"{text}\n## The table\n\n{count}\n\n{table(rows)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
