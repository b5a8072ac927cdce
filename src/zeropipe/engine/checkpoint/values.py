"""Python values as JSON that comes back as it was: numbers, strings, lists, tuples, dicts with any such keys, tensors.

The state_dicts of learning-rate schedulers and data loaders are made of these. Tensors are kept beside the JSON.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zeropipe.errors import ConfigError, short

_TAG = "__is__"  # key of a dict that stands for something else


def encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for a value; tensors in it are added to `tensors`. ConfigError for what is of another kind."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
    if isinstance(value, Tensor) and not hasattr(value, "full_tensor"):
        name = str(len(tensors))
        tensors[name] = value.detach()
        return {_TAG: "tensor", "value": name}
    if type(value) in (list, tuple):
        inside = [encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
        return inside if type(value) is list else {_TAG: "tuple", "value": inside}
    if type(value) in (dict, Counter):
        pairs = [
            [encode(key, where, tensors), encode(item, f"{where}[{short(key)}]", tensors)]
            for key, item in value.items()
        ]
        if type(value) is dict and all(type(key) is str and key != _TAG for key in value):
            return dict(pairs)
        return {_TAG: type(value).__name__, "value": pairs}
    raise ConfigError(
        f"{where} is a {type(value).__name__}: a checkpoint keeps numbers, strings, lists, tuples, dicts and tensors"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value again."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    inside = value["value"]
    match value[_TAG]:
        case "float":
            return float(inside)
        case "tensor":
            return tensors[inside]
        case "tuple":
            return tuple(decode(item, tensors) for item in inside)
        case kind:
            made = {decode(key, tensors): decode(item, tensors) for key, item in inside}
            return Counter(made) if kind == "Counter" else made
