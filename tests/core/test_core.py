"""Actions, placements, text forms, dependencies, and the two ways a kernel can run."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zeropipe as zp
from zeropipe.core import jit
from zeropipe.core.action import COMM, COMPUTE, SHARDING, Action, Kind, Overlap, actions_of, parse_step, peer_message
from zeropipe.core.explain import idle_times
from zeropipe.core.formats import csv
from zeropipe.core.needs import build_dependencies, key_action, needs
from zeropipe.core.packed import decode, encode, pack, unpack
from zeropipe.core.placement import match_placement

MORE = (st.integers(0, 2**40), st.none(), st.just(False))  # microbatch, slice, checkpointed
actions = st.one_of(
    st.builds(Action, st.integers(0, 65535), st.sampled_from(sorted(COMPUTE | COMM)), *MORE),
    st.builds(Action, st.integers(0, 65535), st.sampled_from(sorted(SHARDING)), st.just(0), *MORE[1:]),
)
steps = st.one_of(
    actions,
    st.builds(
        Overlap,
        st.builds(Action, st.integers(0, 65535), st.just(Kind.F), *MORE),
        st.builds(Action, st.integers(0, 65535), st.sampled_from([Kind.B, Kind.I]), *MORE),
    ),
)


@given(actions)
def test_an_action_survives_packing(action):
    assert decode(encode(*action[:3])) == action


@given(st.lists(steps, max_size=20))
def test_steps_survive_packing_and_text(row):
    assert list(unpack(pack(row))) == row
    assert [parse_step(str(step)) for step in row] == row


@given(st.lists(steps, max_size=20))
def test_the_actions_of_steps_are_those_of_their_text(row):
    texts = [cell for step in row for cell in str(step).removesuffix("OVERLAP_F_B").strip("()").split(";")]
    assert [str(action) for action in actions_of(row)] == texts


def test_a_message_has_one_partner_on_the_other_rank():
    placement = zp.mirror(zp.Problem(4, 4, 6))
    for text, other in (("1SEND_F0", "2RECV_F0"), ("2SEND_B5", "1RECV_B5")):
        send, receive = parse_step(text), parse_step(other)
        assert (peer_message(send), peer_message(receive)) == (receive, send)
        assert placement.peer_of(send) == placement.rank_of(receive.stage, receive.microbatch)
        assert placement.peer_of(receive) == placement.rank_of(send.stage, send.microbatch)
    assert all(peer_message(peer_message(Action(3, kind, 1))) == Action(3, kind, 1) for kind in COMM)


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "(1F1;2B0)", "(1B1;2F0)OVERLAP_F_B", "70000F0", "-1F0"])
def test_what_is_no_action_is_named(text):
    with pytest.raises(zp.ScheduleError):
        parse_step(text)


def test_rows_are_tuples_of_steps():
    schedule = zp.build("1f1b", ranks=2, microbatches=2)
    assert schedule.rows[0] == (
        Action(0, Kind.F, 0), Action(0, Kind.F, 1), Action(0, Kind.B, 0), Action(0, Kind.B, 1),
    )  # fmt: skip
    assert str(schedule).splitlines()[1] == "1F0 1B0 1F1 1B1"
    assert schedule.rows[-1] == schedule.rows[1]
    assert len(schedule.rows) == 2
    with pytest.raises(IndexError):
        schedule.rows[2]


@pytest.mark.parametrize(
    "rule,stages,expected",
    [
        (zp.linear, 4, ((0, 1, 2, 3),)),
        (zp.loop, 8, ((0, 1, 2, 3, 0, 1, 2, 3),)),
        (zp.vee, 8, ((0, 1, 2, 3, 3, 2, 1, 0),)),
        (zp.vee, 16, ((0, 1, 2, 3, 3, 2, 1, 0) * 2,)),
        (zp.mirror, 4, ((0, 1, 2, 3), (3, 2, 1, 0))),
    ],
)
def test_placements(rule, stages, expected):
    problem = zp.Problem(4, stages, 6)
    placement = rule(problem)
    assert placement.copies == expected
    assert match_placement(placement.copies, placement.second_from, problem).name == placement.name
    for stage in range(stages):
        assert stage in placement.stages_of(placement.rank_of(stage, microbatch=5))


def test_a_mirror_sends_the_second_half_the_other_way():
    placement = zp.mirror(zp.Problem(4, 4, 6))
    assert [placement.rank_of(0, m) for m in range(6)] == [0, 0, 0, 3, 3, 3]


@pytest.mark.parametrize(
    "text,words",
    [
        ("", "has no action"),
        ("0F0,0Q0\n", "line 1, cell 2: '0Q0' is not an action"),
        ("0F0;0B0\n", "separate actions by commas"),
        ("0F0\t0B0\n", "separate actions by commas"),
        ("0F0,2F0,0B0,2B0\n", "stage 1 is missing"),
        ("0SEND_F0\n", "no computation"),
        ("0F0,0B0\n,\n1F0,1B0\n", "line 2 has no action: every line is a rank"),
        ("0F0\n0F9999999\n", "fewer actions than 1 stage times 10,000,000 microbatches"),
    ],
)
def test_a_bad_csv_is_named(text, words):
    with pytest.raises(zp.ScheduleError, match=words):
        zp.from_csv(text)


@pytest.mark.parametrize("num_stages", [3, 300])
def test_a_csv_is_read_in_a_fixed_number_of_passes(num_stages, monkeypatch):
    """Also where the last microbatch leaves most stages out, and one action is on the wrong rank."""
    rows = [[f"{s}F0", f"{s}B0"] for s in range(num_stages)]
    rows[0] += ["0F1", "0B1", "1F0"]
    passes = []
    whole = csv._ranked_actions
    monkeypatch.setattr(csv, "_ranked_actions", lambda rows: passes.append(1) or whole(rows))
    schedule = zp.from_csv("\n".join(",".join(row) for row in rows))
    assert schedule.placement.name == "linear"
    assert len(passes) <= 8


def test_csv_takes_torch_padding_and_parameter_actions():
    plain = zp.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    dressed = zp.from_csv(
        "0UNSHARD,0F0,,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    assert dressed == plain
    assert plain.placement.name == "linear"


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda t: "{", "not JSON"),
        (lambda t: "[]", "not zeropipe's"),
        (lambda t: t.replace('"zeropipe": 1', '"zeropipe": 9'), "version 9"),
        (lambda t: t.replace('"num_ranks": 2', '"num_ranks": 3'), "there are 2 rows"),
        (lambda t: t.replace('"num_ranks": 2', '"num_ranks": "x"'), "num_ranks is 'x'"),
        (lambda t: t.replace('"rows"', '"rovs"'), "unknown field .rovs.: did you mean .rows."),
        (lambda t: t.replace("0F0", "0Z0"), "'0Z0' is not an action"),
        (lambda t: t.replace('"copies": [[0, 1]]', '"copies": [[0, 7]]'), "rank 7"),
    ],
)
def test_a_bad_json_is_named(change, words):
    with pytest.raises(zp.ZeropipeError, match=words):
        zp.from_json(change(zp.to_json(zp.build("1f1b", ranks=2, microbatches=2))))


def test_a_timeline_survives_json():
    timeline = zp.simulate(zp.build("zbv", ranks=3, microbatches=6), zp.Costs(f=1, i=1.5, w=0.5, p2p=0.25, unit="s"))
    assert zp.from_json(zp.to_json(timeline)) == timeline


@pytest.mark.parametrize("name,ranks", [("1f1b", 3), ("zbv", 3), ("dualpipe", 4), ("interleaved", 2), ("dualpipev", 3)])
def test_links_state_the_same_rule_as_needs(name, ranks):
    schedule = zp.build(name, ranks=ranks, microbatches=8)
    deps = build_dependencies(jit.Plain, schedule)
    for at, code in enumerate(deps.codes):
        action = decode(code)
        found = {key_action(k, schedule) for k in (deps.remote[at], deps.own[at]) if k >= 0}
        assert found == set(needs(action, schedule.num_stages))


@pytest.mark.parametrize("name,ranks", [("1f1b", 4), ("zbv", 4), ("dualpipe", 4), ("dualpipev", 4), ("chimera", 4)])
def test_compiled_kernels_equal_plain_ones(name, ranks, monkeypatch):
    schedule = zp.build(name, ranks=ranks, microbatches=16)
    costs = zp.Costs(f=1, i=1.25, w=0.5, overlap=2.25, p2p=0.125, stash=0.5, serial_links=True)
    plain = zp.simulate(schedule, costs)
    lowered, causes = zp.lower(schedule), idle_times(plain)
    monkeypatch.setattr(jit, "COMPILE_FROM_SIZE", 0)
    zp.check(schedule)
    fast = zp.simulate(schedule, costs)
    assert fast == plain
    assert zp.lower(schedule) == lowered
    assert fast.makespan == plain.makespan
    assert fast.peak_memory == plain.peak_memory
    assert [tuple(map(float, c)) for c in idle_times(fast)] == [pytest.approx(tuple(c)) for c in causes]


@pytest.fixture
def young(monkeypatch):
    """A process that has done nothing yet."""
    monkeypatch.setattr(jit._Process, "plain_actions", 0)
    monkeypatch.setattr(jit._Process, "is_compiled", False)


@pytest.mark.usefixtures("young")
def test_a_short_process_stays_plain():
    assert {jit.arrays(size) for size in (10, 3_000, 100_000)} == {jit.Plain}


@pytest.mark.usefixtures("young")
def test_a_process_that_lives_on_takes_compiled_kernels_for_all_but_small_inputs():
    taken = [jit.arrays(10_000) for _ in range(51)]
    assert taken == [jit.Plain] * 50 + [jit.Compiled]
    assert jit.arrays(jit.MIN_COMPILED_SIZE) is jit.Compiled
    assert jit.arrays(jit.MIN_COMPILED_SIZE - 1) is jit.Plain


@pytest.mark.usefixtures("young")
@pytest.mark.parametrize("begin", [jit.use_compiled, lambda: jit.arrays(jit.COMPILE_FROM_SIZE)])
def test_a_process_that_says_so_or_meets_a_large_input_lives_on(begin):
    begin()
    assert jit.arrays(jit.MIN_COMPILED_SIZE) is jit.Compiled


@pytest.mark.usefixtures("young")
@pytest.mark.parametrize("walked", range(jit.COMPILE_AFTER_ACTIONS - 20_000, jit.COMPILE_AFTER_ACTIONS, 3_000))
def test_kernels_may_change_in_the_middle_of_a_piece_of_work(walked, monkeypatch):
    schedule = zp.build("zbv", ranks=4, microbatches=90)
    assert schedule.num_actions >= jit.MIN_COMPILED_SIZE
    monkeypatch.setattr(jit._Process, "plain_actions", walked)
    zp.check(schedule)
    assert zp.simulate(schedule).makespan == 543


def test_a_kernel_is_compiled_where_no_cache_can_be_kept(monkeypatch):
    import numba

    whole = numba.njit

    def njit(function, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return whole(function, **options)

    monkeypatch.setattr(numba, "njit", njit)
    assert jit.compiled.__wrapped__(add_twice)(2) == 4


def test_a_changed_helper_or_number_is_another_kernel_for_the_cache(monkeypatch):
    before = jit._fingerprint(add_twice)
    monkeypatch.setitem(globals(), "plus", lambda a, b: a - b)
    other = jit._fingerprint(add_twice)
    monkeypatch.setitem(globals(), "NOTHING", 1)
    assert len({before, other, jit._fingerprint(add_twice)}) == 3


NOTHING = 0


def add_twice(number):
    return plus(number, number) + NOTHING


def plus(a, b):
    return a + b


@pytest.mark.parametrize(
    "change,words",
    [
        ({"num_weight_part": 4}, "unknown field 'num_weight_part': did you mean 'num_weight_parts'?"),
        ({"costs": {"f": 2}}, "unknown field 'costs': use one of zeropipe, type, name,"),
        (
            {"placement": {"copies": [[0, 1]], "split": None, "second_from": 1}},
            "'second_from' of the placement: use one of",
        ),
        ({"type": "program"}, "type='program': must be 'schedule' or 'timeline'"),
    ],
)
def test_a_field_that_a_schedule_does_not_have_is_refused(change, words):
    data = json.loads(zp.to_json(zp.build("1f1b", ranks=2, microbatches=2)))
    with pytest.raises(zp.ScheduleError) as error:
        zp.from_json(json.dumps({**data, **change}))
    assert words in str(error.value)
    del data["type"], data["num_weight_parts"]  # neither has to be there
    assert zp.from_json(json.dumps(data)) == zp.build("1f1b", ranks=2, microbatches=2)


def test_rows_are_equal_where_their_steps_are():
    first, again, other = (zp.build("zbv", ranks=2, microbatches=number) for number in (3, 3, 4))
    assert first.rows == again.rows
    assert first.rows == tuple(again.rows)
    assert len({first.rows, again.rows, tuple(again.rows)}) == 1
    assert first.rows != other.rows
    assert first.rows != "rows"
