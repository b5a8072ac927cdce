"""What a plan is of: a known name, or the text of a config.json or of layer costs. No file of this machine is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from zeropipe.app.errors import Refusal
from zeropipe.core.files import has_suffix
from zeropipe.core.formats.parse import parse_json
from zeropipe.core.limits import PLAN_DEPTH, PLAN_LAYERS, PLAN_SETTINGS
from zeropipe.core.model.configs import CONFIGS_BY_COUNT, CONFIGS_BY_SHAPE, COUNTED_PARAMETERS
from zeropipe.core.model.layers import above_layers
from zeropipe.errors import ConfigError, short
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import num_parameters
from zeropipe.estimating.model import ShapedModel, open_model
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.sim.layer_file import from_layer_data, is_layer_data

HELD = 2  # models that a process holds open
_MORE = "the command line takes more"


@cache
def can_count() -> bool:
    """Whether layers can be counted here. The server only looks; a worker process imports torch when it counts."""
    return find_spec("torch") is not None and find_spec("transformers") is not None


def known_models() -> dict[str, int]:
    """Names that can be planned here, with their parameters."""
    counted = {name: COUNTED_PARAMETERS[name][0] for name in CONFIGS_BY_COUNT} if can_count() else {}
    return {name: num_parameters(name)[0] for name in CONFIGS_BY_SHAPE} | counted


def require_known(model: str) -> None:
    """A Refusal for a name that cannot be planned here."""
    if model in CONFIGS_BY_COUNT and not can_count():
        need = "needs torch and transformers: pip install 'zeropipe[engine]'"
        raise Refusal(("model", f"model={short(model)}: its layers are counted, which {need}"))
    if model not in CONFIGS_BY_SHAPE | CONFIGS_BY_COUNT:
        names = ", ".join([*CONFIGS_BY_SHAPE, *(CONFIGS_BY_COUNT if can_count() else ())])
        raise Refusal(("model", f"model={short(model)}: give a config.json, or choose one of {names}"))


@lru_cache(maxsize=HELD)
def opened(model: str, text: str | None) -> ShapedModel | CountedModel | LayerCosts:
    """The model of that name, or what is in a file that is called so. What was counted of it is kept with it."""
    if text is None:
        return open_model(model)
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{model} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{model} is not a model's configuration: give a config.json, or costs of layers")
    _require_shallow(model, data)
    if is_layer_data(data):
        return _costs(model, data)
    if above := above_layers(data, PLAN_LAYERS):
        raise ConfigError(f"{model}: {above}: the page takes up to {PLAN_LAYERS} layers; {_MORE}")
    return open_model({**data, "_name_or_path": model})


def _costs(name: str, data: Mapping[str, Any]) -> LayerCosts:
    if not has_suffix(name, ".json"):
        raise ConfigError(f"{name} holds costs of layers: give it a name that ends in .json, as a run.toml needs it")
    for what, most in (("layers", PLAN_LAYERS), ("settings", PLAN_SETTINGS)):
        given = data.get(what)
        if isinstance(given, list) and len(given) > most:
            raise ConfigError(f"{name} has {len(given):,} {what}: the page takes up to {most}; {_MORE}")
    return from_layer_data(data, name)


def _require_shallow(model: str, data: Mapping[str, Any]) -> None:
    level: list[Any] = [data]
    for _ in range(PLAN_DEPTH):
        inside = [one for each in level for one in (each.values() if isinstance(each, dict) else each)]
        level = [one for one in inside if isinstance(one, (dict, list))]
    if level:
        raise ConfigError(f"{model}: its tables are nested more than {PLAN_DEPTH} deep: give a model's config.json")
