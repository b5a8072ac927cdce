"""How a saved model takes the place of the one before it in its directory.

Ranks write their files into a folder inside the directory that nobody looks at. When all are there the first rank moves
them beside the old ones, under other names, and replaces the index: a single rename. Then it removes the old files,
first of all a model.safetensors, which transformers prefers to an index. Whatever moment a crash chooses, the directory
holds the old model or the new one.
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
from zeropipe.engine.stages.stored import INDEX, SINGLE, Stored
from zeropipe.errors import ConfigError

_THIS_PROCESS = uuid4().hex[:12]
_SHARD = re.compile(r"model(-new)?-\d{5}-of-\d{5}\.safetensors")
_OTHER_FORMS = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json")
# Beside weights and config: what turns text into tokens and back.
_OF_THE_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
)  # fmt: skip
_WITH_THE_MODEL = (*_OF_THE_TOKENIZER, "generation_config.json")
# Fields of a config that do not change what a checkpoint means.
_HARMLESS_IN_ADAPTERS = {"base_model_name_or_path", "inference_mode", "peft_version", "auto_mapping", "revision"}
_HARMLESS = {"dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path", "use_cache"}


@dataclass(frozen=True)
class Part:
    """What one stage wrote: the tensors of each file, by their names there, and those of the model it has saved."""

    files: dict[str, list[str]]
    saved: list[str]
    num_bytes: int


class Workshop:
    """The folder in which the files of one save are gathered."""

    def __init__(self, directory: Path, token: str) -> None:
        self.directory, self.path = directory, directory / f".saving-{token}"

    @classmethod
    def token(cls, is_distributed: bool) -> str:
        """A name for one save; calls of a single process for its ranks share one."""
        return uuid4().hex[:12] if is_distributed else _THIS_PROCESS

    def open(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write into {self.directory}: {error.strerror}") from None

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def add(self, stage: int, part: Part) -> None:
        """Note that a stage is complete."""
        write_whole(self.path / f"{stage}.json", json.dumps(asdict(part)))

    def is_complete(self, num_stages: int) -> bool:
        return all((self.path / f"{stage}.json").exists() for stage in range(num_stages))

    def parts(self, num_stages: int) -> list[Part]:
        """What every stage wrote."""
        found = []
        for stage in range(num_stages):
            note = self.path / f"{stage}.json"
            if not note.exists():
                raise ConfigError(f"stage {stage} is not in {self.directory}: give a directory that all ranks see")
            found.append(Part(**json.loads(note.read_text())))
        return found


def require_same_model(directory: Path, config: Any) -> None:
    """ConfigError if the directory holds another model: its config and ours could not be exchanged in one step."""
    if (directory / ADAPTER_CONFIG).exists():
        raise ConfigError(f"{directory} holds an adapter ({ADAPTER_CONFIG}): save the model elsewhere")
    if not any((directory / name).exists() for name in (SINGLE, INDEX, "pytorch_model.bin")):
        return
    from transformers import AutoConfig

    try:
        old = AutoConfig.from_pretrained(directory).to_dict()
    except (OSError, ValueError, KeyError):
        return  # nothing that could be loaded is lost
    new = config.to_dict()
    differ = sorted(
        name for name in (old.keys() | new.keys()) - _HARMLESS if _plain(old.get(name)) != _plain(new.get(name))
    )
    if differ == ["tie_word_embeddings"] and old["tie_word_embeddings"] and _has_head(directory):
        return  # it said tied and held two tensors, which no one tied
    if differ:
        name = differ[0]
        raise ConfigError(
            f"{directory} holds another model ({name} is {_short(old.get(name))}, here {_short(new.get(name))}): save "
            "this one elsewhere"
        )


def switch_to_model(workshop: Workshop, num_stages: int, wanted: set[str], config: Any) -> None:
    """Put the gathered files in the place of the directory's model."""
    parts, directory = workshop.parts(num_stages), workshop.directory
    if missing := wanted - {name for part in parts for name in part.saved}:
        raise ConfigError(f"no stage has {min(missing)}: the stages are not those of one model")
    require_same_model(directory, config)
    files = {file: names for part in parts for file, names in part.files.items()}
    final = _final_names(list(files), _in_use(directory))
    weight_map: dict[str, str] = {}
    for file, names in files.items():
        weight_map = dict.fromkeys(names, final[file]) | weight_map  # a tensor of two stages is taken from the first
    config.save_pretrained(workshop.path)
    for file, name in final.items():
        os.replace(workshop.path / file, directory / name)
    _copy_tokenizer(getattr(config, "_name_or_path", ""), directory, _WITH_THE_MODEL)
    os.replace(workshop.path / "config.json", directory / "config.json")
    sync_to_disk(directory)
    index = {"metadata": {"total_size": sum(part.num_bytes for part in parts)}, "weight_map": weight_map}
    write_whole(directory / INDEX, json.dumps(index, indent=1, sort_keys=True))
    sync_to_disk(directory)
    (directory / SINGLE).unlink(missing_ok=True)
    _clean(directory, keep=set(final.values()))


