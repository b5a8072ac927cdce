"""All schedules by name, each with its facts. Adding one touches one file: the one that holds `@register`."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import isfinite
from pathlib import Path
from typing import Any

from zeropipe.core.action import MAX_MICROBATCHES, MAX_SLICES, MAX_STAGES
from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix
from zeropipe.core.packed import PackedRows
from zeropipe.core.placement import Placement, PlacementRule, Problem, require_placement
from zeropipe.core.schedule import Schedule
from zeropipe.core.units import to_python
from zeropipe.errors import ConfigError, ZeropipeError, short
from zeropipe.schedules.lane import Lane

SLICES = "slices"  # the option for the number of slices of each microbatch
ENTRY_POINTS = "zeropipe.schedules"
FILES = (*SCHEDULE_SUFFIXES, ".toml", ".py")  # suffixes that the name of a schedule must not have


@dataclass(frozen=True)
class Entry:
    """A schedule's facts. `write` fills one lane (parameter `lane`) or all of them (parameter `lanes`)."""

    name: str
    write: Callable[..., None]
    placement: PlacementRule
    stages_per_rank: tuple[int, ...]  # the allowed numbers; the first one is the default
    splits_backward: bool = False
    overlaps: bool = False
    sliced: bool = False  # made for slices: with one slice it is like another schedule
    aliases: tuple[str, ...] = ()
    paper: str = ""
    limits: str = ""  # what `require` refuses, in words
    require: Callable[..., None] | None = field(default=None, repr=False)  # raises ConfigError

    @property
    def summary(self) -> str:
        """A description: the first line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0].rstrip(".")

    @property
    def is_ours(self) -> bool:
        """Whether it is in this package: valid at every size, and known to other processes."""
        return _is_ours(self.write)

    @property
    def function(self) -> Callable[..., None]:
        """The function `write`, without functools.partial."""
        return _bare(self.write)

    @property
    def placement_name(self) -> str:
        """linear, loop, vee, mirror or custom."""
        try:
            return self.placement(Problem(4, 4 * self.stages_per_rank[0], 8)).name
        except Exception:  # a user's rule, which may refuse this size
            return "custom"

    @property
    def has_slices(self) -> bool:
        """Whether it can divide the sequences of a microbatch into slices: it has the option `slices`."""
        return SLICES in self.options

    @property
    def options(self) -> Mapping[str, Any]:
        """The options besides sizes, with their defaults; None for an option without default."""
        return {p.name: None if p.default is p.empty else p.default for p in self._knobs}

    @property
    def plain_options(self) -> dict[str, bool | int | float | str | None]:
        """The options as data for JSON; values other than numbers are converted to text."""
        return {name: _as_data(default) for name, default in self.options.items()}

    @property
    def needed_options(self) -> list[str]:
        """The options without a default."""
        return [p.name for p in self._knobs if p.default is p.empty]

    @property
    def _knobs(self) -> list[inspect.Parameter]:
        parameters = inspect.signature(self.write).parameters.values()
        return [p for p in parameters if p.kind is p.KEYWORD_ONLY]

    def __str__(self) -> str:
        return self.name


_entries: dict[str, Entry] = {}


def register(
    name: str,
    *,
    placement: PlacementRule,
    stages_per_rank: int | tuple[int, ...] = 1,
    splits_backward: bool = False,
    overlaps: bool = False,
    sliced: bool = False,
    aliases: tuple[str, ...] = (),
    paper: str = "",
    limits: str = "",
    require: Callable[..., None] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a schedule under `name`.

        @register("1f1b", placement=linear)
        def one_f_one_b(lane, rank, p): ...

    A function of `(lane, rank, p)` writes one rank's row; a function of `(lanes, p)` writes all of them. Keyword-only
    parameters become options of `build` and of the command line. A file (or a notebook) may register its names again;
    a name that another file has registered is refused.
    """
    allowed = (stages_per_rank,) if isinstance(stages_per_rank, int) else stages_per_rank
    _require_facts(name, aliases, placement, allowed)

    def add(write: Callable[..., None]) -> Callable[..., None]:
        if not callable(write):
            raise ConfigError(f"register({name!r}) is of {short(write)}: put it before a function that writes a row")
        if not _is_ours(write):
            _load_ours()  # their names are reserved
        for other in _entries.values():
            clash = {_plain(n) for n in (name, *aliases)} & {_plain(n) for n in (other.name, *other.aliases)}
            if clash and (other.name != name or _home(other.write) != _home(write)):
                where = f"{other.name} of {_home(other.write)}"
                raise ConfigError(f"the schedule name {clash.pop()!r} is taken by {where}: choose another")
        _entries[name] = Entry(
            name, write, placement, allowed, splits_backward, overlaps, sliced, aliases, paper, limits, require
        )
        return write

    return add


