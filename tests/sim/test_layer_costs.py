"""Costs of layers: any cut into stages, and the file that estimate and profile write."""

import json
import re
from dataclasses import replace

import pytest
from toy_costs import COSTS, KINDS

import zeropipe as zp
from zeropipe.core.placement import Problem, mirror, vee
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Link
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting
from zeropipe.sim.layer_file import from_layer_data, to_layer_json


def test_any_cut_adds_up_its_layers():
    costs = COSTS.costs((1, 2, 1))
    assert costs.f == pytest.approx((1.1, 3, 1.5))
    assert costs.i == pytest.approx((1.2, 3.2, 1.7))
    assert costs.b == pytest.approx((2, 5.5, 3))  # where a whole backward was measured, that
    assert costs.overlap == pytest.approx((3.1, 8, 4.5))
    assert costs.activation == (10, 40, 16)
    assert costs.stash == (8, 28, 14)
    assert costs.message == 4
    assert costs.weights == (150 * 18, 140 * 18, 150 * 18)
    assert costs.workspace == (3, 7, 0), "the largest of its layers; what the head has freed is enough for the last"
    assert costs.i_workspace == (3, 7, 3)
    assert (costs.p2p, costs.bandwidth, costs.unit, costs.memory_unit) == (1e-5, 1e9, "s", "B")
    for counts in [(4,), (0, 4, 0), (2, 1, 1), (1, 1, 1, 1)]:
        assert sum(COSTS.costs(counts).f) == pytest.approx(5.6), "no layer is lost"


def test_shards_share_the_optimizer_and_stages_of_a_rank_a_tied_weight():
    sharded = COSTS.costs((1, 1, 1, 1), placement=vee(Problem(2, 4, 4)), shards=4)
    each = 2 + 4 + 12 / 4  # the shard of the sum of gradients replaces the full ones
    assert sharded.weights == (150 * each, 50 * each, 90 * each, 150 * each)
    tied = replace(COSTS, tied=True)
    assert tied.costs((1, 1, 1, 1), placement=vee(Problem(2, 4, 4))).weights[-1] == 50 * 18, "on one rank, held once"
    assert tied.costs((1, 1, 1, 1)).weights[-1] == 150 * 18
    mirrored = tied.costs((1, 1, 1, 1), placement=mirror(Problem(4, 4, 4))).weights
    assert mirrored == (150 * 18, 50 * 18, 90 * 18, 50 * 18), "ranks hold stages 0 and 3, or 1 and 2"


def test_gathers_and_reduces_of_shards_are_simulated():
    link = Link(None, 100.0)
    costs = COSTS.costs((2, 2), shards=4, gather="keep", shard_link=link)
    assert costs.full_weights == (200 * 2, 240 * 2)
    assert costs.full_gradients == (200 * 4 * 3 / 4, 240 * 4 * 3 / 4), "a quarter remains, as the shard of the sum"
    assert costs.reduce == (200 * 4 / costs.shard_bandwidth, 240 * 4 / costs.shard_bandwidth)
    assert costs.weights == (200 * 16 / 4, 240 * 16 / 4)
    assert costs.i_workspace == (3, 7 - 2), "the layer after it has freed 2 in its I"
    assert (costs.shards, costs.units, costs.shard_bandwidth) == ("keep", 2, pytest.approx(100 * 4 / 3))
    schedule = zp.build("1f1b", ranks=2, microbatches=4)
    sharded, whole = zp.simulate(schedule, costs), zp.simulate(schedule, COSTS.costs((2, 2), shards=4))
    assert sharded.makespan > whole.makespan
    assert max(sharded.peak_memory) <= max(whole.peak_memory)


def test_every_other_layer_is_checkpointed():
    costs = COSTS.costs((1, 1, 1, 1), ac="selective:3")
    assert costs.activation == (4, 10, 30, 10)  # layers 0 and 3; the head as ever
    assert COSTS.costs((1, 1, 1, 1), ac="selective:1", setting=COSTS.setting(ac="full")).activation[1] == 4


def test_the_workspace_of_a_split_backward_that_leaves_more_than_it_found():
    """Checkpointed: I computes a layer's activations again, and leaves a part of them for W."""
    layer = LayerCost(1, 1, 1, activation=1, stash=6, workspace=9)
    costs = LayerCosts("toy", "profile", ("x",) * 3, (Setting({"x": layer}),), before=(), after=()).costs((3,))
    assert costs.workspace == (9,), "a full backward frees all of a layer before the next"
    assert costs.i_workspace == (9 + 2 * 5,), "two layers left 6 for 1 each"


