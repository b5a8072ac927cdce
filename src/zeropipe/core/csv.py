"""torch.distributed.pipelining's CSV: one line per rank, one cell per step, empty cells ignored.

Both of torch's forms are read: `compute_only`, and `compute_comms` with SEND, RECV, UNSHARD, RESHARD and REDUCE_GRAD.
A W in n parts is n cells with the same text, which torch does not know.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter

from zeropipe.core.action import COMM, Action, Kind, Overlap, Step, actions_of, parse_step
from zeropipe.core.packed import PackedRows, pack
from zeropipe.core.placement import Placement, Problem, recognise, require_actions
from zeropipe.core.schedule import Program, Schedule
from zeropipe.errors import ScheduleError

# FSDP's parameter traffic: the engine decides on it by itself
_PARAMETERS = re.compile(r"\s*\d+\s*(UNSHARD|RESHARD|REDUCE_GRAD)\s*")


def to_csv(what: Schedule | Program) -> str:
    """torch's CSV: of a Schedule the `compute_only` form, of a Program the `compute_comms` form."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in what.rows:
        writer.writerow(map(str, row))
    return out.getvalue()


def from_csv(text: str, name: str = "custom") -> Schedule:
    """The Schedule of a CSV in either of torch's forms; messages are left out, the placement is inferred."""
    return _schedule(_read(text), name)


def program_from_csv(text: str, name: str = "custom") -> Program:
    """The Program of a CSV in the `compute_comms` form, with its own order of messages."""
    rows = _read(text)
    schedule = _schedule(rows, name)
    return Program(schedule, PackedRows.of(pack(row) for row in rows))


def has_messages(text: str) -> bool:
    """Whether a CSV is in the `compute_comms` form."""
    return "SEND_" in text or "RECV_" in text


def _read(text: str) -> list[list[Step]]:
    try:
        lines = list(csv.reader(text.removeprefix("\ufeff").splitlines()))  # spreadsheets begin with that mark
    except csv.Error as error:
        raise ScheduleError(f"not a CSV: {error}") from None
    rows = []
    for number, cells in enumerate(lines):
        row = []
        for place, cell in enumerate(cells):
            if not cell.strip() or _PARAMETERS.fullmatch(cell):
                continue
            try:
                row.append(parse_step(cell))
            except ScheduleError as error:
                raise ScheduleError(f"line {number + 1}, cell {place + 1}: {error}") from None
        rows.append(row)
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ScheduleError("the CSV holds no action: write one line per rank, like 0F0,0B0")
    return rows


def _schedule(rows: list[list[Step]], name: str) -> Schedule:
    compute = [[step for step in row if isinstance(step, Overlap) or step.kind not in COMM] for row in rows]
    homes: dict[tuple[int, int], Counter[int]] = {}
    weights: Counter[Action] = Counter()
    num_stages = num_microbatches = 0
    for rank, row in enumerate(compute):
        for action in actions_of(row):
            if action.kind is Kind.W:
                weights[action] += 1
            homes.setdefault((action.stage, action.microbatch), Counter())[rank] += 1
            num_stages = max(num_stages, action.stage + 1)
            num_microbatches = max(num_microbatches, action.microbatch + 1)
    if not homes:
        raise ScheduleError("the CSV holds messages but no computation")
    # what most W have: one that is there once too often is a mistake
    parts = Counter(weights.values()).most_common(1)[0][0] if weights else 1
    problem = Problem(len(rows), num_stages, num_microbatches, parts)
    require_actions(problem, sum(counter.total() for counter in homes.values()))
    return Schedule.of(problem, infer_placement(problem, homes), compute, name)


def infer_placement(problem: Problem, homes: dict[tuple[int, int], Counter[int]]) -> Placement:
    """The placement most actions agree with: one table, or two where early and late microbatches differ."""
    last = problem.num_microbatches - 1
    first_table = _majority(problem, homes, range(problem.num_microbatches))
    if all(c[first_table[s]] == c.total() for (s, _), c in homes.items()):
        return recognise((first_table,), None, problem)
    # two copies: find where the last microbatch's way begins
    late = _majority(problem, homes, range(last, last + 1))
    split = last
    while split > 0 and all(
        homes.get((s, split - 1), Counter({late[s]: 1})).most_common(1)[0][0] == late[s]
        for s in range(problem.num_stages)
    ):
        split -= 1
    if split > 0:
        early = _majority(problem, homes, range(split))
        if all(c[(early if m < split else late)[s]] == c.total() for (s, m), c in homes.items()):
            return recognise((early, late), split, problem)
    return recognise((first_table,), None, problem)


def _majority(problem: Problem, homes: dict[tuple[int, int], Counter[int]], microbatches: range) -> tuple[int, ...]:
    votes = [Counter[int]() for _ in range(problem.num_stages)]
    for (stage, microbatch), counter in homes.items():
        if microbatch in microbatches:
            votes[stage] += counter
    for stage, counter in enumerate(votes):
        if not counter:
            # a stage nobody runs here: take it from any microbatch, or say so
            for (other, _), found in homes.items():
                if other == stage:
                    counter += found
            if not counter:
                raise ScheduleError(f"stage {stage} does not appear: stages are numbered 0 to the highest without gaps")
    return tuple(counter.most_common(1)[0][0] for counter in votes)
