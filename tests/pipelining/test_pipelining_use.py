"""Our pipelining classes in use: sharded stages, options, timelines, torch's names rebound, programs that just end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import pipelining_use_cases as cases
import script_runner
from engine_helpers import TOLERANCE, ranks
from full_marker import mark_rest_full
from stage_stand_ins import stand_ins
from torch.distributed.pipelining import schedules as torchs

import zeropipe as zp
import zeropipe.pipelining as ours
from zeropipe.pipelining.schedules import CLASSES


@pytest.mark.parametrize(
    ("name", "per_rank", "summing", "beside"),
    [
        ("Schedule1F1B", 1, False, True),
        ("ScheduleInterleaved1F1B", 2, True, True),
        ("ScheduleZBVZeroBubble", 2, False, False),
        ("ScheduleDualPipeV", 2, True, False),
    ],
)
def test_sharded_stages(name, per_rank, summing, beside):
    """Gradients are means over the processes, or sums where their owner says so; equal to torch's where it has them."""
    assert max(ranks(4).run(cases.sharded, name, per_rank, summing, beside)) < TOLERANCE


def test_pipelines_that_share_weights_may_have_different_numbers_of_microbatches():
    assert max(ranks(4).run(cases.sharded_on_a_mesh)) < TOLERANCE


@pytest.mark.parametrize(("name", "per_rank"), [("Schedule1F1B", 1), ("ScheduleZBVZeroBubble", 2)])
def test_stages_that_torchs_tensor_parallelism_has_spread(name, per_rank):
    assert max(ranks(4).run(cases.tensor_parallel, name, per_rank)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "per_rank", "layout"),
    mark_rest_full(
        [
            (name, per_rank, layout)
            for name, per_rank in (("Schedule1F1B", 1), ("ScheduleZBVZeroBubble", 2))
            for layout in ("sharded", "whole")
        ],
        [("Schedule1F1B", 1, "whole"), ("ScheduleZBVZeroBubble", 2, "sharded")],
    ),
)
def test_dtensors_go_from_stage_to_stage(name, per_rank, layout):
    assert max(ranks(4).run(cases.spread_between_stages, name, per_rank, layout)) < TOLERANCE


@pytest.mark.parametrize("compiled", [False, True])
def test_spread_layers_leave_weight_gradients_to_w(compiled):
    assert max(ranks(2).run(cases.spread_products, compiled)) < TOLERANCE


@pytest.mark.parametrize("options", [{"ac": "full"}, {"ac": "full", "blocks": "layers"}, {"dynamic_weights": True}])
def test_options_of_the_engine(options):
    for seen in ranks(2).run(cases.configured, options):
        assert seen["seen"] < TOLERANCE
        assert seen["changed"] == ("ac" in options)


@pytest.mark.parametrize("how", mark_rest_full(["in place", "wrapped", "checkpointed"], ["wrapped", "checkpointed"]))
def test_blocks_that_the_user_has_compiled_or_checkpointed(how):
    """torch's own classes refuse this under a split backward, or fail."""
    assert max(ranks(2).run(cases.compiled_by_the_user, how)) < TOLERANCE


def test_a_step_leaves_a_timeline():
    assert all(ranks(4).run(cases.recorded))


def test_torchs_names_can_be_rebound():
    for seen in ranks(2).run(cases.rebound):
        assert seen == ["torch torch torch", "zeropipe zeropipe zeropipe", "zeropipe", "torch torch torch"]


def test_what_trainers_do_with_torchs_insides():
    *others, last = ranks(4).run(cases.reached_inside)
    assert (last["merged"], last["forgotten"], last["losses"]) == ("4 chunks", "0 chunks", 4)
    assert all((seen["merged"], seen["losses"]) == (None, 0) for seen in others)
    assert max(seen["gap"] for seen in (*others, last)) < TOLERANCE


def test_skip_connections_are_refused():
    texts = ranks(4).run(cases.skips)
    assert "a stage gets the outputs of the previous stage" in texts[2] + texts[3]
    assert texts[:2] == ["taken", "taken"]