def test_what_a_forward_needs_is_beside_what_later_layers_keep():
    layer, end = LayerCost(1, 1, 1, activation=4, f_workspace=6), LayerCost(1, 1, 1, activation=1, f_workspace=2)
    kinds = (Setting({"x": layer, "y": end}),)
    costs = LayerCosts("toy", "profile", ("x", "x"), kinds, before=(), after=("y",)).costs((1, 1))
    assert costs.f_workspace == (6, 6 - 1)


@pytest.mark.parametrize(("chunks", "chunk"), [(4.0, 10), (1.0, 10 / 2)])
def test_a_slice_has_its_share_of_workspaces_and_what_does_not_shrink(chunks, chunk):
    """Keys for all heads are of all tokens up to its end; chunks of logits are not smaller, but for the slice."""
    layer = LayerCost(1, 1, 1, workspace=20, f_workspace=4, keys=1, repeated_keys=6, attention_workspace=10)
    head = LayerCost(1, 1, 1, f_workspace=12, chunk_workspace=10, chunks=chunks)
    kinds = (Setting({"x": layer, "y": head}),)
    costs = LayerCosts("toy", "profile", ("x", "x"), kinds, before=(), after=("y",))
    whole, halves = costs.costs((1, 1)), costs.costs((1, 1), slice_shares=(0.5, 0.5))
    assert (whole.f_workspace, whole.workspace) == ((4, 12), (20, 20))
    assert [0.5 * size for size in halves.f_workspace] == [4 / 2 + 6, max(4 / 2 + 6, 2 / 2 + chunk)]
    assert 0.5 * halves.workspace[0] == max(20 / 2 + 6, 10 / 2 + 2 * 6)


def test_settings_are_found_or_refused():
    assert COSTS.setting(microbatch_size=2).compile
    assert COSTS.setting(ac="selective:2") is COSTS.settings[0]
    with pytest.raises(ConfigError, match="no setting with ac=selective:op, tp=2: must be one of ac none"):
        COSTS.setting(ac="selective:op", tp=2)


@pytest.mark.parametrize(
    "counts,more,message",
    [
        ("ab", {}, "layers='ab': must be the number of layers of each stage"),
        ((), {}, "must be the number of layers of each stage"),
        ((1.5, 2.5), {}, "must be the number of layers of each stage"),
        (None, {}, "must be the number of layers of each stage"),
        ((2, 2), {"shards": 0}, "shards=0: must be a positive integer"),
        ((2, 2), {"shards": "2"}, "shards='2': must be a positive integer"),
    ],
)
def test_counts_and_shards_that_make_no_sense_are_refused(counts, more, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        COSTS.costs(counts, **more)


def test_the_file_gives_back_an_equal_value():
    text = to_layer_json(COSTS)
    assert from_layer_data(json.loads(text)) == COSTS
    zp.simulate(
        zp.build("zbv", ranks=2, microbatches=4), from_layer_data(json.loads(text)).stage_costs(Problem(2, 4, 4))
    )


@pytest.mark.parametrize(
    "path,value,message",
    [
        (("source",), "guess", '"estimate" or "profile"'),
        (("zeropipe",), 9, "version 9"),
        (("typo",), 1, "unknown field 'typo'"),
        (("layers",), ["dense", "dens"], "lack the layer kind 'dens'"),
        (("layers",), [], "no layers"),
        (("settings",), [], "must be a list of at least one"),
        (("settings", 0, "ac"), "some", "activation checkpointing 'some'"),
        (("settings", 0, "kinds", "dense", "f"), -1, "settings[0].dense: f=-1: must be a non-negative number"),
        (("settings", 0, "kinds", "dense", "f"), float("nan"), "must be a non-negative number"),
        (("settings", 0, "kinds", "dense", "parameters"), 1.5, "must be an integer from 0"),
        (("settings", 0, "compile"), "yes", "true or false"),
        (("link",), {"speed": 1}, "a table with p2p, bandwidth"),
        (("state", "weights"), None, "state.weights=None"),
        (("machine",), 3, "must be a table"),
        (("machine",), {"memory": "80"}, "machine.memory='80': must be a non-negative number"),
        (("machine",), {"peak_flops": float("inf")}, "machine.peak_flops=inf: must be 0, or from 1e-30"),
        (("machine",), {"gpu": ["h100"]}, "machine.gpu=['h100']: must be a string of one line"),
        (
            ("machine",),
            {"efficiency": {"memory": "x"}},
            "machine.efficiency['memory']='x': must be a non-negative number",
        ),
        (("link",), {"bandwidth": 1e-300}, "link.bandwidth=1e-300: must be 0, or from 1e-30"),
        (("settings", 0, "tp"), 0, "tp=0: must be an integer from 1 to 1e+18"),
        (("settings", 0, "microbatch_size"), 0, "microbatch_size=0: must be an integer from 1"),
        (("settings", 0, "kinds", "dense", "parameters"), 10**399, "must be an integer from 0 to 1e+18"),
        (("settings", 0, "kinds", "two\nlines"), {}, "'two\\nlines': the name of a layer kind must be one line"),
        (("settings", 0, "ac"), "selective:2", "ac='selective:2': must be none and full in two settings"),
        (("settings", 0, "kinds"), {kind: {"f": 0, "i": 1, "w": 1} for kind in KINDS}, "settings[0]: its layers take"),
    ],
)
def test_damaged_files_are_told_in_one_line(path, value, message):
    data = json.loads(to_layer_json(COSTS))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ConfigError) as error:
        from_layer_data(json.loads(json.dumps(data)), "c.json")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["null", "[]", "{}", '{"type": "layer costs"}', '{"zeropipe": 1, "type": "layer costs"}']
)
def test_other_files_are_refused(text):
    with pytest.raises(ConfigError):
        from_layer_data(json.loads(text))


