"""What each lever of the best row bought: the best row without it, or how much that is over the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from zeropipe.planning.candidates import OversizedRun
from zeropipe.planning.rows import Candidate, PlanRow, Run


class Lever(NamedTuple):
    """A lever of the best row, and the best row without it."""

    name: str
    row: PlanRow | None  # the fastest that fits; None if none does
    slower: float | None  # its step over that of the best row, less 1
    over: float | None  # if none fits: the bytes above the limit of what comes closest; None if nothing was tried


def list_levers(
    rows: Sequence[PlanRow], misfits: Sequence[PlanRow], too_large: Sequence[OversizedRun]
) -> tuple[Lever, ...]:
    """Every lever of the first row; `misfits` and `too_large` are those that do not fit."""
    found = [_compare(name, without, rows, misfits, too_large) for name, without in _levers_of(rows[0])]
    if (mode := rows[0].candidate.shards) == "keep":
        return tuple(found)
    others = [[row for row in some if row.candidate.shards != mode] for some in (rows, misfits)]
    return (*found, _compare(mode, lambda run: True, rows, others[1], (), others[0]))


def _levers_of(row: PlanRow) -> Iterator[tuple[str, Callable[[Candidate | Run], bool]]]:
    """The name of each lever, and whether a run is without it."""
    run = row.candidate.run
    for name in ("pp", "dp_shard", "cp", "tp", "ep"):
        if (size := getattr(run.layout, name)) > 1:
            yield f"{name}={size}", lambda other, name=name: getattr(other.layout, name) == 1  # type: ignore[misc]
    if run.layout.sequence_parallel:
        yield "sequence parallelism", lambda other: not other.layout.sequence_parallel
    if run.ac != "none":
        yield f"ac {run.ac}", lambda other: other.ac != run.ac and other.ac in ("none", "selective:op")
    if row.candidate.slices > 1:
        yield f"slices={row.candidate.slices}", lambda other: getattr(other, "slices", 1) == 1
    if row.candidate.offload:
        yield "offload", lambda other: not getattr(other, "offload", False)
    if row.candidate.checkpointing:
        yield "some F checkpointed", lambda other: not getattr(other, "checkpointing", False)
    if row.candidate.gradients != "whole":
        yield f"gradients {row.candidate.gradients}", lambda other: getattr(other, "gradients", "whole") == "whole"


def _compare(
    name: str, without: Callable[[Candidate | Run], bool], rows: Sequence[PlanRow], misfits: Sequence[PlanRow],
    too_large: Sequence[OversizedRun], others: Sequence[PlanRow] | None = None,
) -> Lever:  # fmt: skip
    """`others`: the rows among which one without the lever is sought; by default all."""
    fitting = next((row for row in (rows if others is None else others) if without(row.candidate)), None)
    if fitting is not None:
        return Lever(name, fitting, fitting.step / rows[0].step - 1, None)
    over = [
        *(row.excess for row in misfits if without(row.candidate)),
        *(misfit.excess for misfit in too_large if without(misfit.run)),
    ]
    return Lever(name, None, None, min(over, default=None))
