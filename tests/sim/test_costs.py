"""Costs: what may be said, what is meant by it, and what is refused."""

from dataclasses import fields, replace

import pytest

import zeropipe as zp
from zeropipe.sim.compare import compare
from zeropipe.sim.costs import COST_FIELDS, Link, flat_fields
from zeropipe.sim.costs_file import costs_from_data, costs_to_data, load_costs


def spans(timeline):
    return {str(s.action): (s.start, s.end) for r in range(timeline.num_ranks) for s in timeline.spans(r)}


@pytest.mark.parametrize(
    "inter,expected",
    [({}, (1.0, 4.0)), ({"p2p": 3.0}, (3.0, 4.0)), ({"bandwidth": 2.0}, (1.0, 2.0)), (None, (1.0, 4.0))],
)
def test_a_link_between_machines_is_like_one_inside_where_nothing_is_said(inter, expected):
    costs = costs_from_data(
        {"p2p": 1.0, "bandwidth": 4.0, "node_size": 2} | ({} if inter is None else {"inter_node": inter})
    )
    assert costs.link(0, 1) == (1.0, 4.0)
    assert costs.link(1, 2) == expected
    assert costs_from_data({"p2p": 1.0, "bandwidth": 4.0, "edges": {"0-1": inter or {}}}).link(0, 1) == expected


def test_crossing_machines_is_never_free_by_default():
    schedule = zp.build("gpipe", ranks=4, microbatches=1)
    flat = spans(zp.simulate(schedule, zp.Costs(p2p=1)))
    assert spans(zp.simulate(schedule, zp.Costs(p2p=1, node_size=2))) == flat


@pytest.mark.parametrize("edge", [(99, 100), (0, 4), (4, 0)])
def test_an_edge_to_a_rank_that_is_not_there_is_refused(edge):
    costs = zp.Costs(edges={edge: Link(1.0)})
    with pytest.raises(zp.ConfigError, match=rf"edge {edge[0]}-{edge[1]}: ranks are 0 to 3"):
        zp.simulate(zp.build("1f1b", ranks=4, microbatches=2), costs)
    zp.simulate(zp.build("1f1b", ranks=101, microbatches=1), costs)


@pytest.mark.parametrize("edge", [(0, 0), (-1, 0), ("0", 1), (0, True)])
def test_what_is_no_edge_is_refused(edge):
    with pytest.raises(zp.ConfigError, match="two different ranks"):
        zp.Costs(edges={edge: Link(1.0)})


def test_blocking_is_one_of_two():
    with pytest.raises(zp.ConfigError, match="set one of them"):
        zp.Costs(blocking=True, blocking_ends=True)


@pytest.mark.parametrize("table", [{0: 0.5, 2: 4}, {"0": 0.5, "2": 4}])
def test_a_table_names_some_stages_and_the_others_keep_the_default(table):
    costs = zp.Costs(f=table, i=3, b=table, stash=table, activation=7, weights=table)
    assert costs.column("f", 4) == [0.5, 1, 4, 1]
    assert costs.column("b", 4) == [0.5, 4, 4, 4]  # i + w
    assert costs.column("stash", 4) == [0.5, 7, 4, 7]
    assert costs.column("weights", 4) == [0.5, 0, 4, 0]
    assert zp.Costs(f={**table, "default": 2}).column("f", 4) == [0.5, 2, 4, 2]
    assert zp.Costs(f={"default": 2}).column("f", 3) == [2, 2, 2]
    assert replace(costs, w=2).column("f", 4) == [0.5, 1, 4, 1]


def test_a_table_gives_the_times_of_the_list_it_stands_for():
    schedule = zp.build("zbv", ranks=4, microbatches=6)
    table, full = (zp.Costs(f=f, p2p=0.5) for f in ({0: 0.8, 7: 2}, [0.8, *[1.0] * 6, 2]))
    assert zp.simulate(schedule, table).makespan == zp.simulate(schedule, full).makespan


def test_in_a_comparison_a_table_names_parts_of_the_model():
    schedules = [zp.build(name, ranks=4, microbatches=8) for name in ("1f1b", "zbv")]
    tables, lists = (
        compare(schedules, zp.Costs(f=f, b=b)) for f, b in (({3: 2}, {0: 5}), ([1, 1, 1, 2], [5, 2, 2, 2]))
    )
    assert [t.makespan for t in tables] == [t.makespan for t in lists]
    with pytest.raises(zp.ConfigError, match="f has stage 4"):
        compare(schedules, zp.Costs(f={4: 2}))