def _require_facts(name: Any, aliases: Any, placement: Any, stages_per_rank: Any) -> None:
    """ConfigError for an invalid argument of `register`."""
    if isinstance(aliases, str):
        raise ConfigError(f"aliases={short(aliases)}: must be a sequence of names, like ({short(aliases)},)")
    for one in (name, *aliases):
        is_name = isinstance(one, str) and one.strip() and not set(one) & set(":,")
        if not is_name or one == "all" or has_suffix(one, *FILES):
            raise ConfigError(
                f"the schedule name {short(one)}: must be a text without ':' and ',', not 'all', not a file's name"
            )
    if not callable(placement):
        raise ConfigError(f"placement={short(placement)}: must be zp.linear, zp.loop, zp.vee or a function")
    listed = stages_per_rank if isinstance(stages_per_rank, Sequence) else ()
    if not listed or not all(type(number) is int and number > 0 for number in listed):
        raise ConfigError(f"stages_per_rank={short(stages_per_rank)}: must be a positive integer or several")


def names() -> list[str]:
    """All schedule names, sorted."""
    return sorted(entry.name for entry in entries())


def entries() -> list[Entry]:
    """All registered schedules, sorted by name."""
    _load()
    return sorted(_entries.values(), key=lambda entry: entry.name)


def find(name: str) -> Entry:
    """The entry of a name or alias; ConfigError with the nearest names if there is none."""
    _load()
    wanted = _plain(str(name))
    for entry in _entries.values():
        own = {_plain(entry.name), *map(_plain, entry.aliases)}
        if wanted in own or wanted.removeprefix("schedule") in own:  # torch's classes are ScheduleGPipe, ...
            return entry
    from difflib import get_close_matches

    known = {_plain(n): entry.name for entry in _entries.values() for n in (entry.name, *entry.aliases)}
    near = list(dict.fromkeys(known[n] for n in get_close_matches(wanted, known, n=3, cutoff=0.5)))
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(names())}"
    raise ConfigError(f"unknown schedule {short(name)}: {hint}")


def build(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None, **options: Any) -> Schedule:
    """The schedule `name` for `ranks` pipeline ranks and `microbatches` microbatches.

    `stages_per_rank` has a default for each schedule; other keywords are the schedule's own options.
    """
    return build_entry(find(name), ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank, **options)


