"""torch.distributed.pipelining's CSV: one line per rank, one cell per step, empty cells ignored.

Both of torch's forms are read: `compute_only`, and `compute_comms` with SEND, RECV, UNSHARD, RESHARD and REDUCE_GRAD.
Extensions that torch does not have: a W in n parts is n cells with the same text; OFFLOAD and RELOAD; an action of a
slice is 0F0.1; a checkpointed F is 0F0c.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator

from zeropipe.core.action import COMPUTE, OFFLOADING, Action, Kind, Overlap, Step, actions_of, parse_step
from zeropipe.core.formats.parse import require_text
from zeropipe.core.packed import PackedRows, pack
from zeropipe.core.placement import Placement, Problem, match_placement, require_num_actions
from zeropipe.core.schedule import Program, Schedule, require_schedule
from zeropipe.errors import ScheduleError


def to_csv(what: Schedule | Program) -> str:
    """torch's CSV: the `compute_only` form of a Schedule, the `compute_comms` form of a Program."""
    if not isinstance(what, Program):
        require_schedule(what)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in what.rows:
        writer.writerow(map(str, row))
    return out.getvalue()


def from_csv(text: str, name: str = "custom") -> Schedule:
    """The Schedule of a CSV in either of torch's forms: its computations, with an inferred placement."""
    return _build_schedule(_parse_rows(text), name)


def program_from_csv(text: str, name: str = "custom") -> Program:
    """The Program of a CSV in the `compute_comms` form, with its order of messages, gathers and reductions."""
    rows = _parse_rows(text)
    schedule = _build_schedule(rows, name)
    return Program(schedule, PackedRows.of(pack(row, schedule.num_slices) for row in rows))


def has_messages(text: str) -> bool:
    """Whether a CSV is in the `compute_comms` form."""
    return "SEND_" in text or "RECV_" in text


_OTHER_SEPARATOR = re.compile(r"^\s*\d+[A-Z_]+\d*(?:\.\d+)?c?\s*[;\t |]\s*\d")


def _parse_rows(text: str) -> list[list[Step]]:
    require_text(text, "csv")
    try:
        lines = list(csv.reader(text.removeprefix("\ufeff").splitlines()))  # spreadsheets write a byte-order mark
    except csv.Error as error:
        raise ScheduleError(f"not a CSV: {error}") from None
    rows = []
    for number, cells in enumerate(lines):
        row = []
        for column, cell in enumerate(cells):
            if not cell.strip():
                continue
            try:
                row.append(parse_step(cell))
            except ScheduleError as error:
                hint = "; separate actions by commas" if _OTHER_SEPARATOR.search(cell) else ""
                raise ScheduleError(f"line {number + 1}, cell {column + 1}: {error}{hint}") from None
        rows.append(row)
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ScheduleError("the CSV has no action: write one line per rank, like 0F0,0B0")
    for number, row in enumerate(rows):
        if not row:
            raise ScheduleError(f"line {number + 1} has no action: every line is a rank; remove empty ones")
    return rows


def _build_schedule(rows: list[list[Step]], name: str) -> Schedule:
    compute = [[step for step in row if isinstance(step, Overlap) or step.kind in COMPUTE] for row in rows]
    weights: Counter[Action] = Counter()
    num_stages = num_microbatches = num_actions = 0
    num_slices = 1
    for _, action in _ranked_actions(compute):
        if action.kind is Kind.W:
            weights[action] += 1
        num_actions += 1
        num_stages = max(num_stages, action.stage + 1)
        num_microbatches = max(num_microbatches, action.microbatch + 1)
        num_slices = max(num_slices, 1 if action.slice is None else action.slice + 1)
    if not num_actions:
        raise ScheduleError("the CSV has messages but no computation")
    # the most common number of repetitions: a W with another one is an error that the checker reports
    parts = Counter(weights.values()).most_common(1)[0][0] if weights else 1
    problem = Problem(len(rows), num_stages, num_microbatches, parts, num_slices)
    require_num_actions(problem, num_actions)
    kept = [[step for step in row if isinstance(step, Overlap) or step.kind in COMPUTE | OFFLOADING] for row in rows]
    return Schedule.of(problem, _infer_placement(problem, compute), kept, name)


def _ranked_actions(rows: list[list[Step]]) -> Iterator[tuple[int, Action]]:
    """Every action with its rank."""
    for rank, row in enumerate(rows):
        for action in actions_of(row):
            yield rank, action


def _infer_placement(problem: Problem, rows: list[list[Step]]) -> Placement:
    """The placement that most actions agree with: one table, or two if early and late microbatches differ."""
    counts = _count_by_rank(problem, rows, range(problem.num_microbatches))
    for stage, ranks in enumerate(counts):
        if not ranks:
            raise ScheduleError(f"stage {stage} is missing: stages are numbered 0 to the highest without gaps")
    single = _majority_ranks(counts, counts)
    if all(rank == single[action.stage] for rank, action in _ranked_actions(rows)):
        return match_placement((single,), None, problem)
    # two copies: the second one has the microbatches after the last one that is elsewhere than the last microbatch
    last = problem.num_microbatches - 1
    late = _majority_ranks(_count_by_rank(problem, rows, range(last, last + 1)), counts)
    elsewhere = (action.microbatch for rank, action in _ranked_actions(rows) if rank != late[action.stage])
    second_from = max(elsewhere, default=-1) + 1
    if 0 < second_from <= last:
        early = _majority_ranks(_count_by_rank(problem, rows, range(second_from)), counts)
        tables = (early, late)
        actions = _ranked_actions(rows)
        if all(rank == tables[action.microbatch >= second_from][action.stage] for rank, action in actions):
            return match_placement(tables, second_from, problem)
    return match_placement((single,), None, problem)


def _count_by_rank(problem: Problem, rows: list[list[Step]], microbatches: range) -> list[Counter[int]]:
    """For each stage, the number of actions of these microbatches on each rank."""
    counts = [Counter[int]() for _ in range(problem.num_stages)]
    for rank, action in _ranked_actions(rows):
        if action.microbatch in microbatches:
            counts[action.stage][rank] += 1
    return counts


def _majority_ranks(counts: list[Counter[int]], fallback: list[Counter[int]]) -> tuple[int, ...]:
    """The rank with the most actions of each stage; by `fallback` for stages without actions."""
    return tuple((own or other).most_common(1)[0][0] for own, other in zip(counts, fallback, strict=True))
