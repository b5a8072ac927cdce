"""Makes the compiled kernels of a search ready before its clock runs.

After an installation they have to be compiled, once, which takes longer than many searches; later they are only loaded.
Small searches by steps call all of them.
"""

from __future__ import annotations

from functools import cache

from zeropipe.core.check import check
from zeropipe.core.jit import MIN_COMPILED_SIZE, use_compiled
from zeropipe.core.placement import PLACEMENTS, Problem
from zeropipe.schedules.registry import build
from zeropipe.searching.climb import ROUNDS, Effort, climb
from zeropipe.searching.hunt import Hunt
from zeropipe.searching.judge import Judge
from zeropipe.searching.model import Task
from zeropipe.searching.starts.starts import one_by_one
from zeropipe.sim.costs import Costs
from zeropipe.sim.fill import fill_gaps
from zeropipe.sim.simulate import simulate


def make_ready(num_actions: int) -> None:
    """Load the kernels for a search of schedules with so many actions, compiled before if need be."""
    if num_actions >= MIN_COMPILED_SIZE:
        _walking()
    _searching()


@cache
def _searching() -> None:
    costs = Costs(f=1.0, i=1.2, w=0.7, p2p=0.05, memory_limit=3)
    for per_rank, rule, steps in ((1, "linear", 20), (2, "vee", 200)):
        problem = Problem(4, 4 * per_rank, 8)
        task = Task(problem, PLACEMENTS[rule](problem), costs, False, None)
        _, interrupted = Hunt([task], steps=steps, seconds=0.0, seed=0, workers=1, progress=None).run()
        effort = Effort(ROUNDS[0][3] + 1)  # a walk, and one step of the next round
        if not interrupted and (start := Judge(task).plays(one_by_one(task))):
            climb(task, [start], 0.0, effort, 0, 1)
        if interrupted or effort.interrupted:  # Ctrl-C, which these searches took for themselves
            raise KeyboardInterrupt


@cache
def _walking() -> None:
    """The kernels that check, simulate and fill schedules."""
    use_compiled()
    costs, schedule = Costs(p2p=0.05), build("zb-h1", ranks=8, microbatches=MIN_COMPILED_SIZE // 16)
    check(schedule)
    simulate(fill_gaps(schedule, costs, weight_parts=1), costs)
