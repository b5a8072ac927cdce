"""The tensors of a directory of safetensors, read one by one."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.stages.quantized import PlainFormat, StorageFormat
from zeropipe.errors import ConfigError, MissingExtra, first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_OPEN_FILES = 8  # each has a file descriptor


class SafetensorsReader:
    """Tensors by name. A tensor is read on request; a file is opened once, not once per tensor."""

    def __init__(self, directory: Path, storage: StorageFormat | None = None, *, single: str = SINGLE) -> None:
        self.directory, self._format = directory, storage or PlainFormat()
        self._open: OrderedDict[str, Any] = OrderedDict()
        if (directory / single).exists():  # transformers prefers it too
            self.file_of = dict.fromkeys(self._file(single).keys(), single)
        elif (directory / INDEX).exists() and single == SINGLE:
            self.file_of = read_index(directory)
        else:
            raise ConfigError(f"{directory} has no {single}; write it with save_pretrained() of transformers")

    @property
    def names(self) -> list[str]:
        """The names that can be read."""
        return self._format.names(self.file_of)

    def read(self, name: str) -> Tensor:
        """Read one tensor, dequantized."""
        return self._format.read(name, self.file_of, lambda stored: self._call(stored, "get_tensor"))

    def file_key(self, name: str) -> str:
        """A sort key by which tensors of one file are read one after the other."""
        return self.file_of.get(name) or self.file_of.get(f"{name}_blocks", "")

    def is_equal(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values, compared 1024 rows at a time."""
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
        """An open file; the least recently used one is closed if there are more than MAX_OPEN_FILES."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise MissingExtra("safetensors", "engine") from None
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt")
            except FileNotFoundError:
                raise ConfigError(f"{self.directory / file} is missing; copy all files of the model") from None
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"cannot read {self.directory / file}: {error}; copy it again") from None
            if len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        return self._open[file]


def read_index(directory: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a directory."""
    index = directory / INDEX
    try:
        files = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {index}: {first_line(error)}") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{index} has no weight_map: must be an index of safetensors") from None
    if not isinstance(files, dict) or not all(isinstance(f, str) and f == Path(f).name for f in files.values()):
        raise ConfigError(f"the weight_map of {index} must map each tensor to a file in the same directory")
    return files
