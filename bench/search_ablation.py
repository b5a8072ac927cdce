"""What each part of the search adds: every case is searched once with all parts, and once without each part.

Called by `bench/search.py --ablate`. A part that is switched off is replaced while a search runs: a bound gives 0, a
source of candidates gives none. Searches are by steps, so that results depend on neither time nor machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from search_cases import TABLES, Case, allows_zero_bubble
from zeropipe.searching.bound import bound, few
from zeropipe.searching.starts import rules, wide

import zeropipe as zp
from zeropipe.core import jit
from zeropipe.searching import climb, cpsat, hunt, walks

SETS = {
    "grid": ("grid",),
    "published": ("zb-1p", "zb-2p", "zb-v", "1f1b-i", "crosspipe", "family"),
    "random": ("random",),
    "vee": ("vee",),
    "proofs": ("proofs",),
    "large": ("large",),
}
ALL = "nothing"  # is switched off


def anything(search: dict) -> bool:
    return True


def has_turns(search: dict) -> bool:
    return search.get("stages_per_rank", 1) > 1


def is_linear(search: dict) -> bool:
    return not has_turns(search)


def is_scarce(search: dict) -> bool:
    return not allows_zero_bubble(search)


def both(*conditions: Callable[[dict], bool]) -> Callable[[dict], bool]:
    return lambda search: all(condition(search) for condition in conditions)


def has_serial_links(search: dict) -> bool:
    return search["costs"].serial_links


class Part(NamedTuple):
    """A part of the search: (object, attribute, what stands there while it is off), and the cases it is meant for."""

    patches: tuple[tuple[Any, str, Any], ...]
    meant_for: Callable[[dict], bool] = anything
    recompile: bool = False  # a number inside compiled kernels changes


def _without_whole_w(*args: Any) -> Any:
    *rest, whole, parts, m = args
    return _owed_of(*rest, [False] * len(whole), parts, m)


_owed_of = few.owed_of

PARTS: dict[str, Part] = {
    ALL: Part(()),
    "bound: links": Part(((bound, "_link_bound", lambda *_: 0.0),), has_serial_links),
    "bound: warm-up": Part(((bound, "_warm_up", lambda *_: 0.0),)),
    "bound: drain": Part(((bound, "_drain", lambda *_, **__: 0.0),)),
    "bound: rounds": Part(((bound, "_rounds", lambda *_: 0.0),), is_scarce),
    "bound: area": Part(((bound, "_area", lambda *_: 0.0),), is_scarce),
    "bound: rank subsets": Part(((few.Asked, "by_few", lambda self, best, cap, effort: best),), is_scarce),
    "bound: fewer microbatches": Part(((few.Asked, "_fewer", lambda self, rank, effort: effort),), is_scarce),
    "bound: turns": Part(((bound, "_turns_bound", lambda *_: 0.0),), is_scarce),
    "bound: whole W": Part(((few, "owed_of", _without_whole_w),), is_scarce),
    "start: built-in": Part(((hunt, "passes_of", lambda schedule: np.zeros(0, np.int64)),)),
    "start: dispatch": Part(((hunt, "dispatched", lambda *_: []),)),
    "start: patterns": Part(((hunt, "repeating", lambda *_: iter(())),), both(has_turns, is_scarce)),
    "start: beams": Part(((hunt.Hunt, "_beam", lambda self, leg, starts, until: starts),), is_scarce),
    "start: wide beams": Part(((hunt.Hunt, "_widen", lambda self, legs, stop: []),), is_scarce),
    "start: scarce": Part(((wide, "WAYS", (("begun", 0.0, 0.5), ("begun", 0.0, 0.0))),), both(has_turns, is_scarce)),
    "start: stretch": Part(((rules, "stretched", lambda *_: None),)),
    "moves: critical path": Part(((walks, "DECISIVE", 0),), recompile=True),
    "moves: streams": Part(((walks, "STREAMS", walks.DECISIVE),), recompile=True),
    "moves: W fit": Part(((walks, "FILLS", walks.STREAMS),), recompile=True),
    "moves: single": Part(((walks, "FILLS", 100),), recompile=True),
    "moves: tuning": Part(((climb, "ROUNDS", tuple(row for row in climb.ROUNDS if row[0] == "walk")),)),
    "smaller limits": Part(((hunt, "smaller_limits", lambda task: []),), is_scarce),
    "solver": Part(((cpsat, "available", lambda: False),)),
    "fill gaps": Part(((hunt, "fill_gaps", lambda schedule, costs, weight_parts: schedule),)),
}


@contextmanager
def without(part: Part) -> Iterator[None]:
    """Switch a part off."""
    patches = [patch.object(*one) for one in part.patches]
    for one in patches:
        one.start()
    _clear(part)
    try:
        yield
    finally:
        for one in patches:
            one.stop()
        _clear(part)


def _clear(part: Part) -> None:
    if part.recompile:
        jit.compiled.cache_clear()
        jit._inner.cache_clear()


class Outcome(NamedTuple):
    """Of one search."""

    value: float
    bound: float
    seconds: float  # of processor time

    @property
    def gap(self) -> float:
        return self.value / self.bound - 1


def large() -> Iterator[Case]:
    """More than 20,000 passes: rules are tried on fewer microbatches and their rows stretched."""
    for p, m, v, rule in ((16, 640, 1, zp.linear), (16, 320, 2, zp.vee), (32, 256, 2, zp.vee)):
        costs = zp.Costs(f=1 / v, i=1.2 / v, w=0.7 / v, p2p=0.05, memory_limit=0.75 * p * v)
        options = {"ranks": p, "microbatches": m, "stages_per_rank": v, "placement": rule, "costs": costs}
        yield Case(f"{rule.__name__} {p} x {m}", 0.0, lambda found, value: value, [options])


def cases_of(name: str, every: int, count: int) -> Iterator[tuple[str, int, Case]]:
    """(set, number, case): every so many-th case of each table of a set."""
    for table in SETS[name]:
        cases = {**TABLES, "large": large}[table]()
        for number, case in enumerate(islice(cases, count if table == "random" else None)):
            if number % every == every // 2:
                yield table, number, case


def ablate(sets: list[str], parts: list[str], every: int, count: int, steps: int, file: Path | None) -> None:
    """Search all cases without each part, and print what it adds."""
    kept = _kept(file)
    cases = {name: list(cases_of(name, every if name in ("grid", "random") else 1, count)) for name in sets}
    for part in [ALL, *parts]:
        for name in sets:
            _search(part, cases[name], steps, kept, file)
            if part != ALL:
                print(line(part, name, cases[name], kept), flush=True)


def _kept(file: Path | None) -> dict[tuple[str, str, int, int], Outcome]:
    if file is None or not file.exists():
        return {}
    rows = map(json.loads, file.read_text().splitlines())
    return {(part, table, number, at): Outcome(*outcome) for part, table, number, at, *outcome in rows}


def _search(part: str, cases: list[tuple[str, int, Case]], steps: int, kept: dict, file: Path | None) -> None:
    """Search what is not kept yet."""
    with without(PARTS[part]):
        for table, number, case in cases:
            for at, search in enumerate(case.searches):
                key = part, table, number, at
                if key in kept or not PARTS[part].meant_for(search):
                    continue
                begin = time.process_time()
                found = zp.search(**search, steps=steps, workers=1)
                kept[key] = Outcome(found.value, found.bound, time.process_time() - begin)
                if file is not None:
                    with file.open("a") as out:
                        out.write(json.dumps([*key, *kept[key]]) + "\n")


def line(part: str, name: str, cases: list[tuple[str, int, Case]], kept: dict) -> str:
    """What is lost without a part: means and the worst, in percent; and the processor time without over with it."""
    pairs, lost = [], []
    for table, number, case in cases:
        for at in range(len(case.searches)):
            key = table, number, at
            if (part, *key) in kept:
                pairs.append((kept[ALL, *key], kept[part, *key]))
    if not pairs:
        return f"{part:28} {name:10} no case"
    gaps = [100 * (off.gap - on.gap) for on, off in pairs]
    values = [100 * (off.value / on.value - 1) for on, off in pairs]
    bounds = [100 * (1 - off.bound / on.bound) for on, off in pairs]
    seconds = sum(off.seconds for _, off in pairs) / sum(on.seconds for on, _ in pairs)
    numbers = "  ".join(f"{fmean(column):6.2f} {max(column):6.2f}" for column in (gaps, values, bounds))
    return f"{part:28} {name:10} {len(pairs):4}  {numbers}  {seconds:6.2f} {sum(lost)}"
