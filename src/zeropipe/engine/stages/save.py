"""Saves stages as a Hugging Face model directory, or their adapter as one of peft."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.engine.comm.collective import nothing, on_all_ranks, on_first_rank
from zeropipe.engine.comm.ranks import DEFAULT_TIMEOUT_S, Ranks, job_ranks
from zeropipe.engine.stages.adapters import (
    AdaptedSkeleton,
    Adapter,
    find_adapter,
    find_adapter_layers,
    is_adapter_name,
    merge_layer,
    wrapped_layer,
)
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.skeleton import SCORE_WEIGHT, ModelSkeleton, build_on_meta, format_names
from zeropipe.engine.stages.staging import (
    StageFiles,
    StagingFolder,
    commit_adapter,
    commit_model,
    require_same_adapter,
    require_same_model,
    write_tensors,
)
from zeropipe.engine.transformers_private import classifier_name, to_published
from zeropipe.errors import ConfigError, EngineError, short

MAX_FILE_BYTES = 5_000_000_000  # also of the tensors that are on the CPU at once: a stage may be larger
Tensors = dict[str, Callable[[], Tensor]]  # functions, since tensors are merged one by one


def save_stages(
    stages: Mapping[int, HFStage],
    placement: Placement | Schedule,
    rank: int,
    directory: str | Path,
    *,
    group: Any = None,
    merge: bool = False,
) -> None:
    """Save the model of which this rank has some stages, for `from_pretrained(directory)`.

    `placement` is that of the schedule, or the schedule itself.
    Of stages with a LoRA adapter only the adapter is saved, for `PeftModel.from_pretrained(model, directory)`; with
    `merge` the full model is saved, with its adapter added to the weights (in the files, not in the stages).

    All ranks of a pipeline call this with the same arguments; `group` is their process group (default: all processes),
    `directory` is shared by all of them. At any moment it has the complete old model or the complete new one.
    Without torch.distributed a single process saves for its ranks one after the other.
    """
    if isinstance(placement, Schedule):
        placement = placement.placement
    if not isinstance(placement, Placement):
        raise ConfigError(f"placement={short(placement)}: must be a schedule, or the placement of one")
    with _ranks_of(placement, rank, group) as ranks:
        _save(ranks, stages, placement, rank, Path(directory), merge)


def _save(
    ranks: Ranks | None, stages: Mapping[int, HFStage], placement: Placement, rank: int, directory: Path, merge: bool
) -> None:
    num_stages = len(placement.copies[0])
    _, found = on_all_ranks(ranks, lambda: _find_adapter(_require_stages(stages, placement, rank)))
    adapter = next((each for each in found if each is not None), None)
    writer, _ = on_all_ranks(ranks, lambda: _create_writer(next(iter(stages.values())), adapter, merge), share=nothing)
    staging = StagingFolder(directory, on_first_rank(ranks, lambda: StagingFolder.create_token(ranks is not None)))
    try:
        on_first_rank(ranks, lambda: writer.require_same(staging.directory))
        on_all_ranks(ranks, lambda: _write(stages, placement, rank, writer, staging), error=EngineError)
        if ranks is not None or staging.is_complete(num_stages):
            on_first_rank(ranks, lambda: writer.commit(staging, num_stages), error=EngineError)
    except Exception:
        staging.close()
        raise


@contextmanager
def _ranks_of(placement: Placement, rank: int, group: Any) -> Iterator[Ranks | None]:
    """The ranks of a pipeline; None if a single process saves for all of them, one after the other."""
    num_ranks = 1 + max(max(table) for table in placement.copies)
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "save_stages() with several processes needs torch.distributed; call init_process_group() first"
            )
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank={rank}: must be from 0 to {num_ranks - 1}, the ranks of the placement")
        yield None
        return
    if dist.get_world_size(group) != num_ranks or dist.get_rank(group) != rank:
        raise ConfigError(
            f"rank={rank} of {num_ranks} ranks in the placement is process {dist.get_rank(group)} of "
            f"{dist.get_world_size(group)}: must be the same; pass group=, the process group of one pipeline"
        )
    with job_ranks(DEFAULT_TIMEOUT_S, "called save_stages()", group) as ranks:
        ranks.enter("saving the stages", busy=True)
        yield ranks


def _create_writer(stage: HFStage, adapter: Adapter | None, merge: bool) -> _ModelWriter | _AdapterWriter:
    return _ModelWriter(stage, adapter) if adapter is None or merge else _AdapterWriter(stage, adapter)


class _ModelWriter:
    """Saves the full model, with an adapter merged."""

    def __init__(self, stage: HFStage, adapter: Adapter | None) -> None:
        self._skeleton, self._config = build_skeleton(stage), config_to_save(stage)
        self._adapter = adapter.name if adapter else ""
        self._names = names_to_save(self._skeleton)

    def require_same(self, directory: Path) -> None:
        require_same_model(directory, self._config)

    def write(self, number: int, stage: HFStage, folder: Path) -> StageFiles:
        tensors = {self._saved_as(n): get for n, get in merged_tensors(stage, self._adapter).items()}
        tensors = {name: get for name, get in tensors.items() if name in self._names}
        return write_files(self._skeleton, tensors, number, folder, MAX_FILE_BYTES)

    def _saved_as(self, name: str) -> str:
        """The name under which a tensor with two names is saved."""
        return name if name in self._skeleton.ends else self._skeleton.ties.get(name, name)

    def commit(self, staging: StagingFolder, num_stages: int) -> None:
        commit_model(staging, num_stages, self._names, self._config)


def names_to_save(skeleton: ModelSkeleton) -> set[str]:
    """The tensors that are saved, by their names in the model; of tied ends the embedding."""
    names = skeleton.stored | (skeleton.tensors.keys() & {SCORE_WEIGHT})
    return names - skeleton.ties.keys() if skeleton.head == "lm" else names


def write_files(skeleton: ModelSkeleton, tensors: Tensors, number: int, folder: Path, max_bytes: int) -> StageFiles:
    """Write tensors of a model, under the names they are published with, in files of at most `max_bytes`."""
    files: dict[str, list[str]] = {}
    total = 0
    for content in _group_by_file(skeleton, tensors, max_bytes):
        file = f"{number}-{len(files)}.safetensors"
        write_tensors(content, folder / file)
        files[file] = list(content)
        total += sum(tensor.nbytes for tensor in content.values())
    return StageFiles(files, list(tensors), total)


class _AdapterWriter:
    """Saves only the adapter."""

    def __init__(self, stage: HFStage, adapter: Adapter) -> None:
        self._adapted = AdaptedSkeleton(build_skeleton(stage), adapter)
        self._config = self._adapted.saved_config(getattr(stage.full_config, "_name_or_path", ""))

    def require_same(self, directory: Path) -> None:
        require_same_adapter(directory, self._config)

    def write(self, number: int, stage: HFStage, folder: Path) -> StageFiles:
        keys = self._adapted.keys
        named = {stage.full_name(name): p for name, p in stage.named_parameters(remove_duplicate=False)}
        if trained := {name for name, p in named.items() if p.requires_grad and name not in keys}:
            reason = "not in its config" if any(map(is_adapter_name, trained)) else "not part of the adapter"
            raise ConfigError(
                f"{format_names(trained)} is trained but would not be saved: it is {reason}; "
                "save with merge=True, or freeze it"
            )
        tensors = {keys[name]: _to_cpu(p) for name, p in named.items() if name in keys}
        file = f"{number}.safetensors"
        write_tensors(tensors, folder / file)
        return StageFiles({file: list(tensors)}, [name for name in named if name in keys], 0)

    def commit(self, staging: StagingFolder, num_stages: int) -> None:
        origin = str(self._config.base_model_name_or_path or "")
        commit_adapter(staging, num_stages, set(self._adapted.keys), self._config, origin)


def _require_stages(stages: Mapping[int, Any], placement: Placement, rank: int) -> Mapping[int, HFStage]:
    if sorted(stages) != list(placement.stages_of(rank)):
        raise ConfigError(f"rank {rank} has stages {sorted(stages)}: must be {list(placement.stages_of(rank))}")
    for number, stage in stages.items():
        if not isinstance(stage, HFStage):
            raise ConfigError(
                f"stage {number} is a {type(stage).__name__}: must be a stage of hf_stages; use save_checkpoint()"
            )
        for name, tensor in stage.state_dict().items():
            if isinstance(tensor, DTensor):
                raise ConfigError(
                    f"{name} of stage {number} is sharded; use save_checkpoint(path, engine), then "
                    "`zeropipe checkpoint convert path directory` to get a model directory"
                )
    return stages


def _find_adapter(stages: Mapping[int, HFStage]) -> Adapter | None:
    """The adapter of some stages, without its values."""
    found = [adapter for stage in stages.values() if (adapter := find_adapter(stage)) is not None]
    return Adapter(found[0].config, found[0].name) if found else None


def _write(
    stages: Mapping[int, HFStage],
    placement: Placement,
    rank: int,
    writer: _ModelWriter | _AdapterWriter,
    staging: StagingFolder,
) -> None:
    """Write this rank's stages; a stage on two ranks is written by one of them."""
    staging.open()
    for number, stage in stages.items():
        if placement.rank_of(number) == rank:
            staging.add(number, writer.write(number, stage, staging.path))


