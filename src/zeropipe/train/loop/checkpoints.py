"""Checkpoints of a run: saved, pruned, found and resumed from.

    checkpoints/step-000123/    a checkpoint, as docs/checkpoints.md describes it
    checkpoints/latest          the name of the newest complete one
    checkpoints/best            the name of the one with the best evaluation

All ranks write their shards of a checkpoint. The first rank manages the folder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zeropipe.core.files import write_whole
from zeropipe.engine.checkpoint.load import LoadResult, load_checkpoint
from zeropipe.engine.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest, resolve_pointer
from zeropipe.engine.checkpoint.save import SaveHandle, describe_layout, require_savable, save_checkpoint
from zeropipe.engine.checkpoint.writer import FolderError
from zeropipe.engine.comm.collective import on_first_rank
from zeropipe.engine.engine import Engine
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.save import config_to_save
from zeropipe.engine.stages.small_model import is_dropout_field
from zeropipe.errors import ConfigError, EngineError, short
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.metrics import log
from zeropipe.train.loop.setup import random_fields

_NAME = re.compile(r"step-(\d{6,})")
_NOT_COMPARED = {"checkpoint.resume"}  # which checkpoint, not what is trained
_MAX_SHOWN = 20
# fields of a model's config that do not change what it computes
HARMLESS_FIELDS = {"dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path", "use_cache"}


class CheckpointFolder:
    """The folder of a run's checkpoints, on one rank."""

    def __init__(self, config: RunConfig, engine: Engine, is_first: bool) -> None:
        self._table, self._engine, self._is_first = config.checkpoint, engine, is_first
        self._saves_frozen = config.lora is None  # an adapter's base model is not saved
        self.folder = _checkpoint_folder(config)
        self._saving: SaveHandle | None = None
        self._is_best = False
        self.step: int | None = None  # of the newest checkpoint
        self.path: Path | None = None  # of the newest checkpoint

    def require_savable(self, optimizer: Any) -> None:
        """Raise ConfigError if a checkpoint cannot hold the state of this run; all ranks call this."""
        require_savable(self._engine, optimizer, frozen=self._saves_frozen)

    def save(self, step: int, optimizer: Any, extra: Any, *, is_best: bool, is_last: bool) -> None:
        """Save a checkpoint; all ranks call this. The last one of a run must succeed, and is waited for."""
        self.finish()
        path = self.folder / f"step-{step:06d}"
        try:
            self._saving = save_checkpoint(
                path, self._engine, optimizer, step=step, extra=extra, frozen=self._saves_frozen,
                asynchronous=self._table.asynchronous,
            )  # fmt: skip
        except (FolderError, EngineError) as error:  # may be temporary; any other ConfigError is not, and ends the run
            self._handle_failure(error, is_last)
            return
        self.step, self.path, self._is_best = step, path, is_best
        if is_last or not self._table.asynchronous:
            self.finish(is_last)

    def poll(self) -> None:
        """Finish the checkpoint that is being written, if all ranks are done. To be called between steps."""
        if self._saving is not None and self._saving.done:
            self.finish()

    def finish(self, is_last: bool = False) -> None:
        """Wait for the checkpoint that is being written, then remove older ones."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.wait()
        except EngineError as error:
            self._handle_failure(error, is_last)
            return
        if self._is_first:
            try:
                self._update_folder(saving.path.name)
            except (ConfigError, OSError) as error:  # the checkpoint is complete, and is found without `latest`
                log(f"warning: {error}")

    def _update_folder(self, name: str) -> None:
        write_pointer(self.folder, "latest", name)
        if self._is_best:
            write_pointer(self.folder, "best", name)
        prune(self.folder, self._table.keep, read_pointer(self.folder, "best") if self._table.best else None)

    def _handle_failure(self, error: Exception, is_last: bool) -> None:
        """Log the error and continue, unless it is the last checkpoint of the run."""
        self.step = None
        if is_last:
            newest = _find_newest(self.folder)
            rest = f"the newest complete one is {newest}" if newest else "there is none before it"
            raise EngineError(f"{error}; {rest}; fix that and start again")
        if self._is_first:
            log(f"warning: {error}; training continues")


def _checkpoint_folder(config: RunConfig) -> Path:
    return Path(config.train.output) / "checkpoints"


def write_pointer(folder: Path, name: str, checkpoint: str) -> None:
    """Write `latest` or `best`."""
    if read_pointer(folder, name) != checkpoint:
        write_whole(folder / name, checkpoint + "\n")


def read_pointer(folder: Path, name: str) -> str | None:
    """The checkpoint that `latest` or `best` names."""
    try:
        return (folder / name).read_text().strip()
    except OSError:
        return None


def list_steps(folder: Path) -> dict[int, Path]:
    """The steps and folders of checkpoints, complete or not, the newest first."""
    found = {int(match[1]): path for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def is_complete(path: Path) -> bool:
    """Whether all files of a checkpoint are there, with their sizes."""
    try:
        read_manifest(path)
    except ConfigError:
        return False
    return True


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Remove all but the newest `keep` complete checkpoints and the best one, and what killed saves have left.

    A newer one that is damaged, or cannot be read at the moment, stays.
    """
    num_complete = 0
    for path in list_steps(folder).values():
        is_old = num_complete >= keep and path.name != best
        if is_old or not (path / MANIFEST_FILE).exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            num_complete += is_complete(path)


