"""Weights of a directory of safetensors, in all names and shapes that transformers can load."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.quantized import find_format
from zeropipe.engine.stages.reader import SafetensorsReader
from zeropipe.engine.stages.skeleton import SCORE_WEIGHT, ModelSkeleton, copy_into, format_names, named_tensors
from zeropipe.engine.stages.weights import compute_buffers, initialize_modules
from zeropipe.engine.transformers_private import (
    Conversion,
    build_multimodal,
    conversions,
    kept_in_float32,
    text_model_names,
    unexpected_names,
)
from zeropipe.errors import ConfigError, first_line


class DirectorySource:
    """Reads the tensors of a stage, and no others."""

    def __init__(
        self, directory: Path, quantization: dict[str, Any] | None, dtype: torch.dtype, seed: int, config: Any
    ) -> None:
        self._stored = SafetensorsReader(directory, find_format(quantization, directory))
        self._dtype, self._seed, self._config = dtype, seed, config

    def prepare(self, skeleton: ModelSkeleton) -> bool:
        self._skeleton, self._model, names = skeleton, skeleton.model, None
        if type(self._config) is not type(skeleton.model.config):  # the text part of a multimodal model
            with torch.device("meta"):
                self._model = build_multimodal(self._config, self._dtype)
            names = text_model_names(self._model, skeleton.model)
        found, unused = conversions(self._model, self._stored.names)
        self._names = names or {target: target for conversion in found for target in conversion.targets}
        self._conversions = {
            self._names[target]: conversion
            for conversion in found
            for target in conversion.targets
            if target in self._names
        }
        self._float32 = kept_in_float32(skeleton.model, self._dtype, skeleton.tensors)
        self._tied_to: dict[str, str] = {}
        tied = self._is_tied(skeleton)
        if missing := skeleton.stored - self._conversions.keys() - self._tied_to.keys():
            raise ConfigError(
                f"{self._stored.directory} has no tensor {format_names(missing)}; {skeleton.hint(missing)}"
            )
        if unknown := unexpected_names(self._model, unused - skeleton.tensors.keys()):
            warnings.warn(
                f"{self._stored.directory} has {format_names(unknown)}, which the model does not use", stacklevel=4
            )
        return tied

    def _is_tied(self, skeleton: ModelSkeleton) -> bool:
        """Whether head and embedding are tied, as in transformers: not if two different tensors are stored."""
        tied = skeleton.tied_ends is not None
        for pair in skeleton.ties.items():
            name, other = pair if pair[1] in self._conversions else pair[::-1]
            if name not in skeleton.tensors:
                continue  # a head that these stages do not have
            if name in self._conversions and other in self._conversions and not self._is_equal(name, other):
                if skeleton.tied_ends is None or set(pair) != set(skeleton.tied_ends):
                    raise ConfigError(
                        f"{name} and {other} differ in {self._stored.directory}: must be equal by its config"
                    )
                tied = False
            else:
                self._tied_to[name] = other
        return tied

    def _is_equal(self, name: str, other: str) -> bool:
        one, two = self._conversions[name], self._conversions[other]
        if one.is_plain and two.is_plain:
            return self._stored.is_equal(one.stored[0], two.stored[0])
        return torch.equal(self._run(one)[name], self._run(two)[other])

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if name in self._float32 else dtype

    def fill(self, stage: HFStage) -> None:
        compute_buffers(stage, self._seed)
        targets: dict[str, list[Tensor]] = defaultdict(list)
        for name, tensor in named_tensors(stage).items():
            full = stage.full_name(name)
            if full == SCORE_WEIGHT:
                self._fill_score(stage, name, tensor)
            elif full in self._skeleton.stored:
                targets[self._tied_to.get(full, full)].append(tensor)
        needed = {id(self._conversions[name]): self._conversions[name] for name in targets}
        for conversion in sorted(needed.values(), key=lambda c: self._stored.file_key(c.stored[0])):
            for name, value in self._run(conversion).items():
                for tensor in targets.get(name, ()):
                    copy_into(name, tensor, value, str(self._stored.directory))

    def _fill_score(self, stage: HFStage, name: str, tensor: Tensor) -> None:
        if SCORE_WEIGHT in self._stored.names:
            copy_into(SCORE_WEIGHT, tensor, self._stored.read(SCORE_WEIGHT), str(self._stored.directory))
        else:
            initialize_modules(stage, {name.rpartition(".")[0]}, self._seed)

    def _run(self, conversion: Conversion) -> dict[str, Tensor]:
        if missing := _find_gaps(conversion):
            raise ConfigError(
                f"{self._stored.directory} has no tensor {format_names(missing)}: it is incomplete; copy all files"
            )
        parts = [self._stored.read(name) for name in conversion.stored]
        try:
            converted = conversion.run(self._model, dict(zip(conversion.stored, parts)).__getitem__)
            return {self._names[name]: value for name, value in converted.items() if name in self._names}
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"cannot convert {format_names(conversion.stored)} of {self._stored.directory} to "
                f"{conversion.targets[0]}: {first_line(error)}"
            ) from None


def _find_gaps(conversion: Conversion) -> set[str]:
    """Stored names that are missing in a numbered sequence: expert 3 if there are 0, 1, 2 and 4."""
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
            prefix, suffix = _around_number(names[0], column)
            rows[prefix, suffix] = {int(row[column]) for row in numbers}
    length = max((max(numbers) + 1 for numbers in rows.values()), default=0)
    return {f"{prefix}{n}{suffix}" for (prefix, suffix), found in rows.items() for n in set(range(length)) - found}


def _around_number(name: str, column: int) -> tuple[str, str]:
    """The text before and after one of the numbers in a name."""
    match = list(re.finditer(r"\d+", name))[column]
    return name[: match.start()], name[match.end() :]
