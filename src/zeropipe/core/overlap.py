"""The time of an Overlap, from the phases of its two sides.

A rank computes on one lane and exchanges rows on another. Both lanes run the phases of an F and of a B in one order,
each as soon as its lane is free and the phase before it on its own side has ended. While an exchange is under way, it
takes `sm_tax` of the GPU from computations.

The layers of the two stages are paired: the first of F with the last of B, and so on. A pair begins when the one before
it has ended. Layers that one side has more run alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import permutations
from typing import NamedTuple

from zeropipe.core.action import Action, Kind
from zeropipe.core.phases import EXCHANGES, PHASES, LayerPhases, Phases, PhaseSpan, StagePhases
from zeropipe.errors import ConfigError


class Part(NamedTuple):
    """A phase of one side of an Overlap: F, or I and W."""

    kind: Kind
    phase: str


# in which the engine runs a pair of layers: each side computes until it has started an exchange, B first; a W runs
# after the next exchange of its side
ORDER = tuple(
    Part(Kind[kind], phase)
    for phase, kind in (
        ("combine", "I"), ("attention", "F"), ("experts", "I"), ("dispatch", "F"), ("dispatch", "I"), ("experts", "W"),
        ("experts", "F"), ("attention", "I"), ("attention", "W"), ("combine", "F"),
    )
)  # fmt: skip
_EXPERTS_W = Part(Kind.W, "experts")


def _delay_weights(order: tuple[Part, ...]) -> tuple[Part, ...]:
    """The order whose experts' W runs after the attention's I."""
    rest = [part for part in order if part != _EXPERTS_W]
    at = rest.index(Part(Kind.I, "attention")) + 1
    return (*rest[:at], _EXPERTS_W, *rest[at:])


# which the engine takes instead where the attention takes less time than the experts
DELAYED_ORDER = _delay_weights(ORDER)
_CACHED = 2**16  # results: pairs of layers of a plan


def divide_lanes(order: Iterable[Part]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The order of the computations, and that of the exchanges. Orders that agree in both take the same time."""
    parts = tuple(order)
    return (
        tuple(part for part in parts if part.phase not in EXCHANGES),
        tuple(part for part in parts if part.phase in EXCHANGES),
    )


@lru_cache(_CACHED)
def walk_pair(
    forward: LayerPhases,
    backward: LayerPhases,
    *,
    has_w: bool = True,
    sm_tax: float = 0.0,
    order: tuple[Part, ...] = ORDER,
    layers: tuple[int, int] = (0, 0),
) -> tuple[PhaseSpan, ...]:
    """The phases in time of the F of one layer and the B of another (without `has_w`: its I), in the given order.

    `layers` are the numbers of the two layers in their stages. ConfigError for an order that cannot end.
    """
    lanes = [[part for part in lane if has_w or part.kind is not Kind.W] for lane in divide_lanes(order)]
    remaining = {
        part: getattr(forward if part.kind is Kind.F else backward, part.phase).of(part.kind) for part in order
    }
    starts: dict[Part, float] = {}
    ended: set[Part] = set()
    spans, now = [], 0.0
    while any(lanes):
        running = [lane[0] if lane and _needs(lane[0]) <= ended else None for lane in lanes]
        speeds = 1 - sm_tax if running[1] else 1.0, 1.0  # of the computation, of the exchange
        rates = {part: speed for part, speed in zip(running, speeds) if part}
        if not rates:
            text = ", ".join(f"{part.phase} {part.kind.name}" for part in order)
            raise ConfigError(f"order={text}: a phase comes before one that it needs")
        for part in rates:
            starts.setdefault(part, now)
        first = min(rates, key=lambda part: remaining[part] / rates[part])
        passed = remaining[first] / rates[first]
        now += passed
        for part, rate in rates.items():
            remaining[part] = 0.0 if part is first else max(0.0, remaining[part] - passed * rate)
        ended.add(first)
        lanes[first.phase in EXCHANGES].pop(0)
        spans.append(PhaseSpan(first.kind, first.phase, layers[first.kind is not Kind.F], starts[first], now))
    return tuple(spans)


@cache
def _needs(part: Part) -> frozenset[Part]:
    """The phase before it on its own side: F runs the phases in their order, I in the opposite one, W after its I."""
    if part.kind is Kind.W:
        return frozenset({Part(Kind.I, part.phase)})
    path = PHASES if part.kind is Kind.F else PHASES[::-1]
    at = path.index(part.phase)
    return frozenset({Part(part.kind, path[at - 1])} if at else ())


