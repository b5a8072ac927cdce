"""Small models of every type that transformers has, made from its default configs."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from paths import DOCS
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from zeropipe.engine import hf_model
from zeropipe.engine.stages.families import find_layer_list
from zeropipe.engine.stages.skeleton import build_on_meta, find_decoder_config
from zeropipe.engine.stages.small_model import small_config

_spec = importlib.util.spec_from_file_location("models_table", DOCS / "models.py")
models_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models_table)

_text = models_table.FILE.read_text()
TABLE, VERSION = models_table.read(_text), models_table.version(_text)
IS_OF_TABLE = transformers.__version__ == VERSION  # another transformers may have, or refuse, what the table does not

# what the project promises by name
PROMISED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "gpt_neox", "phi", "gpt2",
    "falcon", "phi3", "mixtral", "qwen2_moe", "qwen3_next", "gpt_oss", "deepseek_v3", "llama4_text", "glm4",
    "glm4_moe", "granite", "granitemoe", "olmo2", "olmo3", "stablelm", "cohere", "cohere2", "ministral", "smollm3",
    "starcoder2", "ernie4_5", "exaone4", "nemotron", "minimax", "jamba",
)  # fmt: skip


@cache
def _default(model_type: str) -> tuple[Any, int]:
    """A type's own config, and how many layers that has."""
    config = find_decoder_config(AutoConfig.for_model(model_type, **models_table.EXAMPLES.get(model_type, {})))
    if model_type in PROMISED:
        return config, config.num_hidden_layers
    model = build_on_meta(config, torch.float32)  # some configs count in another way
    return config, len(model.get_submodule(find_layer_list(model)))


def tiny(model_type: str, num_layers: int = 4, **changes: Any) -> Any:
    """A config with small widths and the first layers of the type's own pattern."""
    config, total = _default(model_type)
    small = small_config(config, range(min(num_layers, total)), total, sizes=changes)
    small._experts_implementation = "eager"  # transformers' grouped product has no float64
    return small


class Float64(TorchFunctionMode):
    """Some types compute their rotation, their softmax or their routers in float32, whatever the weights are: not here.

    Packed sequences would have other rounding errors than the same ones apart.
    """

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


def whole_of(model_type, seed, dtype=None, **changes):
    """A small model, or a skipped test where it is refused: only by another transformers than the table's."""
    try:
        return hf_model(tiny(model_type, **changes), dtype=dtype, seed=seed)
    except Exception:
        row = models_table.row(model_type)
        if IS_OF_TABLE or row.cut == "exact":
            raise
        pytest.skip(f"transformers {transformers.__version__}: {row.cut}")


EXACT = [
    pytest.param(
        model_type,
        marks=pytest.mark.skipif(
            not IS_OF_TABLE and model_type not in models_table.CAUSAL_TYPES,
            reason=f"transformers {transformers.__version__} has no model_type={model_type!r}",
        ),
    )
    for model_type, row in TABLE.items()
    if row.cut == "exact"
]
