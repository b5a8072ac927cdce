"""Traces of torch.profiler, one file per rank, as a measured Timeline.

The engine annotates its actions there (`2F0`), as does the runtime of torch.distributed.pipelining (`PP:2F0`). Times
are the GPU's if the trace has them, else the host's.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from zeropipe.core.action import COMM, Action, Kind, Overlap, Step, actions_of, parse_step
from zeropipe.core.complete import check_complete
from zeropipe.core.formats.action_names import ActionNames
from zeropipe.core.formats.csv import from_csv
from zeropipe.core.timeline import Timeline
from zeropipe.errors import ScheduleError

PREFIX = "PP:"  # of torch's own runtime
PIPELINE = "zeropipe_pipeline"  # the field in which the engine writes the number of stages
_NEXT_STAGE_MESSAGE = re.compile(r"([0-9]{1,9})(SEND_F|RECV_B)[0-9]+")
_HOST, _GPU = "user_annotation", "gpu_user_annotation"
_FUNCTION = "python_function"  # of a profile with stacks, like `megatron/.../schedules.py(181): forward_step`
_PROFILED_STEP = re.compile(r"ProfilerStep#[0-9]+")  # between two calls of profiler.step()


class TimedStep(NamedTuple):
    """One step of a rank, in seconds."""

    step: Step
    start: float
    end: float


def is_torch_trace(data: Any) -> bool:
    """Whether parsed JSON is a trace of a profiler, and not a timeline of zeropipe."""
    return isinstance(data, dict) and "traceEvents" in data and "zeropipe" not in data


def from_torch_traces(
    traces: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None, actions: ActionNames | None = None
) -> Timeline:
    """The Timeline of one pipeline from the parsed traces of all its ranks: of its training step of median length.

    Ranks are in the order of their numbers in the files (`distributedInfo`), or of the files if these have none.
    `names` are the names of the files in errors; `actions` finds actions by other names than torch's and the engine's.
    """
    names = names or [f"trace {n}" for n in range(len(traces))]
    order = _rank_order(traces, names)
    ranks = [_training_steps(_rank_steps(traces[n], names[n], actions, rank), names[n]) for rank, n in enumerate(order)]
    number = len(ranks[0])
    for n, steps in zip(order, ranks, strict=True):
        if len(steps) != number:
            raise ScheduleError(
                f"{names[n]} has {len(steps)} training steps, {names[order[0]]} has {number}; "
                "profile the same steps on all ranks"
            )
    lengths = [
        max(rank[at][-1].end for rank in ranks) - min(rank[at][0].start for rank in ranks) for at in range(number)
    ]
    middle = sorted(range(number), key=lengths.__getitem__)[number // 2]
    timeline = _build_timeline([rank[middle] for rank in ranks])
    num_stages = max(map(_min_num_stages, traces))
    if num_stages > timeline.schedule.num_stages:
        raise ScheduleError(
            f"these traces have {timeline.schedule.num_stages} of {num_stages} stages; pass the traces of all ranks"
        )
    return timeline


def _min_num_stages(trace: Mapping[str, Any]) -> int:
    """A lower bound of the number of stages: as the engine wrote it, or by torch's messages to the next stage."""
    pipeline = trace.get(PIPELINE)
    number = pipeline.get("num_stages") if isinstance(pipeline, Mapping) else None
    texts = (event["name"].removeprefix(PREFIX) for event in trace["traceEvents"] if _is_annotation(event))
    by_messages = [int(match[1]) + 2 for text in texts if (match := _NEXT_STAGE_MESSAGE.fullmatch(text))]
    return max([number if isinstance(number, int) else 0, *by_messages])


