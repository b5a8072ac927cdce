"""An adapter added to the weights of its base model: a model directory, with one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.core.model.layers import layer_ranges
from zeropipe.engine.checkpoint import reader
from zeropipe.engine.checkpoint.catalog import group_ties, list_stage_tensors
from zeropipe.engine.checkpoint.fingerprint import combine_sums, is_current, position_sum
from zeropipe.engine.checkpoint.manifest import Manifest
from zeropipe.engine.stages.adapters import AdaptedSkeleton, Adapter, is_adapter_name, restore_adapter
from zeropipe.engine.stages.build import Model, open_model
from zeropipe.engine.stages.contract import describe_stage
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.save import merged_tensors, names_to_save, write_files
from zeropipe.engine.stages.skeleton import ModelSkeleton, build_on_meta
from zeropipe.engine.stages.staging import StagingFolder
from zeropipe.errors import ConfigError

Begin = Callable[[str], None]
_TRAINING_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def open_merge(source: Path, manifest: Manifest, base: str | Path | None, dtype: torch.dtype | None) -> Model:
    """The base model of a checkpoint with the adapter of the checkpoint.

    ConfigError if the base model is missing, or has other weights than the adapter was trained with.
    """
    adapter = manifest.model.get("adapter")
    if adapter is None:
        raise ConfigError(f"{source} has no adapter; convert it without merging")
    origin = Path(str(base or manifest.model.get("origin") or ""))
    if not origin.name or not origin.is_dir():
        named = f"the base model {str(origin)!r} does not exist" if origin.name else "its base model is not known"
        raise ConfigError(f"{source}: {named}; pass the directory of the base model (--base)")
    _require_same_base(source, manifest, origin)
    model = open_model(origin, dtype, manifest.model["head"], 0)
    return _add_adapter(model, source, manifest)


def write_merged(model: Model, staging: StagingFolder, shard_size: int, begin: Begin) -> set[str]:
    """Write the merged layers, each as a stage. Returns the names of the tensors."""
    assert model.adapter is not None
    full = ModelSkeleton(build_on_meta(model.config, model.dtype), model.head)
    names = names_to_save(full)
    for number, stage in enumerate(_build_stages(model, begin)):
        merged = merged_tensors(stage, model.adapter.adapter.name)
        saved = {name if name in full.ends else full.ties.get(name, name): get for name, get in merged.items()}
        tensors = {name: get for name, get in saved.items() if name in names}
        staging.add(number, write_files(full, tensors, number, staging.path, shard_size))
    return names


def _build_stages(model: Model, begin: Begin) -> Iterator[HFStage]:
    """A stage for each layer, with its part of the adapter."""
    cut = layer_ranges((1,) * model.family.num_layers)
    for number in range(len(cut)):
        begin(f"layer {number}")
        stage = model.build_stage(cut, number, "cpu")
        model.attach_adapter(stage, "cpu")
        yield stage


def _add_adapter(model: Model, source: Path, manifest: Manifest) -> Model:
    described = restore_adapter(manifest.model["adapter"])
    adapter = Adapter(described.config, described.name, lambda adapted: _SavedAdapter(source, manifest))
    return replace(
        model, adapter=AdaptedSkeleton(ModelSkeleton(build_on_meta(model.config, model.dtype), model.head), adapter)
    )


class _SavedAdapter(Mapping[str, Tensor]):
    """The adapter's tensors in a checkpoint, read one at a time."""

    def __init__(self, source: Path, manifest: Manifest) -> None:
        self._folder = source / manifest.folder
        self._entries = {name: entry for name, entry in manifest.select("model").items() if is_adapter_name(name)}

    def __getitem__(self, name: str) -> Tensor:
        return reader.read_full_tensor(self._folder, name, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _require_same_base(source: Path, manifest: Manifest, origin: Path) -> None:
    """Compare the fingerprint of the frozen weights, in the dtype in which they were trained with."""
    saved = manifest.model.get("base")
    if saved is None:
        raise ConfigError(f"{source} has all weights; load it into an engine, use save_stages(merge=True)")
    if not is_current(saved):
        raise ConfigError(
            f"{source} has a fingerprint of its base model of an older version, which cannot be compared without the "
            "mesh that wrote it; resume the run once to write a new checkpoint"
        )
    own = open_model(origin, None, manifest.model["head"], 0).dtype
    for dtype in dict.fromkeys((own, *_TRAINING_DTYPES)):
        model = _add_adapter(open_model(origin, dtype, manifest.model["head"], 0), source, manifest)
        if _compute_fingerprint(model, manifest.model["ties"]) == saved:
            return
    raise ConfigError(
        f"{source} was trained with other weights than those in {origin}; pass the directory of its base model (--base)"
    )


def _compute_fingerprint(model: Model, ties: Mapping[str, str]) -> str:
    names = {name: min(group) for group in group_ties(ties) for name in group}
    sums: dict[str, tuple[Any, ...]] = {}
    for number, stage in enumerate(_build_stages(model, lambda name: None)):
        for own in list_stage_tensors(describe_stage(number, stage)):
            tensor, name = own.tensor, names.get(own.name, own.name)
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and name not in sums:
                dtype = str(tensor.dtype).removeprefix("torch.")
                sums[name] = (tuple(tensor.shape), dtype, position_sum(tensor, [0] * tensor.ndim))
    return combine_sums([(name, *facts) for name, facts in sums.items()])
