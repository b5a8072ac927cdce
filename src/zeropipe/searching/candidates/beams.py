"""Candidates by beam search, for little memory: narrow beams with many settings, and a few wide ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TypeVar

import numpy as np

from zeropipe.core.jit import compiled
from zeropipe.searching.bounds.rank_bounds import earliest_times, rank_limits
from zeropipe.searching.bounds.subset_bound import subset_tables
from zeropipe.searching.candidates.beam_kernel import BeamBuffers, BeamSetting, BeamTables, grow_beam
from zeropipe.searching.candidates.rules import fitting_activations
from zeropipe.searching.evaluator import Candidate, Evaluator
from zeropipe.searching.local_search import walk_from
from zeropipe.searching.tables import Array
from zeropipe.searching.task import SearchTask

TOLERANCE = 1e-9  # of a mean pass
EXTENSIONS_EACH = 12  # buffered for each partial schedule, on average

# narrow beams
FIRST_WIDTH = 8
CAP_PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # of the activations that fit, with several stages per rank
STEADY_CAPS = ((1.0, 0), (1.0, 1), (1.2, 0), (1.35, 1), (1.5, 0), (2.0, 0))  # times the steady number, plus
MEAN_WEIGHTS = (1.0, 5.0)
NUM_BEST, NUM_CHANGED = 4, 8  # settings that go on with twice the width, and changed ones beside them
CHANGE_WEIGHT, CHANGE_FIT = 0.15, 0.4  # changes up to the first number: the mean weight; up to the second: min_fit
SHORT_WALK, LONG_WALK = 11, 64  # steps per width: from the end of each beam, and of the best ones
NARROW_CAP = 1.1  # times the best value: partial schedules that cannot end before that are dropped

# wide beams
WIDE_FITS = (0.5, 0.0)  # min_fit of one beam after the other
WIDE_MEAN_WEIGHT = 20.0
MIN_WIDTH, WIDTH_PER_STEP = 250, 0.08  # width by time at first; and for each step of a search by steps
MAX_CELLS = 10_000_000  # width times passes
WIDE_CAP = 1.03  # as NARROW_CAP
NUM_WALKS, WALK_STEPS = 2, 20  # from the end of each beam; steps per width
NUM_LAST_WALKS, LAST_WALK_STEPS = 4, 60  # from the best end of all

Job = TypeVar("Job")
Result = TypeVar("Result")


def narrow_beams(task: SearchTask, value: float, seed: int, workers: int = 1) -> Iterator[tuple[int, Candidate | None]]:
    """Return the width of one beam after the other, and its candidate: the best settings are changed and widened.

    After each round come longer walks from its best ends, with width 0. `value` is the best so far. The workers share
    the work, and change nothing else.
    """
    tables, random = beam_tables(task), np.random.default_rng(seed)
    width, settings = FIRST_WIDTH, list(first_settings(task))
    while True:
        beams = _NarrowBeams(task, tables, width, value * NARROW_CAP, min(workers, len(settings)))
        found: list[tuple[Candidate, BeamSetting]] = []
        jobs = [(setting, _walk_seed(random)) for setting in settings]
        for (setting, _), candidate in zip(jobs, _map_in_order(beams.run, jobs, workers)):
            if candidate is not None:
                found.append((candidate, setting))
            yield width, candidate
        found = sorted(found, key=lambda pair: pair[0].value)[:NUM_BEST]
        for candidate in _map_in_order(beams.walk, [(one, _walk_seed(random)) for one, _ in found], workers):
            value = min(value, candidate.value)
            yield 0, candidate
        width *= 2
        best = [setting for _, setting in found] or list(first_settings(task))
        settings = best + [change_setting(best[k % len(best)], task, random) for k in range(NUM_CHANGED)]


class _NarrowBeams:
    """Beams of one width, each worker with its own buffers."""

    def __init__(self, task: SearchTask, tables: BeamTables, width: int, cap: float, workers: int) -> None:
        self._task, self._tables, self._width, self._cap = task, tables, width, cap
        self._buffers = [beam_buffers(tables, width, np.zeros(1, np.int64)) for _ in range(workers)]

    def run(self, worker: int, job: tuple[BeamSetting, int]) -> Candidate | None:
        """Return the candidate of a beam, with a short walk from it."""
        setting, seed = job
        found = run_beam(self._task, self._tables, self._buffers[worker], setting, self._cap, self._width)
        return found and self._walk(found, SHORT_WALK, seed)

    def walk(self, worker: int, job: tuple[Candidate, int]) -> Candidate:
        """Return the candidate of a long walk."""
        return self._walk(job[0], LONG_WALK, job[1])

    def _walk(self, candidate: Candidate, steps: int, seed: int) -> Candidate:
        return walk_from(self._task, candidate, steps * self._width, seed, 0.0, np.zeros(1, np.int64))


def _walk_seed(random: np.random.Generator) -> int:
    return 1 + 7919 * int(random.integers(1 << 40))


def _map_in_order(work: Callable[[int, Job], Result], jobs: list[Job], workers: int) -> Iterator[Result]:
    """Return the results of the jobs in their order; as many run at a time as there are workers."""
    with ThreadPoolExecutor(workers) as threads:
        for low in range(0, len(jobs), workers):
            yield from threads.map(work, range(workers), jobs[low : low + workers])


def first_settings(task: SearchTask) -> Iterator[BeamSetting]:
    """Return settings with several caps on all but the last stage of each rank."""
    fitting, is_line = fitting_activations(task), task.problem.stages_per_rank == 1
    caps = [np.floor(fitting * part) for part in ((1.0,) if is_line else CAP_PARTS)]
    caps += [np.ceil(times * steady_activations(task) + more) for times, more in STEADY_CAPS]
    last_stages = [task.placement.stages_of(rank)[-1] for rank in range(task.num_ranks)]
    for number, (cap, mean_weight) in enumerate(product(caps, MEAN_WEIGHTS)):
        max_live = np.clip(cap, 1, fitting).astype(np.int64)
        if not is_line:
            max_live[last_stages] = fitting[last_stages]
        for min_fit in (0.5, 0.0, 1.0) if is_line and number < len(MEAN_WEIGHTS) else (0.5,):
            yield BeamSetting(mean_weight, np.full(task.num_ranks, min_fit), max_live, is_grouped=False)


def change_setting(setting: BeamSetting, task: SearchTask, random: np.random.Generator) -> BeamSetting:
    """Return a setting with one change, on a range of ranks."""
    low = int(random.integers(task.num_ranks))
    high = low + 1 + int(random.integers(task.num_ranks - low)) * int(random.integers(2))
    kind, min_fit, max_live = random.random(), setting.min_fit.copy(), setting.max_live.copy()
    if kind < CHANGE_WEIGHT:
        return setting._replace(mean_weight=setting.mean_weight * float(random.choice((0.4, 2.5))))
    if kind < CHANGE_FIT:
        min_fit[low:high] = random.choice((0.0, 0.25, 0.5, 0.75, 1.0))
        return setting._replace(min_fit=min_fit)
    slot, more = int(random.integers(task.problem.stages_per_rank)), int(random.choice((-2, -1, -1, 1, 1, 2)))
    stages = [task.placement.stages_of(rank)[slot] for rank in range(low, high)]
    max_live[stages] = np.clip(max_live[stages] + more, 1, fitting_activations(task)[stages])
    return setting._replace(max_live=max_live)


def steady_activations(task: SearchTask) -> Array:
    """Return the live activations of each stage if the tightest rank's memory is always full and nothing waits."""
    stages = np.arange(task.num_stages)
    i, duration, period = task.last_pass - stages, task.tables.duration, min_period(task)
    lifetime: Array = task.solo_starts[i] + duration[i] - task.solo_starts[stages]
    return lifetime / period if period > 0 else np.full(task.num_stages, float(task.num_microbatches))


