"""The model of a plan: a known name, or the text of a config.json. No file of this machine is read for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from zeropipe.app.errors import Refusal
from zeropipe.core.layers import NUM_LAYERS
from zeropipe.core.parse import parse_json
from zeropipe.errors import ConfigError, short
from zeropipe.search.estimate.counted import CountedModel
from zeropipe.search.estimate.estimate import num_parameters
from zeropipe.search.estimate.known import COUNTED, COUNTED_PARAMETERS, KNOWN
from zeropipe.search.estimate.model import ShapedModel, open_model

MOST_LAYERS = 512  # balancing them takes memory with the square of their number
DEEPEST = 16  # tables in tables of a config; transformers writes up to 5
HELD = 2  # models that a process holds open


@cache
def can_count() -> bool:
    """Whether layers can be counted here. The server only looks; a worker process imports torch when it counts."""
    return find_spec("torch") is not None and find_spec("transformers") is not None


def known_models() -> dict[str, int]:
    """Names that can be planned here, with their parameters."""
    counted = {name: COUNTED_PARAMETERS[name][0] for name in COUNTED} if can_count() else {}
    return {name: num_parameters(name)[0] for name in KNOWN} | counted


def require_known(model: str) -> None:
    """A Refusal for a name that cannot be planned here."""
    if model in COUNTED and not can_count():
        need = "needs torch and transformers: pip install 'zeropipe[engine]'"
        raise Refusal(("model", f"model={short(model)}: its layers are counted, which {need}"))
    if model not in KNOWN | COUNTED:
        names = ", ".join([*KNOWN, *(COUNTED if can_count() else ())])
        raise Refusal(("model", f"model={short(model)}: give a config.json, or choose one of {names}"))


@lru_cache(maxsize=HELD)
def opened(model: str, config: str | None) -> ShapedModel | CountedModel:
    """The model of that name, or of a config.json that is called so. What was counted of it is kept with it."""
    if config is None:
        return open_model(model)
    try:
        data = parse_json(config)
    except ValueError as error:
        raise ConfigError(f"{model} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{model} is not a model's configuration: give a config.json")
    _require_shallow(model, data)
    _require_few_layers(model, data)
    return open_model({**data, "_name_or_path": model})


def _require_shallow(model: str, data: Mapping[str, Any]) -> None:
    level: list[Any] = [data]
    for _ in range(DEEPEST):
        inside = [one for each in level for one in (each.values() if isinstance(each, dict) else each)]
        level = [one for one in inside if isinstance(one, (dict, list))]
    if level:
        raise ConfigError(f"{model}: its tables are nested more than {DEEPEST} deep: give a model's config.json")


def _require_few_layers(model: str, data: Mapping[str, Any]) -> None:
    for part in (data, data.get("text_config")):
        numbers = {name: part.get(name) for name in NUM_LAYERS} if isinstance(part, dict) else {}
        for name, number in numbers.items():
            if type(number) is int and number > MOST_LAYERS:
                most = f"the page takes up to {MOST_LAYERS} layers; the command line takes more"
                raise ConfigError(f"{model}: {name}={short(number)}: {most}")
