"""`zp.search`: a schedule for given costs under a memory limit, and how far it is from the best possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

from zeropipe.core.action import MAX_STAGES
from zeropipe.core.placement import MAX_WEIGHT_PARTS, PLACEMENTS, Placement, PlacementRule, Problem, linear
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.searching.hunt import Hunt, Progress, gap_of, value_of
from zeropipe.searching.model import Task
from zeropipe.searching.ready import make_ready
from zeropipe.sim.costs import Costs, require_stage_costs

Objective = Literal["makespan", "span"]
MOST = 4_000_000  # F and I of all stages and microbatches


@dataclass(frozen=True)
class Found:
    """The best schedule that was found, and a time that no schedule can beat."""

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    bound: float
    seconds: float
    interrupted: bool = False
    named: Timeline | None = None  # the best schedule with a name that fits

    @property
    def value(self) -> float:
        """What was minimised."""
        return self.value_of(self.timeline)

    def value_of(self, timeline: Timeline) -> float:
        """The same of another timeline."""
        return value_of(timeline, self.objective == "span")

    @property
    def gap(self) -> float:
        """How far the value is above the bound: 0.01 is one percent, and 0 the proof that nothing is better."""
        return gap_of(self.value, self.bound)

    def __str__(self) -> str:
        return f"{self.schedule.name}: {self.objective} {self.value:g}, bound {self.bound:g}, gap {self.gap:.2%}"


def search(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    stages_per_rank: int = 1,
    placement: PlacementRule | str | None = None,
    weight_parts: int = 1,
    rank_limits: Sequence[float] | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    objective: Objective = "makespan",
    steps: int | None = None,
    progress: Callable[[Progress], object] | None = None,
    workers: int | None = None,
) -> Found:
    """The best schedule that is found within `seconds`, or with `steps` of local search however long they take.

    `costs` are per stage, as in `simulate`. `costs.memory_limit` is kept, or where ranks have different memory
    `rank_limits`, one for each. `placement` is a rule like `zp.vee`, its
    name, or "all" (also the default for several stages per rank). The same seed and steps give the same schedule;
    a search by time depends on the machine. `progress` is called again and again with how far the search is, and ends
    it by returning True. Ctrl-C ends it too: the best so far is returned. Before `seconds` begin the compiled kernels
    are made ready: in a second, and after an installation, when they have to be compiled, in about half a minute.
    """
    given = require_stage_costs(costs)
    require_positive_integers(ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    require_helpers(progress, workers)
    if steps is not None and (type(steps) is not int or steps < 0):
        raise ConfigError(f"steps={steps!r}: a whole number from 0 on is needed, or None to search for `seconds`")
    require_seconds("seconds", seconds)
    if type(seed) is not int:
        raise ConfigError(f"seed={seed!r}: a whole number is needed")
    if objective not in get_args(Objective):
        raise ConfigError(f'objective={objective!r}: choose "makespan" or "span"')
    if type(weight_parts) is not int or not 1 <= weight_parts <= MAX_WEIGHT_PARTS:
        raise ConfigError(f"weight_parts={weight_parts!r}: a W is cut into 1 to {MAX_WEIGHT_PARTS} parts")
    problem = Problem(ranks, ranks * stages_per_rank, microbatches, weight_parts)
    if problem.num_stages > MAX_STAGES or 2 * problem.num_stages * microbatches > MOST:
        raise ConfigError(
            f"{problem.num_stages} stages x {microbatches} microbatches are too many to search: "
            f"at most {MOST // 2} together; search with fewer microbatches"
        )
    limits = None if rank_limits is None else _limits(rank_limits, ranks, given)
    tasks = [Task(problem, where, given, objective == "span", limits) for where in _placements(placement, problem)]
    for task in tasks:
        task.require_room()
    if steps is None:
        make_ready(tasks[0].num_actions)
    hunt = Hunt(tasks, steps=steps, seconds=float(seconds), seed=seed, workers=workers or _cores(), progress=progress)
    best, interrupted = hunt.run()
    return Found(best.schedule, best, objective, hunt.bound, hunt.elapsed, interrupted, hunt.named)


def require_seconds(name: str, value: object, way: str = "") -> None:
    """ConfigError for what is no time to search for."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (isfinite(value) and value >= 0):
        raise ConfigError(f"{name}={short(value)}: a number from 0 on is needed{way}")


def require_helpers(progress: object, workers: object) -> None:
    """ConfigError for what cannot be told how far a search or a plan is, and for no number of workers."""
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress={short(progress)}: a function is needed, or None")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ConfigError(f"workers={short(workers)}: a whole number from 1 on is needed, or None for all cores")


def _limits(limits: Sequence[float], ranks: int, costs: Costs) -> tuple[float, ...]:
    """One memory limit per rank, none above the limit for all."""
    for limit in limits:
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 0:
            raise ConfigError(f"rank_limits has {limit!r}: a number from 0 on is needed")
    if len(limits) != ranks:
        raise ConfigError(f"rank_limits has {len(limits)} entries: there are {ranks} ranks, give one for each")
    most = float("inf") if costs.memory_limit is None else costs.memory_limit
    return tuple(min(float(limit), most) for limit in limits)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _placements(wish: PlacementRule | str | None, problem: Problem) -> list[Placement]:
    """The placements to be searched, each once."""
    alone = problem.num_stages == problem.num_ranks
    if wish is None or wish == "all":
        rules = [linear] if alone else [PLACEMENTS["vee"], PLACEMENTS["loop"]]
    elif callable(wish):
        rules = [wish]
    elif wish in PLACEMENTS:
        rules = [PLACEMENTS[wish]]
    else:
        raise ConfigError(f"placement={wish!r}: choose linear, loop, vee or all")
    found: list[Placement] = []
    for rule in rules:
        if rule is linear and not alone:
            per_rank = problem.stages_per_rank
            raise ConfigError(f"placement linear has one stage per rank, not {per_rank}: choose loop, vee or all")
        placement = rule(problem)
        if len(placement.copies) > 1:
            raise ConfigError(f"placement {placement.name} keeps two copies of the model: choose linear, loop or vee")
        if set(placement.copies[0]) != set(range(problem.num_ranks)):
            raise ConfigError(f"placement {placement.name} leaves ranks without a stage: every rank needs one")
        if placement not in found:
            found.append(placement)
    return found