def min_period(task: SearchTask) -> float:
    """Return the least time per microbatch: by the work of a rank, and by how long its activations live."""
    tables, stages = task.tables, np.arange(task.num_stages)
    i, w = task.last_pass - stages, tables.w_duration * tables.weight_parts
    duration = tables.duration + (tables.lag if tables.blocking else 0.0)
    work = np.bincount(tables.rank, duration, task.num_ranks) + np.bincount(tables.rank[stages], w, task.num_ranks)
    lifetime = task.solo_starts[i] + tables.duration[i] - task.solo_starts[stages]
    used = tables.memory[stages] * lifetime + tables.w_memory * tables.weight_parts * w
    held = np.bincount(tables.rank[stages], used, task.num_ranks)
    return float(max(work.max(), (held / np.clip(tables.limit, 1e-300, 1e300)).max()))


def wide_beams(
    task: SearchTask, value: float, target: float, steps: int | None, seed: int, stop: Array
) -> Iterator[Candidate]:
    """Return the candidates of one wide beam after the other, until `target` is reached; `value` is the best so far.

    By time each round is twice as wide as the one before; by steps there is one, as wide as the steps allow.
    """
    max_width = MAX_CELLS // int(task.tables.row_start[-1])
    width = MIN_WIDTH if steps is None else min(max_width, int(WIDTH_PER_STEP * steps))
    while MIN_WIDTH <= width <= max_width:
        best: Candidate | None = None
        for number in range(len(WIDE_FITS) + 1):
            if value <= target or stop[0]:
                return
            if number < len(WIDE_FITS):
                found = wide_beam(task, WIDE_CAP * value, width, WIDE_FITS[number], seed + number, stop)
            else:
                found = best and _best_walk(task, best, NUM_LAST_WALKS, LAST_WALK_STEPS * width, seed + number, stop)
            if found is not None:
                best = min(best or found, found, key=lambda one: one.value)
                value = min(value, found.value)
                yield found
        if steps is not None:
            return
        width *= 2