def test_copies_of_one_parameter_are_mentioned():
    """Of the four stages the second and the last use one block, and torch gives each a copy."""
    texts = ranks(4).run(cases.copies)
    assert [len(text) for text in texts] == [0, 1, 0, 1]
    assert "several stages use b.down.weight and b.scale and b.up.bias and b.up.weight, and each" in texts[1][0]


def test_unknown_options_are_refused():
    with pytest.raises(zp.ConfigError, match="did you mean timeout"):
        ours.configure(time_out=3)
    with pytest.raises(zp.ConfigError, match="activation checkpointing 'some'"):
        ours.configure(ac="some")


@pytest.mark.parametrize("number", ["4", 0, 2.0, None])
def test_what_is_no_number_of_microbatches_is_refused(number):
    stage = SimpleNamespace(num_stages=1, group_size=1, group_rank=0)
    with pytest.raises(zp.ConfigError, match=r"^n_microbatches=.*: must be a positive integer$"):
        ours.Schedule1F1B(stage, number)


def test_every_schedule_with_one_copy_has_a_class():
    one_copy = {n for n in zp.names() if len(zp.build(n, ranks=4, microbatches=8).placement.copies) == 1}
    assert set(CLASSES) == one_copy - {"seq1f1b", "slimpipe"}  # torch's interface has no slices of sequences
    for name, kind in CLASSES.items():
        assert ours.get_schedule_class(name) is kind
        torchs_kind = getattr(torchs, kind.__name__, None)
        if torchs_kind is not None:  # so that issubclass and isinstance say what they said
            assert issubclass(kind, torchs_kind)
            assert ours.get_schedule_class(kind.__name__.removeprefix("Schedule").upper()) is kind


def test_two_copies_are_refused_with_the_reason():
    for name in ("dualpipe", "chimera"):
        with pytest.raises(zp.ConfigError, match="keeps two copies of each stage"):
            ours.get_schedule_class(name)
    with pytest.raises(zp.ConfigError, match="keeps two copies of each stage"):
        ours.PipelineSchedule(stand_ins(4, 1), 8, schedule=zp.build("dualpipe", ranks=4, microbatches=8))
    with pytest.raises(ValueError, match="unknown schedule 'zbw': did you mean zbv"):  # torch raises ValueError, too
        ours.get_schedule_class("zbw")
    with pytest.raises(zp.ConfigError, match="schedule_name=3: must be a name such as '1F1B' or 'zbv'"):
        ours.get_schedule_class(3)


def test_classes_know_where_stages_belong():
    assert ours.ScheduleVHalf.stages_of(1, 4, 8) == ours.ScheduleZBVZeroBubble.stages_of(1, 4, 8) == (1, 6)
    assert ours.ScheduleInterleaved1F1B.stages_of(1, 4, 8) == (1, 5)
    assert ours.Schedule1F1B.placement_of(4, 4).copies == ((0, 1, 2, 3),)
    with pytest.raises(zp.ConfigError, match="12 stages on 4 ranks: zbv takes 2 per rank"):
        ours.ScheduleZBVZeroBubble.stages_of(0, 4, 12)
    for rank in (4, -1, "0", True):
        with pytest.raises(zp.ConfigError, match=f"^rank={rank!r}: must be from 0 to 3 for num_ranks=4$"):
            ours.ScheduleVHalf.stages_of(rank, 4, 8)
    for numbers in ((0, 8), (2.0, 4), (2, None)):
        with pytest.raises(zp.ConfigError, match=r"^num_(ranks|stages)=.*: must be a positive integer$"):
            ours.ScheduleVHalf.stages_of(0, *numbers)


