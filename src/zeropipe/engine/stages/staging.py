"""The files of one save, and how they replace the previous model of a directory.

Ranks write their files into a staging folder inside the directory. When all are complete the first rank moves them
beside the old ones, under other names, and replaces the index with a single rename. Then it removes the old files,
first of all a model.safetensors, which transformers prefers to an index. After a crash at any moment the directory has
the old model or the new one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from zeropipe.core.files import sync_to_disk, write_whole
from zeropipe.engine.stages.adapters import CONFIG as ADAPTER_CONFIG
from zeropipe.engine.stages.adapters import WEIGHTS as ADAPTER_WEIGHTS
from zeropipe.engine.stages.reader import INDEX, SINGLE, SafetensorsReader, read_index
from zeropipe.errors import ConfigError, short

_PROCESS_TOKEN = uuid4().hex[:12]
_SHARD = re.compile(r"model(-new)?-\d{5}-of-\d{5}\.safetensors")
_OLD_FORMATS = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json")
# files that are copied from the directory a model was loaded from
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
)  # fmt: skip
_MODEL_FILES = (*_TOKENIZER_FILES, "generation_config.json")
# config fields that may differ between two checkpoints of one model
_IGNORED_ADAPTER_FIELDS = {"base_model_name_or_path", "inference_mode", "peft_version", "auto_mapping", "revision"}
_IGNORED_FIELDS = {"dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path", "use_cache"}


@dataclass(frozen=True)
class StageFiles:
    """The files that one stage has written."""

    files: dict[str, list[str]]  # file name -> names of its tensors
    saved: list[str]  # names in the model of the tensors in these files
    num_bytes: int


class StagingFolder:
    """The folder in which the ranks write the files of one save."""

    def __init__(self, directory: Path, token: str) -> None:
        self.directory, self.path = directory, directory / f".saving-{token}"

    @staticmethod
    def create_token(is_distributed: bool) -> str:
        """A name for one save; the calls of a single process for all ranks share one."""
        return uuid4().hex[:12] if is_distributed else _PROCESS_TOKEN

    def open(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write into {self.directory}: {error.strerror}") from None

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def add(self, stage: int, files: StageFiles) -> None:
        """Record that a stage is complete."""
        write_whole(self.path / f"{stage}.json", json.dumps(asdict(files)))

    def is_complete(self, num_stages: int) -> bool:
        return all((self.path / f"{stage}.json").exists() for stage in range(num_stages))

    def read_all(self, num_stages: int) -> list[StageFiles]:
        """The files of all stages."""
        found = []
        for stage in range(num_stages):
            record = self.path / f"{stage}.json"
            if not record.exists():
                raise ConfigError(
                    f"stage {stage} is missing in {self.directory}: must be a directory that all ranks share"
                )
            found.append(StageFiles(**json.loads(record.read_text())))
        return found


def require_same_model(directory: Path, config: Any) -> None:
    """ConfigError if the directory has another model: weights and config cannot be replaced in one atomic step."""
    if (directory / ADAPTER_CONFIG).exists():
        raise ConfigError(f"{directory} has an adapter ({ADAPTER_CONFIG}); save the model to another directory")
    if not any((directory / name).exists() for name in (SINGLE, INDEX, "pytorch_model.bin")):
        return
    from transformers import AutoConfig

    try:
        old = AutoConfig.from_pretrained(directory).to_dict()
    except (OSError, ValueError, KeyError):
        return  # the directory has no model that could be loaded
    new = config.to_dict()
    differ = sorted(
        name
        for name in (old.keys() | new.keys()) - _IGNORED_FIELDS
        if _as_json(old.get(name)) != _as_json(new.get(name))
    )
    if differ == ["tie_word_embeddings"] and old["tie_word_embeddings"] and _has_head(directory):
        return  # its config says tied, but it has two tensors
    if differ:
        name = differ[0]
        raise ConfigError(
            f"{directory} has another model ({name} is {short(old.get(name))}, here {short(new.get(name))}); save this "
            "one to another directory"
        )


def commit_model(staging: StagingFolder, num_stages: int, expected: set[str], config: Any) -> None:
    """Replace the directory's model by the staged files."""
    stages, directory = staging.read_all(num_stages), staging.directory
    if missing := expected - {name for stage in stages for name in stage.saved}:
        raise ConfigError(f"no stage has {min(missing)}: must be the stages of one model")
    require_same_model(directory, config)
    files = {file: names for stage in stages for file, names in stage.files.items()}
    final = _final_names(list(files), _indexed_files(directory))
    weight_map: dict[str, str] = {}
    for file, names in files.items():
        weight_map = dict.fromkeys(names, final[file]) | weight_map  # a tensor of two stages comes from the first
    config.save_pretrained(staging.path)
    for file, name in final.items():
        os.replace(staging.path / file, directory / name)
    _copy_files(getattr(config, "_name_or_path", ""), directory, _MODEL_FILES)
    os.replace(staging.path / "config.json", directory / "config.json")
    sync_to_disk(directory)
    index = {"metadata": {"total_size": sum(stage.num_bytes for stage in stages)}, "weight_map": weight_map}
    write_whole(directory / INDEX, json.dumps(index, indent=1, sort_keys=True))
    sync_to_disk(directory)
    (directory / SINGLE).unlink(missing_ok=True)
    _remove_old_files(directory, keep=set(final.values()))