def require_same_adapter(directory: Path, config: Any) -> None:
    """ConfigError if the directory holds another adapter: its config and ours could not be exchanged in one step."""
    if not (directory / ADAPTER_WEIGHTS).exists() or not (directory / ADAPTER_CONFIG).exists():
        return
    try:
        old = json.loads((directory / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError):
        return
    new = _plain(config.to_dict())
    for name in sorted((old.keys() & new.keys()) - _HARMLESS_IN_ADAPTERS):
        if _in_order(old[name]) != _in_order(new[name]):
            raise ConfigError(
                f"{directory} holds another adapter ({name} is {_short(old[name])}, here {_short(new[name])}): save "
                "this one elsewhere"
            )


def switch_to_adapter(workshop: Workshop, num_stages: int, wanted: set[str], config: Any, origin: str = "") -> None:
    """Put the gathered tensors, in one file, in the place of the directory's adapter.

    `origin`: the model directory whose tokenizer is copied.
    """
    from safetensors.torch import load_file

    parts, directory = workshop.parts(num_stages), workshop.directory
    if differ := wanted ^ {name for part in parts for name in part.saved}:
        raise ConfigError(
            f"the stages' adapters and their config do not agree about {min(differ)}: add them with "
            "hf_stages(adapter=...)"
        )
    require_same_adapter(directory, config)
    tensors = {k: t for part in parts for file in part.files for k, t in load_file(workshop.path / file).items()}
    save_tensors(tensors, workshop.path / ADAPTER_WEIGHTS)
    config.save_pretrained(str(workshop.path))
    os.replace(workshop.path / ADAPTER_WEIGHTS, directory / ADAPTER_WEIGHTS)
    _copy_tokenizer(origin, directory, _OF_THE_TOKENIZER)
    sync_to_disk(directory)
    os.replace(workshop.path / ADAPTER_CONFIG, directory / ADAPTER_CONFIG)
    (directory / "adapter_model.bin").unlink(missing_ok=True)
    _clean_workshops(directory)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file and have it on the disk before anything refers to it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
        sync_to_disk(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _final_names(files: list[str], in_use: set[str]) -> dict[str, str]:
    """Names that the present index does not use, so that both models can lie side by side."""
    for prefix in ("model", "model-new"):
        names = [f"{prefix}-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        if not in_use & set(names):
            break
    return dict(zip(files, names))


def _in_use(directory: Path) -> set[str]:
    try:
        return set(Stored.index_of(directory).values()) if (directory / INDEX).exists() else set()
    except ConfigError:
        return set()  # an index that cannot be read loads nothing


def _has_head(directory: Path) -> bool:
    try:
        return bool(Stored(directory).file_of.keys() & {"lm_head.weight", "embed_out.weight"})
    except ConfigError:
        return False


def _copy_tokenizer(origin: str | None, directory: Path, patterns: tuple[str, ...]) -> None:
    """From where the model was loaded, what is not there yet."""
    folder = Path(origin or "")
    if not folder.name or not folder.is_dir():
        return
    for pattern in patterns:
        for file in folder.glob(pattern):
            if file.is_file() and not (directory / file.name).exists():
                write_whole(directory / file.name, file.read_bytes())


def _clean(directory: Path, keep: set[str]) -> None:
    """Remove the old model's files, and what saves that did not end have left."""
    for path in directory.iterdir():
        if path.name not in keep and (_SHARD.fullmatch(path.name) or _OTHER_FORMS.fullmatch(path.name)):
            path.unlink(missing_ok=True)
    _clean_workshops(directory)


def _clean_workshops(directory: Path) -> None:
    for path in directory.glob(".saving-*"):
        shutil.rmtree(path, ignore_errors=True)


def _in_order(value: Any) -> Any:
    """Sets are saved as lists, in any order."""
    return sorted(value, key=str) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda v: list(v) if isinstance(v, set | frozenset) else str(v)))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
