"""Checkpointed F in schedules and programs: their text, files, and what keeps the marks."""

from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.core.action import Action, Kind, Overlap, actions_of, parse_action, parse_step
from zeropipe.core.formats.csv import program_from_csv
from zeropipe.core.resize import repeat, resize, trim
from zeropipe.core.slices import slices_as_microbatches
from zeropipe.core.waits import find_ends, ready_time
from zeropipe.errors import ConfigError, ScheduleError

ROWS = "0F0c,0F1,0F2c,0B0,0B1,0B2\n1F0,1B0,1F1c,1B1,1F2,1B2"


def all_marked(schedule):
    """The schedule with every F checkpointed."""
    problem = schedule.problem
    marks = {(stage, number) for stage in range(problem.num_stages) for number in range(problem.total_slices)}
    return replace(schedule, checkpointed=frozenset(marks))


def test_text_and_files():
    one = zp.from_csv(ROWS)
    assert one.checkpointed == {(0, 0), (0, 2), (1, 1)}
    assert str(one) == ROWS.replace(",", " ")
    assert zp.to_csv(one).strip() == ROWS
    assert zp.from_csv(zp.to_csv(one)) == one == zp.from_json(zp.to_json(one))
    assert zp.from_json(zp.to_json(zp.simulate(one))).schedule == one
    plain = zp.from_csv(ROWS.replace("c", ""))
    assert plain.packed == one.packed
    assert plain.rows != one.rows
    assert plain != one == zp.Schedule.of(plain.problem, plain.placement, one.rows)
    assert "c" not in zp.to_csv(plain)
    assert "checkpointed" not in zp.to_json(one)


def test_an_action_says_so():
    action = parse_action("2F10.3c")
    assert action == Action(2, Kind.F, 10, 3, checkpointed=True)
    assert str(action) == "2F10.3c"
    text = "(1F1c;2B0)OVERLAP_F_B"
    assert str(parse_step(text)) == text
    assert zp.from_csv(ROWS).rows[1][2].checkpointed
    assert not zp.from_csv(ROWS).rows[1][3].checkpointed
    for wrong in ("2B0c", "0OFFLOAD1c", "1W3c"):
        with pytest.raises(ScheduleError, match=f"{wrong}' is marked c: only an F can be checkpointed"):
            parse_action(wrong)
    one = zp.from_csv(ROWS)
    with pytest.raises(ScheduleError, match="0B0c is marked c: only an F"):
        zp.Schedule.of(one.problem, one.placement, [[Action(0, Kind.B, 0, None, True)], []])
    with pytest.raises(ScheduleError, match="cell 1: '0SEND_F0c'"):
        zp.from_csv("0SEND_F0c")


@pytest.mark.parametrize("shards", [None, "keep", "regather"])
def test_a_program_has_the_marks(shards):
    one = zp.from_csv(ROWS)
    program = zp.lower(one, shards)
    zp.check(program)
    again = program_from_csv(zp.to_csv(program))
    assert str(again) == str(program)
    assert again.schedule == one
    assert str(program).count("c") == 3


@pytest.mark.parametrize("name", zp.names())
def test_every_schedule_with_all_marks(name):
    plain = zp.build(name, ranks=4, microbatches=8)
    one = all_marked(plain)
    zp.check(one)
    assert zp.from_csv(zp.to_csv(one)).rows == one.rows
    forwards = [a for row in one.rows for a in actions_of(row) if a.kind is Kind.F]
    assert all(a.checkpointed for a in forwards)
    assert len(forwards) == len(one.checkpointed)
    assert sum(isinstance(step, Overlap) for row in one.rows for step in row) == sum(
        isinstance(step, Overlap) for row in plain.rows for step in row
    )


def test_other_numbers_of_microbatches_keep_the_marks():
    one = zp.from_csv(ROWS)
    twice = repeat(one, 2)
    assert twice.checkpointed == {(0, 0), (0, 2), (1, 1), (0, 3), (0, 5), (1, 4)}
    assert trim(twice, 4).checkpointed == {(0, 0), (0, 2), (1, 1), (0, 3)}
    assert resize(one, 2).checkpointed == {(0, 0), (1, 1)}
    sliced = all_marked(zp.build("seq1f1b", ranks=2, microbatches=2, slices=3))
    zp.check(sliced)
    assert zp.from_json(zp.to_json(sliced)) == sliced
    assert slices_as_microbatches(sliced).rows[0][1].checkpointed


def test_what_a_waiting_action_needs_is_found():
    timeline = zp.simulate(all_marked(zp.build("1f1b", ranks=2, microbatches=3)))
    ends = find_ends(timeline)
    for rank in range(2):
        for span in timeline.spans(rank):
            assert ready_time(span.action, ends, timeline) <= span.start
    assert [str(span.action) for span in timeline.spans(1)] == str(timeline.schedule).splitlines()[1].split()


def test_wrong_marks_are_refused():
    one = zp.from_csv(ROWS)
    for stage, microbatch in ((2, 0), (0, 3)):
        with pytest.raises(ScheduleError, match=f"{stage}F{microbatch}c is checkpointed and out of range"):
            zp.check(replace(one, checkpointed=frozenset({(stage, microbatch)})))
    both = zp.from_csv("0F0c,0OFFLOAD0,0F1,0RELOAD0,0B0,0B1")
    for use in (zp.check, zp.simulate, zp.lower):
        with pytest.raises(ScheduleError, match="0F0c is checkpointed and its activations are copied to the host"):
            use(both)
    zp.check(zp.from_csv("0F0,0OFFLOAD0,0F1c,0RELOAD0,0B0,0B1"))
    marked = all_marked(zp.build("zb-h1", ranks=2, microbatches=4))
    with pytest.raises(ConfigError, match=r"zb-h1 has checkpointed F, .*: fill gaps first"):
        zp.fill_gaps(marked)
    with pytest.raises(ConfigError, match="zb-h1 has checkpointed F: make Overlaps first"):
        zp.with_overlaps(marked)
    copied = zp.with_offload(zp.from_csv(ROWS), offload=1.0)
    zp.check(copied)
    assert "OFFLOAD1" in str(copied)
    assert copied.checkpointed == zp.from_csv(ROWS).checkpointed
