"""Types of option values."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

import click

from zeropipe.errors import ConfigError, short

DTYPES = ("float32", "bfloat16", "float64")
_OLD_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "float16": "float16", "fp32": "float32"}


class Integers(click.ParamType):
    """A tuple of positive integers: 16, or 16,32,64."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        name = param.name if param else "size"
        try:
            numbers = tuple(dict.fromkeys(int(part) for part in str(value).split(",")))
        except ValueError:
            rule = "must be positive integers, like 16,32" if "," in value else "must be a positive integer"
            raise ConfigError(f"{name}={short(value)}: {rule}") from None
        if min(numbers) < 1:
            raise ConfigError(f"{name}={min(numbers)}: must be a positive integer")
        return numbers


class Tokens(click.ParamType):
    """A number of tokens, of at least 2: 4096, or 128K or 1M in powers of 1024."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = value if isinstance(value, int) else self._parse(str(value))
        if number < 2:
            self.fail(f"{short(value)}: must be a number of at least 2 tokens, like 4096, 128K or 1M", param, ctx)
        return number

    def _parse(self, text: str) -> int:
        """The number of a text; 0 if it is none."""
        match = re.fullmatch(r"([0-9]{1,9})([KM]?)", text.strip().upper())
        return int(match[1]) * 1024 ** " KM".index(match[2] or " ") if match else 0


class Dtype(click.Choice):
    """A data type of the training file. Old spellings, and float16 for estimates, are accepted too."""

    def __init__(self) -> None:
        super().__init__(DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _OLD_DTYPES.get(value) or super().convert(value, param, ctx)


class SwitchOrAuto(click.types.BoolParamType):
    """A switch whose default is `auto`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, param, ctx)


class Bytes(float):
    """An amount of memory that was given with a unit."""


class Size(click.ParamType):
    """An amount of memory: a number, or one with a unit like 40GB or 32GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return parse_size(str(param.name) if param else "size", value) if isinstance(value, str) else value


def parse_size(name: str, text: str) -> float:
    """Parse `40` as a number and `40GB` as Bytes; `name` is for errors."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(?:([KMGT]?)(i?)B)?\s*", text)
    try:
        amount = float(match[1]) if match else None
    except ValueError:
        amount = None
    if match is None or amount is None:
        raise ConfigError(f"{name}={short(text)}: must be a number, or a number of bytes like 40GB or 32GiB")
    if match[2] is None:
        return amount
    return Bytes(amount * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


class FiniteRange(click.FloatRange):
    """A finite number in a range: click's own accepts nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def parse_numbers(flag: str, text: str) -> float | tuple[float, ...] | dict[str, float]:
    """Parse `1`, `1,1,2`, or a table of stages: `0=0.8,default=2`."""
    parts = text.split(",")
    try:
        if "=" in text:
            pairs = [part.split("=") for part in parts]
            return {key.strip(): float(value) for key, value in pairs}
        values = tuple(map(float, parts))
    except ValueError:
        raise ConfigError(f"{flag} {short(text)}: write a number, several like 1,1,2, or some like 0=0.8") from None
    return values[0] if len(values) == 1 else values
