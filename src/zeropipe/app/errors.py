"""From what went wrong to the field that caused it, in the words of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import inf
from typing import Any

from zeropipe.app.models import MAX_CHOICES
from zeropipe.core.limits import LARGEST, PLAN_TEXT, SMALLEST
from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.errors import ZeropipeError, short
from zeropipe.sim.costs import MAX_UNITS, NO_BANDWIDTH, PER_STAGE, Costs

MOST_ERRORS = 20  # of one answer
COST_FIELDS = frozenset(field.name for field in fields(Costs))
_WHOLE = "a whole number from 1 on is needed"
_RULES = {
    "ranks": _WHOLE,
    "microbatches": _WHOLE,
    "stages_per_rank": _WHOLE,
    "weight_parts": f"a W is cut into 1 to {MAX_WEIGHT_PARTS} parts",
    "node_size": "a whole number of ranks from 1 on is needed",
    "file": f"the text of a config.json or of layer costs is needed, of at most {PLAN_TEXT // 1024} KiB",
    "gpus": _WHOLE,
    "gpus_per_node": _WHOLE,
    "memory": "a number of gigabytes is needed, like 80",
    "batch": _WHOLE,
    "sequence": _WHOLE,
    "per": "rank or stage is needed",
    "blocking": "true or false is needed",
    "blocking_ends": "true or false is needed",
    "serial_links": "true or false is needed",
    "shards": "keep or regather is needed",
    "units": f"a whole number from 1 to {MAX_UNITS} is needed",
    "options": "a number, a text, true or false is needed",
    "unit": "a text of at most 16 characters is needed",
    "memory_unit": "a text of at most 16 characters is needed",
}


class Refusal(ZeropipeError):
    """Fields of a request and what is wrong with each; becomes an answer with status 422."""

    def __init__(self, *errors: tuple[str, str]) -> None:
        super().__init__(*errors)
        self.errors = errors


def cost_field(message: str) -> str:
    """The field a message about costs begins with: `costs.f` for "f=-1: ..." and for "f has 3 entries, ..."."""
    first = message.split("=")[0].split(" ")[0].split(".")[0]
    return f"costs.{first}" if first in COST_FIELDS else "costs"


def broken_rules(details: Sequence[Any]) -> list[tuple[str, str]]:
    """What pydantic found, one line per field."""
    found: dict[str, str] = {}
    for detail in details:
        field, name, value = _place(detail)
        found.setdefault(field, _words(name, value, detail))
        if len(found) == MOST_ERRORS:
            break
    return list(found.items())


def _place(detail: Any) -> tuple[str, str, Any]:
    """The form's field of one finding, its name, and the value given there."""
    where = [str(part) for part in detail["loc"] if part not in ("body", "path", "query")]
    if where[:1] == ["costs"] and len(where) > 1:
        name = ".".join(where[1:]) if where[1] in ("edges", "inter_node") else where[1]
        return f"costs.{name}" if where[1] == "inter_node" else f"costs.{where[1]}", name, detail.get("input")
    if where[:1] == ["schedules"] and len(where) > 1:
        name = ".".join(where[2:4]) if where[2:3] == ["options"] else where[-1]
        return f"schedules.{where[1]}", name, detail.get("input")
    return ".".join(where), where[0] if where else "", detail.get("input")


def _words(name: str, value: Any, detail: Any) -> str:
    kind = detail["type"]
    if kind == "json_invalid":
        return f"not JSON: {detail.get('ctx', {}).get('error', 'cannot be read')}"
    if not name and kind == "model_attributes_type":
        return "the body is no JSON object: send one, with the header Content-Type: application/json"
    if kind == "extra_forbidden":
        return f"unknown field {name!r}"
    if kind == "missing":
        return f"{name or 'a JSON body'} is missing"
    if name == "schedules":
        return f"choose from 1 to {MAX_CHOICES} schedules"
    if name.endswith("bandwidth") and value == 0:
        return f"{name}=0: {NO_BANDWIDTH}"
    if kind == "less_than_equal" and _RULES.get(name) == _WHOLE:
        return f"{name}={short(value)}: the page takes up to {detail['ctx']['le']:,}; the command line takes more"
    if isinstance(value, str) and name in PER_STAGE:
        return f"{name}={short(value)}: write a number, several like 1,1,2, or some like 0=0.8"
    table = name.split(".")[0]
    is_cost = table in COST_FIELDS
    if is_cost and isinstance(value, int | float) and LARGEST < value < inf:
        return f"{name}={short(value)}: give 0, or a number from {SMALLEST} to {LARGEST}"
    rule = (
        _RULES.get(name) or _RULES.get(table) or ("a number from 0 on is needed" if is_cost else detail["msg"].lower())
    )
    return f"{name}={short(value)}: {rule}"
