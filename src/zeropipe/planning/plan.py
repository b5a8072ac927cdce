"""`zp.plan`: a model, GPUs, memory and a batch in; what to run, how fast, and how far from the best possible, out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import estimate
from zeropipe.estimating.gpus import find_gpu
from zeropipe.estimating.model import Model, ShapedModel, open_model
from zeropipe.planning.layouts import Layout, layouts, most_stages
from zeropipe.planning.pool import score_groups
from zeropipe.planning.refine import searched, with_gaps
from zeropipe.planning.result import Plan
from zeropipe.planning.rows import Candidate, Row
from zeropipe.planning.score import RESERVE, Scene, optimizer_bandwidth, schedule_of
from zeropipe.planning.tries import Run, candidates, grouped, named_variants, runs, sifted
from zeropipe.schedules.registry import entries
from zeropipe.searching.search import require_callbacks, require_seconds
from zeropipe.sim.layer_costs import LayerCosts

MODES = ("none", "selective:op", "full")
SIZES = (1, 2, 4)
MOST = 4000  # candidates that are simulated: those whose work takes least
SHOWN = 12  # rows that are compared with their bound


def plan(
    model: str | Mapping[str, Any] | ShapedModel | CountedModel | LayerCosts,
    *,
    gpus: int,
    batch: int,
    gpus_per_node: int = 8,
    memory: float | None = None,
    reserve: float = RESERVE,
    gpu: str = "h100",
    sequence: int = 4096,
    dtype: str = "bf16",
    compile: bool = True,
    efficiency: dict[str, Any] | None = None,
    pp: int | Sequence[int] | None = None,
    tp: int | Sequence[int] | None = None,
    microbatch_sizes: int | Sequence[int] | None = None,
    ac: str | Sequence[str] | None = None,
    schedules: str | Sequence[str] | None = None,
    search_seconds: float = 10.0,
    search_steps: int | None = None,
    most: int = MOST,
    workers: int | None = None,
    progress: Callable[[str, float], object] | None = None,
) -> Plan:
    """Try layouts, schedules, microbatch sizes, checkpointing modes and cuts, and rank what fits.

    `model` is what `zp.estimate` takes (then `gpu`, `sequence`, `dtype`, `compile` and `efficiency` are for it), or
    LayerCosts of a file. `batch` is the number of sequences of a step, over all GPUs. `memory` is that of a GPU, of
    which `reserve` is left alone. By default microbatches of 1, 2 and 4 sequences, no checkpointing, `selective:op` and
    `full` are tried, or what the costs are of; and every schedule with a name. Then schedules are searched for the best
    ones, for `search_seconds` in all, or each with `search_steps`, as in `zp.search`. No more than `most` candidates
    are simulated, those with least work. `progress` is called with what is done and the share of all that is done.
    """
    require_callbacks(progress, workers)
    begun, tell = monotonic(), progress or (lambda what, share: None)
    require_positive_integers(gpus=gpus, batch=batch, gpus_per_node=gpus_per_node, most=most)
    require_seconds("search_seconds", search_seconds, "; 0 for no search")
    if search_steps is not None and (search_seconds == 0 or schedules is not None):
        why = "schedules are named" if search_seconds else "search_seconds=0"
        raise ConfigError(f"search_steps={short(search_steps)}: nothing is searched where {why}; leave one of them out")
    pp, tp, microbatch_sizes = _several("pp", pp), _several("tp", tp), _several("microbatch_sizes", microbatch_sizes)
    ac, schedules = _texts("ac", ac), _texts("schedules", schedules)
    if isinstance(model, LayerCosts):
        costs = model
        _require_settings(costs, tp or (), microbatch_sizes or (), ac or ())
        microbatch_sizes = microbatch_sizes or sorted({setting.microbatch_size for setting in costs.settings})
        ac = ac or list(dict.fromkeys(setting.ac for setting in costs.settings))
        sizes = sorted({setting.tp for setting in costs.settings})
        if tp is not None:
            sizes = [size for size in sizes if size in tp]
    else:
        microbatch_sizes, ac = microbatch_sizes or SIZES, ac or MODES
        opened = open_model(model)
        sizes = _tensor_sizes(opened, tp, gpus_per_node, gpus)
        costs = estimate(
            opened, gpu=gpu, sequence=sequence, dtype=dtype, compile=compile, efficiency=efficiency, tp=sizes,
            microbatch_size=list(microbatch_sizes), ac=list(ac),
        )  # fmt: skip
        memory = find_gpu(gpu).memory if memory is None else memory
    memory = costs.machine.get("memory") if memory is None else memory
    if isinstance(reserve, bool) or not isinstance(reserve, (int, float)) or not reserve >= 0:
        raise ConfigError(f"reserve={short(reserve)}: a number of bytes from 0 on is needed")
    if memory is None:
        raise ConfigError("memory is missing: the costs do not say how much a GPU has, give it, like 80GB")
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory > reserve:
        given_is = f" is {memory / 1e9:g} GB" if isinstance(memory, (int, float)) else ""
        raise ConfigError(
            f"memory={short(memory)}{given_is}: bytes above the reserve of {reserve / 1e9:g} GB are needed, like 80GB; "
            "or give a smaller reserve"
        )
    scene = Scene(costs, gpus_per_node, memory - reserve, optimizer_bandwidth(costs))
    every = layouts(gpus, gpus_per_node, sizes, costs.num_layers)
    options = [one for one in every if pp is None or one.pp in pp]
    given = runs(scene, batch, options, microbatch_sizes, ac)
    if not options:
        known = ", ".join(map(str, sorted({one.pp for one in every})))
        raise ConfigError(
            f"pp={', '.join(map(str, pp or ()))}: no layout of {gpus} GPUs and {costs.num_layers} layers has that many "
            f"pipeline ranks: give some of {known}"
        )
    if not given:
        raise _no_runs(batch, gpus, options, microbatch_sizes)
    possible, too_large = sifted(scene, given)
    variants = named_variants(schedules, any(k.overlap is not None for s in costs.settings for k in s.kinds.values()))
    count = _cores() if workers is None else workers
    if schedules is not None and any(name not in _known() for name, _ in variants):
        count = 1  # other processes do not know a user's own
    tries = candidates(possible, variants, costs.num_layers)
    if possible and not tries:
        raise _too_many_stages(possible, variants, costs.num_layers)
    rows = _scored(scene, tries[:most], count, lambda share: tell("trying schedules", 0.8 * share))
    if tries and not rows:
        schedule_of(tries[0])  # says why it cannot be built
    num_tried = len({row.candidate for row in rows})
    if search_seconds > 0 and schedules is None:
        fitting = [row for row in _ranked(rows) if row.fits]
        rows += searched(
            scene, fitting, search_seconds, search_steps, lambda share: tell("searching", 0.8 + 0.15 * share)
        )
    fitting = with_gaps(scene, [row for row in _ranked(rows) if row.fits], SHOWN)
    tell("done", 1.0)
    misfits = sorted((row for row in _best_cut(rows) if not row.fits), key=lambda row: row.over)
    left_out, seconds = max(0, len(tries) - most), monotonic() - begun
    return Plan(
        tuple(fitting), tuple(misfits), tuple(too_large), scene, gpus, batch, num_tried, left_out, seconds
    )  # fmt: skip


def _scored(scene: Scene, tries: Sequence[Candidate], workers: int, tell: Callable[[float], object]) -> list[Row]:
    groups = grouped(tries)
    rows = score_groups(scene, groups, workers, lambda done: tell(done / len(groups)))
    return [row for group in rows for row in group]


def _ranked(rows: Sequence[Row]) -> list[Row]:
    """The faster first; of equal ones the smaller. Other cuts of a candidate are left out, unless they are smaller."""
    found: list[Row] = []
    least: dict[Candidate, float] = {}
    for row in sorted(rows, key=lambda row: (row.step, row.memory.peak, row.candidate)):
        one = replace(row.candidate, cut="")
        if row.memory.peak < least.get(one, inf) * (1 - 1e-9):
            least[one] = row.memory.peak
            found.append(row)
    return found


def _best_cut(rows: Sequence[Row]) -> list[Row]:
    """Of every candidate the row that fits, or comes closest."""
    best: dict[Candidate, Row] = {}
    for row in rows:
        one = replace(row.candidate, cut="")
        if one not in best or row.over < best[one].over:
            best[one] = row
    return list(best.values())


def _tensor_sizes(model: Model, wish: Sequence[int] | None, gpus_per_node: int, gpus: int) -> list[int]:
    """Sizes of tensor parallelism: those asked for, or the powers of two that the model allows."""
    if wish is not None:
        return list(wish)
    powers = [2**n for n in range(5)]
    return [t for t in powers if t <= min(gpus_per_node, gpus) and gpus % t == 0 and model.allows(t)]


def _no_runs(batch: int, gpus: int, options: Sequence[Layout], sizes: Sequence[int]) -> ConfigError:
    """Why there is nothing to try."""
    listed = ", ".join(map(str, sizes))
    if any(batch % (layout.dp_shard * size) == 0 for layout in options for size in sizes):
        return ConfigError(
            f"batch={batch}: so many microbatches of {listed} are too much to simulate: give a smaller batch, or "
            "larger microbatches"
        )
    return ConfigError(
        f"batch={batch} cannot be shared out over {gpus} GPUs in microbatches of {listed}: give a multiple of them, or "
        "larger or smaller ones"
    )


def _too_many_stages(given: Sequence[Run], variants: Sequence[tuple[str, int]], num_layers: int) -> ConfigError:
    pp, (name, per_rank) = min(run.layout.pp for run in given), min(variants, key=lambda variant: variant[1])
    return ConfigError(
        f"schedules={name}: {pp} pipeline ranks with {count_text(per_rank, 'stage')} each are {pp * per_rank} stages, "
        f"and {num_layers} layers fill {most_stages(num_layers)} at most: give fewer pipeline ranks or other schedules"
    )


def _known() -> set[str]:
    return {entry.name for entry in entries() if entry.is_ours}


def _require_settings(costs: LayerCosts, tp: Iterable[int], sizes: Iterable[int], modes: Iterable[str]) -> None:
    """ConfigError for what the costs are not of: it must not be left out without a word."""
    for ways in tp:
        costs.setting(tp=ways)
    for size in sizes:
        costs.setting(microbatch_size=size)
    for mode in modes:
        costs.setting(ac=mode)


def _several(name: str, value: int | Sequence[int] | None) -> Sequence[int] | None:
    """One number, or several of them."""
    if value is None:
        return None
    several = list(value) if isinstance(value, Iterable) else [value]
    if not several or any(type(one) is not int or one < 1 for one in several):
        raise ConfigError(f"{name}={short(value)}: whole numbers from 1 on are needed, like 4 or [2, 4]")
    return several


def _texts(name: str, value: str | Sequence[str] | None) -> list[str] | None:
    """One text, or several of them."""
    if value is None:
        return None
    several = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    if not several or not all(isinstance(one, str) for one in several):
        raise ConfigError(f"{name}={short(value)}: a name is needed, or a list of them")
    return several


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
