"""Checkpoints to and from Hugging Face model directories, without processes and with one layer in memory at a time."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from zeropipe.core.model.layers import layer_ranges
from zeropipe.engine.checkpoint import reader, writer
from zeropipe.engine.checkpoint.catalog import group_ties, list_stage_tensors
from zeropipe.engine.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    TensorEntry,
    read_manifest,
    resolve_pointer,
    suggest_checkpoint,
)
from zeropipe.engine.checkpoint.merge import open_merge, write_merged
from zeropipe.engine.checkpoint.save import describe_model
from zeropipe.engine.checkpoint.writer import StagedCheckpoint, WrittenShards
from zeropipe.engine.stages.adapters import CONFIG as ADAPTER_CONFIG
from zeropipe.engine.stages.adapters import AdaptedSkeleton, is_adapter_name, restore_adapter
from zeropipe.engine.stages.build import Model, open_model, read_config
from zeropipe.engine.stages.contract import describe_stage
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.save import MAX_FILE_BYTES, names_to_save, write_files
from zeropipe.engine.stages.skeleton import ModelSkeleton, build_on_meta, format_names
from zeropipe.engine.stages.staging import (
    StageFiles,
    StagingFolder,
    commit_adapter,
    commit_model,
    require_same_adapter,
    require_same_model,
    write_tensors,
)
from zeropipe.errors import ConfigError

Begin = Callable[[str], None]
DEFAULT_SHARD_SIZE = MAX_FILE_BYTES


def convert(
    source: str | Path, target: str | Path, *, shard_size: int = DEFAULT_SHARD_SIZE, like: str | Path | None = None,
    dtype: torch.dtype | None = None, begin: Begin = lambda name: None, merge: bool = False,
    base: str | Path | None = None,
) -> str:  # fmt: skip
    """Convert a checkpoint to a model directory, or a model directory to a checkpoint.

    Returns what was written: "model", "checkpoint", or "adapter" for a run that trained an adapter, of which the
    adapter alone is written, as peft does. `like`: the model directory whose tokenizer is copied; the one that the
    model was loaded from by default. `dtype`: of the weights of a model directory, their own by default. `shard_size`:
    maximum bytes of a safetensors file. `merge`: add an adapter to the weights of its base model, and write that model;
    `base` is the directory of the base model, the one that it was loaded from by default. `begin` is called with
    the name of each tensor or layer before it is converted.
    """
    source, target = resolve_pointer(Path(source)), Path(target)
    if source.resolve() == target.resolve():
        raise ConfigError(f"{source} cannot be converted to itself; use another folder to write to")
    if merge:
        _write_merged(source, target, shard_size, like, dtype, base, begin)
        return "model"
    if base is not None:
        raise ConfigError(f"base={str(base)!r} is only for merge=True; leave it out")
    if (source / MANIFEST_FILE).exists():
        manifest = read_manifest(source)
        if manifest.model.get("adapter") is not None:
            _write_adapter(source, manifest, target, like, begin)
            return "adapter"
        _write_model(source, manifest, target, shard_size, like, dtype, begin)
        return "model"
    if (source / "config.json").exists():
        _write_checkpoint(source, target, begin)
        return "checkpoint"
    raise ConfigError(
        f"{source} is neither a checkpoint ({MANIFEST_FILE}) nor a model directory "
        f"(config.json){suggest_checkpoint(source)}"
    )


# from a checkpoint


def _write_model(
    source: Path, manifest: Manifest, directory: Path, shard_size: int, like: str | Path | None,
    dtype: torch.dtype | None, begin: Begin,
) -> None:  # fmt: skip
    if shard_size < 1:
        raise ConfigError(f"shard_size={shard_size}: must be a positive number of bytes")
    config, saved = _load_config(source, manifest), manifest.select("model")
    if adapters := [name for name in saved if is_adapter_name(name)]:
        raise ConfigError(
            f"{source} has an adapter ({format_names(adapters)}); load it into an engine, use save_stages(merge=True)"
        )
    if manifest.model.get("base") is not None:
        raise ConfigError(f"{source} has only the trained weights; load it into an engine and use save_stages")
    config.dtype = dtype or config.dtype
    config._name_or_path = str(like or manifest.model.get("origin") or "")
    model = ModelSkeleton(build_on_meta(config, config.dtype or torch.float32), manifest.model["head"])
    saved_names = _find_saved_names(source, names_to_save(model), saved, manifest.model["ties"])

    def read(name: str) -> Tensor:
        begin(name)
        tensor = reader.read_full_tensor(source / manifest.folder, saved_names[name], saved[saved_names[name]])
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    require_same_model(directory, config)
    tensors = {name: lambda n=name: read(n) for name in sorted(saved_names)}
    with _open_staging(directory) as staging:
        staging.add(0, write_files(model, tensors, 0, staging.path, shard_size))
        commit_model(staging, 1, set(saved_names), config)


def _write_merged(
    source: Path, directory: Path, shard_size: int, like: str | Path | None, dtype: torch.dtype | None,
    base: str | Path | None, begin: Begin,
) -> None:  # fmt: skip
    if (source / MANIFEST_FILE).exists():
        model = open_merge(source, read_manifest(source), base, dtype)
    elif (source / ADAPTER_CONFIG).exists():
        if base is None:
            model = open_model(source, dtype, "lm", 0)
        else:
            model = open_model(base, dtype, "lm", 0, adapter=source)
    else:
        raise ConfigError(
            f"{source} is neither a checkpoint ({MANIFEST_FILE}) nor an adapter ({ADAPTER_CONFIG}), which can be "
            f"merged{suggest_checkpoint(source)}"
        )
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype
    config._name_or_path = str(like or config._name_or_path or "")
    require_same_model(directory, config)
    with _open_staging(directory) as staging:
        names = write_merged(model, staging, shard_size, begin)
        commit_model(staging, model.family.num_layers, names, config)


def _write_adapter(source: Path, manifest: Manifest, directory: Path, like: str | Path | None, begin: Begin) -> None:
    """All tensors of an adapter are in memory at once: it is small."""
    model_config = _load_config(source, manifest)
    model = ModelSkeleton(build_on_meta(model_config, model_config.dtype or torch.float32), manifest.model["head"])
    adapted = AdaptedSkeleton(model, restore_adapter(manifest.model["adapter"]))
    saved, keys = manifest.select("model"), adapted.keys
    config = adapted.saved_config(manifest.model.get("origin"))
    if missing := keys.keys() - saved.keys():
        raise ConfigError(f"{source} has no {format_names(missing)}: its manifest describes another adapter")
    require_same_adapter(directory, config)
    with _open_staging(directory) as staging:
        tensors = {}
        for name, key in sorted(keys.items()):
            begin(name)
            tensors[key] = reader.read_full_tensor(source / manifest.folder, name, saved[name])
        write_tensors(tensors, staging.path / "0.safetensors")
        staging.add(0, StageFiles({"0.safetensors": list(tensors)}, list(keys), 0))
        commit_adapter(staging, 1, set(keys), config, str(like or manifest.model.get("origin") or ""))


@contextmanager
def _open_staging(directory: Path) -> Iterator[StagingFolder]:
    """The folder in which files for a directory are collected; it is removed after an error."""
    staging = StagingFolder(directory, StagingFolder.create_token(is_distributed=True))
    staging.open()
    try:
        yield staging
    except BaseException:
        staging.close()
        raise


def _load_config(source: Path, manifest: Manifest) -> Any:
    if manifest.model["config"] is None:
        raise ConfigError(f"{source} is not of a Hugging Face model: only stages of hf_stages can be converted")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(manifest.model["config"]))
        return read_config(Path(folder))


def _find_saved_names(
    source: Path, names: set[str], saved: Mapping[str, TensorEntry], ties: Mapping[str, str]
) -> dict[str, str]:
    """The names in the checkpoint of a model directory's tensors; ConfigError if both do not have the same tensors."""
    tied = {name: group for group in group_ties(ties) for name in group}
    found = {name: next((n for n in (name, *tied.get(name, ())) if n in saved), "") for name in names}
    if missing := [name for name, saved_name in found.items() if not saved_name]:
        raise ConfigError(f"{source} has no {format_names(missing)}: its config is of another model")
    if unused := saved.keys() - set(found.values()):
        raise ConfigError(f"{source} has {format_names(unused)}, which a model of its config does not have")
    return found


