"""Our orders against those of the installed torch, and our CSVs in torch's own runtime."""

import pytest

import zeropipe as zp

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

from stage_stand_ins import stand_ins  # noqa: E402

LOOPED = [(1, 1, 2), (1, 4, 3), (2, 2, 2), (2, 4, 1), (2, 10, 3), (3, 3, 2), (3, 9, 4), (4, 3, 2), (4, 8, 2)]
LOOPED += [(4, 10, 2), (4, 16, 8), (5, 15, 2), (8, 6, 2), (8, 32, 3)]
VEE = [(1, 2), (1, 5), (2, 4), (2, 9), (3, 6), (3, 11), (4, 8), (4, 10), (5, 10), (6, 24), (8, 16), (8, 37)]
SMALL_VEE = [(2, 1), (2, 2), (3, 2), (4, 1), (4, 3), (4, 6), (5, 8), (8, 5)]
SINGLE = [(1, 1), (1, 5), (2, 1), (2, 7), (3, 3), (4, 2), (4, 8), (5, 4), (6, 13), (8, 8), (8, 20)]

CASES = [
    *(("ScheduleGPipe", "gpipe", p, m, 1) for p, m in SINGLE),
    *(("ScheduleLoopedBFS", "looped-bfs", *size) for size in LOOPED),
    *(("ScheduleInterleaved1F1B", "interleaved", *size) for size in LOOPED),
    *(("ScheduleInterleavedZeroBubble", "interleaved-zb", *size) for size in LOOPED),
    *(("ScheduleZBVZeroBubble", "zbv", p, m, 2) for p, m in VEE + SMALL_VEE),
    *(("ScheduleDualPipeV", "dualpipev", p, m, 2) for p, m in VEE),
]


def torch_rows(torch_name, ranks, microbatches, per_rank):
    """torch's order, without its padding and its hints on when to reduce gradients."""
    stages = stand_ins(ranks, per_rank)
    schedule = getattr(schedules, torch_name)(stages if torch_name != "ScheduleGPipe" else stages[0], microbatches)
    order = schedule.pipeline_order if torch_name != "ScheduleGPipe" else schedule._get_pipeline_order()
    return [[str(a) for a in order[r] if a is not None and "REDUCE" not in str(a)] for r in range(ranks)]


@pytest.mark.parametrize(("torch_name", "name", "ranks", "microbatches", "per_rank"), CASES)
def test_rows_are_torchs(torch_name, name, ranks, microbatches, per_rank):
    ours = zp.build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank)
    assert [[str(step) for step in row] for row in ours.rows] == torch_rows(torch_name, ranks, microbatches, per_rank)


def test_torchs_names_are_aliases():
    for name in (
        "GPipe",
        "1F1B",
        "LoopedBFS",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ):
        torchs = schedules.get_schedule_class(name)  # torch knows it
        assert zp.build(name, ranks=2, microbatches=4) == zp.build(torchs.__name__, ranks=2, microbatches=4)


# two copies of a stage on different ranks are beyond torch's schedules
ONE_COPY = [name for name in zp.names() if zp.build(name, ranks=4, microbatches=8).placement.second_from is None]


@pytest.mark.parametrize("name", ONE_COPY)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 7), (4, 11)])
def test_torchs_runtime_takes_our_csv(name, ranks, microbatches, tmp_path):
    schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
    for text, form in ((zp.to_csv(schedule), "compute_only"), (zp.to_csv(zp.lower(schedule)), "compute_comms")):
        runtime = schedules._PipelineScheduleRuntime(stand_ins(ranks, schedule.problem.stages_per_rank), microbatches)
        path = tmp_path / f"{form}.csv"
        path.write_text(text)
        runtime._load_csv(str(path), format=form)  # validates; of compute_only it also adds the messages
        homes = {stage: schedule.placement.rank_of(stage) for stage in range(schedule.num_stages)}
        assert runtime.stage_index_to_group_rank == homes
        lowered = "\n".join(",".join(map(str, row)) for row in runtime.pipeline_order_with_comms.values())
        assert zp.from_csv(lowered) == schedule
