"""Timer logs of Megatron-LM (`--timing-log-level 2 --timing-log-option all`): seconds of each rank per training step.

    times across ranks (ms):
      forward-compute:
         rank  0: 345.67

They have the sum of all forwards and of all backwards of a rank, without their order. So there is no timeline, but the
mean cost of every pipeline rank, and the time of the step (`forward-backward`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from statistics import median
from typing import NamedTuple

from zeropipe.core.limits import MAX_TIME
from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Costs

_BEGIN = re.compile(r"^(?:.*[ :])?times across ranks \(ms\):\s*$")
_MIN_MAX = re.compile(r"(?:\(min, max\)|max) time across ranks \(ms\):")
_TIMER = re.compile(r"^\s+([A-Za-z][\w-]*):\s*$")
_RANK = re.compile(r"^\s+rank\s+(\d{1,9}):\s+([0-9.eE+-]{1,40})\s*$")
FORWARD, BACKWARD, STEP = "forward-compute", "backward-compute", "forward-backward"
_WAY_OUT = "log with --timing-log-level 2 --timing-log-option all"


class TimerLog(NamedTuple):
    """Seconds per training step of every process, the median over the logged steps."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    step: float  # of the slowest process
    num_steps: int


def is_megatron_log(text: str) -> bool:
    """Whether a text has blocks of Megatron's timers."""
    return "across ranks (ms):" in text


def parse_megatron_log(text: str) -> TimerLog:
    """The times of a log; ConfigError unless it has those of every process."""
    steps = _parse_blocks(text)
    if not steps:
        present = "only their smallest and largest time" if _MIN_MAX.search(text) else "no times of ranks"
        raise ConfigError(f"the log has {present}; {_WAY_OUT}")
    columns: dict[str, tuple[float, ...]] = {}
    for timer in (FORWARD, BACKWARD, STEP):
        tables = [step[timer] for step in steps if timer in step]
        if not tables:
            raise ConfigError(f"the log has no timer {timer}; {_WAY_OUT}")
        ranks = sorted(set().union(*tables))
        if ranks != list(range(len(ranks))) or any(len(table) < len(ranks) for table in tables):
            raise ConfigError(f"timer {timer} lacks some ranks: the log is truncated, or not of all ranks; {_WAY_OUT}")
        columns[timer] = tuple(median(table[rank] for table in tables) / 1e3 for rank in ranks)
    sizes = {len(column) for column in columns.values()}
    if len(sizes) > 1:
        raise ConfigError(f"its timers have different numbers of ranks, {sorted(sizes)}: the log is truncated")
    return TimerLog(columns[FORWARD], columns[BACKWARD], max(columns[STEP]), len(steps))


def _parse_blocks(text: str) -> list[dict[str, dict[int, float]]]:
    """Milliseconds by timer and rank, for each block of the log."""
    blocks: list[dict[str, dict[int, float]]] = []
    is_inside, timer = False, ""
    for line in text.splitlines():
        if _BEGIN.match(line):
            is_inside, timer = True, ""
            blocks.append(defaultdict(dict))
        elif is_inside and (match := _RANK.match(line)) and timer:
            blocks[-1][timer][int(match[1])] = _parse_milliseconds(match[2], timer)
        elif is_inside and (match := _TIMER.match(line)):
            timer = match[1]
        elif line.strip():
            is_inside = False
    return [block for block in blocks if block]


def _parse_milliseconds(text: str, timer: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < MAX_TIME:
        raise ConfigError(f"{timer}: {text}: must be a non-negative number of milliseconds")
    return value


def costs_from_log(log: TimerLog, schedule: Schedule) -> Costs:
    """The costs of a schedule's stages: the time of a rank, divided evenly among its stages and microbatches.

    Megatron numbers the processes of a pipeline rank consecutively; their mean is used.
    """
    num_ranks, num_processes = schedule.num_ranks, len(log.forward)
    if num_processes % num_ranks:
        raise ConfigError(f"the log has {num_processes} ranks: must be a multiple of the {num_ranks} pipeline ranks")
    if len(schedule.placement.copies) > 1:
        raise ConfigError(f"{schedule.name} has two copies of each stage: Megatron runs no such schedule")
    per_rank, columns = num_processes // num_ranks, []
    for times in (log.forward, log.backward):
        column = [0.0] * schedule.num_stages
        for rank in range(num_ranks):
            stages = schedule.placement.stages_of(rank)
            mean = sum(times[rank * per_rank : (rank + 1) * per_rank]) / per_rank
            for stage in stages:
                column[stage] = mean / len(stages) / schedule.num_microbatches
        columns.append(tuple(column))
    f, b = columns
    half = tuple(time / 2 for time in b)
    return Costs(f=f, b=b, i=half, w=half, unit="s")
