"""Checkpoints to and from model directories of Hugging Face: no processes, and memory for a layer at a time."""

from __future__ import annotations

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
from zeropipe.engine.checkpoint import pieces
from zeropipe.engine.checkpoint.manifest import FILE, Manifest, Saved, Target, followed, one_inside, read_manifest
from zeropipe.engine.checkpoint.names import own_tensors, tied_sets
from zeropipe.engine.checkpoint.pieces import Written
from zeropipe.engine.checkpoint.save import described_model
from zeropipe.engine.stages.adapters import Injected, adapter_from, is_adapters
from zeropipe.engine.stages.contract import describe_stage
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.models import meta_model
from zeropipe.engine.stages.open import Model, open_model, read_config
from zeropipe.engine.stages.save import names_saved, write_files
from zeropipe.engine.stages.switch import (
    Part,
    Workshop,
    require_same_adapter,
    require_same_model,
    save_tensors,
    switch_to_adapter,
    switch_to_model,
)
from zeropipe.engine.stages.whole import Whole, listed
from zeropipe.errors import ConfigError

Begin = Callable[[str], None]
MOST_BYTES = 5_000_000_000


def convert(
    source: str | Path, target: str | Path, *, shard_size: int = MOST_BYTES, like: str | Path | None = None,
    dtype: torch.dtype | None = None, begin: Begin = lambda name: None,
) -> str:  # fmt: skip
    """Make a model directory of a checkpoint, or a checkpoint of a model directory; which of them was made.

    Of a run that trained an adapter the adapter alone is written, as a directory of peft's ("adapter").
    `like`: a model directory whose tokenizer goes with the new one; where the model came from if not given. `dtype`: of
    the weights of a model directory, if not their own.
    `shard_size`: bytes of a safetensors file at most. `begin` is called with the name of each part that is begun.
    """
    source, target = followed(Path(source)), Path(target)
    if source.resolve() == target.resolve():
        raise ConfigError(f"{source} is converted to itself: give another folder to write")
    if (source / FILE).exists():
        manifest = read_manifest(source)
        if manifest.model.get("adapter") is not None:
            _to_adapter(source, manifest, target, begin)
            return "adapter"
        _to_model(source, manifest, target, shard_size, like, dtype, begin)
        return "model"
    if (source / "config.json").exists():
        _to_checkpoint(source, target, begin)
        return "checkpoint"
    raise ConfigError(
        f"{source} is neither a checkpoint ({FILE}) nor a model directory (config.json){one_inside(source)}"
    )


def _to_model(
    source: Path, manifest: Manifest, directory: Path, shard_size: int, like: str | Path | None,
    dtype: torch.dtype | None, begin: Begin,
) -> None:  # fmt: skip
    if shard_size < 1:
        raise ConfigError(f"shard_size={shard_size}: give the bytes that a file may have")
    config, saved = _config(source, manifest), manifest.under("model")
    if adapters := [name for name in saved if is_adapters(name)]:
        raise ConfigError(
            f"{source} holds an adapter ({listed(adapters)}): load it into an engine and use save_stages(merge=True)"
        )
    if manifest.model.get("base") is not None:
        raise ConfigError(f"{source} has the trained weights only: load it into an engine and use save_stages")
    config.dtype = dtype or config.dtype
    config._name_or_path = str(like or manifest.model.get("origin") or "")
    whole = Whole(meta_model(config, config.dtype or torch.float32), manifest.model["head"])
    wanted = _stored_as(source, names_saved(whole), saved, manifest.model["ties"])

    def get(name: str) -> Tensor:
        begin(name)
        found = pieces.read_whole(source / manifest.folder, wanted[name], saved[wanted[name]])
        return found.to(dtype) if dtype is not None and found.is_floating_point() else found

    require_same_model(directory, config)
    tensors = {name: lambda n=name: get(n) for name in sorted(wanted)}
    with _opened(directory) as workshop:
        workshop.add(0, write_files(whole, tensors, 0, workshop.path, shard_size))
        switch_to_model(workshop, 1, set(wanted), config)


