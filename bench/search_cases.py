"""Cases of bench/search.py: published tables, and others of which only the gap counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import zeropipe as zp
from zeropipe.core.placement import Problem
from zeropipe.searching.task import SearchTask
from zeropipe.sim.costs import Link

if TYPE_CHECKING:
    from zeropipe.searching.search import SearchResult


# model, ranks, microbatches, F, I, W, latency; 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p (bubble rates), layers
ZERO_BUBBLE = [
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, (0.2431, 0.1585, 0.1083, 0.1585, 0.0433), 24),
    ("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, (0.1985, 0.1242, 0.0837, 0.1242, 0.0039), 24),
    ("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, (0.1240, 0.0674, 0.0444, 0.0674, 0.0026), 24),
    ("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, (0.2347, 0.1323, 0.0698, 0.1323, 0.0029), 32),
    ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, (0.1898, 0.1045, 0.0559, 0.1045, 0.0022), 32),
    ("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, (0.1091, 0.0554, 0.0294, 0.0554, 0.0010), 32),
]
# ranks, microbatches, F, I, W of half a stage, latency; 1F1B, ZB-H1, ZB-H2, ZB-V
ZERO_BUBBLE_V = [
    (16, 48, 14407, 14380, 9676, 1610, (0.2668, 0.1536, 0.0823, 0.0697)),
    (16, 64, 14412, 14393, 9688, 1621, (0.2206, 0.1198, 0.0630, 0.0533)),
    (16, 128, 14316, 14306, 9639, 1619, (0.1390, 0.0637, 0.0325, 0.0274)),
]
# bytes that a forward takes, and that a pending W keeps
MEMORY = {"1.5B": (34 * 2304 + 5 * 24 * 1024, 32 * 2304), "6.2B": (34 * 4096 + 5 * 32 * 1024, 32 * 4096)}
# latency and transfer of the middle edge in F; the better of CP-UD and CP-Wave in case 1 and in case 3
CROSSPIPE = [
    (0, 0, 0.119, 0.108), (0.25, 0.25, 0.127, 0.112), (0.25, 2, 0.177, 0.150), (2, 0.25, 0.148, 0.115),
    (2, 2, 0.196, 0.147),
]  # fmt: skip


class Case(NamedTuple):
    """One published number, and how to search for it."""

    name: str
    published: float
    unit: Callable[[SearchResult, float], float]  # what was published, of a value of the objective
    searches: list[dict]  # keywords of zp.search: the best counts
    digits: int = 4


def rate(work: float) -> Callable[[SearchResult, float], float]:
    """The bubble rate of the longest span."""
    return lambda found, value: 1 - work / value


def per_microbatch(found: SearchResult, value: float) -> float:
    return value / found.schedule.num_microbatches


def plain(found: SearchResult, value: float) -> float:
    return value


def zero_bubble(columns: dict[str, tuple[int, Callable[[int], float]]]) -> Iterator[Case]:
    """Columns of the tables with one stage per rank: where the number is, and how many activations the limit is."""
    for model, p, m, f, i, w, c, numbers, _ in ZERO_BUBBLE:
        yield from _columns(f"{model} {p} x {m}", model, p, m, (f, i, w), c, numbers, columns)
    for p, m, f, i, w, c, numbers in ZERO_BUBBLE_V:
        some = {name: column for name, column in columns.items() if name in ("1F1B", "ZB-H1", "ZB-H2")}
        yield from _columns(f"6.2B {p} x {m}", "6.2B", p, m, (2 * f, 2 * i, 2 * w), c, numbers, some)


def _columns(title, model, p, m, times, c, numbers, columns) -> Iterator[Case]:  # type: ignore[no-untyped-def]
    activation, stash = MEMORY[model]
    for name, (at, activations) in columns.items():
        costs = zp.Costs(
            f=times[0], i=times[1], w=times[2], p2p=c, activation=activation, stash=stash,
            memory_limit=activations(p) * activation,
        )  # fmt: skip
        options = {"ranks": p, "microbatches": m, "costs": costs, "objective": "span"}
        yield Case(f"{name} {title}", numbers[at], rate(m * sum(times)), [options])


def zero_bubble_v() -> Iterator[Case]:
    """Two half stages per rank, with the memory of 1F1B."""
    activation, stash = MEMORY["6.2B"]
    for p, m, f, i, w, c, numbers in ZERO_BUBBLE_V:
        costs = zp.Costs(f=f, i=i, w=w, p2p=c, activation=activation, stash=stash, memory_limit=2 * p * activation)
        options = {"ranks": p, "microbatches": m, "stages_per_rank": 2, "placement": zp.vee, "costs": costs}
        yield Case(f"ZB-V 6.2B {p} x {m}", numbers[-1], rate(2 * m * (f + i + w)), [{**options, "objective": "span"}])


def interleaved() -> Iterator[Case]:
    """1F1B-I with every wrap-around message, at its own memory; the table leaves some of them out."""
    for model, p, m, f, i, w, c, _, layers in ZERO_BUBBLE:
        v = layers // p
        bubble = (p - 1) * (f + i + w) / v + (2 * p * v - 2) * c
        costs = zp.Costs(f=f / v, i=i / v, w=w / v, p2p=c)
        peak = max(zp.simulate(zp.build("interleaved", ranks=p, microbatches=m, stages_per_rank=v), costs).peak_memory)
        costs = zp.Costs(f=f / v, i=i / v, w=w / v, p2p=c, memory_limit=peak)
        options = {"ranks": p, "microbatches": m, "stages_per_rank": v, "placement": zp.loop, "costs": costs}
        work = m * (f + i + w)
        yield Case(
            f"1F1B-I {model} {p} x {m}", bubble / (work + bubble), rate(work), [{**options, "objective": "span"}]
        )


def crosspipe() -> Iterator[Case]:
    """Eight ranks in two halves; seconds per microbatch. Case 1: 1F1B's memory, case 3: twice that."""
    f, i, w = 0.038, 0.046, 0.021
    for latency, transfer, *numbers in CROSSPIPE:
        link = Link(latency * f, 1 / (transfer * f) if transfer else None)
        for case, m, limit, published in ((1, 16, 8, numbers[0]), (3, 32, 16, numbers[1])):
            searches = []
            for v, rule in ((1, zp.linear), (2, zp.vee)):
                costs = zp.Costs(
                    f=f / v, i=i / v, w=w / v, message=1, edges={(3, 4): link, (4, 3): link}, serial_links=True,
                    activation=1 / v, memory_limit=limit,
                )  # fmt: skip
                searches.append(
                    {"ranks": 8, "microbatches": m, "stages_per_rank": v, "placement": rule, "costs": costs}
                )
            yield Case(f"CrossPipe {case}: {latency}, {transfer}", published, per_microbatch, searches)


