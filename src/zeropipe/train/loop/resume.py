"""Going on from a checkpoint: which one, and whether it belongs to this run's model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeropipe.engine.checkpoint.load import Loaded, load_checkpoint
from zeropipe.engine.checkpoint.manifest import Manifest, read_manifest
from zeropipe.engine.checkpoint.save import written_by
from zeropipe.engine.engine import Engine
from zeropipe.engine.stages.chance import is_chance
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.save import config_of
from zeropipe.errors import ConfigError, short
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.kept import start_from
from zeropipe.train.loop.metrics import tell
from zeropipe.train.loop.setup import chances_of

# fields of a config that do not change what a model computes
HARMLESS = {"dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path", "use_cache"}


def resumed(config: RunConfig, engine: Engine, optimizer: Any, is_first: bool) -> tuple[Path, Loaded] | None:
    """Load the checkpoint that the first rank chooses, if there is one; all ranks call this alike."""
    with engine.together("looking for a checkpoint") as team:
        (chosen, fault), *_ = team.fabric.exchange(_chosen(config, engine) if is_first else (None, None))
        here = written_by(team.schedule, team.fabric.layout)
    if fault is not None:
        raise fault
    if chosen is None:
        return None
    try:
        loaded = load_checkpoint(chosen, engine, optimizer)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_way_out(config)}") from None
    if is_first:
        tell(f"goes on after step {loaded.step} of {chosen}")
        for line in _remarks(config, read_manifest(chosen), here):
            tell(line)
    return chosen, loaded


def _chosen(config: RunConfig, engine: Engine) -> tuple[Path | None, Exception | None]:
    try:
        path = start_from(config)
        if path is not None:
            _require_same_model(config, path, engine)
        return path, None
    except Exception as error:  # all ranks raise it
        return None, error


def _require_same_model(config: RunConfig, path: Path, engine: Engine) -> None:
    """ConfigError for a model of the same shapes that computes something else."""
    stage = next((stage for stage in engine.stages.values() if isinstance(stage, HFStage)), None)
    before = read_manifest(path).model["config"]
    if stage is None or before is None:
        return
    for name, old, new in _differences(before, json.loads(config_of(stage).to_json_string())):
        raise ConfigError(
            f"{path} is of a model with {name}={short(old)}, model.path={config.model.path!r} has {short(new)}: give "
            f"the model that it was trained from; {_way_out(config)}"
        )


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Fields that both have, with other values, the type first. A missing one has a default that none knows here."""
    for name in sorted(before.keys() & now.keys() - HARMLESS, key=lambda name: (name != "model_type", name)):
        old, new = before[name], now[name]
        if isinstance(old, dict) and isinstance(new, dict):
            yield from ((f"{name}.{inner}", *values) for inner, *values in _differences(old, new))
        elif old != new and not is_chance(name, old):
            yield name, old, new


def _way_out(config: RunConfig) -> str:
    if config.checkpoint.resume != "auto":
        return "give another checkpoint.resume"
    return f"train.output={config.train.output!r} goes on from it: give another one to begin anew"


def _remarks(config: RunConfig, manifest: Manifest, here: dict[str, Any]) -> Iterator[str]:
    """What is not as it would have been without the stop."""
    origin, path = str(manifest.model.get("origin") or ""), config.model.path
    if config.model.weights == "load" and config.lora is None and origin and Path(origin).name != Path(path).name:
        yield f"the weights are the checkpoint's, which began with {origin}; those of model.path={path!r} are not read"
    # on the layout of the checkpoint a run draws the random numbers that it would have drawn, elsewhere not
    if any(manifest.written_by.get(name) != here[name] for name in ("mesh", "schedule", "num_stages")):
        for name, value in chances_of(config).items():
            yield f"{name}={value:g} draws other random numbers on this layout than on the checkpoint's"