# to a checkpoint


def _write_checkpoint(source: Path, path: Path, begin: Begin) -> None:
    model = open_model(source, None, "lm", 0)
    if model.adapter is not None:
        raise ConfigError(f"{source} is an adapter; convert the model, and use hf_stages(adapter=...)")
    staged = StagedCheckpoint(path, StagedCheckpoint.create_folder(path))
    try:
        _write_layers(model, staged, begin)
    except BaseException:
        staged.discard()
        raise


def _write_layers(model: Model, staged: StagedCheckpoint, begin: Begin) -> None:
    """Write each layer as a stage of its own, in a file of its own."""
    cut = layer_ranges((1,) * model.family.num_layers)
    metadata = Metadata({})
    written: list[WrittenShards] = []
    ties: dict[str, str] = {}
    for number in range(len(cut)):
        begin(f"layer {number}")
        stage = model.build_stage(cut, number, "cpu")
        tensors = {f"model.{name}": tensor for name, tensor in _untie(stage, ties).items()}
        plans, layer = writer.plan_global([*[SavePlan([])] * number, writer.plan_local(tensors)])
        written.append(writer.write_shards(staged.folder, plans[number], tensors))
        metadata.state_dict_metadata.update(layer.state_dict_metadata)
    written_by = {"mesh": {}, "schedule": "", "placement": "", "num_stages": len(cut)} | writer.describe_versions()
    staged.commit(Manifest("", None, written_by, describe_model(stage, ties), None, None), metadata, written)


def _untie(stage: HFStage, ties: dict[str, str]) -> dict[str, Tensor]:
    """A stage's tensors, a tied one under one name; its other names are added to `ties`."""
    found: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    embedding, head = (stage.full_name(name) for name in stage.tied_names)
    for own in (own for own in list_stage_tensors(describe_stage(stage.stage, stage)) if not own.is_copy):
        if own.name == head and stage.is_tied and not stage.is_first:
            ties[head] = embedding
        elif id(own.tensor) in names:
            ties[own.name] = names[id(own.tensor)]
        else:
            names[id(own.tensor)] = own.name
            found[own.name] = own.tensor.detach()
    return found