@pytest.mark.parametrize(
    "table,words",
    [
        ({-1: 1}, "-1 must be the number of a stage"),
        ({"first": 1}, "'first' must be the number of a stage"),
        ({"9" * 5000: 1}, "must be the number of a stage"),
        ({0: -1}, r"f\.0=-1: must be a non-negative number"),
        ({"default": "x"}, "f.default='x'"),
    ],
)
def test_a_table_of_something_else_is_refused(table, words):
    with pytest.raises(zp.ConfigError, match=words) as caught:
        zp.Costs(f=table)
    assert len(str(caught.value)) < 300


def test_a_table_that_names_a_stage_too_many_is_refused():
    with pytest.raises(zp.ConfigError, match="f has stage 4: stages are 0 to 3"):
        zp.simulate(zp.build("1f1b", ranks=4, microbatches=4), zp.Costs(f={4: 1}))


@pytest.mark.parametrize(
    "suffix,text", [("toml", "[f]\n0 = 0.8\ndefault = 2\n"), ("json", '{"f": {"0": 0.8, "default": 2}}')]
)
def test_a_costs_file_may_hold_a_table(tmp_path, suffix, text):
    path = tmp_path / f"costs.{suffix}"
    path.write_text(text)
    assert load_costs(str(path)) == zp.Costs(f={0: 0.8, "default": 2})


def test_comparing_shares_costs_out_over_stages():
    schedules = [zp.build(name, ranks=4, microbatches=8) for name in ("1f1b", "zbv", "interleaved")]
    timelines = compare(schedules, zp.Costs(f=2, i=2, w=2, activation=1))
    assert [sum(t.busy) for t in timelines] == pytest.approx([4 * 8 * 6] * 3)
    assert max(timelines[0].peak_memory) == 4
    fine = compare(schedules, zp.Costs(f=[1, 2, 3, 4, 5, 6, 7, 8]))
    assert fine[0].busy[0] == pytest.approx(8 * (1 + 2) + 8 * 2)


@pytest.mark.parametrize(
    "values,words",
    [
        ({"f": -1}, "f=-1: must be a non-negative number"),
        ({"f": float("nan")}, "f=nan"),
        ({"f": "1"}, "f='1'"),
        ({"w": [1, True]}, "w=True"),
        ({"f": [1.0, float("nan")]}, "f=nan"),
        ({"f": [float("nan"), 1.0]}, "f=nan"),
        ({"f": [1.0, -1.0]}, "f=-1.0: must be a non-negative number"),
        ({"f": [1.0, float("inf")]}, "f=inf"),
        ({"bandwidth": 0}, "^bandwidth=0"),
        ({"shard_bandwidth": 0}, "^shard_bandwidth=0"),
        ({"edges": {"0-1": {"bandwidth": 0}}}, "^edges.0-1.bandwidth=0"),
        ({"node_size": 0}, "node_size=0"),
        ({"g": 1}, "unknown field 'g'"),
        ({"activatoin": 1}, "did you mean 'activation'"),
        ({"edges": {"01": {}}}, "edge '01'"),
        ({"edges": {"0-1": 3}}, "edges.0-1=3"),
        ({"inter_node": {"latency": 1}}, "inter_node"),
        ({"inter_node": {"p2p": 1}}, "inter_node is set without node_size: set the ranks per machine"),
    ],
)
def test_bad_costs_are_named(values, words):
    with pytest.raises(zp.ConfigError, match=words):
        costs_from_data(values)


def test_costs_files(tmp_path):
    toml, json = tmp_path / "c.toml", tmp_path / "c.json"
    toml.write_text('f = 1\np2p = 0.5\nunit = "s"\nnode_size = 2\n[edges.0-1]\np2p = 2.0\n[inter_node]\np2p = 1.0\n')
    json.write_text(
        '{"f": 1, "p2p": 0.5, "unit": "s", "node_size": 2, "edges": {"0-1": {"p2p": 2.0}}, "inter_node": {"p2p": 1}}'
    )
    assert load_costs(str(toml)) == load_costs(str(json))
    assert load_costs(str(toml)).link(0, 1) == Link(2.0)
    for text, words in (("f = = 1", "is not TOML"), ("zz = 1", "unknown field 'zz'")):
        toml.write_text(text)
        with pytest.raises(zp.ConfigError, match=words):
            load_costs(str(toml))
    with pytest.raises(zp.ConfigError, match="cannot read"):
        load_costs(str(tmp_path / "none.toml"))


