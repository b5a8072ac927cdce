"""Overlaps of layers with phases: against a published trace, a longest path, and small steps of time."""

from math import inf
from random import Random

import pytest
from reference_simulator import reference_simulate

import zeropipe as zp
from zeropipe.core import jit
from zeropipe.core.action import Kind
from zeropipe.core.explain import sum_exchanges
from zeropipe.core.overlap import (
    DELAYED_ORDER,
    ORDER,
    Part,
    choose_order,
    divide_lanes,
    find_best_order,
    saved_time,
    walk_pair,
    walk_stages,
)
from zeropipe.core.phases import EXCHANGES, PHASES, LayerPhases, PhaseTimes
from zeropipe.searching.bounds.lower_bound import lower_bound
from zeropipe.searching.task import SearchTask
from zeropipe.sim.costs_file import costs_from_data, costs_to_data, load_costs

# DeepSeek's profile of DualPipe (github.com/deepseek-ai/profile-data): ms per layer, and of a pair as one step
DEEPSEEK = LayerPhases(
    PhaseTimes(4.37, 9.34, 2.39), PhaseTimes(6.69, 7.48), PhaseTimes(4.60, 5.31, 3.54), PhaseTimes(8.69, 5.77)
)
PAIR = 32.25
PUBLISHED = (
    "combine I", "attention F", "experts I", "dispatch F", "dispatch I", "experts W", "experts F", "attention I",
    "attention W", "combine F",
)  # fmt: skip


def some_layer(random):
    times = [PhaseTimes(*(random.choice((0, 1, 2, 3.5, random.random() * 4)) for _ in "FIW")) for _ in PHASES]
    layer = LayerPhases(*times)
    return layer._replace(**{name: getattr(layer, name)._replace(w=0.0) for name in EXCHANGES})


def parse_order(texts):
    return tuple(Part(Kind[text.split()[1]], text.split()[0]) for text in texts)


def needs(part):
    """The parts of the same side that come before it."""
    if part.kind is Kind.W:
        return [Part(Kind.I, part.phase)]
    path = list(PHASES) if part.kind is Kind.F else list(reversed(PHASES))
    at = path.index(part.phase)
    return [Part(part.kind, path[at - 1])] if at else []


def time_of(part, forward, backward):
    return getattr(getattr(forward if part.kind is Kind.F else backward, part.phase), part.kind.name.lower())


def longest_path(forward, backward, order):
    """The time of a pair without a tax: each part waits for its lane and for its own side."""
    end = {}
    free = {True: 0.0, False: 0.0}
    for part in order:
        lane = part.phase in EXCHANGES
        start = max([free[lane], *(end[other] for other in needs(part))])
        end[part] = free[lane] = start + time_of(part, forward, backward)
    return max(end.values())


def step_by_step(forward, backward, order, tax, step=1e-3):
    """The time of a pair, in small steps."""
    left = {part: time_of(part, forward, backward) for part in order}
    lanes = {lane: [part for part in order if (part.phase in EXCHANGES) == lane] for lane in (True, False)}
    done, now = set(), 0.0
    while any(lanes.values()):
        for lane in lanes.values():
            while lane and left[lane[0]] <= 1e-12 and done.issuperset(needs(lane[0])):
                done.add(lane.pop(0))
        heads = {k: lane[0] for k, lane in lanes.items() if lane and done.issuperset(needs(lane[0]))}
        for is_exchange, part in heads.items():
            left[part] -= step * (1 - tax if not is_exchange and True in heads else 1)
        now += step
    return now


def test_a_pair_takes_the_time_of_the_published_trace():
    assert parse_order(PUBLISHED) == ORDER
    spans = walk_pair(DEEPSEEK, DEEPSEEK, order=parse_order(PUBLISHED))
    assert spans[-1].end == pytest.approx(PAIR, rel=0.05)
    assert DEEPSEEK.total(Kind.F) + DEEPSEEK.total(Kind.B) == pytest.approx(58.2, abs=0.05)
    assert saved_time((DEEPSEEK,) * 3, (DEEPSEEK,) * 3) == pytest.approx(3 * (58.18 - spans[-1].end))


