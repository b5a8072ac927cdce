"""Ablation of the search: every case is searched once with all parts, and once without each part.

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

import zeropipe as zp
from zeropipe.core import jit
from zeropipe.searching import driver, local_search, local_search_kernel, solver, task
from zeropipe.searching.bounds import lower_bound, rank_bounds, subset_bound
from zeropipe.searching.candidates import rules

SETS = {
    "grid": ("grid",),
    "published": ("zb-1p", "zb-2p", "zb-v", "1f1b-i", "crosspipe", "family"),
    "random": ("random",),
    "vee": ("vee",),
    "proofs": ("proofs",),
    "large": ("large",),
}
ALL_PARTS = "nothing"  # is switched off


def is_any(search: dict) -> bool:
    return True


def has_little_memory(search: dict) -> bool:
    return not allows_zero_bubble(search)


def has_one_stage(search: dict) -> bool:
    return has_little_memory(search) and search.get("stages_per_rank", 1) == 1


def has_serial_links(search: dict) -> bool:
    return search["costs"].serial_links


class Part(NamedTuple):
    """A part of the search: (object, attribute, replacement while it is off), and the cases it is meant for."""

    patches: tuple[tuple[Any, str, Any], ...]
    is_meant_for: Callable[[dict], bool] = is_any
    recompile: bool = False  # a constant of compiled kernels changes


def _zero_times(search_task: Any, *_: Any) -> Any:
    return np.zeros(search_task.num_microbatches + 1)


def _pending_w_in_any_part(*args: Any) -> Any:
    *rest, is_whole, parts, m = args
    return _pending_w(*rest, [False] * len(is_whole), parts, m)


_pending_w = subset_bound.pending_w
_kernel = local_search_kernel
_walks = tuple(one for one in local_search.FIRST_ROUNDS if not one.tunes_rules)
_repeated_walks = tuple(one for one in local_search.REPEATED_ROUNDS if not one.tunes_rules)

PARTS: dict[str, Part] = {
    ALL_PARTS: Part(()),
    "bound: links": Part(((lower_bound, "link_bound", lambda *_: 0.0),), has_serial_links),
    "bound: warm-up": Part(((rank_bounds, "warm_up_times", lambda *args: (_zero_times(*args),) * 2),)),
    "bound: drain": Part(((rank_bounds, "drain_time", lambda *_, **__: 0.0),)),
    "bound: turnover": Part(((rank_bounds, "turnover_times", _zero_times),), has_little_memory),
    "bound: rank subsets": Part(
        ((subset_bound.SubsetBounds, "raise_bound", lambda self, best, cap, effort: best),), has_little_memory
    ),
    "bound: later work of ranks": Part(
        ((subset_bound, "_time_by_rank", lambda search_task, *_: np.zeros(search_task.num_microbatches)),),
        has_little_memory,
    ),
    "bound: turns": Part(((lower_bound, "turn_bound", lambda *_: 0.0),), has_one_stage),
    "bound: whole W": Part(((subset_bound, "pending_w", _pending_w_in_any_part),), has_little_memory),
    "candidates: registered": Part(((driver, "registered_schedules", lambda *_: []),)),
    "candidates: dispatch rules": Part(((driver, "dispatched_candidates", lambda *_: []),)),
    "candidates: narrow beams": Part(
        ((driver.SearchDriver, "_add_beams", lambda self, sub, candidates, until: candidates),), has_little_memory
    ),
    "candidates: wide beams": Part(
        ((driver.SearchDriver, "_run_wide_beams", lambda self, subproblems, stop: []),), has_little_memory
    ),
    "candidates: stretch": Part(((rules, "stretch_rows", lambda *_: None),)),
    "moves: critical path": Part(((_kernel, "CRITICAL", 0),), recompile=True),
    "moves: streams": Part(((_kernel, "STREAM", _kernel.CRITICAL),), recompile=True),
    "moves: W fit": Part(((_kernel, "FIT", _kernel.STREAM),), recompile=True),
    "moves: single": Part(((_kernel, "FIT", 100),), recompile=True),
    "moves: rules": Part(((local_search, "FIRST_ROUNDS", _walks), (local_search, "REPEATED_ROUNDS", _repeated_walks))),
    "local search": Part(((driver, "local_search", lambda task, candidates, *_: candidates[0]),)),
    "smaller limits": Part(((task.SearchTask, "smaller_limits", lambda self: []),), has_little_memory),
    "solver": Part(((solver, "is_available", lambda: False),)),
    "fill gaps": Part(((driver, "fill_gaps", lambda schedule, costs, weight_parts: schedule),)),
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
    """(set, number, case): every `every`-th case of the tables of a set."""
    for table in SETS[name]:
        cases = {**TABLES, "large": large}[table]()
        for number, case in enumerate(islice(cases, count if table == "random" else None)):
            if number % every == every // 2:
                yield table, number, case


def ablate(sets: list[str], parts: list[str], every: int, count: int, steps: int, file: Path | None) -> None:
    """Search all cases without each part, and print the loss as a table of Markdown."""
    results = _read_results(file)
    cases = {name: list(cases_of(name, every, count)) for name in sets}
    print("| without | cases | number | gap, mean | worst | value, mean | worst | bound, mean | worst | CPU |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for part in [ALL_PARTS, *parts]:
        for name in sets:
            _search(part, cases[name], steps, results, file)
            if part != ALL_PARTS:
                print(format_row(part, name, cases[name], results), flush=True)


def _read_results(file: Path | None) -> dict[tuple[str, str, int, int], Outcome]:
    if file is None or not file.exists():
        return {}
    rows = map(json.loads, file.read_text().splitlines())
    return {(part, table, number, at): Outcome(*outcome) for part, table, number, at, *outcome in rows}


def _search(part: str, cases: list[tuple[str, int, Case]], steps: int, results: dict, file: Path | None) -> None:
    """Search the cases that have no result yet."""
    with without(PARTS[part]):
        for table, number, case in cases:
            for at, search in enumerate(case.searches):
                key = part, table, number, at
                if key in results or not PARTS[part].is_meant_for(search):
                    continue
                begin = time.process_time()
                found = zp.search(**search, steps=steps, workers=1)
                results[key] = Outcome(found.value, found.bound, time.process_time() - begin)
                if file is not None:
                    with file.open("a") as out:
                        out.write(json.dumps([*key, *results[key]]) + "\n")


def format_row(part: str, name: str, cases: list[tuple[str, int, Case]], results: dict) -> str:
    """Return the loss without a part: mean and worst, in percent; and the processor time without over with it."""
    keys = [(table, number, at) for table, number, case in cases for at in range(len(case.searches))]
    pairs = [(results[ALL_PARTS, *key], results[part, *key]) for key in keys if (part, *key) in results]
    if not pairs:
        return f"| {part} | {name} | 0 | | | | | | | |"
    gaps = [100 * (off.gap - on.gap) for on, off in pairs]
    values = [100 * (off.value / on.value - 1) for on, off in pairs]
    bounds = [100 * (1 - off.bound / on.bound) for on, off in pairs]
    seconds = sum(off.seconds for _, off in pairs) / sum(on.seconds for on, _ in pairs)
    numbers = " | ".join(f"{fmean(column):.2f} | {max(column):.2f}" for column in (gaps, values, bounds))
    return f"| {part} | {name} | {len(pairs)} | {numbers} | {seconds:.2f} |"