def wide_beam(task: SearchTask, cap: float, width: int, min_fit: float, seed: int, stop: Array) -> Candidate | None:
    """Return the best of a grouped beam and of walks from it; None if it does not end before `cap` or is stopped."""
    tables = beam_tables(task)
    setting = BeamSetting(
        WIDE_MEAN_WEIGHT, np.full(task.num_ranks, min_fit), fitting_activations(task), is_grouped=True
    )
    found = run_beam(task, tables, beam_buffers(tables, width, stop), setting, cap, width)
    return found and _best_walk(task, found, NUM_WALKS, WALK_STEPS * width, seed, stop)


def _best_walk(task: SearchTask, candidate: Candidate, count: int, steps: int, seed: int, stop: Array) -> Candidate:
    seeds = [1 + 7919 * seed + 104_729 * number for number in range(count)]
    return min((walk_from(task, candidate, steps, one, 0.0, stop) for one in seeds), key=lambda found: found.value)


def run_beam(
    task: SearchTask, tables: BeamTables, buffers: BeamBuffers, setting: BeamSetting, cap: float, width: int
) -> Candidate | None:
    """Return the best schedule of a beam, None if it has none that ends before `cap`."""
    if not compiled(grow_beam)(tables=tables, buffers=buffers, setting=setting, cap=cap, width=width):
        return None
    passes, index = np.zeros(len(buffers.chosen), np.int64), 0
    for layer in range(len(passes) - 1, -1, -1):
        passes[layer], index = buffers.chosen[layer, index], buffers.parent[layer, index]
    rows = [passes[task.tables.rank[passes] == rank] for rank in range(task.num_ranks)]
    return Evaluator(task).simulate(np.concatenate(rows), setting.min_fit)


def beam_tables(task: SearchTask) -> BeamTables:
    """Return the tables of a task for its beams."""
    tables, times, all_ranks = task.tables, earliest_times(task), tuple(range(task.num_ranks))
    ranks = subset_tables(task, times, [rank_limits(task, times, rank) for rank in all_ranks], all_ranks)
    if tables.blocking:  # a message is part of the sender's work
        tables = tables._replace(duration=tables.duration + tables.lag, lag=np.zeros_like(tables.lag))
    work = np.bincount(ranks.rank, ranks.work * task.num_microbatches, task.num_ranks)
    return BeamTables(tables, ranks, work - ranks.span_start, TOLERANCE * float(tables.duration.mean()))


def beam_buffers(tables: BeamTables, width: int, stop: Array) -> BeamBuffers:
    """Allocate buffers for a beam; `stop[0] = 1` ends it."""

    def ints(*size: int) -> Array:
        return np.zeros(size, np.int64)

    passes, m = len(tables.passes.rank), tables.passes.num_microbatches
    ranks, activation = len(tables.rank_work), float(tables.passes.memory[0])
    window = m if activation <= 0 else int(min(m, tables.passes.limit[tables.passes.rank[0]] / activation + 1))
    size = EXTENSIONS_EACH * width
    return BeamBuffers(
        counts=ints(2, width, passes), next_pass=ints(2, width, window), arrival=np.zeros((2, width, window)),
        w_done=ints(2, width, passes // 2), free=np.zeros((2, width, ranks)), waited=np.zeros((2, width, ranks)),
        level=np.zeros((2, width, ranks)), pending=np.zeros((2, width, ranks)), latest=np.zeros((2, width)),
        hashes=ints(2, width), table=ints(2 * width + 1), spare_done=ints(passes // 2), begin=np.zeros(passes),
        num_w=ints(passes), then_level=np.zeros(passes), then_waited=np.zeros(passes), then_pending=np.zeros(passes),
        rating=np.zeros(size), origin=ints(size), choice=ints(size), ext_begin=np.zeros(size), ext_num_w=ints(size),
        ext_level=np.zeros(size), ext_waited=np.zeros(size), ext_pending=np.zeros(size), heap=ints(size),
        postponed=ints(size), group_size=ints(m + 2), parent=np.zeros((passes * m, width), np.int32),
        chosen=np.zeros((passes * m, width), np.int16), stop=stop,
    )  # fmt: skip