def _find_newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder."""
    return next((path for path in list_steps(folder).values() if is_complete(path)), None)


def resume(config: RunConfig, engine: Engine, optimizer: Any, is_first: bool) -> tuple[Path, LoadResult] | None:
    """Load the checkpoint that the first rank chooses, if there is one; all ranks call this."""
    with engine.together("looking for a checkpoint") as view:
        path = on_first_rank(view.comm, lambda: _choose(config, engine))
        here = describe_layout(view.schedule, view.comm.layout)
    if path is None:
        return None
    try:
        loaded = load_checkpoint(path, engine, optimizer)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_way_out(config)}") from None
    if is_first:
        log(f"resumed after step {loaded.step} from {path}")
        if "run" in loaded.extra and (changes := describe_changes(loaded.extra["run"], config)):
            log(changes)
        for line in _list_differences(config, read_manifest(path), here):
            log(line)
    return path, loaded


def _choose(config: RunConfig, engine: Engine) -> Path | None:
    path = _choose_checkpoint(config)
    if path is not None:
        _require_same_model(config, path, engine)
    return path


def _choose_checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint to resume from. ConfigError if the run's folder has later ones, of another run."""
    folder, choice = _checkpoint_folder(config), config.checkpoint.resume
    if choice == "auto":
        return _find_newest(folder)
    found = None if choice == "never" else _resolve(Path(choice))
    first = 0 if found is None else read_manifest(found).step or 0
    later = [step for step, path in list_steps(folder).items() if step > first and is_complete(path)]
    if later:
        raise ConfigError(
            f"{folder} has checkpoints up to step {later[0]}, this run begins at step {first}; use another "
            "train.output, delete them, or use checkpoint.resume=auto"
        )
    return found


def _resolve(path: Path) -> Path:
    """A checkpoint by its own path, by `latest` or `best`, or by the folder of a run or of its checkpoints (newest)."""
    path = resolve_pointer(path)
    for folder in (path, path / "checkpoints"):
        if list_steps(folder) and (newest := _find_newest(folder)) is not None:
            return newest
    return path


def _require_same_model(config: RunConfig, path: Path, engine: Engine) -> None:
    """Raise ConfigError for a checkpoint of a model with other config values."""
    stage = next((stage for stage in engine.stages.values() if isinstance(stage, HFStage)), None)
    saved = read_manifest(path).model["config"]
    if stage is None or saved is None:
        return
    for name, old, new in compare_configs(saved, json.loads(config_to_save(stage).to_json_string())):
        raise ConfigError(
            f"{path} is of a model with {name}={short(old)}, model.path={config.model.path!r} has {short(new)}; use "
            f"the model that it was trained from; {_way_out(config)}"
        )


def compare_configs(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Fields of both configs with different values, model_type first. A missing field has an unknown default."""
    for name in sorted(old.keys() & new.keys() - HARMLESS_FIELDS, key=lambda name: (name != "model_type", name)):
        a, b = old[name], new[name]
        if isinstance(a, dict) and isinstance(b, dict):
            yield from ((f"{name}.{inner}", *values) for inner, *values in compare_configs(a, b))
        elif a != b and not is_dropout_field(name, a):
            yield name, a, b


def _way_out(config: RunConfig) -> str:
    if config.checkpoint.resume != "auto":
        return "use another checkpoint.resume"
    return f"train.output={config.train.output!r} is resumed from it, use another one to start a new run"


def _list_differences(config: RunConfig, manifest: Manifest, here: dict[str, Any]) -> Iterator[str]:
    """Lines about what differs from a run that was never stopped."""
    origin, path = str(manifest.model.get("origin") or ""), config.model.path
    if config.model.weights == "load" and config.lora is None and origin and Path(origin).name != Path(path).name:
        yield f"the weights are those of the checkpoint, which began with {origin}, not of model.path={path!r}"
    # random numbers depend on the layout
    if any(manifest.written_by.get(name) != here[name] for name in ("mesh", "schedule", "num_stages")):
        for name, value in random_fields(config).items():
            yield f"{name}={value:g} draws other random numbers on this layout than on the checkpoint's"


# the fields of a training file that differ from those of the run that wrote a checkpoint


def dump_fields(config: RunConfig) -> dict[str, dict[str, Any]]:
    """All fields with a value, as JSON, for a checkpoint."""
    return json.loads(config.model_dump_json(exclude_none=True))


def describe_changes(old: Mapping[str, Mapping[str, Any]], config: RunConfig) -> str:
    """`changed since the checkpoint: optimizer.lr 0.01 -> 0.001, ...`; empty if nothing has changed."""
    before, now = _flatten(old), _flatten(dump_fields(config))
    changed = [
        f"{name} {_show(before, name)} -> {_show(now, name)}"
        for name in dict.fromkeys([*now, *before])
        if name not in _NOT_COMPARED and before.get(name) != now.get(name)
    ]
    if len(changed) > _MAX_SHOWN:
        changed = [*changed[:_MAX_SHOWN], f"and {len(changed) - _MAX_SHOWN} more"]
    return f"changed since the checkpoint: {', '.join(changed)}" if changed else ""


def _flatten(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{table}.{name}": value for table, fields in tables.items() for name, value in fields.items()}


def _show(fields: Mapping[str, Any], name: str) -> str:
    return short(fields[name]) if name in fields else "none"