def test_numbers_of_numpy_and_torch_are_numbers():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    schedule = zp.build("zbv", ranks=numpy.int64(2), microbatches=torch.tensor(4))
    assert schedule == zp.build("zbv", ranks=2, microbatches=4)
    ours = zp.Costs(
        f=1.5, i=[1, 2, 3, 4], w=[1.0, 0.5, 1.0, 1.0], p2p=2, activation={0: 2.0}, node_size=1, memory_limit=9
    )
    theirs = zp.Costs(
        f=torch.tensor(1.5), i=numpy.arange(1, 5), w=[numpy.float32(1), torch.tensor(0.5), 1, 1], p2p=numpy.int64(2),
        activation={numpy.int64(0): numpy.float32(2)}, node_size=numpy.int32(1), memory_limit=torch.tensor(9),
    )  # fmt: skip
    assert theirs == ours
    assert zp.to_json(zp.simulate(schedule, theirs)) == zp.to_json(zp.simulate(schedule, ours))
    for value in (numpy.array([1.0, numpy.nan]), torch.tensor(-1), numpy.True_):
        with pytest.raises(zp.ConfigError, match="must be a non-negative number"):
            zp.Costs(f=value)


@pytest.mark.parametrize("link", [Link(0.5, 2.0), {"p2p": 0.5, "bandwidth": 2.0}, (0.5, 2.0)])
@pytest.mark.parametrize("edge", [(0, 1), "0-1"])
def test_a_link_is_said_in_python_as_in_a_file(edge, link):
    costs = zp.Costs(edges={edge: link}, inter_node=link, node_size=1)
    assert costs == costs_from_data(
        {"edges": {"0-1": {"p2p": 0.5, "bandwidth": 2.0}}, "node_size": 1, "inter_node": link}
    )
    assert costs.link(0, 1) == costs.link(5, 6) == Link(0.5, 2.0)


@pytest.mark.parametrize(
    "value",
    [
        {"f": None, "activation": 5}, {"p2p": None}, {"f": b"1234"}, {"edges": None}, {"edges": {(0, 1): 3}},
        {"edges": {"0--1": {}}}, {"edges": {5: {}}}, {"inter_node": None}, {"inter_node": (1,)}, {"node_size": True},
    ],
)  # fmt: skip
def test_what_is_no_cost_is_refused_and_not_guessed(value):
    with pytest.raises(zp.ConfigError, match=r"must be a|two different ranks"):
        zp.Costs(**value)


def test_former_names_of_fields_are_accepted():
    costs = zp.Costs(shards="keep", full_weights=2, full_gradients=[1, 3])
    with pytest.warns(DeprecationWarning, match="whole_weights of Costs is full_weights now"):
        assert zp.Costs(shards="keep", whole_weights=2, full_gradients=[1, 3]) == costs
    with pytest.warns(DeprecationWarning, match="whole_gradients of Costs is full_gradients now"):
        assert costs.whole_gradients == (1, 3)
    assert costs_from_data({"shards": "keep", "whole_weights": 2, "whole_gradients": [1, 3]}) == costs
    with pytest.raises(AttributeError, match="full_heights"):
        _ = costs.full_heights


def test_fields_have_a_help_text_and_a_rule():
    """The command line and the page are derived from them."""
    assert set(COST_FIELDS) == {field.name for field in fields(zp.Costs)}
    for name, field in flat_fields().items():
        assert field.help.endswith("."), name
        assert field.rule.startswith("must be "), name
    assert {"inter_p2p", "inter_bandwidth"} < set(flat_fields())
    assert "edges" not in flat_fields()


@pytest.mark.parametrize(
    "costs",
    [
        zp.Costs(),
        zp.Costs(
            f=[1, 2], i={0: 0.5, "default": 2}, b=3, edges={(0, 1): Link(0.5)}, node_size=2, inter_node=Link(1, 2)
        ),
        zp.Costs(shards="regather", full_weights=1, units=3, memory_limit=4, unit="s", blocking_ends=True),
    ],
)
def test_costs_survive_plain_data(costs):
    assert costs_from_data(costs_to_data(costs)) == costs
    assert set(costs_to_data(costs)) == {
        name for name in COST_FIELDS if getattr(costs, name) != getattr(zp.Costs(), name)
    }
