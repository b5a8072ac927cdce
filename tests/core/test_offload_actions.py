"""OFFLOAD and RELOAD in schedules and programs: their text, where they may be, and what keeps them."""

from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.core.action import OFFLOADING, SHARDING, Kind, actions_of, parse_action
from zeropipe.core.formats.csv import program_from_csv
from zeropipe.core.jit import Compiled
from zeropipe.core.offload_actions import check_offloading
from zeropipe.core.resize import resize
from zeropipe.errors import ConfigError, ScheduleError
from zeropipe.sim.fill import fill_gaps

LAST = "1F0,1B0,1F1,1B1,1F2,1B2"


def schedule(first="0F0,0OFFLOAD0,0F1,0F2,0RELOAD0,0B0,0B1,0B2"):
    return zp.from_csv(f"{first}\n{LAST}")


def copies_of(row):
    return [str(action) for action in actions_of(row) if action.kind in OFFLOADING]


def test_text_and_files():
    one = schedule()
    assert str(one).splitlines()[0] == "0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B0 0B1 0B2"
    assert zp.from_csv(zp.to_csv(one)) == one == zp.from_json(zp.to_json(one))
    assert str(parse_action("3RELOAD12")) == "3RELOAD12"
    plain = schedule("0F0,0F1,0F2,0B0,0B1,0B2")
    assert one.packed == plain.packed
    assert one != plain
    assert plain.offloading is None
    assert zp.from_json(zp.to_json(plain)).offloading is None


def test_a_program_has_them_after_the_messages_of_their_forward():
    program = zp.lower(schedule())
    zp.check(program)
    assert str(program).splitlines()[0] == (
        "0F0 0SEND_F0 0OFFLOAD0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0RELOAD0 0B0 0RECV_B1 0B1 0RECV_B2 0B2"
    )
    again = program_from_csv(zp.to_csv(program))
    assert again.packed == program.packed
    assert again.schedule == program.schedule


@pytest.mark.parametrize("shards", ["keep", "regather", "ends"])
@pytest.mark.parametrize("name", zp.names())
def test_every_schedule_with_all_its_copies_and_shards(name, shards):
    one = zp.with_offload(zp.build(name, ranks=4, microbatches=8), offload=1.0)
    zp.check(one)
    program = zp.lower(one, shards=shards)
    zp.check(program)
    assert sum(len(copies_of(row)) for row in one.rows) > 0
    for row, plain in zip(program.rows, zp.lower(replace(one, offloading=None), shards=shards).rows, strict=True):
        steps = [action for action in actions_of(row) if action.kind not in OFFLOADING]
        assert steps == actions_of(plain)
    for row, own in zip(program.rows, one.rows, strict=True):
        assert copies_of(row) == copies_of(own)
        kinds = [action.kind for action in actions_of(row) if action.kind in SHARDING]
        assert kinds


WRONG = {
    "0OFFLOAD0,0F0,0F1,0F2,0RELOAD0,0B0,0B1,0B2": "rank 0, step 0: 0OFFLOAD0 has nothing to copy yet",
    "0F0,0OFFLOAD0,0F1,0F2,0B0,0RELOAD0,0B1,0B2": "rank 0, step 4: 0B0 runs while its activations are on the host",
    "0F0,0OFFLOAD0,0F1,0F2,0B0,0B1,0B2": "rank 0, step 4: 0B0 runs while its activations are on the host",
    "0F0,0F1,0F2,0RELOAD0,0B0,0B1,0B2": "rank 0, step 3: 0RELOAD0 finds nothing on the host",
    "0F0,0OFFLOAD0,0OFFLOAD0,0F1,0F2,0RELOAD0,0B0,0B1,0B2": "rank 0, step 2: 0OFFLOAD0 is repeated",
    "0F0,0OFFLOAD0,0F1,0F2,0RELOAD0,0RELOAD0,0B0,0B1,0B2": "rank 0, step 5: 0RELOAD0 is repeated",
    "0F0,0OFFLOAD0,0F1,0RELOAD0,0OFFLOAD0,0F2,0B0,0B1,0B2": "rank 0, step 4: 0OFFLOAD0 is repeated",
    "0F0,0F1,0F2,0B0,0OFFLOAD0,0RELOAD0,0B1,0B2": "rank 0, step 4: 0OFFLOAD0 is after its backward",
    "0F0,0F1,0F2,0B0,0RELOAD0,0B1,0B2": "rank 0, step 4: 0RELOAD0 finds nothing on the host",
    "0F0,1OFFLOAD0,0F1,0F2,0B0,0B1,0B2": "rank 0, step 1: 1OFFLOAD0 is on the wrong rank",
    "0F0,0OFFLOAD7,0F1,0F2,0B0,0B1,0B2": "rank 0, step 1: 0OFFLOAD7 is out of range",
    "0F0,9RELOAD0,0F1,0F2,0B0,0B1,0B2": "rank 0, step 1: 9RELOAD0 is out of range",
}


