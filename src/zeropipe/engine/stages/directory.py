"""Weights that come from a directory of safetensors, in whatever form transformers can load them."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.quantised import form_of
from zeropipe.engine.stages.stored import Stored
from zeropipe.engine.stages.weights import compute_buffers, seed_modules
from zeropipe.engine.stages.whole import SCORE, Whole, listed, put, tensors_of
from zeropipe.engine.transformers_private import (
    Conversion,
    build_around,
    conversions,
    kept_in_float32,
    text_names,
    unexpected,
)
from zeropipe.errors import ConfigError


class DirectorySource:
    """Reads the tensors that a stage is made of, and no others."""

    def __init__(
        self, directory: Path, quantization: dict[str, Any] | None, dtype: torch.dtype, seed: int, config: Any
    ) -> None:
        self._stored = Stored(directory, form_of(quantization, directory))
        self._dtype, self._seed, self._config = dtype, seed, config

    def prepare(self, whole: Whole) -> bool:
        self._whole, self._model, names = whole, whole.model, None
        if type(self._config) is not type(whole.model.config):  # the text part of a model of several kinds of input
            with torch.device("meta"):
                self._model = build_around(self._config, self._dtype)
            names = text_names(self._model, whole.model)
        found, unused = conversions(self._model, self._stored.names)
        self._name_of = names or {target: target for conversion in found for target in conversion.targets}
        self._made_by = {
            self._name_of[target]: conversion
            for conversion in found
            for target in conversion.targets
            if target in self._name_of
        }
        self._float32 = kept_in_float32(whole.model, self._dtype, whole.tensors)
        self._same: dict[str, str] = {}
        tied = self._is_tied(whole)
        if missing := whole.stored - self._made_by.keys() - self._same.keys():
            raise ConfigError(f"{self._stored.directory} has no tensor {listed(missing)}: {whole.way_out(missing)}")
        if strangers := unexpected(self._model, unused - whole.tensors.keys()):
            warnings.warn(
                f"{self._stored.directory} has {listed(strangers)}, which the model does not use", stacklevel=4
            )
        return tied

    def _is_tied(self, whole: Whole) -> bool:
        """As transformers decides: what the config ties stays apart if two different tensors are stored."""
        tied = whole.tie is not None
        for pair in whole.ties.items():
            name, other = pair if pair[1] in self._made_by else pair[::-1]
            if name not in whole.tensors:
                continue  # a head that these stages do not have
            if name in self._made_by and other in self._made_by and not self._is_equal(name, other):
                if whole.tie is None or set(pair) != set(whole.tie):
                    raise ConfigError(f"{name} and {other} differ in {self._stored.directory}: its config ties them")
                tied = False
            else:
                self._same[name] = other
        return tied

    def _is_equal(self, name: str, other: str) -> bool:
        one, two = self._made_by[name], self._made_by[other]
        if one.is_plain and two.is_plain:
            return self._stored.is_equal(one.stored[0], two.stored[0])
        return torch.equal(self._run(one)[name], self._run(two)[other])

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if name in self._float32 else dtype

    def fill(self, stage: HFStage) -> None:
        compute_buffers(stage, self._seed)
        wanted: dict[str, list[Tensor]] = defaultdict(list)
        for name, tensor in tensors_of(stage).items():
            full = stage.full_name(name)
            if full == SCORE:
                self._fill_score(stage, name, tensor)
            elif full in self._whole.stored:
                wanted[self._same.get(full, full)].append(tensor)
        needed = {id(self._made_by[name]): self._made_by[name] for name in wanted}
        for conversion in sorted(needed.values(), key=lambda c: self._stored.place_of(c.stored[0])):
            for name, value in self._run(conversion).items():
                for tensor in wanted.get(name, ()):
                    put(name, tensor, value, str(self._stored.directory))

    def _fill_score(self, stage: HFStage, name: str, tensor: Tensor) -> None:
        if SCORE in self._stored.names:
            put(SCORE, tensor, self._stored.read(SCORE), str(self._stored.directory))
        else:
            seed_modules(stage, {name.rpartition(".")[0]}, self._seed)

    def _run(self, conversion: Conversion) -> dict[str, Tensor]:
        if missing := _gaps(conversion):
            raise ConfigError(f"{self._stored.directory} has no tensor {listed(missing)}: the checkpoint is not whole")
        parts = [self._stored.read(name) for name in conversion.stored]
        try:
            made = conversion.run(self._model, dict(zip(conversion.stored, parts)).__getitem__)
            return {self._name_of[name]: value for name, value in made.items() if name in self._name_of}
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"cannot make {conversion.targets[0]} of {listed(conversion.stored)} in {self._stored.directory}: "
                f"{str(error).splitlines()[0]}"
            ) from None


def _gaps(conversion: Conversion) -> set[str]:
    """Stored names that are missing in a row: expert 3 where there are 0, 1, 2 and 4, or where only its half is."""
    rows: dict[tuple[str, str], set[int]] = defaultdict(set)
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for name, pattern in conversion.sources:
        by_pattern[pattern].append(name)
    if len(conversion.sources) == 1:
        return set()
    for names in by_pattern.values():
        numbers = [re.findall(r"\d+", name) for name in names]
        if len(names) > 1 and len({len(row) for row in numbers}) == 1:
            column = next(c for c, values in enumerate(zip(*numbers)) if len(set(values)) > 1)
            head, tail = _around(names[0], column)
            rows[head, tail] = {int(row[column]) for row in numbers}
    length = max((max(numbers) + 1 for numbers in rows.values()), default=0)
    return {f"{head}{n}{tail}" for (head, tail), there in rows.items() for n in set(range(length)) - there}


def _around(name: str, column: int) -> tuple[str, str]:
    """What is before and after one of a name's numbers."""
    match = list(re.finditer(r"\d+", name))[column]
    return name[: match.start()], name[match.end() :]
