"""Writes stages back as a Hugging Face model directory, or their adapter as one of peft's."""

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

from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.engine.comm.collective import nothing, on_all_ranks, on_first_rank
from zeropipe.engine.comm.ranks import DEFAULT_TIMEOUT_S, Ranks, job_ranks
from zeropipe.engine.stages.adapters import Adapter, Injected, adapter_in, is_adapters, merged, wrapped, wrappers
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.models import meta_model
from zeropipe.engine.stages.switch import (
    Part,
    Workshop,
    require_same_adapter,
    require_same_model,
    save_tensors,
    switch_to_adapter,
    switch_to_model,
)
from zeropipe.engine.stages.whole import SCORE, Whole, listed
from zeropipe.engine.transformers_private import classifier_name, published
from zeropipe.errors import ConfigError, EngineError, short

_MOST_BYTES = 5_000_000_000  # of a file, and of what is copied to the CPU at once: a stage may be larger
Tensors = dict[str, Callable[[], Tensor]]  # made one by one


def save_stages(
    stages: Mapping[int, HFStage],
    placement: Placement | Schedule,
    rank: int,
    directory: str | Path,
    *,
    group: Any = None,
    merge: bool = False,
) -> None:
    """Write the model of which this rank has some stages: `from_pretrained(directory)` loads it whole.

    `placement` is that of the schedule, or the schedule itself.
    Of stages with a LoRA adapter the adapter alone is written, for `PeftModel.from_pretrained(model, directory)`; with
    `merge` the whole model, its adapter added to the weights (in the files, not in the stages).

    All ranks of a pipeline call this alike; `group` is their process group (all processes if not given), `directory`
    one that they all see. It holds the old model until the last moment and then the new one, whatever happens.
    Without torch.distributed a single process saves for its ranks one after the other.
    """
    if isinstance(placement, Schedule):
        placement = placement.placement
    if not isinstance(placement, Placement):
        raise ConfigError(f"placement={short(placement)}: the schedule, or its placement, is needed")
    with _ranks_of(placement, rank, group) as ranks:
        _save(ranks, stages, placement, rank, Path(directory), merge)


def _save(
    ranks: Ranks | None, stages: Mapping[int, HFStage], placement: Placement, rank: int, directory: Path, merge: bool
) -> None:
    num_stages = len(placement.copies[0])
    _, found = on_all_ranks(ranks, lambda: _adapter_of(_checked(stages, placement, rank)))
    adapter = next((each for each in found if each is not None), None)
    form, _ = on_all_ranks(ranks, lambda: _form(next(iter(stages.values())), adapter, merge), share=nothing)
    workshop = Workshop(directory, on_first_rank(ranks, lambda: Workshop.token(ranks is not None)))
    try:
        on_first_rank(ranks, lambda: form.require(workshop.directory))
        on_all_ranks(ranks, lambda: _write(stages, placement, rank, form, workshop), error=EngineError)
        if ranks is not None or workshop.is_complete(num_stages):
            on_first_rank(ranks, lambda: form.switch(workshop, num_stages), error=EngineError)
    except Exception:
        workshop.close()
        raise


@contextmanager
def _ranks_of(placement: Placement, rank: int, group: Any) -> Iterator[Ranks | None]:
    """The ranks of a pipeline; None where a single process is called for one after the other."""
    num_ranks = 1 + max(max(table) for table in placement.copies)
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("several processes must agree on this: call init_process_group() first")
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"rank={rank}: the placement has ranks 0 to {num_ranks - 1}")
        yield None
        return
    if dist.get_world_size(group) != num_ranks or dist.get_rank(group) != rank:
        raise ConfigError(
            f"rank={rank} of {num_ranks} in the placement is process {dist.get_rank(group)} of "
            f"{dist.get_world_size(group)}: give group=, the process group of one pipeline"
        )
    with job_ranks(DEFAULT_TIMEOUT_S, "called save_stages()", group) as ranks:
        ranks.enter("saving the stages", busy=True)
        yield ranks


def _form(stage: HFStage, adapter: Adapter | None, merge: bool) -> _Model | _Adapter:
    """What is written, as any stage knows."""
    return _Model(stage, adapter) if adapter is None or merge else _Adapter(stage, adapter)


class _Model:
    """A whole model; an adapter in it is merged."""

    def __init__(self, stage: HFStage, adapter: Adapter | None) -> None:
        self._whole, self._config = whole_of(stage), config_of(stage)
        self._adapter = adapter.name if adapter else ""
        self._names = names_saved(self._whole)

    def require(self, directory: Path) -> None:
        require_same_model(directory, self._config)

    def write(self, number: int, stage: HFStage, folder: Path) -> Part:
        tensors = {self._saved_as(n): get for n, get in merged_tensors(stage, self._adapter).items()}
        tensors = {name: get for name, get in tensors.items() if name in self._names}
        return write_files(self._whole, tensors, number, folder, _MOST_BYTES)

    def _saved_as(self, name: str) -> str:
        """Of two names of one tensor in a stage the one that is saved."""
        return name if name in self._whole.ends else self._whole.ties.get(name, name)

    def switch(self, workshop: Workshop, num_stages: int) -> None:
        switch_to_model(workshop, num_stages, self._names, self._config)


def names_saved(whole: Whole) -> set[str]:
    """The tensors that are saved, by their names in memory; of a tied weight the embedding, not the head."""
    names = whole.stored | (whole.tensors.keys() & {SCORE})
    return names - whole.ties.keys() if whole.head == "lm" else names


