"""`zp.search`: a schedule for given costs under a memory limit, and its distance from the best possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from time import monotonic
from typing import get_args

from zeropipe.core.action import MAX_SLICES, MAX_STAGES
from zeropipe.core.placement import MAX_WEIGHT_PARTS, PLACEMENTS, Placement, PlacementRule, Problem, linear
from zeropipe.core.timeline import Timeline
from zeropipe.core.workers import count_cores
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.searching.driver import TICK_SECONDS, Progress, SearchDriver
from zeropipe.searching.memory_saving import create_memory_saving, search_saving_memory
from zeropipe.searching.result import Objective, SearchResult
from zeropipe.searching.sliced import SlicedTask, search_sliced
from zeropipe.searching.task import SearchTask
from zeropipe.searching.warm_kernels import warm_kernels
from zeropipe.sim.costs import Costs, require_stage_costs
from zeropipe.sim.simulate import simulate

MAX_PASSES = 4_000_000  # F and I of all stages and microbatches


def search(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    stages_per_rank: int = 1,
    placement: PlacementRule | str | None = None,
    weight_parts: int = 1,
    slices: int | Sequence[int] = 1,
    rank_limits: Sequence[float] | None = None,
    checkpointing: bool = False,
    offload: bool = False,
    seconds: float = 10.0,
    seed: int = 0,
    objective: Objective = "makespan",
    steps: int | None = None,
    progress: Callable[[Progress], object] | None = None,
    workers: int | None = None,
) -> SearchResult:
    """Search for the best schedule for `seconds`, or by `steps` of local search however long they take.

    `costs` are per stage, as in `simulate`. `costs.memory_limit` is kept on every rank, or `rank_limits`, one per rank,
    where they differ. `placement` is a rule like `zp.vee`, its name, or "all" (the default with several stages per
    rank). The same seed and steps give the same schedule; a search by time depends on the machine. `progress` is called
    repeatedly with the state of the search, and ends it by returning True. Ctrl-C ends it too, and the best so far is
    returned. `slices` are the numbers of slices of a sequence to try; with more than one they are searched in the
    placements linear and loop, for the makespan. With `checkpointing` as few F are checkpointed, and with `offload` as
    few activations copied to the host, as keep `costs.memory_limit`, for the makespan. Before the time starts the
    compiled kernels are loaded, which takes a second; after an installation they are compiled, which takes about half a
    minute.
    """
    costs = require_stage_costs(costs)
    require_positive_integers(ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    require_callbacks(progress, workers)
    require_seconds("seconds", seconds)
    if steps is not None and (type(steps) is not int or steps < 0):
        raise ConfigError(f"steps={short(steps)}: must be a non-negative integer, or None to search for `seconds`")
    if type(seed) is not int:
        raise ConfigError(f"seed={short(seed)}: must be an integer")
    if objective not in get_args(Objective):
        raise ConfigError(f'objective={short(objective)}: must be "makespan" or "span"')
    if type(weight_parts) is not int or not 1 <= weight_parts <= MAX_WEIGHT_PARTS:
        raise ConfigError(f"weight_parts={short(weight_parts)}: must be an integer from 1 to {MAX_WEIGHT_PARTS}")
    numbers = _slice_numbers(slices, weight_parts, objective)
    problem = Problem(ranks, ranks * stages_per_rank, microbatches, weight_parts)
    if problem.num_stages > MAX_STAGES or 2 * problem.num_stages * microbatches > MAX_PASSES:
        raise ConfigError(
            f"{problem.num_stages} stages x {microbatches} microbatches: a search takes at most {MAX_PASSES // 2} "
            "stages times microbatches; use fewer microbatches"
        )
    saving = create_memory_saving(checkpointing, offload, costs, problem.num_stages)
    if saving is not None:
        given = {"slices": numbers != (1,), "rank_limits": rank_limits is not None, "objective": objective == "span"}
        if refused := [name for name, is_given in given.items() if is_given]:
            raise ConfigError(f"{refused[0]} with {saving.name}: are not searched together; use one of them")
        return search_saving_memory(
            saving, lambda own, share: search(
                ranks=ranks, microbatches=microbatches, costs=own, stages_per_rank=stages_per_rank, placement=placement,
                weight_parts=weight_parts, seconds=share, seed=seed, steps=steps, progress=progress, workers=workers,
            ), problem, _placements(placement, problem), seconds=float(seconds), steps=steps, seed=seed,
        )  # fmt: skip
    limits = None if rank_limits is None else _limits(rank_limits, ranks, costs)
    if numbers != (1,):
        return _search_slices(
            problem, numbers, _placements(placement, problem), costs, limits, seconds=float(seconds), steps=steps,
            seed=seed, progress=progress, workers=workers,
        )  # fmt: skip
    tasks = [
        SearchTask(
            problem, rule, costs.with_reserved_workspace(rule), minimizes_span=objective == "span", rank_limits=limits
        )
        for rule in _placements(placement, problem)
    ]
    for task in tasks:
        task.require_memory()
    if steps is None:
        warm_kernels(tasks[0].num_actions)
    driver = SearchDriver(
        tasks, steps=steps, seconds=float(seconds), seed=seed, workers=workers or count_cores(), progress=progress
    )
    best, interrupted = driver.run()
    registered = driver.registered
    if any(task.costs is not costs for task in tasks):  # workspace was reserved
        best = simulate(best.schedule, costs)
        registered = None if registered is None else simulate(registered.schedule, costs)
    return SearchResult(
        best.schedule, best, objective, driver.bound, driver.elapsed, interrupted, registered,
        tuple(task.placement.name for task in tasks),
    )  # fmt: skip


def _search_slices(
    problem: Problem, numbers: tuple[int, ...], placements: list[Placement], costs: Costs,
    limits: tuple[float, ...] | None, *, seconds: float, steps: int | None, seed: int,
    progress: Callable[[Progress], object] | None, workers: int | None,
) -> SearchResult:  # fmt: skip
    """Search every number of slices for an equal part of the time; of 1 with `search`."""
    begin, rule = monotonic(), next((one for one in placements if one.name in ("linear", "loop")), None)
    if rule is None:
        raise ConfigError(f"slices={short(numbers)}: are searched in the placements linear and loop; use one of them")
    if limits is None:
        limits = ((float("inf") if costs.memory_limit is None else costs.memory_limit),) * problem.num_ranks
    found: list[SearchResult] = []
    for index, number in enumerate(numbers):
        share = (seconds - (monotonic() - begin)) / (len(numbers) - index)
        if number == 1:
            found.append(
                search(
                    ranks=problem.num_ranks, microbatches=problem.num_microbatches, costs=costs,
                    stages_per_rank=problem.stages_per_rank, placement=lambda _: rule, rank_limits=limits,
                    seconds=max(0.0, share), steps=steps, seed=seed, progress=progress, workers=workers,
                )
            )  # fmt: skip
            continue
        task = SlicedTask(replace(problem, num_slices=number), rule, costs, limits)
        result = _search_number(task, begin, monotonic() + share, steps, seed, progress)
        if result is not None:
            found.append(result)
        if found and found[-1].interrupted:
            break
    if not found:
        raise ConfigError(
            f"slices={short(numbers)}: no schedule with so many fits into the memory; use more, or raise the limit"
        )
    best = min(found, key=lambda one: one.value)
    registered = [one.registered for one in found if one.registered is not None]
    return replace(
        best, bound=min(one.bound for one in found), seconds=monotonic() - begin,
        interrupted=any(one.interrupted for one in found), slices=numbers, placements=(rule.name,),
        registered=min(registered, key=lambda timeline: timeline.makespan, default=None),
    )  # fmt: skip


def _search_number(
    task: SlicedTask, begin: float, until: float, steps: int | None, seed: int,
    progress: Callable[[Progress], object] | None,
) -> SearchResult | None:  # fmt: skip
    """Search one number of slices; None if nothing fits. Ctrl-C and `progress` end it."""
    bound, last, interrupted, kept = task.bound, 0.0, False, list[Timeline]()

    def is_stopped(best: Timeline | None) -> bool:
        nonlocal last, interrupted
        now = monotonic()
        kept[:] = [] if best is None else [best]
        if best is not None and progress is not None and now - last > TICK_SECONDS:
            last = now
            interrupted = bool(progress(Progress(now - begin, best.makespan, bound)))
        return interrupted or (steps is None and now > until)

    registered: Timeline | None = None
    try:
        best, registered = search_sliced(task, float("inf") if steps is None else steps, seed, is_stopped)
    except KeyboardInterrupt:
        interrupted, best = True, next(iter(kept), None)
    if best is None:
        return None
    return SearchResult(best.schedule, best, "makespan", bound, monotonic() - begin, interrupted, registered)


def _slice_numbers(slices: int | Sequence[int], weight_parts: int, objective: Objective) -> tuple[int, ...]:
    """The numbers of slices; ConfigError for those that cannot be searched."""
    numbers = tuple(dict.fromkeys(slices if isinstance(slices, Sequence) else [slices]))
    if not numbers or any(type(number) is not int or not 1 <= number < MAX_SLICES for number in numbers):
        raise ConfigError(f"slices={short(slices)}: must be an integer from 1 to {MAX_SLICES - 1}, or several")
    if numbers != (1,) and weight_parts > 1:
        raise ConfigError(f"weight_parts={weight_parts} with slices={max(numbers)}: use one of them")
    if numbers != (1,) and objective != "makespan":
        raise ConfigError(f"objective={objective!r} with slices={max(numbers)}: must be 'makespan'")
    return numbers


def require_seconds(name: str, value: object, way_out: str = "") -> None:
    """Raise ConfigError unless a value is a time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (isfinite(value) and value >= 0):
        raise ConfigError(f"{name}={short(value)}: must be a non-negative number{way_out}")