def test_the_published_order_is_the_best_of_all():
    found = find_best_order(DEEPSEEK, DEEPSEEK)
    assert divide_lanes(found) == divide_lanes(parse_order(PUBLISHED))
    best = min(longest_path(DEEPSEEK, DEEPSEEK, order) for order in _orders(Random(1), 300))
    assert longest_path(DEEPSEEK, DEEPSEEK, found) <= best


def test_the_best_order_depends_on_the_times():
    """With short exchanges and a long W of experts, F of the experts must not wait for it."""
    layer = DEEPSEEK._replace(experts=PhaseTimes(4.6, 5.3, 30), dispatch=PhaseTimes(1, 1), combine=PhaseTimes(40, 1))
    found = find_best_order(layer, layer)
    assert divide_lanes(found) != divide_lanes(ORDER)
    assert longest_path(layer, layer, found) < longest_path(layer, layer, ORDER)


def test_weight_gradients_of_long_experts_are_delayed():
    layer = DEEPSEEK._replace(attention=PhaseTimes(0.1, 0.2, 0.1), experts=PhaseTimes(9, 9, 9))
    assert choose_order(DEEPSEEK, DEEPSEEK) == ORDER
    assert choose_order(layer, layer) == DELAYED_ORDER
    times = [longest_path(layer, layer, order) for order in (ORDER, DELAYED_ORDER)]
    assert times[1] < times[0]
    assert saved_time((layer,), (layer,)) == pytest.approx(layer.total(Kind.F) + layer.total(Kind.B) - times[1])
    assert [str(span) for span in walk_stages((layer,), (layer,)) if span.kind is Kind.W] == [
        "experts W",
        "attention W",
    ]


def _orders(random, number):
    """Random orders in which each part comes after those that it needs."""
    for _ in range(number):
        order, left = [], list(ORDER)
        while left:
            part = random.choice([part for part in left if set(needs(part)) <= set(order)])
            order.append(part)
            left.remove(part)
        yield tuple(order)


@pytest.mark.parametrize("seed", range(40))
def test_a_pair_is_the_longest_path_over_its_lanes(seed):
    random = Random(seed)
    forward, backward = some_layer(random), some_layer(random)
    for order in _orders(random, 5):
        spans = walk_pair(forward, backward, order=order)
        assert spans[-1].end == pytest.approx(longest_path(forward, backward, order))
        assert sum(span.end - span.start for span in spans) == pytest.approx(
            forward.total(Kind.F) + backward.total(Kind.B)
        )
    best = find_best_order(forward, backward)
    assert longest_path(forward, backward, best) <= longest_path(forward, backward, ORDER) + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_an_exchange_under_way_slows_computations(seed):
    random = Random(seed)
    forward, backward, tax = some_layer(random), some_layer(random), random.choice((0.15, 0.5))
    expected = step_by_step(forward, backward, ORDER, tax)
    assert walk_pair(forward, backward, sm_tax=tax)[-1].end == pytest.approx(expected, abs=0.05)
    assert saved_time((forward,), (backward,), sm_tax=tax) >= 0


def test_an_order_that_cannot_end_is_refused():
    with pytest.raises(zp.ConfigError, match="comes before one that it needs"):
        walk_pair(DEEPSEEK, DEEPSEEK, order=ORDER[::-1])


def test_layers_that_one_side_has_more_run_alone():
    dense = LayerPhases(attention=PhaseTimes(1, 1, 1))
    spans = list(walk_stages((DEEPSEEK, dense), (DEEPSEEK, DEEPSEEK, DEEPSEEK)))
    total = 3 * DEEPSEEK.total(Kind.B) + DEEPSEEK.total(Kind.F) + 1
    assert max(span.end for span in spans) == pytest.approx(
        total - saved_time((DEEPSEEK, dense), (DEEPSEEK, DEEPSEEK, DEEPSEEK))
    )
    assert {(span.kind, span.layer) for span in spans} == {
        (Kind.F, 0), (Kind.F, 1), *((kind, n) for kind in (Kind.I, Kind.W) for n in range(3)),
    }  # fmt: skip
    assert [span.layer for span in spans if str(span) == "combine I"] == [2, 1, 0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["dualpipev", "dualpipe", "1f1b-overlap", "interleaved-overlap", "zbv", "1f1b"])