def test_a_schedules_file_is_told_from_its_text_and_from_other_files(tmp_path):
    text = zp.to_csv(zp.build("1f1b", ranks=2, microbatches=4))
    for name in ("two, first.csv", "two.txt"):
        (tmp_path / name).write_text(text)
    file = ours.PipelineSchedule(stages_at(2, (1,), 2), 4, schedule=str(tmp_path / "two, first.csv"))
    assert file.schedule.rows == ours.PipelineSchedule(stages_at(2, (1,), 2), 4, schedule=text).schedule.rows
    with pytest.raises(zp.ConfigError, match="is a file of no known kind: one with a schedule is named"):
        ours.PipelineSchedule(stages_at(2, (1,), 2), 4, schedule=str(tmp_path / "two.txt"))


def stages_at(ranks, numbers, total):
    stages = stand_ins(ranks, len(numbers))
    for stage, number in zip(stages, numbers):
        stage.stage_index, stage.num_stages, stage.group_rank = number, total, 1
    return stages


def test_stages_on_the_wrong_rank_are_refused():
    with pytest.raises(zp.ConfigError, match=r"needs stages \[1, 2\] on rank 1, got \[1, 3\]: its placement is vee"):
        ours.ScheduleZBVZeroBubble(stages_at(2, (1, 3), 4), 4)
    with pytest.raises(zp.ConfigError, match="Schedule1F1B takes 1 stage per rank, got 2"):
        ours.Schedule1F1B(stages_at(2, (0, 1), 2), 4)
    with pytest.raises(zp.ConfigError, match="is for 4 ranks and 4 stages, these are stages of 2 on 2 ranks"):
        ours.PipelineSchedule(stages_at(2, (1,), 2), 4, schedule=zp.build("1f1b", ranks=4, microbatches=4))


def test_what_is_no_stage_or_no_schedule_is_named():
    with pytest.raises(zp.ConfigError, match=r"^ScheduleGPipe got a str for a stage: must be a PipelineStage"):
        ours.ScheduleGPipe("stage", 4)
    with pytest.raises(zp.ConfigError, match=r"^schedule=3: must be a Schedule, the text of a CSV, a file"):
        ours.PipelineSchedule(stages_at(2, (1,), 2), 4, schedule=3)


def test_what_cannot_be_had_is_said():
    schedule = ours.ScheduleDualPipeV(stages_at(2, (1, 2), 4), 4)
    with pytest.raises(zp.ConfigError, match="runs every action itself"):
        schedule.register_custom_function(torchs._ComputationType.OVERLAP_F_B, print)
    loaded = ours.PipelineSchedule(stages_at(2, (1,), 2), 4)
    with pytest.raises(zp.ConfigError, match="PipelineSchedule has no schedule yet"):
        loaded.step()


@pytest.mark.parametrize("number", [1, 3, 5, 9, 17])
def test_no_limits_on_the_number_of_microbatches(number):
    for kind in (ours.ScheduleInterleaved1F1B, ours.ScheduleDualPipeV, ours.ScheduleZBVZeroBubble):
        numbers = kind.stages_of(1, 4, 8)
        schedule = kind(stages_at(4, numbers, 8), number).schedule
        assert schedule.num_microbatches == number
        zp.check(schedule)


def test_a_program_that_just_ends_is_quiet(tmp_path):
    """Nobody closes an engine that torch's interface hides."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        from zeropipe.pipelining import PipelineStage, Schedule1F1B

        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meeting", rank=rank, world_size=2)
        stage = PipelineStage(torch.nn.Linear(4, 4), rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, t: (y - t).square().mean())
        schedule.step(*([torch.ones(4, 4)] if rank == 0 else []), target=torch.ones(4, 4) if rank else None)
        dist.destroy_process_group()
        print("done")
        """)
    )
    first = subprocess.Popen(
        [sys.executable, program, "0", tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    second = script_runner.torchrun(1, [str(program), "1", str(tmp_path)], tmp_path, os.environ)
    out, errors = first.communicate(timeout=120)
    assert (out, errors, first.returncode) == ("done\n", "", 0)
    assert (second.stdout, second.stderr, second.returncode) == ("done\n", "", 0)
