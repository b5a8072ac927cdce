"""Costs files: .toml or .json with the fields of Costs, costs of layers, or a recorded timeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeropipe.core.complete import check_complete
from zeropipe.core.files import has_suffix, read_text
from zeropipe.core.formats.json import from_data
from zeropipe.core.formats.parse import parse_json, parse_toml
from zeropipe.core.limits import COMMAND_LINE, require_costs, require_times
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, ScheduleError, short, suggest
from zeropipe.sim.costs import COST_FIELDS, DEFAULT, OLD_NAMES, Costs, Link, StageTable
from zeropipe.sim.fit import fit
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.sim.layer_file import from_layer_data, is_layer_data
from zeropipe.sim.phase_costs import phases_to_data


def load_costs(path: str) -> Costs | LayerCosts:
    """The costs of a file: of stages, of layers, or fitted to a recorded timeline."""
    data = read_costs_file(path)
    if is_layer_data(data):
        return from_layer_data(data, path)
    if "zeropipe" not in data and "traceEvents" not in data:
        require_costs(data, f"{path}: ")
        return costs_from_data(data, path)
    try:
        recorded = from_data(data)
        if isinstance(recorded, Timeline):
            require_times(recorded)
            check_complete(recorded.schedule)
            return fit(recorded)
    except ScheduleError as error:
        raise ConfigError(f"{path}: {error}") from None
    raise ConfigError(f"{path} is a schedule without times: must be a costs file, or a recorded timeline")


def read_costs_file(path: str) -> dict[str, Any]:
    """The table of a .toml or .json file."""
    text, is_json = read_text(path, COMMAND_LINE, "the costs file"), has_suffix(path, ".json")
    try:
        data = parse_json(text) if is_json else parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not {'JSON' if is_json else 'TOML'}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} has no table of costs; write fields like f = 1.0")
    return data


def costs_from_data(data: Mapping[str, Any], where: str = "costs") -> Costs:
    """Costs from plain data, as in a costs file; former names of fields are accepted.

    `edges` is a table like {"0-1" = {p2p = 1e-5, bandwidth = 5e10}}.
    """
    values = {OLD_NAMES.get(name, name): value for name, value in data.items()}
    for name in values:
        if name not in COST_FIELDS:
            raise ConfigError(f"{where}: unknown field {short(name)}: {suggest(name, sorted(COST_FIELDS))}")
    return Costs(**values)


def costs_to_data(costs: Costs) -> dict[str, Any]:
    """Costs as plain data for `costs_from_data`: the fields that differ from the defaults."""
    data: dict[str, Any] = {}
    for name, field in COST_FIELDS.items():
        value = getattr(costs, name)
        if value is None or value == field.default:
            continue
        if isinstance(value, StageTable):
            default = {} if value.default is None else {DEFAULT: value.default}
            value = {**{str(stage): number for stage, number in value.entries}, **default}
        elif name == "edges":
            value = {f"{a}-{b}": _link_to_data(link) for (a, b), link in value.items()}
        elif name == "phases":
            value = phases_to_data(value)
        elif isinstance(value, Link):
            value = _link_to_data(value)
        elif isinstance(value, tuple):
            value = list(value)
        data[name] = value
    return data


def _link_to_data(link: Link) -> dict[str, float]:
    return {name: value for name, value in link._asdict().items() if value is not None}
