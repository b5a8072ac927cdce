"""Sharded stages in the Program: gathered ahead of their use, let go, and reduced after their last gradient."""

from collections import Counter

import pytest

import zeropipe as zp
from zeropipe.core.action import COMM, COMPUTE, SHARDING, Kind, actions_of
from zeropipe.core.formats.csv import program_from_csv
from zeropipe.core.jit import Compiled
from zeropipe.core.resize import resize
from zeropipe.core.shard_actions import POLICIES, PREFETCH_STEPS, check_shards

NAMES = zp.names()


def built(name, ranks=4, microbatches=8):
    return zp.build(name, ranks=ranks, microbatches=microbatches)


def text(program, rank):
    """A rank's row without its messages."""
    return " ".join(str(step) for step in program.rows[rank] if getattr(step, "kind", None) not in COMM)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_proven_with_its_shards(name, policy):
    program = zp.lower(built(name), shards=policy)
    zp.check(program)
    assert program_from_csv(zp.to_csv(program)).packed == program.packed
    plain = zp.lower(built(name))
    for rank, row in enumerate(program.rows):
        kinds = Counter((a.stage, a.kind) for a in actions_of(row) if a.kind in SHARDING)
        for stage in program.schedule.placement.stages_of(rank):
            assert kinds[stage, Kind.REDUCE_GRAD] == 1
            assert kinds[stage, Kind.UNSHARD] == kinds[stage, Kind.RESHARD]
            if policy != "regather":
                assert kinds[stage, Kind.UNSHARD] == 1
        rest = [str(step) for step in row if getattr(step, "kind", None) not in SHARDING]
        assert sorted(rest) == sorted(map(str, plain.rows[rank]))


def test_where_they_are():
    keep, regather, ends = (zp.lower(built("1f1b", 2, 2), shards=policy) for policy in POLICIES)
    assert text(keep, 1) == "1UNSHARD 1F0 1B0 1F1 1B1 1RESHARD 1REDUCE_GRAD"
    assert text(regather, 1) == (
        "1UNSHARD 1F0 1RESHARD 1UNSHARD 1B0 1RESHARD 1UNSHARD 1F1 1RESHARD 1UNSHARD 1B1 1RESHARD 1REDUCE_GRAD"
    )
    assert text(ends, 0) == "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0REDUCE_GRAD"
    split = zp.lower(zp.build("zb-h1", ranks=2, microbatches=3), shards="keep")
    assert text(split, 0).endswith("0I2 0RESHARD 0W2 0REDUCE_GRAD")  # a W reads no weights


def test_a_stage_is_gathered_shortly_before_its_first_use_and_not_before():
    program = zp.lower(zp.build("interleaved", ranks=2, microbatches=8, stages_per_rank=4), shards="keep")
    for row in program.rows:
        steps = [a for a in actions_of(row) if a.kind not in COMM]
        for at, action in enumerate(steps):
            if action.kind is Kind.UNSHARD:
                between = [a for a in steps[at:] if a.kind not in SHARDING]
                first = next(i for i, a in enumerate(between) if a.stage == action.stage)
                assert first == PREFETCH_STEPS or at == 0


def test_a_stage_without_work_is_reduced_all_the_same():
    """With one microbatch a mirrored pipeline uses one of its two copies; a replica with more uses both."""
    schedule = resize(built("dualpipe", 2, 4), 1)
    keep, ends = (zp.lower(schedule, shards=policy) for policy in ("keep", "ends"))
    assert text(keep, 0) == "0UNSHARD 0F0 0I0 0RESHARD 0W0 0REDUCE_GRAD 1REDUCE_GRAD"
    assert text(ends, 0) == "0UNSHARD 1UNSHARD 0F0 0I0 0W0 0RESHARD 0REDUCE_GRAD 1RESHARD 1REDUCE_GRAD"
    for program in (keep, ends):
        zp.check(program)


def test_policies_have_names():
    with pytest.raises(zp.ConfigError, match="shards='always': must be 'keep', 'regather', 'ends', or None"):
        zp.lower(built("1f1b"), shards="always")


