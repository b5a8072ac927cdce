"""torch.distributed.pipelining's CSV: one line per rank, one cell per step, empty cells ignored.

Both of torch's forms are read: `compute_only`, and `compute_comms` with SEND, RECV, UNSHARD, RESHARD and REDUCE_GRAD.
A W in n parts is n cells with the same text, which torch does not know.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator

from zeropipe.core.action import COMPUTE, Action, Kind, Overlap, Step, actions_of, parse_step
from zeropipe.core.formats.parse import require_text
from zeropipe.core.packed import PackedRows, pack
from zeropipe.core.placement import Placement, Problem, recognise, require_actions
from zeropipe.core.schedule import Program, Schedule, require_schedule
from zeropipe.errors import ScheduleError


def to_csv(what: Schedule | Program) -> str:
    """torch's CSV: of a Schedule the `compute_only` form, of a Program the `compute_comms` form."""
    if not isinstance(what, Program):
        require_schedule(what)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in what.rows:
        writer.writerow(map(str, row))
    return out.getvalue()


def from_csv(text: str, name: str = "custom") -> Schedule:
    """The Schedule of a CSV in either of torch's forms; only its computations are taken, the placement is inferred."""
    return _schedule(_read(text), name)


def program_from_csv(text: str, name: str = "custom") -> Program:
    """The Program of a CSV in the `compute_comms` form, with its own order of messages, gathering and reducing."""
    rows = _read(text)
    schedule = _schedule(rows, name)
    return Program(schedule, PackedRows.of(pack(row) for row in rows))


def has_messages(text: str) -> bool:
    """Whether a CSV is in the `compute_comms` form."""
    return "SEND_" in text or "RECV_" in text


_OTHER_COMMAS = re.compile(r"^\s*\d+[A-Z_]+\d*\s*[;\t |]\s*\d")


def _read(text: str) -> list[list[Step]]:
    require_text(text, "csv")
    try:
        lines = list(csv.reader(text.removeprefix("\ufeff").splitlines()))  # spreadsheets begin with that mark
    except csv.Error as error:
        raise ScheduleError(f"not a CSV: {error}") from None
    rows = []
    for number, cells in enumerate(lines):
        row = []
        for place, cell in enumerate(cells):
            if not cell.strip():
                continue
            try:
                row.append(parse_step(cell))
            except ScheduleError as error:
                hint = "; separate actions by commas" if _OTHER_COMMAS.search(cell) else ""
                raise ScheduleError(f"line {number + 1}, cell {place + 1}: {error}{hint}") from None
        rows.append(row)
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ScheduleError("the CSV holds no action: write one line per rank, like 0F0,0B0")
    for number, row in enumerate(rows):
        if not row:
            raise ScheduleError(f"line {number + 1} holds no action: a line is a rank's, take empty ones out")
    return rows


def _schedule(rows: list[list[Step]], name: str) -> Schedule:
    compute = [[step for step in row if isinstance(step, Overlap) or step.kind in COMPUTE] for row in rows]
    weights: Counter[Action] = Counter()
    num_stages = num_microbatches = num_actions = 0
    for _, action in _placed(compute):
        if action.kind is Kind.W:
            weights[action] += 1
        num_actions += 1
        num_stages = max(num_stages, action.stage + 1)
        num_microbatches = max(num_microbatches, action.microbatch + 1)
    if not num_actions:
        raise ScheduleError("the CSV holds messages but no computation")
    # what most W have: one that is there once too often is a mistake
    parts = Counter(weights.values()).most_common(1)[0][0] if weights else 1
    problem = Problem(len(rows), num_stages, num_microbatches, parts)
    require_actions(problem, num_actions)
    return Schedule.of(problem, infer_placement(problem, compute), compute, name)


def _placed(rows: list[list[Step]]) -> Iterator[tuple[int, Action]]:
    """Every action with its rank."""
    for rank, row in enumerate(rows):
        for action in actions_of(row):
            yield rank, action


def infer_placement(problem: Problem, rows: list[list[Step]]) -> Placement:
    """The placement most actions agree with: one table, or two where early and late microbatches differ."""
    votes = _votes(problem, rows, range(problem.num_microbatches))
    for stage, counter in enumerate(votes):
        if not counter:
            raise ScheduleError(f"stage {stage} does not appear: stages are numbered 0 to the highest without gaps")
    one = _winners(votes, votes)
    if all(rank == one[action.stage] for rank, action in _placed(rows)):
        return recognise((one,), None, problem)
    # two copies: those microbatches belong to the second one from which on all go the last one's way
    last = problem.num_microbatches - 1
    late = _winners(_votes(problem, rows, range(last, last + 1)), votes)
    elsewhere = (action.microbatch for rank, action in _placed(rows) if rank != late[action.stage])
    second_from = max(elsewhere, default=-1) + 1
    if 0 < second_from <= last:
        early = _winners(_votes(problem, rows, range(second_from)), votes)
        tables = (early, late)
        if all(rank == tables[action.microbatch >= second_from][action.stage] for rank, action in _placed(rows)):
            return recognise(tables, second_from, problem)
    return recognise((one,), None, problem)


def _votes(problem: Problem, rows: list[list[Step]], microbatches: range) -> list[Counter[int]]:
    """For each stage, how many actions of these microbatches each rank has."""
    votes = [Counter[int]() for _ in range(problem.num_stages)]
    for rank, action in _placed(rows):
        if action.microbatch in microbatches:
            votes[action.stage][rank] += 1
    return votes


def _winners(votes: list[Counter[int]], others: list[Counter[int]]) -> tuple[int, ...]:
    """The rank with the most actions of each stage; where there are none, the one that `others` say."""
    return tuple((own or other).most_common(1)[0][0] for own, other in zip(votes, others, strict=True))
