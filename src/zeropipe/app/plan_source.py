"""The source of a plan: a known model, or the text of a config.json or of layer costs. No local file is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from zeropipe.app.errors import Refusal
from zeropipe.core.files import has_suffix
from zeropipe.core.formats.parse import parse_json
from zeropipe.core.limits import MAX_PLAN_DEPTH, MAX_PLAN_LAYERS, MAX_PLAN_SETTINGS
from zeropipe.core.model.configs import BUILT_IN, CONFIGS_BY_COUNT, COUNTED_PARAMETERS, find_similar
from zeropipe.core.model.layers import find_excess_layers
from zeropipe.errors import ConfigError, short
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import num_parameters
from zeropipe.estimating.model import ShapedModel, open_model
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.sim.layer_file import from_layer_data, is_layer_data

PlanSource = ShapedModel | CountedModel | LayerCosts
MAX_OPEN_MODELS = 2  # of a process
_TAKES_MORE = "the command line takes more"


@cache
def can_count() -> bool:
    """Whether layers can be counted here. The server does not import torch; a worker process that counts does."""
    return find_spec("torch") is not None and find_spec("transformers") is not None


def known_models() -> dict[str, int]:
    """Names of models that can be planned here, with their number of parameters."""
    counted = {name: COUNTED_PARAMETERS[name][0] for name in CONFIGS_BY_COUNT} if can_count() else {}
    shaped = (name for name in BUILT_IN if name not in CONFIGS_BY_COUNT)
    return {name: num_parameters(BUILT_IN[name])[0] for name in shaped} | counted


def require_known(model: str) -> None:
    """Raise Refusal for a name that cannot be planned here."""
    if model in CONFIGS_BY_COUNT and not can_count():
        raise Refusal((
            "model", f"model={short(model)}: to count its layers, install torch and transformers: "
            "pip install 'zeropipe[engine]'",
        ))  # fmt: skip
    if model not in BUILT_IN:
        similar = find_similar(model)
        way = f"did you mean {similar!r}? Else open" if similar else "open"
        raise Refusal(("model", f"model={short(model)}: unknown; {way} a config.json, or choose one of the list"))


@lru_cache(maxsize=MAX_OPEN_MODELS)
def open_source(model: str, text: str | None) -> PlanSource:
    """Open a known model, or the text of a file of that name. Counted layers are cached with it."""
    if text is None:
        return open_model(model)
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{model} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{model} is not a model's configuration: use a config.json, or a file of layer costs")
    _require_shallow(model, data)
    if is_layer_data(data):
        return _layer_costs(model, data)
    if above := find_excess_layers(data, MAX_PLAN_LAYERS):
        raise ConfigError(f"{model}: {above}: the page takes up to {MAX_PLAN_LAYERS} layers; {_TAKES_MORE}")
    return open_model({**data, "_name_or_path": model})


def _layer_costs(name: str, data: Mapping[str, Any]) -> LayerCosts:
    if not has_suffix(name, ".json"):
        raise ConfigError(f"{name} holds costs of layers: its name must end in .json, for the run.toml that names it")
    for field, limit in (("layers", MAX_PLAN_LAYERS), ("settings", MAX_PLAN_SETTINGS)):
        values = data.get(field)
        if isinstance(values, list) and len(values) > limit:
            raise ConfigError(f"{name} has {len(values):,} {field}: the page takes up to {limit}; {_TAKES_MORE}")
    return from_layer_data(data, name)


def _require_shallow(model: str, data: Mapping[str, Any]) -> None:
    level: list[Any] = [data]
    for _ in range(MAX_PLAN_DEPTH):
        inside = [value for table in level for value in (table.values() if isinstance(table, dict) else table)]
        level = [value for value in inside if isinstance(value, (dict, list))]
    if level:
        raise ConfigError(f"{model}: its tables are nested more than {MAX_PLAN_DEPTH} deep: use a model's config.json")
