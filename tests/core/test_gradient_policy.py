"""Where rolling gradients are reduced: never more whole than allowed, with the least number of reduces."""

from __future__ import annotations

from itertools import combinations

import pytest

import zeropipe as zp
from zeropipe.core.action import COMM, Kind, actions_of
from zeropipe.core.formats.csv import program_from_csv
from zeropipe.core.gradient_policy import GradientPolicy, check_gradients, count_whole_gradients
from zeropipe.core.jit import Compiled
from zeropipe.core.shard_actions import check_shards

POLICIES = ("rolling", "rolling:1", "rolling:2")
GRADIENTS = (Kind.B, Kind.W)


def text(program, rank):
    """A rank's row without its messages."""
    return " ".join(str(step) for step in program.rows[rank] if getattr(step, "kind", None) not in COMM)


def num_reduces(program, rank):
    return sum(action.kind is Kind.REDUCE_GRAD for action in actions_of(program.rows[rank]))


@pytest.mark.parametrize("shards", ["keep", "regather"])
@pytest.mark.parametrize("gradients", POLICIES)
@pytest.mark.parametrize("name", zp.names())
def test_every_schedule_keeps_the_limit(name, gradients, shards):
    schedule = zp.build(name, ranks=4, microbatches=8)
    program = zp.lower(schedule, shards=shards, gradients=gradients)
    zp.check(program)
    check_gradients(program, gradients)
    limit = GradientPolicy.parse(gradients).limit
    assert max(count_whole_gradients(program)) <= limit
    assert program_from_csv(zp.to_csv(program)).packed == program.packed
    whole = zp.lower(schedule, shards=shards)
    for rank in range(4):
        held = len(schedule.placement.stages_of(rank))
        assert num_reduces(whole, rank) == held <= num_reduces(program, rank)
        if limit == 0:
            assert num_reduces(program, rank) == sum(a.kind in GRADIENTS for a in actions_of(program.rows[rank]))
        if limit >= held:
            assert program.rows[rank] == whole.rows[rank]


def test_where_they_are():
    rolling = zp.lower(zp.build("zb-h1", ranks=2, microbatches=2), "keep", "rolling")
    assert text(rolling, 1) == "1UNSHARD 1F0 1I0 1F1 1I1 1RESHARD 1W0 1REDUCE_GRAD 1W1 1REDUCE_GRAD"
    groups = zp.lower(zp.build("interleaved", ranks=2, microbatches=4), "keep", "rolling:1")
    assert text(groups, 0).endswith(
        "2B0 0F3 2B1 2REDUCE_GRAD 2F2 0B0 2F3 0B1 0REDUCE_GRAD 2B2 2B3 2RESHARD 2REDUCE_GRAD 0B2 0B3 0RESHARD "
        "0REDUCE_GRAD"
    )


def least_reduces(order, limit):
    """The least number of reduces of stages whose gradients come in this order, found by trying all."""
    inner = [at for at in range(len(order)) if order[at] in order[at + 1 :]]
    for number in range(len(inner) + 1):
        for chosen in combinations(inner, number):
            whole, fits = set(), True
            for at, stage in enumerate(order):
                whole.add(stage)
                fits = fits and len(whole) <= limit
                if at in chosen or at not in inner:
                    whole.discard(stage)
            if fits:
                return len(order) - len(inner) + number
    return None


@pytest.mark.parametrize("name, stages_per_rank", [("interleaved", 3), ("zbv", 2), ("hanayo", 2), ("looped-bfs", 4)])
def test_there_are_as_few_reduces_as_possible(name, stages_per_rank):
    options = {"stages_per_rank": stages_per_rank} if name in ("interleaved", "looped-bfs") else {}
    schedule = zp.build(name, ranks=2, microbatches=4, **options)
    for limit in (1, 2):
        program = zp.lower(schedule, "keep", f"rolling:{limit}")
        for rank in range(2):
            order = [a.stage for a in actions_of(program.rows[rank]) if a.kind in GRADIENTS]
            assert num_reduces(program, rank) == least_reduces(order, limit)


def test_a_program_with_more_whole_gradients_is_refused():
    program = zp.lower(zp.build("zbv", ranks=2, microbatches=4), "keep")
    with pytest.raises(zp.ScheduleError) as error:
        check_gradients(program, "rolling:1")
    assert str(error.value) == (
        "rank 0 has whole gradients of 2 stages between two actions: gradients='rolling:1' allows 1"
    )


def test_a_w_in_parts_leaves_its_stage_whole():
    schedule = zp.fill_gaps(zp.build("zb-h1", ranks=3, microbatches=6), zp.Costs(), weight_parts=2)
    with pytest.raises(zp.ConfigError, match="cannot reduce after each of the 2 parts of a W; use 'rolling:1'"):
        zp.lower(schedule, "keep", "rolling")
    program = zp.lower(schedule, "keep", "rolling:1")
    assert count_whole_gradients(program) == [1, 1, 1]


@pytest.mark.parametrize("given", ["sometimes", "rolling:0", "rolling:-1", "rolling:x", "Rolling", 1, None])
def test_policies_have_names(given):
    with pytest.raises(zp.ConfigError, match="must be 'whole', 'rolling', or 'rolling:N' with N from 1"):
        zp.lower(zp.build("1f1b", ranks=2, microbatches=2), "keep", given)


def test_compiled_kernels_write_the_same(monkeypatch):
    schedule = zp.build("interleaved", ranks=4, microbatches=12, stages_per_rank=3)
    plain = [zp.lower(schedule, "regather", gradients) for gradients in POLICIES]
    for module in ("shard_actions", "gradient_policy"):
        monkeypatch.setattr(f"zeropipe.core.{module}.arrays", lambda size: Compiled)
    for program, gradients in zip(plain, POLICIES):
        compiled = zp.lower(schedule, "regather", gradients)
        assert compiled == program
        check_shards(compiled)
        assert count_whole_gradients(compiled) == count_whole_gradients(program)
