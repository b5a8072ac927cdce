"""load_checkpoint: check a checkpoint on all ranks, then read the shards that this rank needs, of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from zeropipe.engine.checkpoint.catalog import Catalog, EngineLike, EngineView, TensorInfo, group_ties, require_engine
from zeropipe.engine.checkpoint.fingerprint import require_same_frozen
from zeropipe.engine.checkpoint.manifest import Manifest, TensorEntry, decode, read_manifest, resolve_pointer
from zeropipe.engine.checkpoint.optimizers import (
    MASTER,
    NamedOptimizer,
    OptimizerUse,
    free_masters,
    has_master_weights,
    require_optimizers,
)
from zeropipe.engine.checkpoint.random_states import set_random_states
from zeropipe.engine.checkpoint.reader import ShardReader, read_full_tensor
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.stages.skeleton import format_names
from zeropipe.errors import ConfigError


class LoadResult(NamedTuple):
    """The `step` and `extra` that were passed to `save_checkpoint`."""

    step: int | None
    extra: Any


def load_checkpoint(path: str | Path, engine: EngineLike, optimizer: Any = None, *, random: bool = False) -> LoadResult:
    """Load a checkpoint into the engine's stages and the optimizer, in place; all ranks call this.

    Mesh, schedule, placement and number of stages may differ from those that saved it. A checkpoint that does not fit,
    or is damaged, is refused on all ranks before anything changes. `random`: restore the random-number generators.
    """
    require_engine(engine)
    if engine.saving is not None:
        engine.saving.wait()
    with engine.together("loading a checkpoint") as view:
        catalog = Catalog(view)
        loader, ranks = on_all_ranks(
            view.comm,
            lambda: _Loader(resolve_pointer(Path(path)), view, catalog, optimizer, random),
            share=lambda loader: (loader.manifest.folder, OptimizerUse(loader.optimizer_kind, catalog.trained_name)),
        )
        require_optimizers([use for _, use in ranks], "loads")
        if len({folder for folder, _ in ranks}) > 1:
            raise ConfigError(f"{path} changed while it was read, or is not the same folder on all ranks; try again")
        require_same_frozen(path, loader.manifest, view.comm, catalog)
    with engine.together("loading a checkpoint", refusing=False):
        loader.run()
        view.comm.exchange(None)  # no rank uses weights that others have not loaded yet
        free_masters(optimizer)
    return LoadResult(loader.manifest.step, loader.extra)


class _Loader:
    """A checkpoint that fits this rank: everything is checked when it is created, before `run` changes anything."""

    def __init__(self, path: Path, view: EngineView, catalog: Catalog, optimizer: Any, random: bool) -> None:
        self._device, self._status = view.comm.device, view.comm.status
        has_masters = has_master_weights(optimizer)
        manifest = _rename_ties(path, read_manifest(path), catalog)
        self.manifest = manifest = _convert_masters(manifest, catalog, has_masters)
        self._folder = path / manifest.folder
        self._weights, self._states = manifest.select("model"), manifest.select("optim")
        _check_model(path, manifest, catalog, has_masters)
        random_states = _select_random_states(manifest, view) if random else {}
        self._optimizer = None if optimizer is None else NamedOptimizer(optimizer, catalog)
        self._targets = {name: tensors for name, tensors in catalog.loadable.items() if name in self._weights}
        self._create_reader({name: tensors[0] for name, tensors in self._targets.items()}, self._weights).verify()
        if self._optimizer is not None:
            self._optimizer.check(self._states, manifest.optimizer)
            self._create_reader(self._optimizer.create_templates(self._states), self._states).verify()
        self.extra = decode(manifest.extra, self._read_full(manifest.select("extra")))
        self._random_states = self._read_full(random_states)

    @property
    def optimizer_kind(self) -> str | None:
        return None if self._optimizer is None else self._optimizer.kind

    def run(self) -> None:
        """Change the model, the optimizer and the random-number generators."""
        self._fill(self._targets, self._weights)
        if self._optimizer is not None:
            self._fill(self._optimizer.reset(self._states, self.manifest.optimizer or {}), self._states)
        if self._random_states:
            set_random_states(self._random_states, self._device)

    def _fill(self, targets: Mapping[str, list[Tensor]], saved: Mapping[str, TensorEntry]) -> None:
        for number in range(max(map(len, targets.values()), default=0)):  # almost always one tensor per name
            self._create_reader(
                {n: tensors[number] for n, tensors in targets.items() if number < len(tensors)}, saved
            ).read()

    def _create_reader(self, targets: Mapping[str, Tensor], saved: Mapping[str, TensorEntry]) -> ShardReader:
        return ShardReader(self._folder, targets, saved, self._report_progress)

    def _read_full(self, tensors: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
        return {name: read_full_tensor(self._folder, name, saved) for name, saved in tensors.items()}

    def _report_progress(self, activity: str) -> None:
        """Show the watchdog that a rank that reads for long makes progress."""
        self._status.phase = f"loading a checkpoint, {activity}"


def _rename_ties(path: Path, manifest: Manifest, catalog: Catalog) -> Manifest:
    """The manifest with the saved names of this model; ConfigError if it has other ties."""
    in_checkpoint, in_model = group_ties(manifest.model["ties"]), catalog.tied_sets
    for names in sorted(in_checkpoint ^ in_model, key=sorted):
        one, other = ("checkpoint", "model") if names in in_checkpoint else ("model", "checkpoint")
        raise ConfigError(
            f"{' and '.join(sorted(names))} are one tensor in the {one} of {path}, and not in the {other}"
        )
    saved_names = {name: catalog.saved_name(name) for names in in_checkpoint for name in names}
    prefixes = {f"{kind}.{old}": f"{kind}.{new}" for old, new in saved_names.items() for kind in ("model", "optim")}

    def rename(name: str) -> str:
        parameter, _, key = name.rpartition(".")
        return prefixes.get(name) or (f"{prefixes[parameter]}.{key}" if parameter in prefixes else name)

    facts = manifest.optimizer
    if facts is not None:
        facts = facts | {k: {saved_names.get(n, n): v for n, v in facts[k].items()} for k in ("numbers", "group_of")}
    return replace(manifest, optimizer=facts, tensors={rename(n): t for n, t in manifest.tensors.items()})


def _convert_masters(manifest: Manifest, catalog: Catalog, has_masters: bool) -> Manifest:
    """The manifest with float32 weights where this layout has them: in the model, or beside it in MasterWeights.

    A float32 weight is its own float32 copy for MasterWeights, and such a copy is the weight of a float32 model.
    """
    tensors = dict(manifest.tensors)
    trained = manifest.optimizer["group_of"] if has_masters and manifest.optimizer else {}
    for name, info in catalog.infos.items():
        weight, master = f"model.{name}", f"optim.{name}.{MASTER}"
        if info.dtype == "float32" and master in tensors:
            tensors[weight] = tensors.pop(master)
        elif name in trained and _is_saved_in_float32(info, tensors.get(weight)):
            tensors.setdefault(master, tensors[weight])
    return replace(manifest, tensors=tensors)


def _is_saved_in_float32(info: TensorInfo, saved: TensorEntry | None) -> bool:
    """Whether a 16-bit weight is saved in float32."""
    return saved is not None and saved.dtype == "float32" and info.dtype in ("bfloat16", "float16")


def _check_model(path: Path, manifest: Manifest, catalog: Catalog, has_masters: bool) -> None:
    """ConfigError unless the checkpoint has the names, shapes and dtypes of the full model."""
    saved, infos = manifest.select("model"), catalog.infos
    if manifest.model.get("base") is not None:
        infos = {name: info for name, info in infos.items() if not info.is_frozen}
    if missing := infos.keys() - saved.keys():
        raise ConfigError(f"{path} has no {format_names(missing)}: it is a checkpoint of another model")
    if unknown := saved.keys() - infos.keys():
        raise ConfigError(f"{path} has {format_names(unknown)}, which is not in the model: it is of another one")
    for name, info in infos.items():
        if saved[name].shape != info.shape:
            raise ConfigError(
                f"{name} is {saved[name].shape} in {path}, {info.shape} in the model: it is of another one"
            )
        if saved[name].dtype != info.dtype and not (has_masters and _is_saved_in_float32(info, saved[name])):
            raise ConfigError(
                f"{name} is {saved[name].dtype} in {path}, {info.dtype} in the model; create the model with that dtype "
                "(hf_stages(dtype=...), or model.dtype of a training file)"
            )


def _select_random_states(manifest: Manifest, view: EngineView) -> dict[str, TensorEntry]:
    mesh, saved_mesh = dict(view.comm.layout.sizes), manifest.written_by["mesh"]
    if not manifest.select("random"):
        raise ConfigError("the checkpoint has no random states; save it with random=True, or load it without")
    if mesh != saved_mesh:
        raise ConfigError(f"the random states are of the mesh {saved_mesh}, this one is {mesh}; load with random=False")
    return manifest.select(f"random.{view.comm.rank}")
