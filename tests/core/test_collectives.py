"""Processes that share stages gather and reduce the same units in the same order, whatever their microbatches."""

import random
from itertools import product
from types import SimpleNamespace as Some

import pytest

pytest.importorskip("torch")

import torch
from full_marker import mark_rest_full
from torch import nn

import zeropipe as zp
from zeropipe.core.action import Kind, actions_of
from zeropipe.core.collectives import Collective, collectives, gather_order
from zeropipe.core.resize import resize
from zeropipe.engine.mesh.sharded_stage import UnitReducer
from zeropipe.engine.options import Options
from zeropipe.engine.step.executor import CollectiveOrder
from zeropipe.engine.step.executor_cache import ExecutorCache, describe_difference, digest

NAMES = zp.names()
OPTIONS = [{}, {"regather": True}]


def built(name, ranks):
    try:
        return zp.build(name, ranks=ranks, microbatches=4 * ranks)
    except zp.ConfigError:  # dualpipe wants an even number of ranks
        return None


def executors_of(schedule, rank, options):
    """Those of a process whose stages have unequal numbers of units."""
    same = {"module": nn.Identity(), "trained_flags": lambda: b"\1", "describe": lambda: ["weight"]}
    stages = schedule.placement.stages_of(rank)
    shards = {stage: Some(units=[None] * (1 + stage % 4), **same) for stage in stages}
    return ExecutorCache(Some(schedule=schedule, rank=rank, shards=shards, options=Options(**options)))


@pytest.mark.parametrize(
    "name, options",
    mark_rest_full(
        product(NAMES, OPTIONS), lambda it: (NAMES.index(it[0]) + OPTIONS.index(it[1])) % 2 == 0 or "dual" in it[0]
    ),
    ids=str,
)
def test_processes_that_share_stages_agree_whatever_their_numbers_of_microbatches(name, options):
    draw = random.Random(name)
    for schedule in filter(None, (built(name, ranks) for ranks in (2, 3, 4))):
        ranks = schedule.num_ranks
        several = [[draw.randint(1, 2 * ranks + 1) for _ in range(3)] for _ in range(2)]
        for rank in range(ranks):
            executors = executors_of(schedule, rank, options)
            for numbers in [[draw.randint(1, ranks)] * 3, *([] if "regather" in options else several)]:
                unequal = len(set(numbers)) > 1  # which the engine refuses with regather
                for use in ("train", "forward"):
                    assert len({executors.order_digests(use, number)[unequal] for number in numbers}) == 1
                    lines = [executors.describe_order(use, number, not unequal) for number in numbers]
                    assert lines[0] == lines[1] == lines[2]
                    program = executors._build_program(use, numbers[0], not unequal)
                    units = {stage: len(some.units) for stage, some in executors._context.shards.items()}
                    ran = collectives(program.rows[rank], units, "regather" in options)
                    assert lines[0] == ["weight"] * len(units) + [str(one) for one in ran]


@pytest.mark.parametrize("policy", ["keep", "regather", "ends"])
@pytest.mark.parametrize("name", NAMES)
def test_every_unit_is_gathered_and_reduced_as_often_as_its_stage(name, policy):
    schedule = built(name, 4)
    program = zp.lower(schedule, shards=policy)
    for rank, row in enumerate(program.rows):
        units = dict.fromkeys(schedule.placement.stages_of(rank)[1:], 3)  # the first one is whole
        found = collectives(row, units, policy == "regather")
        for stage in schedule.placement.stages_of(rank):
            uses = sum(a.stage == stage and a.kind in (Kind.F, Kind.B, Kind.I) for a in actions_of(row))
            times = (uses if policy == "regather" else 1) if stage in units else 0
            for unit in range(3):
                assert found.count(Collective(Kind.UNSHARD, stage, unit)) == times
                assert found.count(Collective(Kind.REDUCE_GRAD, stage, unit)) == (stage in units)