def _to_adapter(source: Path, manifest: Manifest, directory: Path, begin: Begin) -> None:
    """An adapter has as much memory as it needs: it is small."""
    model = _config(source, manifest)
    whole = Whole(meta_model(model, model.dtype or torch.float32), manifest.model["head"])
    injected = Injected(whole, adapter_from(manifest.model["adapter"]))
    saved, keys = manifest.under("model"), injected.keys
    config = injected.saved_config(manifest.model.get("origin"))
    if missing := keys.keys() - saved.keys():
        raise ConfigError(f"{source} has no {listed(missing)}: its adapter is another one")
    require_same_adapter(directory, config)
    with _opened(directory) as workshop:
        tensors = {}
        for name, key in sorted(keys.items()):
            begin(name)
            tensors[key] = pieces.read_whole(source / manifest.folder, name, saved[name])
        save_tensors(tensors, workshop.path / "0.safetensors")
        workshop.add(0, Part({"0.safetensors": list(tensors)}, list(keys), 0))
        switch_to_adapter(workshop, 1, set(keys), config)


@contextmanager
def _opened(directory: Path) -> Iterator[Workshop]:
    """A workshop for a directory, which is gone after a failure."""
    workshop = Workshop(directory, Workshop.token(is_distributed=True))
    workshop.open()
    try:
        yield workshop
    except BaseException:
        workshop.close()
        raise


def _config(source: Path, manifest: Manifest) -> Any:
    given = manifest.model["config"]
    if given is None:
        raise ConfigError(f"{source} is not of a Hugging Face model: only stages of hf_stages can be converted")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(given))
        return read_config(Path(folder))


def _stored_as(source: Path, names: set[str], saved: Mapping[str, Saved], ties: Mapping[str, str]) -> dict[str, str]:
    """The tensors that a model directory has, by the names that they have in the checkpoint."""
    same = {name: group for group in tied_sets(ties) for name in group}
    found = {name: next((n for n in (name, *same.get(name, ())) if n in saved), "") for name in names}
    if missing := [name for name, there in found.items() if not there]:
        raise ConfigError(f"{source} has no {listed(missing)}: its config is of another model")
    if unused := saved.keys() - set(found.values()):
        raise ConfigError(f"{source} has {listed(unused)}, which its config does not know")
    return found


def _to_checkpoint(source: Path, path: Path, begin: Begin) -> None:
    model = open_model(source, None, "lm", 0)
    if model.adapter is not None:
        raise ConfigError(f"{source} is an adapter: convert the model, and give hf_stages(adapter=...)")
    target = Target(path, Target.open(path))
    try:
        _write_model(model, target, begin)
    except BaseException:
        target.close()
        raise


def _write_model(model: Model, target: Target, begin: Begin) -> None:
    """A layer at a time, each as a stage of its own, in a file of its own."""
    cut = layer_ranges((1,) * model.family.num_layers)
    entries: dict[str, Any] = {}
    written: list[Written] = []
    ties: dict[str, str] = {}
    for number in range(len(cut)):
        begin(f"layer {number}")
        stage = model.stage(cut, number, "cpu")
        state = {f"model.{name}": tensor for name, tensor in _once(stage, ties).items()}
        plans, metadata = pieces.share_out([*[SavePlan([])] * number, pieces.plan_save(state)])
        written.append(pieces.write(target.folder, plans[number], state))
        entries |= metadata.state_dict_metadata
    metadata = Metadata(entries)
    pieces.finish(target.folder, metadata, written)
    target.switch(
        Manifest(
            target.folder.name,
            None,
            {"mesh": {}, "schedule": "", "placement": "", "num_stages": len(cut)} | pieces.versions(),
            described_model(stage, ties),
            None,
            None,
            pieces.file_sizes(target.folder, written),
            pieces.saved_tensors(metadata, written),
        )
    )


def _once(stage: HFStage, ties: dict[str, str]) -> dict[str, Tensor]:
    """A stage's tensors, a tied one under one name; its other names are added to `ties`."""
    found: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    embedding, head = (stage.full_name(name) for name in stage.tied_names)
    for own in (own for own in own_tensors(describe_stage(stage.stage, stage)) if not own.is_copy):
        if own.name == head and stage.is_tied and not stage.is_first:
            ties[head] = embedding
        elif id(own.tensor) in names:
            ties[own.name] = names[id(own.tensor)]
        else:
            names[id(own.tensor)] = own.name
            found[own.name] = own.tensor.detach()
    return found