def family() -> Iterator[Case]:
    """The V family and its relatives in unit costs: makespans, from the bubbles and peaks that are published."""
    for p in (4, 6, 8, 12, 16):
        m = 3 * p
        turns = {"ranks": p, "microbatches": m, "stages_per_rank": 2, "placement": zp.vee}
        for name, peak, bubble in (
            ("V-Half", (p + 2) // 2, 3 * p - 7),
            ("V-Min", (p + 4) // 3, 4 * p - 7 if p % 3 == 0 else 4 * p - 5),
            ("ZBV", p, p - 1),
        ):
            options = {**turns, "costs": zp.Costs(memory_limit=2 * peak)}
            yield Case(f"{name} {p} x {m}", 6 * m + bubble, plain, [options], digits=1)
        for name, peak, bubble in (("ZB-H1", p, p - 1), ("ZB-H2", 2 * p - 1, 0)):
            options = {"ranks": p, "microbatches": m, "costs": zp.Costs(memory_limit=peak), "objective": "span"}
            yield Case(f"{name} {p} x {m}, unit costs", 3 * m + bubble, plain, [options], digits=1)


def sizes() -> Iterator[Case]:
    """How long it takes. What stands for the published number is the longest rank's work, which nothing can beat."""
    for p, m in ((8, 64), (16, 128), (32, 256)):
        model, _, _, f, i, w, c, _, _ = ZERO_BUBBLE[2]
        activation, stash = MEMORY[model]
        slow = [f * (1.1 if stage == 0 else 1.3 if stage == p - 1 else 1) for stage in range(p)]
        for name, options, costs, work in (
            ("p", {}, {"f": f, "i": i, "w": w}, f + i + w),
            ("2p", {"objective": "span"}, {"f": f, "i": i, "w": w}, f + i + w),
            ("p, uneven", {}, {"f": slow, "i": i, "w": w}, max(slow) + i + w),
            ("p, vee", {"stages_per_rank": 2, "placement": zp.vee}, {"f": f / 2, "i": i / 2, "w": w / 2}, f + i + w),
        ):
            size = 1 / options.get("stages_per_rank", 1)
            limit = p * activation * (2 if name == "2p" else 1)
            priced = zp.Costs(**costs, p2p=c, activation=activation * size, stash=stash * size, memory_limit=limit)
            search = {"ranks": p, "microbatches": m, "costs": priced, **options}
            yield Case(f"{p} x {m}, limit {name}", m * work, plain, [search], digits=1)


def proofs() -> Iterator[Case]:
    """Small sizes: the solver proves what the search has found, so every gap is to be 0."""
    for p, m in ((2, 8), (3, 8), (4, 6), (4, 8)):
        for limit in (max(1, p // 2), p - 1, p, 2 * p):
            for f, i, w, c in ((1, 1, 1, 0), (1, 1.2, 0.7, 0.1), (1, 1.5, 0.5, 0.3)):
                options = {"ranks": p, "microbatches": m, "costs": zp.Costs(f=f, i=i, w=w, p2p=c, memory_limit=limit)}
                name = f"{p} x {m}, limit {limit}, {f} {i} {w} {c}"
                yield Case(name, m * (f + i + w), plain, [options], digits=2)


# F, I, W, latency, and the memory that a pending W keeps of an activation; the last row has a slow first and last stage
GRID = [
    (1, 1, 1, 0, 1, False), (1, 1.2, 0.7, 0.05, 1, False), (1, 1.5, 0.6, 0.2, 0.4, False),
    (1, 1.2, 0.7, 0.05, 1, True),
]  # fmt: skip
FRACTIONS = (0.5, 0.625, 0.75, 0.875, 1, 1.5, 2)  # of the memory of 1F1B


def grid() -> Iterator[Case]:
    """Any costs, sizes and limits: the gap counts. What stands for the published number is the longest rank's work."""
    for (p, m), (f, i, w, c, stash, uneven) in product(((4, 16), (8, 32), (8, 64)), GRID):
        slow = [1.1 if stage == 0 else 1.5 if stage == p - 1 else 1 for stage in range(p)]
        times = [f * x for x in slow] if uneven else f
        for part in FRACTIONS:
            costs = zp.Costs(f=times, i=i, w=w, p2p=c, stash=stash, memory_limit=part * p)
            options = {"ranks": p, "microbatches": m, "costs": costs}
            name = f"{p} x {m}, {f} {i} {w} {c} {stash}{' uneven' if uneven else ''}, {part:g} p"
            yield Case(name, m * (f * (max(slow) if uneven else 1) + i + w), plain, [options], digits=1)


def by_chance() -> Iterator[Case]:
    """Random costs, sizes and limits, the same ones every time; in turn linear, loop and vee."""
    random = Random(12)
    while True:
        for rule in (zp.linear, zp.loop, zp.vee):
            p, m = random.randint(4, 8), random.randint(8, 32)
            v = 1 if rule is zp.linear else 2 if rule is zp.vee else random.choice((2, 2, 3))
            uneven, apart = random.random() < 0.5, random.random() < 0.5  # stages; limits of the ranks
            parts = [round((random.uniform(0.8, 1.3) if uneven else 1) / v, 2) for _ in range(p * v)]
            i, w = round(random.uniform(0.9, 1.5), 2), round(random.uniform(0.5, 1.5), 2)
            latency, stash = round(random.uniform(0, 0.3), 2), random.choice((1, 1, 0.5))
            share = random.uniform(0.5, 2)  # of the memory of 1F1B
            shares = [random.uniform(0.5, 2) if apart else share for _ in range(p)]
            limits = [max(v + 1, round(part * p * v)) for part in shares]
            times = {"f": parts, "i": [i * part for part in parts], "w": [w * part for part in parts]}
            costs = zp.Costs(**times, p2p=latency, stash=stash)
            options = {"ranks": p, "microbatches": m, "stages_per_rank": v, "placement": rule, "costs": costs}
            least, most = (limit / v / p for limit in (min(limits), max(limits)))
            memory = f"{least:.2f} p" if least == most else f"{least:.2f} to {most:.2f} p"
            name = f"{rule.__name__} {p} x {m} x {v}{' uneven' if uneven else ''}, {i} {w} {latency} {stash}, {memory}"
            placed = rule(Problem(p, p * v, m))
            work = (1 + i + w) * max(sum(parts[stage] for stage in placed.stages_of(rank)) for rank in range(p))
            yield Case(name, m * work, plain, [{**options, "rank_limits": limits}], digits=1)


def allows_zero_bubble(options: dict) -> bool:
    """Whether on every rank memory holds forwards for all the time until the first I can be there."""
    p, v, m = options["ranks"], options.get("stages_per_rank", 1), options["microbatches"]
    problem, limits = Problem(p, p * v, m), options.get("rank_limits")
    task = SearchTask(
        problem, options.get("placement", zp.linear)(problem), options["costs"], False, limits and tuple(limits)
    )
    tables, starts = task.tables, task.solo_starts
    for rank in range(p):
        stages = list(task.placement.stages_of(rank))
        forwards = tables.duration[stages].sum() * min(m, tables.limit[rank] / tables.memory[stages].sum())
        if forwards < starts[task.last_pass - stages[-1]] - starts[stages[0]]:
            return False
    return True


def vee() -> Iterator[Case]:
    """Two stages per rank on a V, below the memory of 1F1B: the gap counts, as in the grid."""
    for (p, m), uneven, part in product(((4, 16), (8, 32), (8, 64)), (False, True), (1 / 2, 2 / 3, 3 / 4)):
        slow = [1.1 if stage == 0 else 1.5 if stage == 2 * p - 1 else 1 for stage in range(2 * p)]
        costs = zp.Costs(f=slow if uneven else 1, i=1.2, w=0.7, p2p=0.05, memory_limit=2 * p * part)
        options = {"ranks": p, "microbatches": m, "stages_per_rank": 2, "placement": zp.vee, "costs": costs}
        name = f"V {p} x {m}{', uneven' if uneven else ''}, {part:.3g} p"
        yield Case(name, m * (6.4 if uneven else 5.8), plain, [options], digits=1)


TABLES: dict[str, Callable[[], Iterator[Case]]] = {
    "zb-1p": lambda: zero_bubble({"1F1B": (0, float), "ZB-H1": (1, float), "ZB-1p": (3, float)}),
    "zb-2p": lambda: zero_bubble({"ZB-H2": (2, lambda p: 2.0 * p - 1), "ZB-2p": (4, lambda p: 2.0 * p)}),
    "zb-v": zero_bubble_v,
    "1f1b-i": interleaved,
    "crosspipe": crosspipe,
    "family": family,
    "proofs": proofs,
    "sizes": sizes,
    "grid": grid,
    "random": by_chance,
    "vee": vee,
}
UNPUBLISHED = ("proofs", "sizes", "grid", "random", "vee")