def test_keeping_weights_would_not_agree_on_a_mirrored_placement():
    """So the test above can fail: with one microbatch the second copy of a stage is never used."""
    schedule = zp.build("dualpipe", ranks=2, microbatches=4)
    orders = [collectives(zp.lower(resize(schedule, n), "keep").rows[0], {0: 2, 1: 2}, False) for n in (1, 5)]
    assert orders[0] != orders[1]


SINGLE = [name for name in NAMES if len(built(name, 2).placement.copies) == 1]


@pytest.mark.parametrize("name", mark_rest_full(SINGLE, SINGLE[::2]))
def test_keeping_weights_agrees_for_any_number_where_each_stage_has_one_copy(name):
    """Pipelines in torch's interface, which without a mesh do not know each other's numbers, rely on it."""
    for schedule in (built(name, 2), built(name, 4)):
        for rank in range(schedule.num_ranks):
            executors = executors_of(schedule, rank, {})
            for use in ("train", "forward"):
                assert (
                    len({executors.order_digests(use, number)[0] for number in (1, 2, 3, schedule.num_ranks + 1, 9)})
                    == 1
                )


def test_a_pass_needs_the_outermost_unit_first():
    assert gather_order(4, backward=False) == [3, 2, 1, 0]
    assert gather_order(4, backward=True) == [3, 0, 1, 2]
    assert gather_order(1, backward=True) == gather_order(1, backward=False) == [0]


def test_another_collective_than_agreed_is_refused_before_it_is_called():
    one, other = Collective(Kind.UNSHARD, 1, 2), Collective(Kind.REDUCE_GRAD, 1, 0)
    order = CollectiveOrder([one, other])
    for _ in range(2):  # two steps
        order.begin()
        order.check(one)
        with pytest.raises(
            zp.EngineError, match=r"gather unit 2 of stage 1, .* agreed to reduce unit 0 of stage 1 next"
        ):
            order.check(one)
        with pytest.raises(zp.EngineError, match=r"about to end its step, .* agreed to reduce unit 0 of stage 1 next"):
            order.end()
        order.check(other)
        order.end()
        with pytest.raises(zp.EngineError, match="agreed to end the step next"):
            order.check(one)


def test_the_first_difference_is_named():
    lines = [["a weight", "gather unit 0"], ["a weight", "gather unit 1"], ["a weight"]]
    assert digest(lines[0]) != digest(lines[1])
    assert "rank 0 has 'gather unit 0' where rank 1 has 'gather unit 1'" in describe_difference(0, 1, lines)
    assert "ranks 0 and 2 share stages" in describe_difference(0, 2, lines)
    assert "rank 2 has 'nothing more'" in describe_difference(0, 2, lines)


def test_units_are_reduced_in_order_when_complete_and_gathered():
    weights = [torch.zeros(2), torch.zeros(2), torch.zeros(3)]  # two in unit 0, one in unit 1; unit 2 has none
    reduced: list[int] = []
    places = {id(weight): unit for weight, unit in zip(weights, (0, 0, 1))}
    shards = Some(stage=4, units=[None] * 3, may_reduce=False, reduce=reduced.append)
    shards.limit = Some(wait=lambda number: None)
    shards.unit_index = lambda weight: places.get(id(weight))
    reduction = UnitReducer(shards, weights, gathers=True)
    reduction.on_gradient(weights[2])
    reduction.on_gradient(weights[0])
    reduction.on_gradient(weights[0])  # a second gradient of one weight completes no other
    reduction.on_gradient(torch.zeros(1))  # nor does one that is not sharded
    shards.may_reduce = True
    assert reduced == []
    reduction.on_gradient(weights[1])
    assert reduced == [0, 1, 2]
    with pytest.raises(zp.EngineError, match=r"stage 4 adds .* of a weight of shape \[2\] after it was summed"):
        reduction.on_gradient(weights[0])
    waiting = UnitReducer(shards, weights, gathers=True)
    shards.may_reduce = False  # the pass still gathers: what it needs must not wait
    for weight in weights:
        waiting.on_gradient(weight)
    assert reduced == [0, 1, 2]
    waiting.finish()
    assert reduced == [0, 1, 2, 0, 1, 2]
