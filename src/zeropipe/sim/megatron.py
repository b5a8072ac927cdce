"""Timer logs of Megatron-LM (`--timing-log-level 2 --timing-log-option all`): seconds of each rank per training step.

    times across ranks (ms):
      forward-compute:
         rank  0: 345.67

They say what a rank spent on all its forwards and backwards together, not when: so there is no timeline to read, but
the mean cost of every pipeline rank, and the time of the step (`forward-backward`).
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
_WAY = "log with --timing-log-level 2 --timing-log-option all"


class Log(NamedTuple):
    """Seconds per training step of every process, the median over the logged steps."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    step: float  # the slowest process's
    num_steps: int


def is_megatron_log(text: str) -> bool:
    """Whether a text has blocks of Megatron's timers."""
    return "across ranks (ms):" in text


def read_megatron_log(text: str) -> Log:
    """The times of a log; ConfigError where it does not tell every process's."""
    steps = _blocks(text)
    if not steps:
        kind = "only their smallest and largest time" if _MIN_MAX.search(text) else "no times of ranks"
        raise ConfigError(f"the log has {kind}: {_WAY}")
    columns: dict[str, tuple[float, ...]] = {}
    for timer in (FORWARD, BACKWARD, STEP):
        tables = [step[timer] for step in steps if timer in step]
        if not tables:
            raise ConfigError(f"the log has no timer {timer}: {_WAY}")
        ranks = sorted(set().union(*tables))
        if ranks != list(range(len(ranks))) or any(len(table) < len(ranks) for table in tables):
            raise ConfigError(f"timer {timer} lacks some ranks: the log is cut off, or is not of all ranks; {_WAY}")
        columns[timer] = tuple(median(table[rank] for table in tables) / 1e3 for rank in ranks)
    sizes = {len(column) for column in columns.values()}
    if len(sizes) > 1:
        raise ConfigError(f"its timers have different numbers of ranks, {sorted(sizes)}: the log is cut off")
    return Log(columns[FORWARD], columns[BACKWARD], max(columns[STEP]), len(steps))


def _blocks(text: str) -> list[dict[str, dict[int, float]]]:
    """Milliseconds by timer and rank, for each block of the log."""
    found: list[dict[str, dict[int, float]]] = []
    inside, timer = False, ""
    for line in text.splitlines():
        if _BEGIN.match(line):
            inside, timer = True, ""
            found.append(defaultdict(dict))
        elif inside and (match := _RANK.match(line)) and timer:
            found[-1][timer][int(match[1])] = _milliseconds(match[2], timer)
        elif inside and (match := _TIMER.match(line)):
            timer = match[1]
        elif line.strip():
            inside = False
    return [block for block in found if block]


def _milliseconds(text: str, timer: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < MAX_TIME:
        raise ConfigError(f"{timer}: {text}: a number of milliseconds from 0 on is needed")
    return value


def costs_of(log: Log, schedule: Schedule) -> Costs:
    """What the log says of a schedule's stages: the time of a rank is shared out over them and the microbatches.

    Megatron numbers processes so that those of one pipeline rank follow each other; their mean counts.
    """
    num_ranks, num_processes = schedule.num_ranks, len(log.forward)
    if num_processes % num_ranks:
        raise ConfigError(f"the log has {num_processes} ranks, which {num_ranks} pipeline ranks do not share evenly")
    if len(schedule.placement.copies) > 1:
        raise ConfigError(f"{schedule.name} keeps two copies of each stage: a log of Megatron is not of such a run")
    each, columns = num_processes // num_ranks, []
    for times in (log.forward, log.backward):
        column = [0.0] * schedule.num_stages
        for rank in range(num_ranks):
            stages = schedule.placement.stages_of(rank)
            mean = sum(times[rank * each : (rank + 1) * each]) / each
            for stage in stages:
                column[stage] = mean / len(stages) / schedule.num_microbatches
        columns.append(tuple(column))
    f, b = columns
    half = tuple(time / 2 for time in b)
    return Costs(f=f, b=b, i=half, w=half, unit="s")
