"""Names for torch.profiler: a trace says which action ran when, as `zeropipe trace compare` reads it."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps

from torch.profiler import record_function

from zeropipe.core.action import Action, Overlap
from zeropipe.core.formats.torch_trace import PIPELINE
from zeropipe.core.schedule import Schedule
from zeropipe.engine.step.cells import Call, Cell
from zeropipe.engine.torch_private.autograd import is_profiling, tell_profiler


class Names:
    """Wraps the computation of a step in its name, while a profiler is there to see it.

    The trace of a rank is also told how many stages there are: without the other ranks' it would look complete.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._facts: str | None = dumps({"schedule": schedule.name, "num_stages": schedule.num_stages})

    def watch(self, call: Call, actions: Sequence[Action], cells: Sequence[Cell]) -> Call:
        name = str(actions[0] if len(actions) == 1 else Overlap(*actions))
        facts, self._facts = self._facts, None  # with the row's first step

        def named() -> None:
            if not is_profiling():
                call()
                return
            if facts is not None:
                tell_profiler(PIPELINE, facts)
            with record_function(name):
                call()

        return named
