"""Writes stages back as a Hugging Face model directory."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zeropipe.core.placement import Placement
from zeropipe.engine.stages.hf import HFStage, meta_model
from zeropipe.engine.stages.switch import Part, Workshop, require_same_model, switch_to_model
from zeropipe.engine.stages.together import Together
from zeropipe.engine.stages.whole import SCORE, Whole
from zeropipe.engine.transformers_private import classifier_name, published
from zeropipe.errors import ConfigError

_MOST_BYTES = 5_000_000_000  # of a file, and of what is copied to the CPU at once: a stage may be larger


def save_stages(
    stages: Mapping[int, HFStage], placement: Placement, rank: int, directory: str | Path, *, group: Any = None
) -> None:
    """Write the model of which this rank has some stages: `from_pretrained(directory)` loads it whole.

    All ranks of a pipeline call this alike; `group` is their process group (all processes if not given), `directory`
    one that they all see. It holds the old model until the last moment and then the new one, whatever happens.
    Without torch.distributed a single process saves for its ranks one after the other.
    """
    ranks, num_stages = Together(placement, rank, group), len(placement.copies[0])
    ranks.each(lambda: _require_stages(stages, placement, rank))
    one = next(iter(stages.values()))
    config, whole = _config(one), Whole(meta_model(one.whole_config, one.lm.dtype), one.head)
    token = ranks.first(lambda: Workshop.token(ranks.is_distributed))
    workshop = Workshop(Path(directory), token)
    try:
        ranks.first(lambda: require_same_model(workshop.directory, config))
        ranks.each(lambda: _write(stages, placement, rank, whole, workshop))
        if ranks.is_distributed or workshop.is_complete(num_stages):
            ranks.first(lambda: switch_to_model(workshop, num_stages, _names(whole), config))
    except Exception:
        workshop.close()
        raise


def _require_stages(stages: Mapping[int, Any], placement: Placement, rank: int) -> None:
    if sorted(stages) != list(placement.stages_of(rank)):
        raise ConfigError(f"rank {rank} has stages {sorted(stages)}: it should have {placement.stages_of(rank)}")
    for number, stage in stages.items():
        if not isinstance(stage, HFStage):
            raise ConfigError(f"stage {number} is a {type(stage).__name__}: only stages of hf_stages can be saved so")
        for name, tensor in stage.state_dict().items():
            if hasattr(tensor, "full_tensor"):
                raise ConfigError(f"{name} of stage {number} is sharded: gather it before it is saved")


def _write(stages: Mapping[int, HFStage], placement: Placement, rank: int, whole: Whole, workshop: Workshop) -> None:
    """This rank's part; a stage that two ranks hold is written by one of them."""
    workshop.open()
    for number, stage in stages.items():
        if placement.rank_of(number) == rank:
            workshop.add(number, _write_stage(number, stage, whole, workshop.path))


def _write_stage(number: int, stage: HFStage, whole: Whole, folder: Path) -> Part:
    tensors = {stage.full_name(name): tensor for name, tensor in stage.state_dict().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name in _names(whole)}
    files: dict[str, list[str]] = {}
    total = 0
    for content in _in_files(whole, tensors):
        file = f"{number}-{len(files)}.safetensors"
        _save(content, folder / file)
        files[file] = list(content)
        total += sum(tensor.nbytes for tensor in content.values())
    return Part(files, list(tensors), total)


def _in_files(whole: Whole, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors as they are published, on the CPU, as many at once as go into a file."""
    content: dict[str, Tensor] = {}
    for layer in _by_layer(tensors):
        for name, tensor in published(whole.model, layer).items():
            if content and sum(t.nbytes for t in content.values()) + tensor.nbytes > _MOST_BYTES:
                yield content
                content = {}
            content[name] = _alone(tensor)
    if content:
        yield content


def _by_layer(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """A published tensor is made of tensors of one layer."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layers.setdefault("".join(re.match(r"(.*?\.\d+\.)?", name).groups("")), {})[name] = tensor
    return list(layers.values())


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU, with a memory that it shares with no other tensor: safetensors wants that."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file and have it on the disk before anything refers to it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _names(whole: Whole) -> set[str]:
    """What is saved of a model: a tied weight once, as its embedding."""
    return (whole.stored | (whole.tensors.keys() & {SCORE})) - set((whole.tie or ())[:1])


def _config(stage: HFStage) -> Any:
    """The config to save: it names the class that loads it."""
    config = copy.deepcopy(stage.whole_config)
    config.architectures = [type(stage.lm).__name__]
    if stage.head == "score":
        config.num_labels = 1
        config.architectures = [classifier_name(config)] if classifier_name(config) else None
    return config