def require_callbacks(progress: object, workers: object) -> None:
    """Raise ConfigError unless `progress` can be called and `workers` is a number of threads, or they are None."""
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress={short(progress)}: must be a function or None")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ConfigError(f"workers={short(workers)}: must be a positive integer, or None for all cores")


def _limits(limits: Sequence[float], ranks: int, costs: Costs) -> tuple[float, ...]:
    """Return one memory limit per rank, none above the limit for all."""
    for limit in limits:
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 0:
            raise ConfigError(f"rank_limits has {short(limit)}: must be non-negative numbers")
    if len(limits) != ranks:
        raise ConfigError(f"rank_limits has {len(limits)} entries: there are {ranks} ranks; use one entry for each")
    largest = float("inf") if costs.memory_limit is None else costs.memory_limit
    return tuple(min(float(limit), largest) for limit in limits)


def _placements(placement: PlacementRule | str | None, problem: Problem) -> list[Placement]:
    """Return the placements to search, each once."""
    is_single = problem.num_stages == problem.num_ranks
    if placement is None or placement == "all":
        rules = [linear] if is_single else [PLACEMENTS["vee"], PLACEMENTS["loop"]]
    elif callable(placement):
        rules = [placement]
    elif placement in PLACEMENTS:
        rules = [PLACEMENTS[placement]]
    else:
        raise ConfigError(f"placement={short(placement)}: must be linear, loop, vee or all")
    found: list[Placement] = []
    for rule in rules:
        if rule is linear and not is_single:
            per_rank = problem.stages_per_rank
            raise ConfigError(f"placement linear has one stage per rank, not {per_rank}; use loop, vee or all")
        placed = rule(problem)
        if len(placed.copies) > 1:
            raise ConfigError(f"placement {placed.name} keeps two copies of the model; use linear, loop or vee")
        if set(placed.copies[0]) != set(range(problem.num_ranks)):
            raise ConfigError(f"placement {placed.name} leaves ranks without a stage: every rank must have one")
        if placed not in found:
            found.append(placed)
    return found
