"""Schedules of users: CSV and JSON files, and functions in Python files."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import Any

from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix, read_text
from zeropipe.core.formats.csv import from_csv
from zeropipe.core.formats.json import from_json
from zeropipe.core.limits import COMMAND_LINE, num_actions, require_times
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, ScheduleError, ZeropipeError
from zeropipe.schedules.registry import Entry, build_entry, entries, find, slices_of


def load(
    spec: str,
    /,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    **options: Any,
) -> Schedule:
    """A schedule by name, from `file.csv` or `file.json`, or by `path/to/mine.py:name`."""
    found = load_any(spec, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank, **options)
    return found.schedule if isinstance(found, Timeline) else found


def load_any(
    spec: str,
    /,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    **options: Any,
) -> Schedule | Timeline:
    """`load`, but a timeline for a file with recorded times."""
    if has_suffix(spec, *SCHEDULE_SUFFIXES):
        return _from_file(spec, ranks, microbatches, stages_per_rank, options)
    entry = entry_of(spec)
    for flag, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value is None:
            raise ConfigError(f"{flag} is missing: {entry.name} is built for a number of {flag}; pass --{flag} N")
    assert ranks is not None
    assert microbatches is not None
    if ranks > 0 and microbatches > 0:  # otherwise `build` reports the missing option
        COMMAND_LINE.require_ranks(ranks)
        per_rank = entry.stages_per_rank[0] if stages_per_rank is None else stages_per_rank
        per_stage = microbatches * slices_of(options)
        COMMAND_LINE.require_actions(num_actions(entry.splits_backward, ranks, per_stage, per_rank), entry.name)
    return build_entry(entry, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank, **options)


def entry_of(spec: str) -> Entry:
    """The registry entry of a name or of `path/to/mine.py:name`."""
    path, colon, name = spec.rpartition(":")
    if colon and has_suffix(path, ".py"):
        return _entry_in(path, name)
    if has_suffix(spec, ".py"):
        raise ConfigError(f"{spec!r} names a file but no schedule: write {spec}:my_schedule")
    return named(spec)


def named(spec: str) -> Entry:
    """The registry entry of a name. Files of other kinds are refused as what they are."""
    try:
        return find(spec)
    except ConfigError:
        if not isfile(spec):  # False also for a name that no file can have
            raise
        kinds = " or ".join(SCHEDULE_SUFFIXES)
        raise ConfigError(f"{spec!r} is a file of no known kind: one with a schedule is named {kinds}") from None


def read_file(path: str) -> Schedule | Timeline:
    """The schedule of a .csv or .json file, or the timeline of a .json file."""
    text, name = read_text(path, COMMAND_LINE), Path(path).stem
    try:
        if has_suffix(path, ".json"):
            found = from_json(text)
            if isinstance(found, Timeline):
                require_times(found)
            return found
        COMMAND_LINE.require_cells(text)
        return from_csv(text, name)
    except (ConfigError, ScheduleError) as error:
        raise type(error)(f"{path}: {error}") from None


def _from_file(
    path: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, options: dict[str, Any]
) -> Schedule | Timeline:
    found = read_file(path)
    problem = (found.schedule if isinstance(found, Timeline) else found).problem
    whole = problem.num_stages % problem.num_ranks == 0
    per_rank = problem.stages_per_rank if whole else f"{problem.num_stages} stages on {problem.num_ranks} ranks"
    for flag, asked, has in (
        ("ranks", ranks, problem.num_ranks),
        ("microbatches", microbatches, problem.num_microbatches),
        ("stages_per_rank", stages_per_rank, per_rank),
    ):
        if asked is not None and asked != has:
            raise ConfigError(f"{flag}={asked}: {path} has {has}; leave it out, or change the file")
    if options:
        raise ConfigError(f"{path} is a complete schedule and has no option {next(iter(options))!r}")
    return found


def _entry_in(path: str, name: str) -> Entry:
    """Run a user's file and find the entry it registered under `name` (or by a function of that name)."""
    import sys
    from importlib.machinery import SourceFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    if not Path(path).is_file():
        raise ConfigError(f"cannot read {path}: no such file")
    module_name = f"zeropipe_user_{abs(hash(str(Path(path).resolve())))}"
    if module_name not in sys.modules:
        found = spec_from_file_location(module_name, path, loader=SourceFileLoader(module_name, path))
        assert found is not None
        assert found.loader is not None
        module = module_from_spec(found)
        sys.modules[module_name] = module
        try:
            found.loader.exec_module(module)
        except ZeropipeError as error:
            del sys.modules[module_name]
            raise ConfigError(f"{path}: {error}") from None
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise ConfigError(f"{path} does not run: {type(error).__name__}: {error}") from error
    here = [entry for entry in entries() if entry.function.__module__ == module_name]
    named = [entry for entry in here if name == entry.name]
    by_function = [entry for entry in here if name == getattr(entry.function, "__name__", None)]
    if len(named or by_function) == 1:
        return (named or by_function)[0]
    if by_function:
        several = ", ".join(entry.name for entry in by_function)
        raise ConfigError(f"{path}:{name} registers several schedules: use one of {several}")
    has = ", ".join(entry.name for entry in here) or "none; decorate a function with @zp.register"
    raise ConfigError(f"{path} registers no schedule {name!r}: it has {has}")