def write_files(whole: Whole, tensors: Tensors, number: int, folder: Path, most_bytes: int) -> Part:
    """Write tensors of a model, under the names they are published with, in files of `most_bytes` at most."""
    files: dict[str, list[str]] = {}
    total = 0
    for content in _in_files(whole, tensors, most_bytes):
        file = f"{number}-{len(files)}.safetensors"
        save_tensors(content, folder / file)
        files[file] = list(content)
        total += sum(tensor.nbytes for tensor in content.values())
    return Part(files, list(tensors), total)


class _Adapter:
    """An adapter alone."""

    def __init__(self, stage: HFStage, adapter: Adapter) -> None:
        self._injected = Injected(whole_of(stage), adapter)
        self._config = self._injected.saved_config(getattr(stage.whole_config, "_name_or_path", ""))

    def require(self, directory: Path) -> None:
        require_same_adapter(directory, self._config)

    def write(self, number: int, stage: HFStage, folder: Path) -> Part:
        keys = self._injected.keys
        named = {stage.full_name(name): p for name, p in stage.named_parameters(remove_duplicate=False)}
        if trained := {name for name, p in named.items() if p.requires_grad and name not in keys}:
            reason = "its config does not name it" if any(map(is_adapters, trained)) else "it is no part of the adapter"
            raise ConfigError(
                f"{listed(trained)} is trained but would not be saved: {reason}; save with merge=True, or freeze it"
            )
        tensors = {keys[name]: _alone(p) for name, p in named.items() if name in keys}
        file = f"{number}.safetensors"
        save_tensors(tensors, folder / file)
        return Part({file: list(tensors)}, [name for name in named if name in keys], 0)

    def switch(self, workshop: Workshop, num_stages: int) -> None:
        origin = str(self._config.base_model_name_or_path or "")
        switch_to_adapter(workshop, num_stages, set(self._injected.keys), self._config, origin)


def _checked(stages: Mapping[int, Any], placement: Placement, rank: int) -> Mapping[int, HFStage]:
    if sorted(stages) != list(placement.stages_of(rank)):
        raise ConfigError(f"rank {rank} has stages {sorted(stages)}: it should have {placement.stages_of(rank)}")
    for number, stage in stages.items():
        if not isinstance(stage, HFStage):
            raise ConfigError(f"stage {number} is a {type(stage).__name__}: only stages of hf_stages can be saved so")
        for name, tensor in stage.state_dict().items():
            if hasattr(tensor, "full_tensor"):
                raise ConfigError(
                    f"{name} of stage {number} is sharded: save_checkpoint(path, engine), and then "
                    "`zeropipe checkpoint convert path directory` makes a model directory of it"
                )
    return stages


def _adapter_of(stages: Mapping[int, HFStage]) -> Adapter | None:
    """The adapter that some stages have, without its values."""
    found = [adapter for stage in stages.values() if (adapter := adapter_in(stage)) is not None]
    return Adapter(found[0].config, found[0].name) if found else None


def _write(
    stages: Mapping[int, HFStage], placement: Placement, rank: int, form: _Model | _Adapter, workshop: Workshop
) -> None:
    """This rank's part; a stage that two ranks hold is written by one of them."""
    workshop.open()
    for number, stage in stages.items():
        if placement.rank_of(number) == rank:
            workshop.add(number, form.write(number, stage, workshop.path))


def merged_tensors(stage: HFStage, adapter: str) -> Tensors:
    """A stage's tensors by their names in a model without adapter."""
    around = wrappers(stage)
    inside = tuple(f"{name}." for name in around)
    found: Tensors = {
        stage.full_name(name): lambda t=tensor: t
        for name, tensor in stage.state_dict().items()
        if not (inside and name.startswith(inside)) and name not in stage.copied_buffers
    }
    for name, module in around.items():
        for leaf in wrapped(module).state_dict():
            found[stage.full_name(f"{name}.{leaf}")] = lambda m=module, k=leaf: merged(m, adapter).state_dict()[k]
    return found


def _in_files(whole: Whole, tensors: Tensors, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors as they are published, on the CPU, as many at once as go into a file."""
    content: dict[str, Tensor] = {}
    for layer in by_layer(tensors):
        for name, tensor in published(whole.model, {name: get() for name, get in layer.items()}).items():
            if content and sum(t.nbytes for t in content.values()) + tensor.nbytes > most_bytes:
                yield content
                content = {}
            content[name] = _alone(tensor)
    if content:
        yield content


def by_layer(tensors: Tensors) -> list[Tensors]:
    """A published tensor is made of tensors of one layer."""
    layers: dict[str, Tensors] = {}
    for name, get in tensors.items():
        layers.setdefault(layer_of(name), {})[name] = get
    return list(layers.values())


def layer_of(name: str) -> str:
    """The part of a tensor's name that says which layer it is of; nothing for one outside of the layers."""
    return "".join(re.match(r"(.*?\.\d+\.)?", name).groups(""))  # type: ignore[union-attr]


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU, with a memory that it shares with no other tensor: safetensors wants that."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def whole_of(stage: HFStage) -> Whole:
    """The model that a stage is a part of, without memory."""
    return Whole(meta_model(stage.whole_config, stage.lm.dtype), stage.head)


def config_of(stage: HFStage) -> Any:
    """The config to save: it names the class that loads it."""
    config = copy.deepcopy(stage.whole_config)
    config.architectures = [type(stage.lm).__name__]
    if stage.head == "score":
        config.architectures = [classifier_name(config)] if classifier_name(config) else None
    return config