def merged_tensors(stage: HFStage, adapter: str) -> Tensors:
    """A stage's tensors, with the adapter merged, by their names in a model without adapter."""
    adapted = find_adapter_layers(stage)
    inside = tuple(f"{name}." for name in adapted)
    found: Tensors = {
        stage.full_name(name): lambda t=tensor: t
        for name, tensor in stage.state_dict().items()
        if not (inside and name.startswith(inside)) and name not in stage.copied_buffers
    }
    for name, module in adapted.items():
        for leaf in wrapped_layer(module).state_dict():
            found[stage.full_name(f"{name}.{leaf}")] = lambda m=module, k=leaf: merge_layer(m, adapter).state_dict()[k]
    return found


def _group_by_file(skeleton: ModelSkeleton, tensors: Tensors, max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors under their published names, on the CPU, in groups of at most `max_bytes`."""
    content: dict[str, Tensor] = {}
    for layer in _group_by_layer(tensors):
        for name, tensor in to_published(skeleton.model, {name: get() for name, get in layer.items()}).items():
            if content and sum(t.nbytes for t in content.values()) + tensor.nbytes > max_bytes:
                yield content
                content = {}
            content[name] = _to_cpu(tensor)
    if content:
        yield content


def _group_by_layer(tensors: Tensors) -> list[Tensors]:
    """Tensors of each layer: a published tensor is made of tensors of one layer."""
    layers: dict[str, Tensors] = {}
    for name, get in tensors.items():
        layers.setdefault(layer_prefix(name), {})[name] = get
    return list(layers.values())


def layer_prefix(name: str) -> str:
    """The name of a tensor up to the index of its layer; empty for one outside of the layers."""
    return "".join(re.match(r"(.*?\.\d+\.)?", name).groups(""))  # type: ignore[union-attr]


def _to_cpu(tensor: Tensor) -> Tensor:
    """A tensor on the CPU with a storage of its own, as safetensors requires."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def build_skeleton(stage: HFStage) -> ModelSkeleton:
    """The full model of a stage, on the meta device."""
    return ModelSkeleton(build_on_meta(stage.full_config, stage.lm.dtype), stage.head)


def config_to_save(stage: HFStage) -> Any:
    """The config of the full model, with the name of the class that loads it."""
    config = copy.deepcopy(stage.full_config)
    config.architectures = [type(stage.lm).__name__]
    if stage.head == "score":
        config.architectures = [classifier_name(config)] if classifier_name(config) else None
    return config
