"""torch.distributed.pipelining's interface over zeropipe's engine: change the import and keep the rest.

    from zeropipe.pipelining import PipelineStage, ScheduleZBVZeroBubble

schedules: the schedule classes
base: a step of these classes
plan: the Schedule that a class runs
engines: `configure`, and the engines of the stages
install: replace torch's classes in a running program
private: private names of torch.distributed.pipelining
"""

from __future__ import annotations

from zeropipe.engine import require_torch

require_torch()

from torch.distributed.pipelining import (  # noqa: E402
    Pipe,
    PipelineStage,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
)

from zeropipe.pipelining.engines import configure  # noqa: E402
from zeropipe.pipelining.install import install, uninstall  # noqa: E402
from zeropipe.pipelining.schedules import (  # noqa: E402
    PipelineSchedule,
    Schedule1F1B,
    Schedule1F1BOverlap,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleHanayo,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedOverlap,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
