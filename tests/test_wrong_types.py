"""What is handed to the public functions by mistake is told in one line: the value, the rule, the way out."""

import pytest

import zeropipe as zp

SCHEDULE = zp.build("zbv", ranks=2, microbatches=4)
SMALL = {"gpus": 2, "batch": 4, "sequence": 512, "search_seconds": 0, "workers": 1}
MISTAKES = {
    "a name to check": (lambda: zp.check("zbv"), "'zbv' is no Schedule: make one with zp.build"),
    "rows to check": (lambda: zp.check(SCHEDULE.rows), "is no Schedule: make one with zp.build"),
    "a name to simulate": (lambda: zp.simulate("zbv"), "'zbv' is no Schedule: make one with zp.build"),
    "a name to lower": (lambda: zp.lower("zbv"), "'zbv' is no Schedule: make one with zp.build"),
    "a table of costs": (
        lambda: zp.simulate(SCHEDULE, {"f": 1}),
        "costs={'f': 1}: costs of stages are needed, give zp.C",
    ),
    "costs of layers": (lambda: zp.simulate(SCHEDULE, zp.estimate("qwen3-8b")), "theirs are of layers; .costs(counts)"),
    "layers to search": (lambda: zp.search(ranks=2, microbatches=2, costs=zp.estimate("qwen3-8b")), "are of layers"),
    "a schedule to draw": (lambda: zp.draw(SCHEDULE), "<Schedule zbv: 2 ranks, 4 st"),
    "nothing to draw": (lambda: zp.draw(None), "None is no Timeline: draw what zp.simulate or a recorded run gives"),
    "no name to build": (lambda: zp.build(None, ranks=2, microbatches=4), "unknown schedule None: "),
    "a text for pp": (lambda: zp.plan("qwen3-0.6b", pp="2", **SMALL), "pp='2': whole numbers from 1 on are needed"),
    "no tensor parallelism": (lambda: zp.plan("qwen3-0.6b", tp=[0], **SMALL), "tp=[0]: whole numbers from 1 on"),
    "no number of seconds": (
        lambda: zp.plan("qwen3-0.6b", **{**SMALL, "search_seconds": float("nan")}),
        "search_seconds=nan: a number from 0 on is needed",
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
