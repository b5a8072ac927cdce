"""Costs of layers as JSON: the format of `zeropipe estimate` and `zeropipe profile`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.model.cp_exchange import EXCHANGES
from zeropipe.core.phases import LayerPhases, PhaseTimes
from zeropipe.errors import ConfigError, short
from zeropipe.sim.costs import TIME_FIELDS, Link
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, ParameterBytes, Setting
from zeropipe.sim.phase_costs import layer_to_data, parse_phases

VERSION = 1
TYPE = "layer costs"
DISPATCHES = ("expert", "process")
MAX_NAME_CHARACTERS = 1000
_MIN_COUNTS = {
    "parameters": 0,
    "trained": 0,
    "microbatch_size": 1,
    "tp": 1,
    "sequence": 0,
    "lora_rank": 1,
    "sample": 1,
    "ep": 1,
    "cp": 1,
    "experts": 0,
}
_OPTIONAL = (  # fields of a layer that are written if they are not 0
    "experts", "f_exchange", "i_exchange", "f_hidden", "i_hidden", "f_workspace", "f_attention", "i_attention",
    "keys", "repeated_keys", "attention_workspace", "chunk_workspace", "chunks",
)  # fmt: skip
_MAX_COUNT = 10**18
_MIN_NUMBER, _MAX_NUMBER = 1e-30, 1e30  # of a number that is not 0
_REQUIRED: dict[Any, tuple[str, ...]] = {
    LayerCosts: ("model", "source", "layers", "settings"), Setting: ("kinds",), LayerCost: ("f", "i", "w"),
}  # fmt: skip


def to_layer_json(costs: LayerCosts) -> str:
    """The text of a costs file."""
    return json.dumps({"zeropipe": VERSION, "type": TYPE, **to_layer_data(costs)}, indent=1)


def to_layer_data(costs: LayerCosts) -> dict[str, Any]:
    """Costs of layers as plain data."""
    data = asdict(costs)
    data["link"], data["inter_node"] = costs.link._asdict(), costs.inter_node._asdict()
    for setting in data["settings"]:
        for kind in setting["kinds"].values():
            for name in ("b", "overlap", "trained", "spread"):
                if kind[name] is None or kind[name] == {}:
                    del kind[name]
            for name in _OPTIONAL:
                if not kind[name]:
                    del kind[name]
            if kind["phases"] is None:
                del kind["phases"]
            else:
                kind["phases"] = layer_to_data(LayerPhases(*map(PhaseTimes._make, kind["phases"])), 1)
        del setting["bandwidths"]
        for name in ("ep", "cp"):
            if setting[name] == 1:
                del setting[name]
        if not setting["exchange"]:
            del setting["exchange"]
    for name in ("lora_rank", "sample"):
        if data[name] is None:
            del data[name]
    if costs.dispatch == "expert":
        del data["dispatch"]
    if not costs.after_full:
        del data["after_full"]
    if not costs.fused_head:
        del data["fused_head"]
    return data


def is_layer_data(data: Any) -> bool:
    """Whether the data of a file are costs of layers."""
    return isinstance(data, Mapping) and data.get("type") == TYPE


def from_layer_data(data: Any, where: str = "costs") -> LayerCosts:
    """The costs of layers of parsed JSON; ConfigError with one line for any other data."""
    if not is_layer_data(data):
        raise ConfigError(
            f"{where} has no costs of layers; `zeropipe estimate` and `zeropipe profile` write such files"
        )
    if data.get("zeropipe") != VERSION:
        raise ConfigError(f"{where} has version {short(data.get('zeropipe'))}: this zeropipe reads version {VERSION}")
    values = {name: value for name, value in data.items() if name not in ("zeropipe", "type")}
    _require_fields(LayerCosts, values, where)
    if values["source"] not in ("estimate", "profile"):
        raise ConfigError(f'{where}: source={short(values["source"])}: must be "estimate" or "profile"')
    if values.get("dispatch", "expert") not in DISPATCHES:
        raise ConfigError(f'{where}: dispatch={short(values["dispatch"])}: must be "expert" or "process"')
    for name in ("layers", "before", "after", "after_full", "each"):
        if name in values:
            kinds = values[name]
            if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
                raise ConfigError(f"{where}: {name}={short(kinds)}: must be a list of layer kinds")
            values[name] = tuple(kinds)
    if not isinstance(values["settings"], list) or not values["settings"]:
        raise ConfigError(f"{where}: settings={short(values['settings'])}: must be a list of at least one setting")
    values["settings"] = tuple(
        _parse_setting(setting, f"{where}: settings[{n}]") for n, setting in enumerate(values["settings"])
    )
    for name in ("link", "inter_node"):
        if name in values:
            values[name] = Link(**_parse_numbers(values[name], Link._fields, f"{where}: {name}", optional=True))
    if "state" in values:
        names = tuple(one.name for one in fields(ParameterBytes))
        values["state"] = ParameterBytes(**_parse_numbers(values["state"], names, f"{where}: state"))
    _require_machine(values.get("machine", {}), f"{where}: machine")
    costs = LayerCosts(**values)
    for n, setting in enumerate(costs.settings):
        if not any(setting.kinds[kind].f for kind in costs.layers):
            raise ConfigError(f"{where}: settings[{n}]: its layers take no time: f must be positive")
    return costs


def _require_machine(data: Mapping[str, Any], where: str) -> None:
    """ConfigError for invalid fields of the machine that the planner uses."""
    if not _is_line(data.get("gpu", "")):
        raise ConfigError(f"{where}.gpu={short(data['gpu'])}: must be a string of one line")
    for name in ("memory", "peak_flops", "bandwidth"):
        _require_number(data.get(name), f"{where}.{name}", optional=True)
    efficiency = data.get("efficiency", {})
    if not isinstance(efficiency, Mapping):
        raise ConfigError(f"{where}.efficiency={short(efficiency)}: must be a table")
    for name, value in efficiency.items():
        _require_number(value, f"{where}.efficiency[{short(name)}]")


def _parse_setting(data: Any, where: str) -> Setting:
    _require_fields(Setting, data, where)
    if not isinstance(data["kinds"], Mapping):
        raise ConfigError(f"{where}: kinds={short(data['kinds'])}: must be a table of layer kinds")
    for name in data["kinds"]:
        if not _is_line(name):
            raise ConfigError(f"{where}: {short(name)}: the name of a layer kind must be one line")
    mode = data.get("ac", "none")
    if Checkpointing.parse(mode).every > 1:
        raise ConfigError(f"{where}: ac={short(mode)}: must be none and full in two settings, which are combined")
    if data.get("exchange", "") not in ("", *EXCHANGES):
        raise ConfigError(f"{where}: exchange={short(data['exchange'])}: must be one of {', '.join(EXCHANGES)}")
    kinds = {name: _parse_layer(kind, f"{where}.{name}") for name, kind in data["kinds"].items()}
    return Setting(**{**data, "kinds": kinds})


def _parse_layer(data: Any, where: str) -> LayerCost:
    _require_fields(LayerCost, data, where)
    values = dict(data)
    if "phases" in values:
        values["phases"] = parse_phases([values["phases"]])[0][0]
    if "spread" in values:
        values["spread"] = _parse_numbers(values["spread"], TIME_FIELDS, f"{where}: spread")
    return LayerCost(**values)


def _require_fields(kind: Any, data: Any, where: str) -> None:
    """ConfigError unless `data` has the fields of a dataclass, none missing or unknown, each of its simple type."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}={short(data)}: must be a table")
    known = {one.name: str(one.type) for one in fields(kind)}
    for name, value in data.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown field {short(name)}: must be one of {', '.join(known)}")
        expected, rule = known[name], ""
        if expected.startswith("float"):
            _require_number(value, f"{where}: {name}", optional="None" in expected)
        elif name in _MIN_COUNTS and (type(value) is not int or not _MIN_COUNTS[name] <= value <= _MAX_COUNT):
            rule = f"must be an integer from {_MIN_COUNTS[name]} to {_MAX_COUNT:.0e}"
        elif expected == "str" and not _is_line(value):
            rule = "must be a string of one line"
        elif expected == "bool" and not isinstance(value, bool):
            rule = "must be true or false"
        elif expected.startswith("Mapping") and not isinstance(value, Mapping):
            rule = "must be a table"
        if rule:
            raise ConfigError(f"{where}: {name}={short(value)}: {rule}")
    for name in _REQUIRED.get(kind, ()):
        if name not in data:
            raise ConfigError(f"{where}: {name} is missing")


def _parse_numbers(data: Any, names: tuple[str, ...], where: str, optional: bool = False) -> dict[str, Any]:
    if not isinstance(data, Mapping) or not set(data) <= set(names):
        raise ConfigError(f"{where}={short(data)}: must be a table with {', '.join(names)}")
    for name, value in data.items():
        _require_number(value, f"{where}.{name}", optional)
    return dict(data)


def _require_number(value: Any, where: str, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"{where}={short(value)}: must be a non-negative number")
    if value and not _MIN_NUMBER <= value <= _MAX_NUMBER:
        raise ConfigError(f"{where}={short(value)}: must be 0, or from {_MIN_NUMBER:g} to {_MAX_NUMBER:g}")


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME_CHARACTERS and len(value.splitlines()) <= 1