@pytest.mark.parametrize(
    "row, message",
    [
        ("0F0 0UNSHARD 0B0 0REDUCE_GRAD", "0F0 runs without the weights of its stage; put a 0UNSHARD before it"),
        ("0UNSHARD 0F0 0RESHARD 0B0 0REDUCE_GRAD", "0B0 runs without the weights of its stage"),
        ("0UNSHARD 0F0 0REDUCE_GRAD 0B0", "0REDUCE_GRAD is before 0B0, which adds gradients"),
        ("0UNSHARD 0F0 0I0 0REDUCE_GRAD 0W0", "0REDUCE_GRAD is before 0W0"),
        ("0UNSHARD 0F0 0B0", "0B0 has the last gradients of a sharded stage, but no 0REDUCE_GRAD follows"),
        ("0UNSHARD 0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "0REDUCE_GRAD is repeated: no B or W has added gradients"),
        ("0UNSHARD 0F0 0F1 0B0 0REDUCE_GRAD 0B1", "0B1 has the last gradients of a sharded stage, but no 0REDUCE_GRAD"),
        ("0UNSHARD 0UNSHARD 0F0 0B0 0REDUCE_GRAD", "0UNSHARD gathers weights that are gathered already"),
        ("0RESHARD 0UNSHARD 0F0 0B0 0REDUCE_GRAD", "0RESHARD frees weights that are not gathered"),
        ("1UNSHARD 0F0 0B0", "1UNSHARD is on the wrong rank: the placement puts no stage 1 there"),
    ],
)
def test_faults_have_one_line(row, message):
    program = program_from_csv(",".join(row.split()))
    for prove in (zp.check, check_shards):
        with pytest.raises(zp.ScheduleError) as error:
            prove(program)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
        assert str(error.value).startswith("rank 0, step ")


def test_nothing_stands_inside_an_overlap():
    from zeropipe.core.packed import PackedRows, pack
    from zeropipe.core.schedule import Program

    schedule = built("1f1b-overlap", 1, 3)
    codes = pack(zp.lower(schedule, shards="keep").rows[0])
    joined = next(at for at, code in enumerate(codes) if code & 1)
    row = [*codes[1 : joined + 1], codes[0], *codes[joined + 1 :]]
    with pytest.raises(zp.ScheduleError, match="is between the two actions of an Overlap"):
        check_shards(Program(schedule, PackedRows.of([row])))


def test_stages_may_be_whole_beside_sharded_ones():
    zp.check(program_from_csv("0UNSHARD,0F0,1F0,1B0,0B0,0RESHARD,0REDUCE_GRAD\n"))


def test_compiled_kernels_write_the_same(monkeypatch):
    plain = zp.lower(built("zbv", 4, 12), shards="regather")
    monkeypatch.setattr("zeropipe.core.shard_actions.arrays", lambda size: Compiled)
    compiled = zp.lower(built("zbv", 4, 12), shards="regather")
    assert compiled == plain
    check_shards(compiled)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_torchs_own_placement_is_proven_and_runs_the_same_work(name):
    """torch gathers and reduces elsewhere, by its own rules; what it wrote is right by ours, too."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch")
    schedule = built(name)
    rows = {}
    for rank, line in enumerate(zp.to_csv(schedule).splitlines()):
        actions = [theirs._Action.from_str(cell) for cell in line.split(",")]
        reduced = theirs._add_reduce_grad(actions, schedule.num_microbatches)
        rows[rank] = theirs._add_unshard_reshard(reduced)
    lowered = theirs._add_send_recv(rows, schedule.placement.rank_of, schedule.num_stages)
    lines = (",".join(map(str, lowered[rank])) for rank in range(schedule.num_ranks))
    program = program_from_csv("\n".join(lines))
    zp.check(program)
    assert any(a.kind is Kind.UNSHARD for a in actions_of(program.rows[0]))
    wanted = COMPUTE | {Kind.REDUCE_GRAD}
    reduced = [a for a in actions_of(program.rows[0]) if a.kind in wanted]
    ours = [a for a in actions_of(zp.lower(schedule, shards="keep").rows[0]) if a.kind in wanted]
    assert reduced == ours  # gradients are reduced in the same places
