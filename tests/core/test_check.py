"""The checker: right schedules pass, broken ones are named, nothing hangs."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_simulator import reference_simulate

import zeropipe as zp
from zeropipe.core import jit
from zeropipe.core.action import Action, Kind, Overlap, parse_action
from zeropipe.core.formats.csv import program_from_csv
from zeropipe.core.packed import PackedRows, pack
from zeropipe.core.schedule import Program, Schedule


def with_rows(schedule, rows):
    return Schedule.of(schedule.problem, schedule.placement, rows, schedule.name)


SIZES = {
    "1f1b": (3, 4), "gpipe": (3, 3), "interleaved": (2, 4), "zb-h1": (3, 5), "zbv": (3, 6), "v-half": (3, 5),
    "dualpipe": (2, 4), "dualpipev": (2, 4), "chimera": (4, 4), "hanayo": (2, 4), "interleaved-overlap": (2, 4),
}  # fmt: skip


@st.composite
def broken(draw):
    """A registered schedule with one action dropped, repeated, swapped with another or moved."""
    name = draw(st.sampled_from(sorted(SIZES)))
    ranks, microbatches = SIZES[name]
    schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
    rows = [list(row) for row in schedule.rows]
    rank = draw(st.integers(0, ranks - 1))
    at = draw(st.integers(0, len(rows[rank]) - 1))
    how = draw(st.sampled_from(["drop", "repeat", "swap", "move"]))
    if how == "drop":
        del rows[rank][at]
    elif how == "repeat":
        rows[rank].insert(draw(st.integers(0, len(rows[rank]))), rows[rank][at])
    elif how == "swap":
        other = draw(st.integers(0, len(rows[rank]) - 1))
        rows[rank][at], rows[rank][other] = rows[rank][other], rows[rank][at]
    else:
        step = rows[rank].pop(at)
        target = draw(st.integers(0, ranks - 1))
        rows[target].insert(draw(st.integers(0, len(rows[target]))), step)
        how = "move" if target != rank else "swap"
    return how, with_rows(schedule, rows)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(broken())
def test_a_broken_schedule_is_rejected_or_harmless(case):
    how, schedule = case
    try:
        zp.check(schedule)
    except zp.DeadlockError:
        assert reference_simulate(schedule, len) is None
    except zp.ScheduleError:
        assert how in ("drop", "repeat", "move")
    else:
        assert how == "swap"  # the order changed and still serves
        assert reference_simulate(schedule, len) is not None


def test_drop_repeat_and_move_are_named():
    good = zp.build("1f1b", ranks=2, microbatches=2)
    rows = [list(row) for row in good.rows]
    for change, words in (
        (lambda r: r[0].pop(0), "stage 0, microbatch 0 has only B"),
        (lambda r: r[0].append(r[0][0]), "rank 0, step 4: 0F0 is repeated"),
        (lambda r: r[1].append(r[0].pop(0)), "rank 1, step 4: 0F0 is on the wrong rank"),
        (lambda r: r[0].append(Action(0, Kind.I, 0)), "is a second backward"),
        (lambda r: r[0].append(Action(2, Kind.F, 0)), "out of range: stages 0 to 1"),
        (lambda r: r[0].append(Action(0, Kind.SEND_F, 0)), "is not a computation"),
    ):
        changed = [list(row) for row in rows]
        change(changed)
        with pytest.raises(zp.ScheduleError, match=words):
            zp.check(with_rows(good, changed))


def test_a_deadlock_names_ranks_steps_needs_and_the_cycle():
    schedule = zp.from_csv("0F0,0B1,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(zp.DeadlockError) as caught:
        zp.check(schedule)
    assert str(caught.value).splitlines() == [
        "no rank can go on after 3 of 8 actions",
        "  rank 0 waits at step 1: 0B1 needs 0F1",
        "  rank 1 waits at step 2: 1F1 needs 0F1",
        "  cycle: rank 0 (0B1) -> rank 0",
        "  rank 0       0F0  [0B1]  0F1  0B0",
        "  rank 1  1F0  1B0  [1F1]  1B1",
    ]
    assert caught.value.stuck[0] == (0, 1, "0B1", "0F1")


def test_a_deadlock_between_ranks_shows_the_circle():
    rows = "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"
    with pytest.raises(zp.DeadlockError, match=r"cycle: rank 0 \(0B0\) -> rank 1 \(1F1\) -> rank 0"):
        zp.check(zp.from_csv(rows))


def test_a_deadlock_far_in_shows_only_the_trouble_spot():
    good = zp.build("1f1b", ranks=4, microbatches=400)
    rows = [list(row) for row in good.rows]
    rows[2][500], rows[2][502] = rows[2][502], rows[2][500]  # two backwards out of order are fine, then
    at = next(i for i, a in enumerate(rows[3]) if a == Action(3, Kind.F, 300))
    rows[3][at], rows[3][at + 1] = rows[3][at + 1], rows[3][at]  # 3B300 before 3F300 is not
    with pytest.raises(zp.DeadlockError) as caught:
        zp.check(with_rows(good, rows))
    assert "[3B300]" in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_an_overlap_that_needs_its_own_half_is_a_deadlock():
    overlap = Overlap(Action(0, Kind.F, 0), Action(0, Kind.B, 0))
    problem = zp.Problem(1, 1, 1)
    with pytest.raises(zp.DeadlockError, match="0B0 needs 0F0"):
        zp.check(Schedule.of(problem, zp.linear(problem), [[overlap]]))


def test_messages_are_proven_too():
    program = zp.lower(zp.build("1f1b", ranks=2, microbatches=2))
    zp.check(program)
    text = zp.to_csv(program)
    first, second = text.splitlines()

    def program_of(a, b):
        return program_from_csv(f"{a}\n{b}\n")

    with pytest.raises(zp.ScheduleError, match="0SEND_F1 is never received"):
        zp.check(program_of(first, second.replace("1RECV_F1,", "")))
    with pytest.raises(zp.ScheduleError, match="1RECV_F1 is never sent"):
        zp.check(program_of(first.replace("0SEND_F1,", ""), second))
    swapped = second.replace("1RECV_F0", "x").replace("1RECV_F1", "1RECV_F0").replace("x", "1RECV_F1")
    with pytest.raises(zp.ScheduleError, match="out of order"):
        zp.check(program_of(first, swapped))
    with pytest.raises(zp.ScheduleError, match="no message carries it"):
        zp.check(program_of(first.replace("0SEND_F1,", ""), second.replace("1RECV_F1,", "")))


def test_a_send_that_meets_no_receive_is_a_rendezvous_deadlock():
    # both ranks send first: fine if sends are buffered, a hang if a send waits for its receive
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    program = program_from_csv(text)
    zp.check(program.schedule)
    with pytest.raises(zp.DeadlockError, match="rank 0 waits at step 3: 0SEND_F1 needs 1RECV_F1") as caught:
        zp.check(program)
    assert "cycle: rank 0 (0SEND_F1) -> rank 1 (1SEND_B0) -> rank 0" in str(caught.value)


def test_a_program_keeps_the_schedules_order():
    for name, (ranks, microbatches) in SIZES.items():
        schedule = zp.build(name, ranks=ranks, microbatches=microbatches)
        program = zp.lower(schedule)
        assert zp.from_csv(zp.to_csv(program)) == schedule, name
        assert isinstance(program, Program)
        assert isinstance(program.packed, PackedRows)


@pytest.mark.parametrize(
    "placement,rows,words",
    [
        (zp.Placement(((0,),)), [["0F0", "0B0"], []], "the placement has 1 stage: must be 2"),
        (zp.Placement(((0, 2),)), [["0F0", "0B0"], []], "stage 1 is placed on rank 2: ranks are 0 to 1"),
        (zp.Placement(((0, 1), (1, 0))), [["0F0", "0B0"], []], "2 tables"),
        (zp.Placement(((0, 0),)), [["0F0", "1F0", "1B0", "0B0"]], "1 rows for 2 ranks"),
    ],
)
def test_a_placement_and_rows_that_do_not_fit_the_problem_are_named(placement, rows, words):
    schedule = Schedule.of(zp.Problem(2, 2, 1), placement, [map(parse_action, row) for row in rows])
    for use in (zp.check, zp.lower, zp.simulate):
        with pytest.raises(zp.ZeropipeError, match=words):
            use(schedule)


def test_a_program_does_the_work_of_its_schedule():
    program = zp.lower(zp.build("zb-h1", ranks=2, microbatches=2))
    rows = [list(row) for row in program.rows]
    assert rows[0][-1].kind is Kind.W
    swapped = [step._replace(microbatch=1 - step.microbatch) if step.kind is Kind.W else step for step in rows[1]]
    for changed, words in (
        ([rows[0][:-1], rows[1]], "rank 0: the program's computations"),
        ([[*rows[0], rows[0][-1]], rows[1]], "rank 0: the program's computations"),
        ([rows[0], swapped], "rank 1: the program's computations"),
        (rows[:1], "1 rows, its schedule 2"),
    ):
        with pytest.raises(zp.ScheduleError, match=words):
            zp.check(Program(program.schedule, PackedRows.of(map(pack, changed))))


def test_many_ranks_take_no_more_than_their_messages():
    """Ten times the ranks, ten times the work: no table of ranks by ranks, no walk over all ranks each turn."""
    schedule = zp.build("1f1b", ranks=20_000, microbatches=1)
    zp.check(schedule)
    assert zp.simulate(schedule).makespan == 60_000


@pytest.mark.parametrize("name,ranks", [("1f1b", 4), ("zbv", 4), ("dualpipe", 4), ("interleaved-overlap", 3)])
def test_broken_programs_are_rejected_by_compiled_kernels_too(name, ranks, monkeypatch):
    program = zp.lower(zp.build(name, ranks=ranks, microbatches=8))
    rows = [list(row) for row in program.rows]
    at = next(n for n, step in enumerate(rows[1]) if isinstance(step, Action) and step.kind is Kind.RECV_F)
    rows[1].append(rows[1].pop(at))
    errors = []
    for size in (jit.COMPILE_FROM_SIZE, 0):
        monkeypatch.setattr(jit, "COMPILE_FROM_SIZE", size)
        with pytest.raises(zp.ScheduleError) as caught:
            zp.check(Program(program.schedule, PackedRows.of(map(pack, rows))))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