@pytest.mark.parametrize("first", WRONG)
def test_wrong_places_are_refused_by_every_reader(first):
    one = schedule(first)
    for read in (zp.check, zp.simulate, zp.lower):
        with pytest.raises(ScheduleError) as caught:
            read(one)
        assert str(caught.value).startswith(WRONG[first])
    with pytest.raises(ScheduleError):
        check_offloading(one, one.offloading)


def test_never_left_on_the_host():
    one = schedule("0F0,0OFFLOAD0,0F1,0F2,0B0,0B1,0B2")
    forwards = zp.Schedule.of(one.problem, one.placement, [one.rows[0][:2], []])
    with pytest.raises(ScheduleError, match="0OFFLOAD0 is never copied back"):
        zp.lower(forwards)


def test_a_program_is_checked_as_it_is():
    program = zp.lower(schedule())
    text = zp.to_csv(program)
    wrong = program_from_csv(text.replace("0RELOAD0,0B0", "0B0,0RELOAD0"))
    with pytest.raises(ScheduleError, match="0B0 runs while its activations are on the host"):
        zp.check(replace(wrong, schedule=replace(wrong.schedule, offloading=None)))


@pytest.mark.parametrize("microbatches", [1, 3, 6, 9])
def test_other_numbers_of_microbatches_keep_the_rule(microbatches):
    built = zp.with_offload(zp.build("1f1b", ranks=2, microbatches=6), offload=1.0)
    for one in (built, zp.from_csv(zp.to_csv(built))):
        resized = resize(one, microbatches)
        zp.check(resized)
        assert resized.num_microbatches == microbatches
        assert resized.offloading is not None or (one is built and microbatches == 1)


def test_compiled_kernels_agree():
    one = zp.with_offload(zp.build("zbv", ranks=4, microbatches=40), offload=1.0)
    plain = zp.lower(one).packed, zp.simulate(one)
    from zeropipe.core import jit

    before = jit.MIN_COMPILED_SIZE, jit._Process.is_compiled
    try:
        jit.MIN_COMPILED_SIZE, jit._Process.is_compiled = 0, True
        assert jit.arrays(one.num_actions) is Compiled
        assert (zp.lower(one).packed, zp.simulate(one)) == plain
        with pytest.raises(ScheduleError, match="0OFFLOAD0 has nothing to copy yet"):
            zp.check(schedule("0OFFLOAD0,0F0,0F1,0F2,0RELOAD0,0B0,0B1,0B2"))
    finally:
        jit.MIN_COMPILED_SIZE, jit._Process.is_compiled = before


def test_gaps_are_filled_before_activations_are_offloaded():
    with pytest.raises(ConfigError, match="fill gaps first"):
        fill_gaps(zp.with_offload(zp.build("zb-h1", ranks=2, microbatches=4), offload=1.0))


def test_kinds_of_the_search_and_of_torch_are_unchanged():
    assert [kind.name for kind in Kind][:11] == [
        "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD",
    ]  # fmt: skip
