"""The costs of the slices of a microbatch: shares of the costs of a stage."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from zeropipe.core.schedule import Schedule
from zeropipe.core.slices import parse_shares
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Costs

_SUM_ROUNDING = 1 + 1e-9


class SliceCosts(NamedTuple):
    """Costs by slice and stage: entry slice * num_stages + stage of each list. One slice has the stage's own costs."""

    costs: Costs
    num_stages: int
    shares: tuple[float, ...]

    @staticmethod
    def of(schedule: Schedule, costs: Costs) -> SliceCosts:
        """Those of a schedule; ConfigError for costs that say nothing of slices."""
        num_slices = schedule.num_slices
        if num_slices > 1 and costs.phases is not None:
            raise ConfigError(f"phases is set for {num_slices} slices: phases are of whole microbatches; leave it out")
        shares = (1.0,) if num_slices == 1 else parse_shares(costs.slice_sizes, num_slices)
        return SliceCosts(costs, schedule.num_stages, shares)

    def rows(self, name: str) -> list[float]:
        """The share of each slice in a cost of each stage."""
        column = self.costs.column(name, self.num_stages)
        return [share * value for share in self.shares for value in column]

    def times(self) -> tuple[list[float], ...]:
        """The times f, b, i, w and overlap."""
        f, b, i, w, overlap = (self.rows(name) for name in ("f", "b", "i", "w", "overlap"))
        more_f, more_i = (self._more_attention(name) for name in ("f", "i"))
        more_overlap = [x + y for x, y in zip(more_f, more_i, strict=True)]
        pairs = ((f, more_f), (b, more_i), (i, more_i), (w, [0.0] * len(w)), (overlap, more_overlap))
        return tuple([time + more for time, more in zip(times, extra, strict=True)] for times, extra in pairs)

    def _more_attention(self, kind: str) -> list[float]:
        """What the attention of each slice takes beyond its share of the tokens, which is negative for the first."""
        name = f"{kind}_attention"
        times, whole = self.costs.column(name, self.num_stages), self.costs.column(kind, self.num_stages)
        if len(self.shares) == 1:
            return [0.0] * self.num_stages
        for stage, (time, limit) in enumerate(zip(times, whole, strict=True)):
            if time > limit * _SUM_ROUNDING:
                raise ConfigError(f"{name}={time:g} of stage {stage}: must be at most its {kind}, {limit:g}")
        ends = accumulate(self.shares)
        # a slice from a to b has b^2 - a^2 of the attention
        parts = [share * (2 * end - share) - share for share, end in zip(self.shares, ends, strict=True)]
        return [part * time for part in parts for time in times]

    def memory(self) -> tuple[list[float], list[float], list[float]]:
        """What F allocates, what B or I frees, and what B or I allocates for the gradients of keys."""
        allocated, freed = self.rows("activation"), self.rows("activation")
        gradients = [0.0] * len(allocated)
        if len(self.shares) > 1:
            keys, sums = (self.costs.column(name, self.num_stages) for name in ("keys", "key_gradients"))
            last = len(allocated) - self.num_stages
            for stage, (kept, summed) in enumerate(zip(keys, sums, strict=True)):
                allocated[stage] += kept
                freed[stage] += kept + summed
                gradients[last + stage] = summed
        return allocated, freed, gradients
