"""Files that the browser sent. The newest are kept, so that a change of costs does not send them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from hashlib import sha256
from pathlib import PurePath
from threading import Lock
from typing import Any

from zeropipe.app.errors import Refusal
from zeropipe.app.models import UploadInfo
from zeropipe.core.check import check, check_csv
from zeropipe.core.formats.csv import from_csv
from zeropipe.core.formats.json import from_data
from zeropipe.core.formats.parse import parse_json, parse_toml
from zeropipe.core.limits import PAGE, require_costs, require_times
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, ScheduleError
from zeropipe.sim.costs import Costs
from zeropipe.sim.costs_file import costs_from_data
from zeropipe.sim.fit import fit
from zeropipe.sim.layer_file import is_layer_data

_DEFAULTS = Costs()
LoadedFile = Schedule | Timeline
LoadedFiles = Mapping[str, LoadedFile]  # by id


class Uploads:
    """Schedules and timelines by id; the oldest are removed when there are too many."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, LoadedFile] = OrderedDict()
        self._lock = Lock()

    def get_all(self, ids: Iterable[str | None]) -> LoadedFiles:
        """The files with these ids that are still here."""
        with self._lock:
            found = {key: self._files[key] for key in ids if key is not None and key in self._files}
            for key in found:
                self._files.move_to_end(key)
        return found

    def add(self, key: str, file: LoadedFile) -> None:
        with self._lock:
            self._files[key] = file
            self._files.move_to_end(key)
            while len(self._files) > 1 and sum(map(_num_actions, self._files.values())) > 2 * PAGE.actions:
                self._files.popitem(last=False)


def _num_actions(file: LoadedFile) -> int:
    return (file.schedule if isinstance(file, Timeline) else file).num_actions


def read_upload(name: str, data: bytes) -> tuple[dict[str, Any], LoadedFile | None]:
    """Return UploadInfo as plain data, and the schedule or timeline. A Refusal has the command line's message."""
    try:
        found = _parse_upload(name, data.decode("utf-8-sig"))
        return _info(name, data, found), None if isinstance(found, dict) else found
    except UnicodeDecodeError:
        raise Refusal(("file", f"{name}: not text: write it in UTF-8")) from None
    except (ConfigError, ScheduleError) as error:
        raise Refusal(("file", f"{name}: {error}")) from None


def _info(name: str, data: bytes, found: LoadedFile | dict[str, Any]) -> dict[str, Any]:
    if isinstance(found, dict):
        return UploadInfo(kind="costs", name=name, costs=found).model_dump()
    schedule = found.schedule if isinstance(found, Timeline) else found
    return UploadInfo(
        kind="timeline" if isinstance(found, Timeline) else "schedule",
        name=found.title if isinstance(found, Timeline) else found.name,
        id=sha256(name.encode("utf-8", "surrogatepass") + b"\0" + data).hexdigest()[:24],
        num_ranks=schedule.num_ranks,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        measured=isinstance(found, Timeline) and found.measured,
        costs=_fitted(found) if isinstance(found, Timeline) else None,
    ).model_dump()


def _parse_upload(name: str, text: str) -> LoadedFile | dict[str, Any]:
    """The schedule or timeline of a .csv or .json text, or the costs of a .toml or .json text as plain data."""
    stem, suffix = PurePath(name).stem, PurePath(name).suffix.lower()
    if suffix == ".toml":
        return _costs(_parse_toml(text))
    if suffix == ".csv":
        return _from_csv(text, stem)
    if suffix == ".json":
        data = _parse_json(text)
        if isinstance(data, dict) and "model_type" in data:
            raise ConfigError("it is a model's configuration: open it on the Plan page")
        if is_layer_data(data):
            command = "zeropipe app zbv -p 4 -m 8 --costs FILE --balance time"
            raise ConfigError(f"it holds costs of layers: open it on the Plan page, or start this one with `{command}`")
        if _is_costs(data):
            return _costs(data)
        _require_size(data)
        return _check(from_data(data))
    raise ConfigError("drop a schedule (.csv, .json), a timeline (.json) or costs (.toml, .json)")


def _from_csv(text: str, name: str) -> Schedule:
    PAGE.require_cells(text)
    schedule = from_csv(text, name)
    _check(schedule)
    check_csv(text, schedule)
    return schedule


def _parse_json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ScheduleError(f"not JSON: {error}") from None


def _parse_toml(text: str) -> Any:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"not TOML: {error}") from None


def _is_costs(data: Any) -> bool:
    """Whether it is a table, but neither our JSON nor a trace."""
    return isinstance(data, dict) and not {"zeropipe", "traceEvents", "rows"} & data.keys()


def _costs(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError("it holds no table of costs: write fields like f = 1.0")
    if {"schedule", "model", "mesh"} & data.keys():
        raise ConfigError("it holds a schedule, too: start the page with it (zeropipe app FILE), or drop its costs")
    costs_from_data(data)
    require_costs(data)
    return data


def _require_size(data: Any) -> None:
    """Refuse sizes above the page's limits before arrays of that size are created."""
    if not isinstance(data, dict):
        return
    ranks, stages, microbatches = (data.get(f"num_{what}") for what in ("ranks", "stages", "microbatches"))
    if isinstance(ranks, int) and ranks > PAGE.ranks:
        raise ConfigError(f"num_ranks is {ranks}: the page takes up to {PAGE.ranks}")
    if isinstance(stages, int) and isinstance(microbatches, int):
        PAGE.require_actions(2 * stages * microbatches, "it")


def _check(found: LoadedFile) -> LoadedFile:
    """Check that a schedule is complete and free of deadlock, and that a timeline can be drawn; returns it."""
    schedule = found.schedule if isinstance(found, Timeline) else found
    problem = schedule.problem
    if problem.num_ranks > PAGE.ranks:
        raise ConfigError(f"it has {problem.num_ranks} ranks: the page takes up to {PAGE.ranks}")
    PAGE.require_actions(max(schedule.num_actions, 2 * problem.num_stages * problem.num_microbatches), "it")
    check(schedule)
    if isinstance(found, Timeline):
        require_times(found)
    return found


def _fitted(timeline: Timeline) -> dict[str, Any]:
    """Costs fitted to the timeline, without those at their defaults."""
    costs = fit(timeline)
    given = {field.name: getattr(costs, field.name) for field in fields(costs)}
    return {name: _readable(value) for name, value in given.items() if value != getattr(_DEFAULTS, name)}


def _readable(value: Any) -> Any:
    """Round to six digits, more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return [_readable(one) for one in value] if isinstance(value, tuple) else value
