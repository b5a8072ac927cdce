"""Compiles or loads the kernels of a search before its clock starts.

After an installation they are compiled, once, which takes longer than many searches; later they are only loaded. Small
searches by steps call all of them.
"""

from __future__ import annotations

from functools import cache

from zeropipe.core.check import check
from zeropipe.core.jit import MIN_COMPILED_SIZE, use_compiled
from zeropipe.core.placement import PLACEMENTS, Problem
from zeropipe.schedules.registry import build
from zeropipe.searching.candidates.registered import sequential_rows
from zeropipe.searching.driver import SearchDriver
from zeropipe.searching.evaluator import Evaluator
from zeropipe.searching.local_search import FIRST_ROUNDS, Effort, local_search
from zeropipe.searching.task import SearchTask
from zeropipe.sim.costs import Costs
from zeropipe.sim.fill import fill_gaps
from zeropipe.sim.simulate import simulate


def warm_kernels(num_actions: int) -> None:
    """Load the kernels for a search of schedules with this many actions, compiled before if need be."""
    if num_actions >= MIN_COMPILED_SIZE:
        _warm_schedule_kernels()
    _warm_search_kernels()


@cache
def _warm_search_kernels() -> None:
    costs = Costs(f=1.0, i=1.2, w=0.7, p2p=0.05, memory_limit=3)
    for per_rank, rule, steps in ((1, "linear", 20), (2, "vee", 200)):
        problem = Problem(4, 4 * per_rank, 8)
        task = SearchTask(problem, PLACEMENTS[rule](problem), costs, minimizes_span=False)
        _, interrupted = SearchDriver([task], steps=steps, seconds=0.0, seed=0, workers=1, progress=None).run()
        effort = Effort(FIRST_ROUNDS[0].steps + 1)  # a walk, and one step of the next round
        if not interrupted and (candidate := Evaluator(task).best_fit(sequential_rows(task))):
            local_search(task, [candidate], 0.0, effort, 0, 1)
        if interrupted or effort.interrupted:  # Ctrl-C, which these searches took for themselves
            raise KeyboardInterrupt


@cache
def _warm_schedule_kernels() -> None:
    """Load the kernels that check, simulate and fill schedules."""
    use_compiled()
    costs, schedule = Costs(p2p=0.05), build("zb-h1", ranks=8, microbatches=MIN_COMPILED_SIZE // 16)
    check(schedule)
    simulate(fill_gaps(schedule, costs, weight_parts=1), costs)