def test_a_schedule_takes_the_times_of_its_phases(name, compiled, monkeypatch):
    if compiled:
        monkeypatch.setattr(jit, "COMPILE_FROM_SIZE", 1)
    random = Random(name)
    schedule = zp.build(name, ranks=4, microbatches=8)
    stages = [tuple(some_layer(random) for _ in range(random.choice((0, 1, 2, 3)))) for _ in range(schedule.num_stages)]
    costs = zp.Costs(phases=stages, sm_tax=0.1)

    def duration(actions):
        if len(actions) == 1:
            return sum(layer.total(actions[0].kind) for layer in stages[actions[0].stage])
        forward, backward = actions
        spans = walk_stages(stages[forward.stage], stages[backward.stage], has_w=backward.kind is Kind.B, sm_tax=0.1)
        return max((span.end for span in spans), default=0.0)

    slow = reference_simulate(schedule, duration)
    timeline = zp.simulate(schedule, costs)
    for rank in range(4):
        for span in timeline.spans(rank):
            assert (span.start, span.end) == pytest.approx(slow[span.action], abs=1e-9)


def test_an_overlap_of_f_and_i_has_no_w():
    schedule = zp.from_csv("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0I1,0W1")
    costs = zp.Costs(phases=[DEEPSEEK])
    whole = walk_pair(DEEPSEEK, DEEPSEEK, has_w=False)[-1].end
    spans = list(zp.simulate(schedule, costs).spans(0))
    assert spans[1].end - spans[1].start == pytest.approx(whole)
    assert whole < PAIR - DEEPSEEK.attention.w


@pytest.mark.parametrize("seed", range(8))
def test_bounds_are_below_overlaps_that_hide_exchanges(seed):
    random = Random(seed)
    schedule = zp.build(random.choice(("dualpipev", "1f1b-overlap", "interleaved-overlap")), ranks=2, microbatches=6)
    stages = [[some_layer(random), DEEPSEEK] for _ in range(schedule.num_stages)]
    costs = zp.Costs(phases=stages)
    task = SearchTask(schedule.problem, schedule.placement, costs, False)
    assert not task.is_split_best
    assert 0 < lower_bound(task) <= zp.simulate(schedule, costs).makespan * (1 + 1e-9)


def test_a_search_starts_from_schedules_with_overlaps():
    costs = zp.Costs(phases=[DEEPSEEK])
    found = zp.search(ranks=2, microbatches=8, stages_per_rank=2, placement="vee", costs=costs, steps=5)
    assert found.value <= zp.simulate(zp.build("dualpipev", ranks=2, microbatches=8), costs).makespan
    assert any("OVERLAP" in str(step) for step in found.schedule.rows[0])


TOML = """
sm_tax = 0.15
exchange_bandwidth = 50.0

[[phases]]
layers = 2
attention = {f = 4, i = 9, w = 2.5}
dispatch = {f = 300, i = 350}
experts = {f = 4.5, i = 5, w = 3.5}
combine = {f = 350, i = 300}

[[phases]]
attention = {f = 3, i = 2, w = 1}
"""