def build_entry(
    entry: Entry, /, *, ranks: int, microbatches: int, stages_per_rank: int | None = None, **options: Any
) -> Schedule:
    """Build the schedule of an entry; the arguments are those of `build`."""
    per_rank = entry.stages_per_rank[0] if stages_per_rank is None else stages_per_rank
    ranks, microbatches, per_rank = map(to_python, (ranks, microbatches, per_rank))
    options = {option: to_python(value) for option, value in options.items()}
    for label, value in (("ranks", ranks), ("microbatches", microbatches), ("stages_per_rank", per_rank)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{label}={value!r}: must be a positive integer")
    if per_rank not in entry.stages_per_rank:
        allowed = _words(entry.stages_per_rank)
        stages = "stage" if allowed == "1" else "stages"
        raise ConfigError(f"{entry.name} needs {allowed} {stages} per rank, got stages_per_rank={per_rank}")
    if microbatches > MAX_MICROBATCHES:
        raise ConfigError(f"microbatches={short(microbatches)}: at most {MAX_MICROBATCHES} are supported")
    if ranks * per_rank > MAX_STAGES:
        raise ConfigError(f"{ranks} ranks x {per_rank} stages per rank are too many: at most {MAX_STAGES} stages")
    for option in options:
        if option not in entry.options:
            if option == SLICES:
                able = ", ".join(other.name for other in entries() if other.has_slices)
                raise ConfigError(f"slices={short(options[option])}: {entry.name} has no slices; use one of {able}")
            has = f"its options are {', '.join(entry.options)}" if entry.options else "it has none"
            raise ConfigError(f"{entry.name} has no option {option!r}: {has}")
    for option in entry.needed_options:
        if option not in options:
            raise ConfigError(f"{entry.name} needs its option {option!r}, which has no default; pass {option}=VALUE")
    problem = Problem(ranks, ranks * per_rank, microbatches, num_slices=_num_slices(entry, options, microbatches))
    try:
        if entry.require is not None:
            entry.require(problem, **{**entry.options, **options})
        placement = entry.placement(problem)
        _require_placement(entry, placement, problem)
        lanes = [Lane(rank, problem, placement) for rank in range(ranks)]
        if "lanes" in inspect.signature(entry.write).parameters:
            entry.write(lanes, problem, **options)
        else:
            for rank, lane in enumerate(lanes):
                entry.write(lane, rank, problem, **options)
    except ZeropipeError:
        raise
    except Exception as error:  # of any type, from a user's function
        frames = traceback.extract_tb(error.__traceback__)
        code = getattr(entry.function, "__code__", None) or getattr(type(entry.function).__call__, "__code__", None)
        file = getattr(code, "co_filename", "")
        own = [frame for frame in frames if frame.filename == file]  # not a line in Lane
        where = (own or frames)[-1]
        raise ConfigError(
            f"{entry.name} does not run: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        ) from error
    again = partial(_rebuild, entry.name, ranks, per_rank, tuple(sorted(options.items())))
    return Schedule(problem, placement, PackedRows.of(lane.codes for lane in lanes), entry.name, again)


def _num_slices(entry: Entry, options: Mapping[str, Any], microbatches: int) -> int:
    """The slices of each microbatch that the options ask for; ConfigError unless they are possible."""
    number = options.get(SLICES, entry.options.get(SLICES, 1))
    if type(number) is not int or not 1 <= number < MAX_SLICES:
        raise ConfigError(f"slices={short(number)}: must be an integer from 1 to {MAX_SLICES - 1}")
    if microbatches * number > MAX_MICROBATCHES:
        raise ConfigError(f"{microbatches} microbatches of {number} slices: at most {MAX_MICROBATCHES} are supported")
    return number


def slices_of(options: Mapping[str, Any]) -> int:
    """The number of slices that options ask for; 1 if it is not a possible one, which `build_entry` refuses."""
    number = options.get(SLICES, 1)
    return number if type(number) is int and number > 0 else 1


def _rebuild(name: str, ranks: int, per_rank: int, options: tuple[tuple[str, Any], ...], microbatches: int) -> Schedule:
    """Call `build` by name: schedules hold this function, which must be small and can be pickled."""
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank, **dict(options))


def _require_placement(entry: Entry, placement: Any, problem: Problem) -> None:
    """ConfigError, with the schedule's name, for an invalid result of a user's placement rule."""
    if not isinstance(placement, Placement):
        raise ConfigError(f"the placement of {entry.name} is {short(placement)}: must be a zp.Placement")
    try:
        require_placement(placement, problem)
    except ConfigError as error:
        raise ConfigError(f"{entry.name}: {error}") from None


def _as_data(value: Any) -> bool | int | float | str | None:
    is_plain = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value))
    return value if is_plain else str(value)


def _home(write: Callable[..., None]) -> str:
    """The file a schedule comes from, or its module where there is no file."""
    module = _bare(write).__module__
    return str(getattr(sys.modules.get(module), "__file__", module))


def _is_ours(write: Callable[..., None]) -> bool:
    return str(_bare(write).__module__).startswith("zeropipe.schedules.")


def _bare(write: Callable[..., None]) -> Callable[..., None]:
    while isinstance(write, partial):
        write = write.func
    return write


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _words(allowed: tuple[int, ...]) -> str:
    *others, last = sorted(allowed)
    if len(others) > 1 and sorted(allowed) == list(range(others[0], last + 1)):
        return f"{others[0]} to {last}"
    return f"{', '.join(map(str, others))} or {last}" if others else str(last)


@cache
def _load_ours() -> None:
    """Import every schedule of this package."""
    from importlib import import_module
    from pkgutil import iter_modules

    package = import_module("zeropipe.schedules")
    for module in iter_modules(package.__path__):
        import_module(f"zeropipe.schedules.{module.name}")


@cache
def _load() -> None:
    """Import every schedule of this package, then those of installed packages."""
    from importlib.metadata import entry_points
    from warnings import warn

    _load_ours()
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # an installed package must not make this one fail
            warn(f"cannot load the schedules of {point.value}: {type(error).__name__}: {error}", stacklevel=1)
