"""torch.distributed.pipelining's schedule classes and one for every other built-in schedule, run by our engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from zeropipe.core.schedule import Schedule
from zeropipe.errors import ConfigError, short
from zeropipe.pipelining import private
from zeropipe.pipelining.base import EngineSchedule
from zeropipe.pipelining.plan import require_one_copy, resolve_schedule
from zeropipe.schedules.registry import Entry, build_entry, find

torch_schedules = private.schedules


class SingleStageSchedule(EngineSchedule, PipelineScheduleSingle):
    """One stage on each rank."""

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        stages = stage if isinstance(stage, list | tuple) else [stage]
        if len(stages) != 1:
            raise ConfigError(f"{type(self).__name__} takes 1 stage per rank, got {len(stages)}")
        self._initialize(
            stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        )
        self._stage = stages[0]
        self._stage_forward_initialized = self._stage_backward_initialized = False
        self._build(options)


class MultiStageSchedule(EngineSchedule, private.Runtime):
    """Several stages on each rank."""

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        self._initialize_multi(
            stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        )
        self._build(options)

    def _initialize_multi(self, stages: Any, *args: Any) -> None:
        self._stages = list(stages) if isinstance(stages, list | tuple) else [stages]
        if not self._stages:
            raise ConfigError(f"{type(self).__name__} got no stages: every rank must have at least 1")
        self._initialize(self._stages, *args)
        self._stages_forward_initialized = self._stages_backward_initialized = False
        self._backward_requires_autograd = True


class PipelineSchedule(MultiStageSchedule):
    """Any Schedule of one copy: built, searched for, or from a CSV (its text, or a file)."""

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        schedule: Schedule | str | None = None,
    ) -> None:
        self._initialize_multi(
            stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        )
        if schedule is not None:
            self._set_schedule(resolve_schedule(schedule, self.pp_group_size, self._num_stages, n_microbatches))


class ScheduleGPipe(SingleStageSchedule, torch_schedules.ScheduleGPipe):
    """All forwards, then all backwards."""

    schedule_name = "gpipe"


class Schedule1F1B(SingleStageSchedule, torch_schedules.Schedule1F1B):
    """One forward, one backward in steady state."""

    schedule_name = "1f1b"


class Schedule1F1BOverlap(SingleStageSchedule):
    """1F1B with a deeper warm-up, so that each F runs together with a B."""

    schedule_name = "1f1b-overlap"


class ScheduleZBH1(SingleStageSchedule):
    """1F1B with split backward: a third of its bubble at the same memory."""

    schedule_name = "zb-h1"


class ScheduleZBH2(SingleStageSchedule):
    """More forwards in warm-up than 1F1B, until no bubble is left at equal costs."""

    schedule_name = "zb-h2"


class ScheduleLoopedBFS(MultiStageSchedule, torch_schedules.ScheduleLoopedBFS):
    """All microbatches through one stage, then through the next."""

    schedule_name = "looped-bfs"

    def __init__(
        self,
        stages: list[Any],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            stages, n_microbatches, loss_fn, output_merge_spec=output_merge_spec, scale_grads=scale_grads, **options
        )


class ScheduleInterleaved1F1B(MultiStageSchedule, torch_schedules.ScheduleInterleaved1F1B):
    """1F1B over several stages per rank."""

    schedule_name = "interleaved"


class ScheduleInterleavedOverlap(MultiStageSchedule):
    """Interleaved with one more forward in warm-up, so that each F runs together with a B."""

    schedule_name = "interleaved-overlap"


class ScheduleInterleavedZeroBubble(MultiStageSchedule, torch_schedules.ScheduleInterleavedZeroBubble):
    """Interleaved with split backward."""

    schedule_name = "interleaved-zb"


class ScheduleZBVZeroBubble(MultiStageSchedule, torch_schedules.ScheduleZBVZeroBubble):
    """No bubble at equal costs with 1F1B's memory: stages go down the ranks and back up (a V)."""

    schedule_name = "zbv"


class ScheduleDualPipeV(MultiStageSchedule, torch_schedules.ScheduleDualPipeV):
    """One copy of the model on a V, each F overlapped with a B."""

    schedule_name = "dualpipev"


class ScheduleVHalf(MultiStageSchedule):
    """Half of 1F1B's activation memory: stages on a V."""

    schedule_name = "v-half"


class ScheduleVMin(MultiStageSchedule):
    """A third of 1F1B's activation memory: stages on a V."""

    schedule_name = "v-min"


class ScheduleHanayo(MultiStageSchedule):
    """Microbatches run down the ranks and back up in waves."""

    schedule_name = "hanayo"


CLASSES: dict[str, type[EngineSchedule]] = {
    kind.schedule_name: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, EngineSchedule) and kind.schedule_name is not None
}


def get_schedule_class(schedule_name: str) -> type[Any]:
    """The class of a registered schedule, by torch's name or ours."""
    if not isinstance(schedule_name, str):
        raise ConfigError(f"schedule_name={short(schedule_name)}: must be a name such as '1F1B' or 'zbv'")
    for base in (PipelineScheduleSingle, PipelineScheduleMulti):
        if schedule_name.lower() == base.__name__.lower():
            return base
    entry = find(schedule_name)
    return CLASSES.get(entry.name) or _create_class(entry)


@cache
def _create_class(entry: Entry) -> type[Any]:
    """Create a class for a schedule that a user registered; ConfigError if it has two copies of each stage."""
    per_rank = entry.stages_per_rank[0]
    require_one_copy(build_entry(entry, ranks=2, microbatches=8 * per_rank))
    parent = SingleStageSchedule if entry.stages_per_rank == (1,) else MultiStageSchedule
    return type(f"Schedule_{entry.name}", (parent,), {"schedule_name": entry.name, "__doc__": entry.summary})


def __getattr__(name: str) -> Any:
    """All other names are torch's; its class for schedules from a CSV is ours."""
    return PipelineSchedule if name == "_PipelineScheduleRuntime" else getattr(torch_schedules, name)