def test_costs_files_have_phases(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_text(TOML)
    costs = load_costs(str(path))
    assert costs_from_data(costs_to_data(costs)) == costs
    moe, dense = 4 + 6 + 4.5 + 7, 3
    assert costs.column("f", 3) == pytest.approx([2 * moe + dense] * 3)
    assert costs.column("b", 1) == pytest.approx([2 * (9 + 7 + 5 + 6 + 2.5 + 3.5) + 3])
    stage = costs.stage_phases(2)[1]
    assert [len(stage), stage[0].dispatch, stage[2].dispatch] == [3, PhaseTimes(6, 7, 0), PhaseTimes()]


def test_costs_per_rank_are_divided_by_layers():
    schedule = zp.build("dualpipev", ranks=2, microbatches=4)
    costs = zp.Costs(phases=[DEEPSEEK] * 4).stage_costs(schedule.problem)
    assert costs.stage_phases(4) == [(DEEPSEEK,) * 2] * 4
    other = DEEPSEEK._replace(attention=PhaseTimes(1, 1, 1))
    costs = zp.Costs(phases=[[other] * 2, [DEEPSEEK] * 2]).stage_costs(schedule.problem)
    assert costs.stage_phases(4) == [(other,), (other,), (DEEPSEEK,), (DEEPSEEK,)]
    with pytest.raises(zp.ConfigError, match="2 layers, which 4 stages cannot share: must be a multiple of 4"):
        zp.Costs(phases=[DEEPSEEK]).stage_costs(schedule.problem)


def test_a_stage_may_take_longer_than_its_phases():
    """The first one embeds, the last one has the head: they overlap with nothing."""
    schedule = zp.build("dualpipev", ranks=2, microbatches=8)
    plain, longer = (zp.Costs(f=f, phases=[DEEPSEEK]) for f in (None, [25, 30, 24.5, 24.5]))
    spans = [list(zp.simulate(schedule, costs).spans(0)) for costs in (plain, longer)]
    pairs = [[span.end - span.start for span in row if _stages(span, row) == (0, 3)] for row in spans]
    assert pairs[0]
    assert pairs[1] == pytest.approx([time + 25 - DEEPSEEK.total(Kind.F) for time in pairs[0]])


def _stages(span, row):
    """The stages of F and of B of the Overlap that a span belongs to."""
    both = [one.action for one in row if (one.start, one.end) == (span.start, span.end)]
    return tuple(action.stage for action in both) if len(both) == 2 else ()


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"phases": 3}, "phases=3: must be a list of layers"),
        ({"phases": []}, "must be a list of layers"),
        ({"phases": [{"attend": {}}]}, "unknown phase 'attend'"),
        ({"phases": [{"attention": 3}]}, "attention=3: must be a table with f, i and w"),
        ({"phases": [{"attention": {"f": -1}}]}, r"attention\.f=-1: must be a non-negative number"),
        ({"phases": [{"attention": {"f": inf}}]}, r"attention\.f=inf: must be a non-negative number"),
        ({"phases": [{"combine": {"w": 1}}]}, r"combine\.w=1: must be 0: an exchange has no weights"),
        ({"phases": [{"layers": 0}]}, "layers=0: must be an integer from 1"),
        ({"phases": [DEEPSEEK], "overlap": 3}, "overlap and phases are both set"),
        ({"phases": [DEEPSEEK], "sm_tax": 1}, "sm_tax=1: must be less than 1"),
        ({"sm_tax": 0.1}, "sm_tax is set without phases"),
        ({"exchange_bandwidth": 1e9}, "exchange_bandwidth is set without phases"),
    ],
)
def test_what_is_no_phase_is_refused(fields, message):
    with pytest.raises(zp.ConfigError, match=message):
        zp.Costs(**fields)


def test_stages_that_do_not_fit_their_phases_are_refused():
    schedule = zp.build("1f1b", ranks=4, microbatches=4)
    with pytest.raises(zp.ConfigError, match="phases has 3 stages, the schedule has 4 stages"):
        zp.simulate(schedule, zp.Costs(phases=[[DEEPSEEK]] * 3))
    with pytest.raises(zp.ConfigError, match=r"i=9 of stage 0 is less than the 27\.9 of its phases"):
        zp.simulate(schedule, zp.Costs(phases=[DEEPSEEK], i=9))


def test_what_overlaps_save_is_hidden():
    """With no tax, what an Overlap saves is what it hides; elsewhere all is exposed."""
    schedule = zp.build("dualpipev", ranks=2, microbatches=8)
    timeline = zp.simulate(schedule, zp.Costs(phases=[DEEPSEEK] * 2))
    saved = saved_time((DEEPSEEK,) * 2, (DEEPSEEK,) * 2)
    exchanging = 2 * sum(sum(getattr(DEEPSEEK, name)) for name in EXCHANGES)
    for rank, found in enumerate(sum_exchanges(timeline)):
        overlaps = sum(len(step) == 2 for step in timeline.steps(rank))
        assert overlaps
        assert found.total == pytest.approx(2 * 8 * exchanging)
        assert found.total - found.exposed == pytest.approx(overlaps * saved)
    assert sum_exchanges(zp.simulate(schedule)) == ((0, 0), (0, 0))
