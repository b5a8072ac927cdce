"""Errors of a request by field, with the messages of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from zeropipe.app.models import MAX_CHOICES, MAX_UNIT_CHARACTERS
from zeropipe.core.limits import MAX_COST, MAX_PLAN_CHARACTERS, MIN_COST
from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.errors import ZeropipeError, short
from zeropipe.sim.costs import COST_FIELDS, PER_STAGE

MAX_ERRORS = 20  # in one answer

_POSITIVE = "must be a positive integer"
_RULES = {
    "ranks": _POSITIVE,
    "microbatches": _POSITIVE,
    "stages_per_rank": _POSITIVE,
    "weight_parts": f"must be an integer from 1 to {MAX_WEIGHT_PARTS}",
    "file": f"must be the text of a config.json or of layer costs, of at most {MAX_PLAN_CHARACTERS // 1024} KiB",
    "gpus": _POSITIVE,
    "gpus_per_node": _POSITIVE,
    "memory": "must be a number of gigabytes, like 80",
    "reserve": "must be a number of gigabytes, like 4",
    "lora": _POSITIVE,
    "pp": _POSITIVE,
    "tp": _POSITIVE,
    "batch": _POSITIVE,
    "sequence": _POSITIVE,
    "per": "must be rank or stage",
    "options": "must be a number, a string, true or false",
}


class Refusal(ZeropipeError):
    """Fields of a request and what is wrong with each; becomes an answer with status 422."""

    def __init__(self, *errors: tuple[str, str]) -> None:
        super().__init__(*errors)
        self.errors = errors


def cost_field(message: str) -> str:
    """The field that a message about costs begins with: `costs.f` for "f=-1: ..." and for "f has 3 entries, ..."."""
    first = message.split("=")[0].split(" ")[0].split(".")[0]
    return f"costs.{first}" if first in COST_FIELDS else "costs"


def describe_errors(details: Sequence[Any]) -> list[tuple[str, str]]:
    """Field and message of pydantic's errors, one per field."""
    messages: dict[str, str] = {}
    for detail in details:
        field, name, value = _locate(detail)
        messages.setdefault(field, _message(name, value, detail))
        if len(messages) == MAX_ERRORS:
            break
    return list(messages.items())


def _locate(detail: Any) -> tuple[str, str, Any]:
    """The form's field of one error, its name in the message, and its value."""
    where = [str(part) for part in detail["loc"] if part not in ("body", "path", "query")]
    if where[:1] == ["costs"] and len(where) > 1:
        name = ".".join(where[1:]) if where[1] in ("edges", "inter_node") else where[1]
        return f"costs.{name}" if where[1] == "inter_node" else f"costs.{where[1]}", name, detail.get("input")
    if where[:1] == ["schedules"] and len(where) > 1:
        name = ".".join(where[2:4]) if where[2:3] == ["options"] else where[-1]
        return f"schedules.{where[1]}", name, detail.get("input")
    return ".".join(where), where[0] if where else "", detail.get("input")


def _message(name: str, value: Any, detail: Any) -> str:
    kind = detail["type"]
    if kind == "json_invalid":
        return f"not JSON: {detail.get('ctx', {}).get('error', 'cannot be read')}"
    if not name and kind == "model_attributes_type":
        return "the body is not a JSON object: send one, with the header Content-Type: application/json"
    if kind == "extra_forbidden":
        return f"unknown field {name!r}"
    if kind == "missing":
        return f"{name or 'a JSON body'} is missing"
    if name == "schedules":
        return f"choose from 1 to {MAX_CHOICES} schedules"

    if kind == "less_than_equal" and _RULES.get(name) == _POSITIVE:
        return f"{name}={short(value)}: the page takes up to {detail['ctx']['le']:,}; the command line takes more"
    if isinstance(value, str) and name in PER_STAGE:
        return f"{name}={short(value)}: write a number, several like 1,1,2, or some like 0=0.8"
    table, _, part = name.partition(".")
    cost = COST_FIELDS.get(table)
    if cost and isinstance(value, int | float) and MAX_COST < value < inf:
        return f"{name}={short(value)}: must be 0, or from {MIN_COST} to {MAX_COST}"
    if cost and cost.type == "text":
        rule = f"must be a string of at most {MAX_UNIT_CHARACTERS} characters"
    elif cost:
        rule = COST_FIELDS.get(part.rpartition(".")[2], cost).rule  # inter_node.p2p, edges.0-1.p2p
    else:
        rule = _RULES.get(name) or _RULES.get(table) or detail["msg"].lower()
    return f"{name}={short(value)}: {rule}"
