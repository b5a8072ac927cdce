"""Which candidates are tried: every layout, microbatch size and mode that may fit, with every schedule and cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from zeropipe.errors import ConfigError
from zeropipe.planning.layouts import Layout, most_stages
from zeropipe.planning.rows import Candidate
from zeropipe.planning.score import Scene
from zeropipe.schedules.registry import entries, find

MOST_STAGES = 4  # per rank
MOST_ACTIONS = 1_000_000  # of a schedule


class Run(NamedTuple):
    """A layout with microbatches and checkpointing: everything but the schedule."""

    layout: Layout
    num_microbatches: int
    microbatch_size: int
    ac: str


class Misfit(NamedTuple):
    """A run whose weights alone are too large."""

    run: Run
    needs: float
    over: float


def runs(scene: Scene, batch: int, options: Iterable[Layout], sizes: Sequence[int], modes: Sequence[str]) -> list[Run]:
    """Everything that shares the batch out evenly, is not too large to try, and whose costs are known."""
    found = []
    for layout in options:
        for size in sizes:
            number, rest = divmod(batch, layout.dp_shard * size)
            if rest or not number or 3 * number * layout.pp * MOST_STAGES > MOST_ACTIONS:
                continue
            for mode in modes:
                try:
                    scene.costs.setting(ac=mode, microbatch_size=size, tp=layout.tp)
                except ConfigError:
                    continue
                found.append(Run(layout, number, size, mode))
    return found


def sifted(scene: Scene, given: Sequence[Run]) -> tuple[list[Run], list[Misfit]]:
    """The runs in the order of their least time; and those that no schedule can fit into memory."""
    possible, misfits = [], []
    for run in given:
        time, needs = _least(scene, run)
        if needs > scene.limit:
            misfits.append(Misfit(run, needs, needs - scene.limit))
        else:
            possible.append((time, run))
    return [run for _, run in sorted(possible)], sorted(misfits, key=lambda misfit: misfit.over)


def _least(scene: Scene, run: Run) -> tuple[float, float]:
    """Seconds and bytes that a run takes at least: an equal share of all work, and of weights and one microbatch."""
    setting = scene.costs.setting(ac=run.ac, microbatch_size=run.microbatch_size, tp=run.layout.tp)
    layers = [
        *scene.costs.layer_list(setting, run.ac),
        *(setting.kinds[kind] for kind in (*scene.costs.before, *scene.costs.after)),
    ]
    work, forward = (sum(time) for time in zip(*((layer.f + layer.full_backward, layer.f) for layer in layers)))
    parameters = sum(layer.parameters for layer in layers)
    if scene.costs.tied:
        parameters -= min(setting.kinds[scene.costs.before[0]].parameters, parameters)
    held = sum(layer.activation for layer in layers)
    pp = run.layout.pp
    bytes_each = (parameters * scene.costs.state.with_full_weights(run.layout.dp_shard) + held) / pp
    return (run.num_microbatches * work + (pp - 1) * forward / pp) / pp, bytes_each


def named_variants(wish: Sequence[str] | None, overlaps: bool) -> list[tuple[str, int]]:
    """Schedules with their stages per rank. Those made of Overlaps only where costs say what an Overlap takes."""
    if wish is None:
        wish = [entry.name for entry in entries() if entry.is_ours and (overlaps or not entry.overlaps)]
    return list(dict.fromkeys(variant for name in wish for variant in _variants(name)))


def _variants(name: str) -> list[tuple[str, int]]:
    """`interleaved` with all its stages per rank, or `interleaved:v=3` with these."""
    base, colon, number = str(name).partition(":v=")
    entry = find(base if number.isdecimal() else name)
    if not colon:
        return [(entry.name, v) for v in entry.stages_per_rank if v <= MOST_STAGES]
    if int(number) not in entry.stages_per_rank:
        raise ConfigError(f"{name}: {entry.name} has {', '.join(map(str, entry.stages_per_rank))} stages per rank")
    return [(entry.name, int(number))]


def candidates(given: Iterable[Run], variants: Sequence[tuple[str, int]], num_layers: int) -> list[Candidate]:
    """Every run with every schedule that has no more stages than layers fill, and every cut.

    Without a pipeline one schedule is like the other.
    """
    return [
        Candidate(run.layout, name, per_rank, run.num_microbatches, run.microbatch_size, run.ac, cut)
        for run in given
        for name, per_rank in (variants if run.layout.pp > 1 else [("1f1b", 1)])
        for cut in _cuts(run.layout.pp * per_rank, num_layers)
    ]


def _cuts(num_stages: int, num_layers: int) -> Iterator[str]:
    if 1 < num_stages <= most_stages(num_layers):
        yield "balanced"
    if num_stages <= num_layers:
        yield "even"


def grouped(tries: Iterable[Candidate]) -> list[list[Candidate]]:
    """Candidates that run the same schedule together."""

    def key(one: Candidate) -> tuple[str, int, int, int]:
        return one.schedule, one.stages_per_rank, one.layout.pp, one.num_microbatches

    return [list(group) for _, group in groupby(sorted(dict.fromkeys(tries), key=key), key)]


def run_of(candidate: Candidate) -> Run:
    """The run of a candidate."""
    return Run(candidate.layout, candidate.num_microbatches, candidate.microbatch_size, candidate.ac)