def require_same_adapter(directory: Path, config: Any) -> None:
    """ConfigError if the directory has another adapter: tensors and config cannot be replaced in one atomic step."""
    if not (directory / ADAPTER_WEIGHTS).exists() or not (directory / ADAPTER_CONFIG).exists():
        return
    try:
        old = json.loads((directory / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError):
        return
    new = _as_json(config.to_dict())
    for name in sorted((old.keys() & new.keys()) - _IGNORED_ADAPTER_FIELDS):
        if _sorted_list(old[name]) != _sorted_list(new[name]):
            raise ConfigError(
                f"{directory} has another adapter ({name} is {short(old[name])}, here {short(new[name])}); save this "
                "one to another directory"
            )


def commit_adapter(staging: StagingFolder, num_stages: int, expected: set[str], config: Any, origin: str = "") -> None:
    """Replace the directory's adapter by the staged tensors, in one file.

    `origin`: the model directory whose tokenizer is copied.
    """
    from safetensors.torch import load_file

    stages, directory = staging.read_all(num_stages), staging.directory
    if differ := expected ^ {name for stage in stages for name in stage.saved}:
        raise ConfigError(
            f"the adapters of the stages and their config differ in {min(differ)}: must be of one adapter; add them "
            "with hf_stages(adapter=...)"
        )
    require_same_adapter(directory, config)
    tensors = {k: t for stage in stages for file in stage.files for k, t in load_file(staging.path / file).items()}
    write_tensors(tensors, staging.path / ADAPTER_WEIGHTS)
    config.save_pretrained(str(staging.path))
    os.replace(staging.path / ADAPTER_WEIGHTS, directory / ADAPTER_WEIGHTS)
    _copy_files(origin, directory, _TOKENIZER_FILES)
    sync_to_disk(directory)
    os.replace(staging.path / ADAPTER_CONFIG, directory / ADAPTER_CONFIG)
    (directory / "adapter_model.bin").unlink(missing_ok=True)
    _remove_staging(directory)


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file and sync it to disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
        sync_to_disk(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _final_names(files: list[str], in_use: set[str]) -> dict[str, str]:
    """File names that the present index does not use, so that both models can be in the directory."""
    for prefix in ("model", "model-new"):
        names = [f"{prefix}-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        if not in_use & set(names):
            break
    return dict(zip(files, names))


def _indexed_files(directory: Path) -> set[str]:
    try:
        return set(read_index(directory).values()) if (directory / INDEX).exists() else set()
    except ConfigError:
        return set()  # no model can be loaded with an index that cannot be read


def _has_head(directory: Path) -> bool:
    try:
        return bool(SafetensorsReader(directory).file_of.keys() & {"lm_head.weight", "embed_out.weight"})
    except ConfigError:
        return False


def _copy_files(origin: str | None, directory: Path, patterns: tuple[str, ...]) -> None:
    """Copy files from the directory a model was loaded from, unless they are there."""
    folder = Path(origin or "")
    if not folder.name or not folder.is_dir():
        return
    for pattern in patterns:
        for file in folder.glob(pattern):
            if file.is_file() and not (directory / file.name).exists():
                write_whole(directory / file.name, file.read_bytes())


def _remove_old_files(directory: Path, keep: set[str]) -> None:
    """Remove the files of the old model, and staging folders of saves that did not finish."""
    for path in directory.iterdir():
        if path.name not in keep and (_SHARD.fullmatch(path.name) or _OLD_FORMATS.fullmatch(path.name)):
            path.unlink(missing_ok=True)
    _remove_staging(directory)


def _remove_staging(directory: Path) -> None:
    for path in directory.glob(".saving-*"):
        shutil.rmtree(path, ignore_errors=True)


def _sorted_list(value: Any) -> Any:
    """A list in sorted order, because sets are saved as lists in any order."""
    return sorted(value, key=str) if isinstance(value, list) else value


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda v: list(v) if isinstance(v, set | frozenset) else str(v)))