def test_commands_know_which_stages_share_a_rank(run, tmp_path):
    file = tmp_path / "c.json"
    file.write_text(to_layer_json(replace(COSTS, tied=True, sending=0.1, receiving=0.1)))
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    there = ("-p", "2", "-m", "4", "--costs", file, "--json")
    shared = replace(COSTS, tied=True, sending=0.1, receiving=0.1).costs(
        (1, 1, 1, 1), placement=schedule.placement, node_size=1
    )
    exact = zp.simulate(schedule, shared)
    _, simulated, _ = run("simulate", "zbv", "--node-size", "1", *there)
    _, compared, _ = run("compare", "zbv", "--node-size", "1", *there)
    for found in (json.loads(simulated), json.loads(compared)["compared"][0]):
        assert (found["makespan"], found["peak_memory"]) == (pytest.approx(exact.makespan), list(exact.peak_memory))
    limit = max(exact.peak_memory)
    _, searched, _ = run("search", "-v", "2", "--placement", "vee", "--memory-limit", limit, "--steps", "1", *there)
    assert max(json.loads(searched)["peak_memory"]) <= limit


def test_commands_take_the_file_and_say_what_it_is(tmp_path, capsys):
    from zeropipe.cli import main

    file = tmp_path / "c.json"
    file.write_text(to_layer_json(replace(COSTS, source="estimate")))
    main(["compare", "1f1b", "zbv", "-p", "2", "-m", "4", "--costs", str(file), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["costs_per"] == "estimate"
    main(["simulate", "zbv", "-p", "2", "-m", "4", "--costs", str(file)])
    text = "estimated costs of layers, spread evenly over the stages; setting: ac none, microbatches of 1, the first"
    assert text in " ".join(capsys.readouterr().out.split()), "whatever the terminal's width is"
    for name in ("1f1b", "zbv"):
        schedule = zp.build(name, ranks=2, microbatches=4)
        (row,) = [row for row in found["compared"] if row["schedule"] == name]
        assert row["makespan"] == pytest.approx(
            zp.simulate(schedule, COSTS.stage_costs(schedule.problem, schedule.placement)).makespan
        )
    main(["simulate", "1f1b", "-p", "2", "-m", "4", "--costs", str(file), "--memory-limit", "9KB"])
    assert "estimated costs of layers" in capsys.readouterr().out
    for wrong in (["--f", "2"], ["-p", "8"]):
        with pytest.raises(SystemExit):
            main(["simulate", "1f1b", "-p", "2", "-m", "4", "--costs", str(file), *wrong])
        assert capsys.readouterr().err.count("\n") == 1
