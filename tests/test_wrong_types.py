"""What is handed to the public functions by mistake is told in one line: the value, the rule, the way out."""

import pytest

import zeropipe as zp
from zeropipe.schedules import registry

SCHEDULE = zp.build("zbv", ranks=2, microbatches=4)
SMALL = {"gpus": 2, "batch": 4, "sequence": 512, "search_seconds": 0, "workers": 1}


def _build_placed(rule):
    entry = registry.Entry("placed", lambda lane, rank, p: lane.f(rank), rule, (1,))
    registry.build_entry(entry, ranks=2, microbatches=1)


MISTAKES = {
    "a name to check": (lambda: zp.check("zbv"), "'zbv': must be a Schedule; use zp.build"),
    "rows to check": (lambda: zp.check(SCHEDULE.rows), ": must be a Schedule; use zp.build"),
    "a name to simulate": (lambda: zp.simulate("zbv"), "'zbv': must be a Schedule; use zp.build"),
    "a name to lower": (lambda: zp.lower("zbv"), "'zbv': must be a Schedule; use zp.build"),
    "a table of costs": (
        lambda: zp.simulate(SCHEDULE, {"f": 1}),
        "costs={'f': 1}: must be costs of stages; use zp.C",
    ),
    "costs of layers": (
        lambda: zp.simulate(SCHEDULE, zp.estimate("qwen3-8b")),
        "must be costs of stages; use .costs(counts)",
    ),
    "layers to search": (
        lambda: zp.search(ranks=2, microbatches=2, costs=zp.estimate("qwen3-8b")),
        "of these costs of layers",
    ),
    "a schedule to draw": (lambda: zp.draw(SCHEDULE), "<Schedule zbv: 2 ranks, 4 st"),
    "nothing to draw": (lambda: zp.draw(None), "None must be a Timeline, from zp.simulate or a recorded run"),
    "texts as rows": (
        lambda: zp.Schedule.of(SCHEDULE.problem, SCHEDULE.placement, [["0F0"]]),
        "'0F0': must be an Action or an Overlap; use zp.from_csv",
    ),
    "a microbatch below 0": (
        lambda: zp.Schedule.of(SCHEDULE.problem, SCHEDULE.placement, [[zp.Action(0, zp.Kind.F, -1)]]),
        "stage 0, microbatch -1: must be non-negative integers, below",
    ),
    "a stage beyond all": (
        lambda: zp.Schedule.of(SCHEDULE.problem, SCHEDULE.placement, [[zp.Action(1 << 16, zp.Kind.F, 0)]]),
        "stage 65536, microbatch 0: must be non-negative integers, below 65536 and",
    ),
    "half a stage": (
        lambda: zp.Schedule.of(SCHEDULE.problem, SCHEDULE.placement, [[zp.Action(0.5, zp.Kind.F, 0)]]),
        "stage 0.5, microbatch 0: must be non-negative integers, below",
    ),
    "a text as kind": (
        lambda: zp.Schedule.of(SCHEDULE.problem, SCHEDULE.placement, [[zp.Action(0, "F", 0)]]),
        "kind='F': must be a zp.Kind, like zp.Kind.F",
    ),
    "sizes as problem": (
        lambda: zp.Schedule.of((2, 4, 4), SCHEDULE.placement, []),
        "problem=(2, 4, 4): must be a zp.Problem, like zp.Problem(4, 8, 16)",
    ),
    "half a rank": (
        lambda: zp.Schedule.of(zp.Problem(2.5, 4, 4), SCHEDULE.placement, []),
        "num_ranks=2.5: must be a non-negative integer",
    ),
    "a table as placement": (
        lambda: _build_placed(lambda p: [0, 1]),
        "the placement of placed is [0, 1]: must be a zp.Placement",
    ),
    "a short table": (
        lambda: _build_placed(lambda p: zp.Placement(((0,),))),
        "placed: the placement has 1 stage: must be 2",
    ),
    "a rule as placement": (
        lambda: zp.Schedule.of(SCHEDULE.problem, zp.vee, []),
        "must be a zp.Placement, like zp.linear(problem)",
    ),
    "no function to register": (
        lambda: zp.register("nothing", placement=zp.linear)(None),
        "register('nothing') is of None: put it before a function",
    ),
    "microbatches without end": (
        lambda: zp.build("1f1b", ranks=2, microbatches=10**30),
        "microbatches=1000000000000000000000000000000: at most 4398046511104 are supported",
    ),
    "no name to build": (lambda: zp.build(None, ranks=2, microbatches=4), "unknown schedule None: "),
    "a text for pp": (
        lambda: zp.plan("qwen3-0.6b", pp="2", **SMALL),
        "pp='2': must be a positive integer or a list of them",
    ),
    "no tensor parallelism": (
        lambda: zp.plan("qwen3-0.6b", tp=[0], **SMALL),
        "tp=[0]: must be a positive integer or a list",
    ),
    "no text of a CSV": (lambda: zp.from_csv(None), "None: must be the text of a file; use Path"),
    "bytes of a JSON": (lambda: zp.from_json(b"{}"), "b'{}': must be the text of a file; use Path"),
    "a timeline as CSV": (lambda: zp.to_csv(zp.simulate(SCHEDULE)), ": must be a Schedule"),
    "a program as JSON": (lambda: zp.to_json(zp.lower(SCHEDULE)), ": must be a Schedule"),
    "a name to fill": (lambda: zp.fill_gaps("zbv"), "'zbv': must be a Schedule"),
    "a table to fill with": (lambda: zp.fill_gaps(SCHEDULE, {"f": 1}), "costs={'f': 1}: must be costs of stages"),
    "a name to advise on": (lambda: zp.advice("zbv"), "'zbv': must be a Schedule"),
    "a name to balance": (lambda: zp.balance("x", SCHEDULE), "costs='x': must be costs of layers; use zp.estimate"),
    "a cut of a name": (lambda: zp.balance(zp.estimate("qwen3-8b"), "zbv"), "'zbv': must be a Schedule"),
    "no model to estimate": (lambda: zp.estimate(None), "model None: must be a directory with config.json"),
    "a number for ac": (lambda: zp.plan("qwen3-0.6b", ac=3, **SMALL), "ac=3: must be a name or a list of names"),
    "no schedules": (
        lambda: zp.plan("qwen3-0.6b", schedules=[], **SMALL),
        "schedules=[]: must be a name or a list of names",
    ),
    "no microbatch sizes": (
        lambda: zp.plan("qwen3-0.6b", microbatch_sizes=[], **SMALL),
        "microbatch_sizes=[]: must be a positive integer or a list",
    ),
    "no model to plan": (lambda: zp.plan(None, **SMALL), "model None: must be a directory with config.json"),
    "a number as a mode": (lambda: zp.estimate("qwen3-8b", ac=1), "ac=1: must be a mode like 'full'"),
    "a word for compile": (lambda: zp.estimate("qwen3-8b", compile="no"), "compile='no': must be True or False"),
    "two lengths": (lambda: zp.estimate("qwen3-8b", sequence=[128]), "sequence=[128]: must be a positive integer"),
    "one efficiency": (lambda: zp.estimate("qwen3-8b", efficiency=0.5), "efficiency=0.5: must be a table like"),
    "a number as a file": (lambda: zp.draw(zp.simulate(SCHEDULE), 5), "cannot draw 5: the name must end in"),
    "no number of seconds": (
        lambda: zp.plan("qwen3-0.6b", **{**SMALL, "search_seconds": float("nan")}),
        "search_seconds=nan: must be a non-negative number",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_value_is_told_in_one_line(name):
    call, message = MISTAKES[name]
    with pytest.raises(zp.ConfigError) as error:
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plan_takes_one_value_where_it_takes_several():
    one = zp.plan("qwen3-0.6b", pp=2, tp=1, microbatch_sizes=1, ac="none", schedules="zbv", **SMALL)
    several = zp.plan("qwen3-0.6b", pp=[2], tp=[1], microbatch_sizes=[1], ac=["none"], schedules=["zbv"], **SMALL)
    assert [row.candidate for row in one.rows] == [row.candidate for row in several.rows]
    assert {row.candidate.schedule for row in one.rows} == {"zbv"}
