"""load_checkpoint: the pieces that this rank needs, whatever layout wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from zeropipe.engine.checkpoint import pieces
from zeropipe.engine.checkpoint.manifest import Manifest, Saved, read_manifest
from zeropipe.engine.checkpoint.names import Catalog, HasTeam, Team, tied_sets
from zeropipe.engine.checkpoint.optimizers import Optimized
from zeropipe.engine.checkpoint.pieces import Reading
from zeropipe.engine.checkpoint.randomness import set_random_states
from zeropipe.engine.checkpoint.values import decode
from zeropipe.engine.setup import agree
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
    if engine.saving is not None:
        engine.saving.wait()
    with engine.together("loading a checkpoint") as team:
        catalog = Catalog(team)
        plans: list[_Plan] = []

        def look() -> str:
            plans.append(_Plan(Path(path), team, catalog, optimizer, random))
            return plans[0].folder

        folders = agree(team.fabric, look)
        (plan,) = plans
        if len(set(folders)) > 1:
            raise ConfigError(f"{path} changed while it was read, or is not the same folder on all ranks: try again")
    with engine.together("loading a checkpoint", refusing=False):
        plan.run()
        team.fabric.exchange(None)  # nobody goes on with weights that others do not have yet
    return Loaded(plan.manifest.step, plan.extra)


class _Plan:
    """Everything that can be wrong is found when this is made."""

    def __init__(self, path: Path, team: Team, catalog: Catalog, optimizer: Any, random: bool) -> None:
        self._catalog, self._device, self._place = catalog, team.fabric.device, team.fabric.place
        self.manifest = manifest = _under_our_names(path, read_manifest(path), catalog)
        self._path, self.folder = path / manifest.folder, manifest.folder
        self._weights, self._states = manifest.under("model"), manifest.under("optim")
        _check_model(path, self._weights, catalog)
        self._random = _random_of(manifest, team) if random else {}
        self._optimized = None if optimizer is None else Optimized(optimizer, catalog)
        weights = {name: tensors[0] for name, tensors in catalog.loaded.items()}
        Reading(self._path, weights, self._weights, self._progress).check()
        if self._optimized is not None:
            self._optimized.check(self._states, manifest.optimizer)
            Reading(self._path, self._optimized.like(self._states), self._states, self._progress).check()
        self.extra = decode(manifest.extra, self._read(manifest.under("extra")))
        self._generators = self._read(self._random)

    def _read(self, tensors: Mapping[str, Saved]) -> dict[str, Tensor]:
        return {name: pieces.read_whole(self._path, name, saved) for name, saved in tensors.items()}

    def _progress(self, where: str) -> None:
        """A rank that reads for long gets on."""
        self._place.name = f"loading a checkpoint, {where}"

    def run(self) -> None:
        """Change the model and the optimizer."""
        self._fill(self._catalog.loaded, self._weights)
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


def _check_model(path: Path, saved: Mapping[str, Saved], catalog: Catalog) -> None:
    """Names, shapes and dtypes are those of the whole model."""
    if missing := catalog.described.keys() - saved.keys():
        raise ConfigError(f"{path} has no {listed(missing)}: it is a checkpoint of another model")
    if unknown := saved.keys() - catalog.described.keys():
        raise ConfigError(f"{path} has {listed(unknown)}, which is not in the model: it is of another one")
    for name, wanted in catalog.described.items():
        if saved[name].shape != wanted.shape:
            raise ConfigError(
                f"{name} is {saved[name].shape} in {path}, {wanted.shape} in the model: it is of another one"
            )
        if saved[name].dtype != wanted.dtype:
            raise ConfigError(
                f"{name} is {saved[name].dtype} in {path}, {wanted.dtype} in the model: give hf_stages(dtype=...)"
            )


def _random_of(manifest: Manifest, team: Team) -> dict[str, Saved]:
    here, there = dict(team.fabric.layout.sizes), manifest.written_by["mesh"]
    states = {name.partition(".") for name in manifest.under("random")}
    if not states:
        raise ConfigError("the checkpoint holds no random states: save it with random=True, or load it without")
    if here != there:
        raise ConfigError(f"random states are of the mesh {there}, this one is {here}: load with random=False")
    return manifest.under(f"random.{team.fabric.rank}")
