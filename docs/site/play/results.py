"""Results of the page that compares schedules: of a grid when the site is built, of any numbers in the browser.

It needs the standard library only, and so does what it imports.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import zeropipe as zp
from zeropipe.core.formats.parse import parse_value
from zeropipe.core.limits import Limits, num_actions, require_costs
from zeropipe.errors import short
from zeropipe.schedules.registry import find
from zeropipe.sim.compare import compare
from zeropipe.viz.payload import payload

COSTS = ("f", "i", "w", "p2p", "memory_limit")
BROWSER = Limits("this page", "use zeropipe compare", actions=200_000, ranks=1024, file_bytes=0)


def answer(request: str) -> str:
    """The results for the fields of the form, as JSON; an `error` if there are none."""
    fields: dict[str, Any] = json.loads(request)
    try:
        ranks, microbatches = (parse_value(fields[name].strip()) for name in ("ranks", "microbatches"))
        costs = _read_costs(fields)
        _require_small(fields["schedules"], ranks, microbatches)
        results = simulate_all(fields["schedules"], ranks, microbatches, costs)
    except zp.ZeropipeError as error:
        results = {"error": str(error)}
    return json.dumps(results, separators=(",", ":"))


def simulate_all(names: Iterable[str], ranks: Any, microbatches: Any, costs: zp.Costs) -> dict[str, Any]:
    """What the viewer shows of each schedule that has this size; errors of the others."""
    timelines, errors = {}, {}
    for name in names:
        try:
            schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
            timelines[name] = compare([schedule], costs)[0]
        except zp.ZeropipeError as error:
            errors[name] = str(error)
    shown = payload(list(timelines.values()))
    return {
        "common": {**shown, "timelines": []},
        "timelines": dict(zip(timelines, shown["timelines"])),
        "errors": errors,
    }


def _read_costs(fields: Mapping[str, str]) -> zp.Costs:
    """Costs per rank: a number, or several such as `1, 1, 2`."""
    given = {name: _read_numbers(name, fields[name]) for name in COSTS if fields[name].strip()}
    require_costs(given)
    return zp.Costs(**given)


def _read_numbers(name: str, text: str) -> float | list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise zp.ConfigError(f"{name}={short(text)}: must be a number, or one for each rank like 1, 1, 2") from None
    return values[0] if len(values) == 1 else values


def _require_small(names: Iterable[str], ranks: Any, microbatches: Any) -> None:
    if not (type(ranks) is type(microbatches) is int):
        return  # the registry refuses it
    BROWSER.require_ranks(ranks)
    entries = [find(name) for name in names]
    actions = [num_actions(one.splits_backward, ranks, microbatches, one.stages_per_rank[0]) for one in entries]
    BROWSER.require_actions(sum(actions), ", ".join(one.name for one in entries))