def _rank_order(traces: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[int]:
    """The indices of the files, ordered by rank."""
    infos = [trace.get("distributedInfo") for trace in traces]
    ranks = [info["rank"] for info in infos if isinstance(info, Mapping) and isinstance(info.get("rank"), int)]
    if len(ranks) < len(traces):
        return list(range(len(traces)))
    if len(set(ranks)) < len(ranks):
        repeated = next(rank for rank in ranks if ranks.count(rank) > 1)
        both = [name for name, rank in zip(names, ranks, strict=True) if rank == repeated]
        raise ScheduleError(f"{both[0]} and {both[1]} are both of rank {repeated}; pass one trace of each rank")
    return sorted(range(len(traces)), key=ranks.__getitem__)


def _rank_steps(trace: Mapping[str, Any], name: str, actions: ActionNames | None, rank: int) -> list[TimedStep]:
    """The computations of a rank in a trace, ordered by time."""
    if not isinstance(trace["traceEvents"], list):
        raise ScheduleError(f"{name}: traceEvents is not a list: this is not a trace of torch.profiler")
    if actions is None:
        return _timed_steps(trace, name, _parse_name)
    timed_steps = _timed_steps(trace, name, lambda text: actions.parse(text, rank), {_HOST, _GPU, _FUNCTION})
    return timed_steps if actions.is_numbered else _number(timed_steps, _profiled_steps(trace))


def _profiled_steps(trace: Mapping[str, Any]) -> list[float]:
    """When the steps of torch.profiler began, in seconds."""
    zero = _zero(trace)
    return sorted(
        zero + event["ts"] / 1e6 for event in trace["traceEvents"]
        if _is_annotation(event, {_HOST}) and _PROFILED_STEP.fullmatch(event["name"])
    )  # fmt: skip


def _number(timed_steps: list[TimedStep], begins: Sequence[float]) -> list[TimedStep]:
    """Count the actions of each stage and kind as microbatches, from 0 in each of the profiler's steps."""
    counts: Counter[tuple[int, int, Kind]] = Counter()
    numbered = []
    for timed in timed_steps:
        assert isinstance(timed.step, Action)
        key = bisect_right(begins, timed.start), timed.step.stage, timed.step.kind
        numbered.append(timed._replace(step=timed.step._replace(microbatch=counts[key])))
        counts[key] += 1
    return numbered


def _zero(trace: Mapping[str, Any]) -> float:
    base = trace.get("baseTimeNanoseconds", 0)
    return base / 1e9 if isinstance(base, int) else 0.0


def _timed_steps(
    trace: Mapping[str, Any],
    name: str,
    parse: Callable[[str], Step | None],
    categories: Collection[str] = (_HOST, _GPU),
) -> list[TimedStep]:
    """The computations of a rank in a trace, ordered by time."""
    events, zero = trace["traceEvents"], _zero(trace)
    found: dict[str, list[TimedStep]] = {_HOST: [], _GPU: []}
    has_kernels = False
    spans: dict[tuple[str, Any], int] = {}  # on a GPU an annotation has an event on every stream that it used
    for event in events:
        step = parse(event["name"]) if _is_annotation(event, categories) else None
        if step is None:
            has_kernels = has_kernels or (isinstance(event, Mapping) and event.get("cat") == "kernel")
            continue
        category, args = _GPU if event["cat"] == _GPU else _HOST, event.get("args")
        start, duration = event.get("ts"), event.get("dur")
        if not all(isinstance(t, (int, float)) and isfinite(t) for t in (start, duration)) or duration < 0:
            raise ScheduleError(f"{name}: {event['name']} has no times (ts, dur): the trace is damaged")
        timed = TimedStep(step, zero + start / 1e6, zero + (start + duration) / 1e6)
        listed = found[category]
        key = (category, args.get("External id")) if isinstance(args, Mapping) else (category, None)
        if category == _GPU and key[1] is not None and key in spans and listed[spans[key]].step == step:
            same = listed[spans[key]]
            listed[spans[key]] = TimedStep(step, min(same.start, timed.start), max(same.end, timed.end))
            continue
        spans[key] = len(listed)
        listed.append(timed)
    chosen = found[_GPU] if len(found[_GPU]) >= len(found[_HOST]) else found[_HOST]
    if has_kernels and chosen is found[_HOST] and chosen:
        missing = next(iter({timed.step for timed in chosen} - {timed.step for timed in found[_GPU]}), chosen[0].step)
        raise ScheduleError(
            f"{name} has kernels of a GPU, but no time of {missing} there, and the host's times are those of its "
            "launch; record the run with the engine (record=True) instead"
        )
    if not chosen:
        raise ScheduleError(
            f"{name} has no action like 2F0 or PP:2F0; profile a run of the engine, or of torch's pipeline runtime, or "
            "name the actions: zeropipe trace import --actions REGEX"
        )
    return sorted(chosen, key=lambda timed: timed.start)


def _parse_name(name: str) -> Step | None:
    """The computation that an event is named after; None for other events."""
    text = name.removeprefix(PREFIX)
    if not text[:1].isdecimal() and not text.startswith("("):
        return None
    try:
        step = parse_step(text)
    except ScheduleError:
        return None
    return None if isinstance(step, Action) and step.kind in COMM else step


def _is_annotation(event: Any, categories: Collection[str] = (_HOST, _GPU)) -> bool:
    if not isinstance(event, Mapping) or event.get("ph") != "X" or event.get("cat") not in categories:
        return False
    return isinstance(event.get("name"), str)


def _training_steps(timed_steps: list[TimedStep], name: str) -> list[list[TimedStep]]:
    """The training steps of a rank: a forward that the present one has already had begins a new one."""
    steps: list[list[TimedStep]] = [[]]
    present: set[Action] = set()
    for timed in timed_steps:
        forwards = {action for action in actions_of([timed.step]) if action.kind is Kind.F}
        if forwards & present:
            steps.append([])
            present = set()
        present |= forwards
        steps[-1].append(timed)
    row = [timed.step for timed in steps[0]]
    for number, others in enumerate(steps):
        if [timed.step for timed in others] != row:
            raise ScheduleError(
                f"{name}: its training steps 1 and {number + 1} differ; profile complete steps of one schedule"
            )
    return steps


def _build_timeline(rows: Sequence[list[TimedStep]]) -> Timeline:
    text = "\n".join(",".join(str(timed.step) for timed in row) for row in rows)
    schedule = from_csv(text, "trace")
    try:
        check_complete(schedule)
    except ScheduleError as error:
        raise ScheduleError(
            f"these traces are not of all ranks of one pipeline, or not of complete steps: {error}"
        ) from None
    zero = min(row[0].start for row in rows)
    start, end = array("d"), array("d")
    for row in rows:
        for timed in row:
            for _ in range(2 if isinstance(timed.step, Overlap) else 1):
                start.append(timed.start - zero)
                end.append(timed.end - zero)
    return Timeline(schedule, start.tobytes(), end.tobytes(), unit="s", measured=True)
