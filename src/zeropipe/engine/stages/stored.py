"""The tensors in a directory of safetensors, read one by one."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.stages.quantised import Form, Plain
from zeropipe.errors import ConfigError, MissingExtra

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_OPEN = 8  # files at once: each holds a descriptor


class Stored:
    """Tensors by name. A tensor is read when it is asked for; a file is opened once, not once per tensor."""

    def __init__(self, directory: Path, form: Form | None = None, *, single: str = SINGLE) -> None:
        self.directory, self._form = directory, form or Plain()
        self._open: OrderedDict[str, Any] = OrderedDict()
        if (directory / single).exists():  # transformers prefers it too
            self.file_of = dict.fromkeys(self._file(single).keys(), single)
        elif (directory / INDEX).exists() and single == SINGLE:
            self.file_of = self.index_of(directory)
        else:
            raise ConfigError(f"{directory} holds no {single}: write it with save_pretrained of transformers")

    @staticmethod
    def index_of(directory: Path) -> dict[str, str]:
        """Which file holds which tensor, as a directory's index says."""
        return _weight_map(directory / INDEX)

    @property
    def names(self) -> list[str]:
        """All tensors that can be read."""
        return self._form.names(self.file_of)

    def read(self, name: str) -> Tensor:
        """One tensor, in real numbers if it is stored in few bits."""
        return self._form.read(name, self.file_of, lambda stored: self._call(stored, "get_tensor"))

    def place_of(self, name: str) -> str:
        """Sorted by this, tensors of one file are read one after the other."""
        return self.file_of.get(name) or self.file_of.get(f"{name}_blocks", "")

    def is_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values, compared a few rows at a time."""
        first, second = self._call(one, "get_slice"), self._call(other, "get_slice")
        shape = first.get_shape()
        if shape != second.get_shape() or first.get_dtype() != second.get_dtype():
            return False
        return all(torch.equal(first[i : i + 1024], second[i : i + 1024]) for i in range(0, shape[0], 1024))

    def _call(self, name: str, method: str) -> Any:
        from safetensors import SafetensorError

        file = self.file_of[name]
        try:
            return getattr(self._file(file), method)(name)
        except SafetensorError as error:
            raise ConfigError(f"cannot read {name} of {self.directory / file}: {error}") from None

    def _file(self, file: str) -> Any:
        """An open file; the one not used for longest is closed if there are too many."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise MissingExtra("safetensors", "engine") from None
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt")
            except FileNotFoundError:
                raise ConfigError(f"{self.directory / file} is missing: copy all of the model") from None
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"cannot read {self.directory / file}: {error}; is it all there? Copy it again"
                ) from None
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {index}: {str(error).splitlines()[0]}") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{index} has no weight_map: it is no index of safetensors") from None
    if not isinstance(files, dict) or not all(isinstance(f, str) and f == Path(f).name for f in files.values()):
        raise ConfigError(f"the weight_map of {index} must say which file beside it holds each tensor")
    return files