def walk_stages(
    forward: StagePhases, backward: StagePhases, *, has_w: bool = True, sm_tax: float = 0.0
) -> Iterator[PhaseSpan]:
    """The phases in time of an Overlap of two stages; of one action alone if the other side has no layers."""
    now = 0.0
    both = min(len(forward), len(backward))
    last = len(backward) - 1
    for n in range(both):
        pair, layers = (forward[n], backward[last - n]), (n, last - n)
        order = choose_order(*pair, has_w, sm_tax)
        spans = walk_pair(*pair, has_w=has_w, sm_tax=sm_tax, order=order, layers=layers)
        yield from _shift(spans, now)
        now += spans[-1].end
    kinds = (Kind.I, Kind.W) if has_w else (Kind.I,)
    rest: list[tuple[int, LayerPhases, Sequence[Kind]]]
    rest = [(n, forward[n], (Kind.F,)) for n in range(both, len(forward))]
    rest += [(n, backward[n], kinds) for n in range(last - both, -1, -1)]
    for n, layer, alone in rest:
        spans = tuple(walk_alone(layer, alone, n))
        yield from _shift(spans, now)
        now += spans[-1].end


def walk_step(phases: Phases, actions: Sequence[Action]) -> tuple[PhaseSpan, ...]:
    """The phases in time of an action, or of the two of an Overlap, from its start; none of a W alone."""
    return _walk_step(phases, tuple((action.stage, action.kind) for action in actions))


@lru_cache(_CACHED)
def _walk_step(phases: Phases, actions: tuple[tuple[int, Kind], ...]) -> tuple[PhaseSpan, ...]:
    sides = {kind is Kind.F: (phases.stages[stage], kind) for stage, kind in actions}
    if len(sides) == 2:
        (forward, _), (backward, kind) = sides[True], sides[False]
        return tuple(walk_stages(forward, backward, has_w=kind is Kind.B, sm_tax=phases.sm_tax))
    (layers, kind) = next(iter(sides.values()))
    if kind is Kind.F:
        return tuple(walk_stages(layers, ()))
    if kind is Kind.W:
        return ()
    return tuple(walk_stages((), layers, has_w=kind is Kind.B))


def walk_alone(layer: LayerPhases, kinds: Sequence[Kind], number: int = 0) -> Iterator[PhaseSpan]:
    """The phases in time of one layer that runs alone, one after the other."""
    now = 0.0
    for phase in PHASES if Kind.F in kinds else PHASES[::-1]:
        for kind in kinds:
            if kind is Kind.W and phase in EXCHANGES:
                continue
            end = now + getattr(layer, phase).of(kind)
            yield PhaseSpan(kind, phase, number, now, end)
            now = end


def _shift(spans: Iterable[PhaseSpan], time: float) -> Iterator[PhaseSpan]:
    return (span._replace(start=span.start + time, end=span.end + time) for span in spans)


@lru_cache(_CACHED)
def pair_time(forward: LayerPhases, backward: LayerPhases, has_w: bool, sm_tax: float) -> float:
    """The time of the F of one layer and the B (or I) of another as one step."""
    order = choose_order(forward, backward, has_w, sm_tax)
    return walk_pair(forward, backward, has_w=has_w, sm_tax=sm_tax, order=order)[-1].end


@lru_cache(_CACHED)
def choose_order(
    forward: LayerPhases, backward: LayerPhases, has_w: bool = True, sm_tax: float = 0.0
) -> tuple[Part, ...]:
    """The faster of the two orders that the engine has."""
    orders = (ORDER, DELAYED_ORDER) if has_w else (ORDER,)
    return min(orders, key=lambda order: walk_pair(forward, backward, has_w=has_w, sm_tax=sm_tax, order=order)[-1].end)


def saved_time(forward: StagePhases, backward: StagePhases, has_w: bool = True, sm_tax: float = 0.0) -> float:
    """The time that an Overlap of two stages saves, compared with its two actions one after the other."""
    kind = Kind.B if has_w else Kind.I
    return sum(
        max(0.0, one.total(Kind.F) + other.total(kind) - pair_time(one, other, has_w, sm_tax))
        for one, other in zip(forward, reversed(backward))
    )


@cache
def list_orders() -> tuple[tuple[Part, ...], ...]:
    """One order for each way to run a pair of layers: the orders of the computations times those of the exchanges."""
    computations, exchanges = divide_lanes(ORDER)
    lanes = ((list(one), list(other)) for one in permutations(computations) for other in permutations(exchanges))
    return tuple(order for compute, exchange in lanes if (order := _merge_lanes(compute, exchange)))


def _merge_lanes(compute: list[Part], exchange: list[Part]) -> tuple[Part, ...]:
    """One order that has the orders of two lanes; empty if there is none."""
    order: list[Part] = []
    lanes = [exchange, compute]
    while any(lanes):
        lane = next((lane for lane in lanes if lane and _needs(lane[0]) <= set(order)), None)
        if lane is None:
            return ()
        order.append(lane.pop(0))
    return tuple(order)


def find_best_order(forward: LayerPhases, backward: LayerPhases, sm_tax: float = 0.0) -> tuple[Part, ...]:
    """The order in which a pair of layers takes the least time, of all there are."""
    return min(list_orders(), key=lambda order: walk_pair(forward, backward, sm_tax=sm_tax, order=order)[-1].end)
