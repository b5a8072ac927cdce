"""The field `phases` of Costs: the phases of the layers of each stage.

As data, a layer is a table like {attention = {f = 2, i = 2, w = 2}, dispatch = {f = 1, i = 1}, ...}; `layers = 4`
repeats it. A list of layers is for every stage, a list of such lists has one per stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from sys import float_info
from typing import Any

from zeropipe.core.phases import EXCHANGES, PHASES, LayerPhases, PhaseTimes, StagePhases
from zeropipe.core.placement import Problem
from zeropipe.core.units import count_text, to_python
from zeropipe.errors import ConfigError, short

RULE = "must be a list of layers, or one such list per stage"
MAX_LAYERS = 100_000  # of one table


def parse_phases(value: Any) -> tuple[StagePhases, ...]:
    """The layers of each stage, or of every stage if there is only one; ConfigError for any other value."""
    if not _is_list(value) or not value:
        raise ConfigError(f"phases={short(value)}: {RULE}")
    if all(_is_list(stage) and not isinstance(stage, LayerPhases) for stage in value):
        return tuple(_parse_stage(stage) for stage in value)
    return (_parse_stage(value),)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _parse_stage(layers: Sequence[Any]) -> StagePhases:
    return tuple(layer for table in layers for layer in _parse_layers(table))


def _parse_layers(table: Any) -> Iterator[LayerPhases]:
    """The layers of one table."""
    if isinstance(table, LayerPhases):
        table = table._asdict()
    if not isinstance(table, Mapping):
        raise ConfigError(f"phases has {short(table)}: must be a layer, a table with {', '.join(PHASES)}")
    number = table.get("layers", 1)
    if type(number) is not int or not 1 <= number <= MAX_LAYERS:
        raise ConfigError(f"phases: layers={short(number)}: must be an integer from 1 to {MAX_LAYERS}")
    unknown = [name for name in table if name not in (*PHASES, "layers")]
    if unknown:
        raise ConfigError(f"phases: unknown phase {short(unknown[0])}: must be one of {', '.join(PHASES)}")
    layer = LayerPhases(**{name: _parse_times(name, table[name]) for name in PHASES if name in table})
    yield from [layer] * number


def _parse_times(name: str, value: Any) -> PhaseTimes:
    if isinstance(value, PhaseTimes):
        value = value._asdict()
    if not isinstance(value, Mapping) or not set(value) <= set(PhaseTimes._fields):
        raise ConfigError(f"phases: {name}={short(value)}: must be a table with f, i and w")
    times = PhaseTimes(**{kind: _parse_number(f"{name}.{kind}", to_python(time)) for kind, time in value.items()})
    if name in EXCHANGES and times.w:
        raise ConfigError(f"phases: {name}.w={times.w:g}: must be 0: an exchange has no weights")
    return times


def _parse_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= float_info.max:
        raise ConfigError(f"phases: {name}={short(value)}: must be a non-negative number")
    return float(value)


def phases_to_data(phases: Sequence[StagePhases]) -> list[Any]:
    """Phases as plain data for `parse_phases`."""
    stages = [[layer_to_data(layer, len(list(same))) for layer, same in groupby(stage)] for stage in phases]
    return stages[0] if len(stages) == 1 else stages


def layer_to_data(layer: LayerPhases, number: int) -> dict[str, Any]:
    tables = {
        name: {kind: time for kind, time in times._asdict().items() if time}
        for name, times in layer._asdict().items()
        if any(times)
    }
    return {"layers": number, **tables} if number > 1 else tables


def stage_phases(phases: Sequence[StagePhases], num_stages: int, bandwidth: float | None) -> list[StagePhases]:
    """The phases of each stage as times."""
    if len(phases) not in (1, num_stages):
        raise ConfigError(
            f"phases has {count_text(len(phases), 'stage')}, the schedule has {count_text(num_stages, 'stage')}: must "
            "be one list of layers, or one per stage"
        )
    if bandwidth is not None:
        known = {layer: exchange_times(layer, bandwidth) for stage in phases for layer in stage}
        phases = [tuple(known[layer] for layer in stage) for stage in phases]
    return list(phases) * num_stages if len(phases) == 1 else list(phases)


def exchange_times(layer: LayerPhases, bandwidth: float) -> LayerPhases:
    """The layer with times of its exchanges, which are bytes."""
    times = {name: PhaseTimes(*(size / bandwidth for size in getattr(layer, name))) for name in EXCHANGES}
    return layer._replace(**times)


def divide_phases(phases: Sequence[StagePhases], problem: Problem) -> tuple[StagePhases, ...]:
    """The layers of each stage of a model whose parts, by default one per rank, have these layers."""
    parts = phases if len(phases) > 1 else list(phases) * problem.num_ranks
    layers = [layer for part in parts for layer in part]
    size, rest = divmod(len(layers), problem.num_stages)
    if rest:
        raise ConfigError(
            f"phases has {count_text(len(layers), 'layer')}, which {count_text(problem.num_stages, 'stage')} cannot "
            f"share: must be a multiple of {problem.num_stages}"
        )
    return tuple(tuple(layers[stage * size : (stage + 1) * size]) for stage in range(problem.num_stages))
