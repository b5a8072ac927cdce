"""load_checkpoint: the pieces that this rank needs, whatever layout wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from zeropipe.engine.checkpoint import pieces
from zeropipe.engine.checkpoint.frozen import require_same_frozen
from zeropipe.engine.checkpoint.manifest import Manifest, Saved, followed, read_manifest
from zeropipe.engine.checkpoint.names import Catalog, Described, HasTeam, Team, require_engine, tied_sets
from zeropipe.engine.checkpoint.optimizers import MASTER, Gives, Optimized, has_masters, require_optimizers
from zeropipe.engine.checkpoint.pieces import Reading
from zeropipe.engine.checkpoint.randomness import set_random_states
from zeropipe.engine.checkpoint.values import decode
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.stages.whole import listed
from zeropipe.errors import ConfigError


class Loaded(NamedTuple):
    """What `save_checkpoint` was given beside engine and optimizer."""

    step: int | None
    extra: Any


def load_checkpoint(path: str | Path, engine: HasTeam, optimizer: Any = None, *, random: bool = False) -> Loaded:
    """Load a checkpoint into the engine's stages and the optimizer, in place; all ranks call this alike.

    Mesh, schedule, placement and number of stages may be others than those that saved it. What does not fit, or is
    damaged, is refused on all ranks before anything changes. `random`: go on with the saved random numbers.
    """
    require_engine(engine)
    if engine.saving is not None:
        engine.saving.wait()
    with engine.together("loading a checkpoint") as team:
        catalog = Catalog(team)
        plan, seen = on_all_ranks(
            team.fabric,
            lambda: _Plan(followed(Path(path)), team, catalog, optimizer, random),
            share=lambda made: (made.folder, Gives(made.kind, catalog.learning)),
        )
        require_optimizers([gives for _, gives in seen], "loads")
        if len({folder for folder, _ in seen}) > 1:
            raise ConfigError(f"{path} changed while it was read, or is not the same folder on all ranks: try again")
        require_same_frozen(path, plan.manifest, team.fabric, catalog)
    with engine.together("loading a checkpoint", refusing=False):
        plan.run()
        team.fabric.exchange(None)  # nobody goes on with weights that others do not have yet
    return Loaded(plan.manifest.step, plan.extra)


class _Plan:
    """Everything that can be wrong is found when this is made."""

    def __init__(self, path: Path, team: Team, catalog: Catalog, optimizer: Any, random: bool) -> None:
        self._device, self._place = team.fabric.device, team.fabric.place
        manifest = _under_our_names(path, read_manifest(path), catalog)
        copies = has_masters(optimizer)
        self.manifest = manifest = learned_here(manifest, catalog, copies)
        self._path, self.folder = path / manifest.folder, manifest.folder
        self._weights, self._states = manifest.under("model"), manifest.under("optim")
        _check_model(path, manifest, catalog, copies)
        self._random = _random_of(manifest, team) if random else {}
        self._optimized = None if optimizer is None else Optimized(optimizer, catalog)
        self._loaded = {name: tensors for name, tensors in catalog.loaded.items() if name in self._weights}
        weights = {name: tensors[0] for name, tensors in self._loaded.items()}
        Reading(self._path, weights, self._weights, self._progress).check()
        if self._optimized is not None:
            self._optimized.check(self._states, manifest.optimizer)
            Reading(self._path, self._optimized.like(self._states), self._states, self._progress).check()
        self.extra = decode(manifest.extra, self._read(manifest.under("extra")))
        self._generators = self._read(self._random)

    @property
    def kind(self) -> str | None:
        """Of the optimizer, if there is one."""
        return None if self._optimized is None else self._optimized.kind

    def _read(self, tensors: Mapping[str, Saved]) -> dict[str, Tensor]:
        return {name: pieces.read_whole(self._path, name, saved) for name, saved in tensors.items()}

    def _progress(self, where: str) -> None:
        """A rank that reads for long gets on."""
        self._place.name = f"loading a checkpoint, {where}"

    def run(self) -> None:
        """Change the model and the optimizer."""
        self._fill(self._loaded, self._weights)
        if self._optimized is not None:
            self._fill(self._optimized.prepare(self._states, self.manifest.optimizer or {}), self._states)
        if self._generators:
            set_random_states(self._generators, self._device)

    def _fill(self, into: Mapping[str, list[Tensor]], saved: Mapping[str, Saved]) -> None:
        for number in range(max(map(len, into.values()), default=0)):  # mostly one tensor of a name
            some = {name: tensors[number] for name, tensors in into.items() if number < len(tensors)}
            Reading(self._path, some, saved, self._progress).run()


def _under_our_names(path: Path, manifest: Manifest, catalog: Catalog) -> Manifest:
    """The model must have the same ties; which name of a tied tensor counts may differ."""
    there, here = tied_sets(manifest.model["ties"]), catalog.tied_sets
    for names in sorted(there ^ here, key=sorted):
        where, not_where = ("the checkpoint", "the model") if names in there else ("the model", "the checkpoint")
        raise ConfigError(f"{' and '.join(sorted(names))} are one tensor in {where} of {path}, and not in {not_where}")
    counted = {name: catalog.counted(name) for names in there for name in names}
    prefixes = {f"{kind}.{old}": f"{kind}.{new}" for old, new in counted.items() for kind in ("model", "optim")}

    def renamed(name: str) -> str:
        own, _, key = name.rpartition(".")
        return prefixes.get(name) or (f"{prefixes[own]}.{key}" if own in prefixes else name)

    facts = manifest.optimizer
    if facts is not None:
        named = {key: {counted.get(n, n): v for n, v in facts[key].items()} for key in ("numbers", "group_of")}
        facts = facts | named
    return replace(manifest, optimizer=facts, tensors={renamed(n): t for n, t in manifest.tensors.items()})


def learned_here(manifest: Manifest, catalog: Catalog, has_masters: bool) -> Manifest:
    """Weights that are learned in float32 may lie in the model on one layout, beside one of 16 bits on another.

    So a float32 weight is its own copy for MasterWeights, and such a copy is the weight of a model in float32.
    """
    tensors = dict(manifest.tensors)
    learned = manifest.optimizer["group_of"] if has_masters and manifest.optimizer else {}
    for name, here in catalog.described.items():
        weight, master = f"model.{name}", f"optim.{name}.{MASTER}"
        if here.dtype == "float32" and master in tensors:
            tensors[weight] = tensors.pop(master)
        elif name in learned and _is_copied(here, tensors.get(weight)):
            tensors.setdefault(master, tensors[weight])
    return replace(manifest, tensors=tensors)


def _is_copied(here: Described, saved: Saved | None) -> bool:
    """Whether a weight of 16 bits is saved in float32."""
    return saved is not None and saved.dtype == "float32" and here.dtype in ("bfloat16", "float16")


def _check_model(path: Path, manifest: Manifest, catalog: Catalog, has_masters: bool) -> None:
    """Names, shapes and dtypes are those of the whole model."""
    saved = manifest.under("model")
    wanted = catalog.described
    if manifest.model.get("base") is not None:
        wanted = {name: here for name, here in wanted.items() if not here.is_frozen}
    if missing := wanted.keys() - saved.keys():
        raise ConfigError(f"{path} has no {listed(missing)}: it is a checkpoint of another model")
    if unknown := saved.keys() - wanted.keys():
        raise ConfigError(f"{path} has {listed(unknown)}, which is not in the model: it is of another one")
    for name, here in wanted.items():
        if saved[name].shape != here.shape:
            raise ConfigError(
                f"{name} is {saved[name].shape} in {path}, {here.shape} in the model: it is of another one"
            )
        if saved[name].dtype != here.dtype and not (has_masters and _is_copied(here, saved[name])):
            raise ConfigError(
                f"{name} is {saved[name].dtype} in {path}, {here.dtype} in the model: make the model with that dtype "
                "(hf_stages(dtype=...), or model.dtype of a training file)"
            )


def _random_of(manifest: Manifest, team: Team) -> dict[str, Saved]:
    here, there = dict(team.fabric.layout.sizes), manifest.written_by["mesh"]
    states = {name.partition(".") for name in manifest.under("random")}
    if not states:
        raise ConfigError("the checkpoint holds no random states: save it with random=True, or load it without")
    if here != there:
        raise ConfigError(f"random states are of the mesh {there}, this one is {here}: load with random=False")
    return manifest.under(f"random.{team.fabric.rank}")
