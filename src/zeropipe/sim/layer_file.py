"""Layer costs as JSON: the one format of `zeropipe estimate` and `zeropipe profile`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from zeropipe.core.formats.parse import parse_json
from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.errors import ConfigError, short
from zeropipe.sim.costs import Link
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting, State

VERSION = 1
TYPE = "layer costs"
LONGEST = 1000  # characters of a name
_COUNTS = {"parameters": 0, "microbatch_size": 1, "tp": 1, "sequence": 0}  # and the least that each can be
_SMALLEST, _LARGEST, _MOST = 1e-30, 1e30, 10**18  # what is not 0: a number, and a count


def to_layer_json(costs: LayerCosts) -> str:
    """The text of a costs file; `from_layer_json` gives back an equal value."""
    return json.dumps({"zeropipe": VERSION, "type": TYPE, **layer_data(costs)}, indent=1)


def layer_data(costs: LayerCosts) -> dict[str, Any]:
    """As plain data."""
    data = asdict(costs)
    data["link"], data["inter_node"] = costs.link._asdict(), costs.inter_node._asdict()
    for setting in data["settings"]:
        for kind in setting["kinds"].values():
            for name in ("b", "overlap", "spread"):
                if kind[name] is None or kind[name] == {}:
                    del kind[name]
    return data


def is_layer_data(data: Any) -> bool:
    """Whether the data of a file are layer costs."""
    return isinstance(data, Mapping) and data.get("type") == TYPE


def from_layer_json(text: str, where: str = "costs") -> LayerCosts:
    """The LayerCosts that `to_layer_json` wrote; ConfigError in one line for anything else."""
    try:
        return from_layer_data(parse_json(text), where)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None


def from_layer_data(data: Any, where: str = "costs") -> LayerCosts:
    """From plain data."""
    if not is_layer_data(data):
        raise ConfigError(f"{where} holds no layer costs: `zeropipe estimate` and `zeropipe profile` write such files")
    if data.get("zeropipe") != VERSION:
        raise ConfigError(f"{where} has version {short(data.get('zeropipe'))}: this zeropipe reads version {VERSION}")
    given = {name: value for name, value in data.items() if name not in ("zeropipe", "type")}
    found = _fields(LayerCosts, given, where)
    if found["source"] not in ("estimate", "profile"):
        raise ConfigError(f'{where}: source={short(found["source"])}: it is "estimate" or "profile"')
    for name in ("layers", "before", "after", "each"):
        if name in found:
            found[name] = tuple(_texts(found[name], f"{where}: {name}"))
    if not isinstance(found["settings"], list) or not found["settings"]:
        raise ConfigError(f"{where}: settings={short(found['settings'])}: a list of at least one is needed")
    found["settings"] = tuple(_setting(one, f"{where}: settings[{at}]") for at, one in enumerate(found["settings"]))
    for name in ("link", "inter_node"):
        if name in found:
            found[name] = Link(**_numbers(found[name], Link._fields, f"{where}: {name}", optional=True))
    if "state" in found:
        names = tuple(one.name for one in fields(State))
        found["state"] = State(**_numbers(found["state"], names, f"{where}: state"))
    _require_machine(found.get("machine", {}), f"{where}: machine")
    costs = LayerCosts(**found)
    for at, setting in enumerate(costs.settings):
        if not any(setting.kinds[kind].f for kind in costs.layers):
            raise ConfigError(f"{where}: settings[{at}]: its layers take no time: give an f above 0")
    return costs


def _require_machine(data: Mapping[str, Any], where: str) -> None:
    """Of what a file says about its machine, that which plans count with."""
    if not _is_line(data.get("gpu", "")):
        raise ConfigError(f"{where}.gpu={short(data['gpu'])}: a text of one line is needed")
    for name in ("memory", "peak_flops", "bandwidth"):
        _number(data.get(name), f"{where}.{name}", optional=True)
    shares = data.get("efficiency", {})
    if not isinstance(shares, Mapping):
        raise ConfigError(f"{where}.efficiency={short(shares)}: a table is needed")
    for name, value in shares.items():
        _number(value, f"{where}.efficiency[{short(name)}]")


def _setting(data: Any, where: str) -> Setting:
    found = _fields(Setting, data, where)
    if not isinstance(found["kinds"], Mapping):
        raise ConfigError(f"{where}: kinds={short(found['kinds'])}: a table of layer kinds is needed")
    for name in found["kinds"]:
        if not _is_line(name):
            raise ConfigError(f"{where}: {short(name)}: a layer kind's name is one line")
    found["kinds"] = {name: _layer(kind, f"{where}.{name}") for name, kind in found["kinds"].items()}
    mode = found.get("ac", "none")
    if Checkpointing.parse(mode).every > 1:
        raise ConfigError(f"{where}: ac={short(mode)} is put together from none and full: give the costs of these")
    return Setting(**found)


def _layer(data: Any, where: str) -> LayerCost:
    found = _fields(LayerCost, data, where)
    if "spread" in found:
        found["spread"] = _numbers(found["spread"], ("f", "i", "w", "b", "overlap"), f"{where}: spread")
    return LayerCost(**found)


def _fields(kind: Any, data: Any, where: str) -> dict[str, Any]:
    """The fields of a dataclass, none missing or unknown, each of its simple type."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}={short(data)}: a table is needed")
    known = {one.name: one for one in fields(kind)}
    for name, value in data.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown field {short(name)}: known are {', '.join(known)}")
        wanted = str(known[name].type)
        if wanted.startswith("float"):
            _number(value, f"{where}: {name}", optional="None" in wanted)
        elif name in _COUNTS and (type(value) is not int or not _COUNTS[name] <= value <= _MOST):
            least = _COUNTS[name]
            raise ConfigError(f"{where}: {name}={short(value)}: a whole number from {least} to {_MOST:.0e} is needed")
        elif wanted == "str" and not _is_line(value):
            raise ConfigError(f"{where}: {name}={short(value)}: a text of one line is needed")
        elif wanted == "bool" and not isinstance(value, bool):
            raise ConfigError(f"{where}: {name}={short(value)}: true or false is needed")
        elif wanted.startswith("Mapping") and not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {name}={short(value)}: a table is needed")
    for name in _REQUIRED.get(kind, ()):
        if name not in data:
            raise ConfigError(f"{where}: {name} is missing")
    return dict(data)


_REQUIRED: dict[Any, tuple[str, ...]] = {
    LayerCosts: ("model", "source", "layers", "settings"), Setting: ("kinds",), LayerCost: ("f", "i", "w"),
}  # fmt: skip


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{where}={short(value)}: a list of layer kinds is needed")
    return value


def _numbers(data: Any, names: tuple[str, ...], where: str, optional: bool = False) -> dict[str, Any]:
    if not isinstance(data, Mapping) or not set(data) <= set(names):
        raise ConfigError(f"{where}={short(data)}: a table with {', '.join(names)} is needed")
    return {name: _number(value, f"{where}.{name}", optional) for name, value in data.items()}


def _number(value: Any, where: str, optional: bool = False) -> float | None:
    if optional and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"{where}={short(value)}: a number from 0 on is needed")
    if value and not _SMALLEST <= value <= _LARGEST:
        raise ConfigError(f"{where}={short(value)}: give 0, or a number from {_SMALLEST:g} to {_LARGEST:g}")
    return value


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST and len(value.splitlines()) <= 1
