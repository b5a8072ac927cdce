"""Costs of layers on the command line: which setting counts, and how the model is cut, or was in a recorded run."""

import json
from dataclasses import replace

import pytest
import toy_costs

import zeropipe as zp
from zeropipe.core.formats.json import from_json, to_json
from zeropipe.core.timeline import Origin
from zeropipe.errors import ScheduleError
from zeropipe.sim.layer_costs import LayerCost
from zeropipe.sim.layer_file import from_layer_data, to_layer_json

HEAD = {"head": LayerCost(2, 2, 2)}  # so much that an even cut is not the best
SETTINGS = tuple(replace(one, kinds={**one.kinds, **HEAD}) for one in toy_costs.COSTS.settings)
COSTS = replace(toy_costs.COSTS, settings=SETTINGS, sequence=128)
SIZES = ("--ranks", 2, "--microbatches", 4)


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(to_layer_json(COSTS))
    return path


@pytest.mark.parametrize(
    "name, flags, layers, ac, size",
    [
        ("1f1b", (), (2, 2), "none", 1),
        ("1f1b", ("--balance", "even", "--microbatch", 2), (2, 2), "none", 2),
        ("1f1b", ("--layers", "even", "--microbatch-size", 2), (2, 2), "none", 2),
        ("1f1b", ("--layers", "3,1", "--ac", "full"), (3, 1), "full", 1),
        ("1f1b", ("--balance", "time"), (3, 1), "none", 1),
        ("1f1b", ("--layers", "balanced"), (3, 1), "none", 1),
        ("zbv", ("--balance", "time", "--ac", "selective:2"), (1, 1, 2, 0), "selective:2", 1),
    ],
)
def test_flags_choose_the_setting_and_the_cut(run, costs, name, flags, layers, ac, size):
    status, out, err = run("simulate", name, *SIZES, "--costs", costs, *flags, "--json")
    assert status == 0, err
    found, schedule = json.loads(out), zp.build(name, ranks=2, microbatches=4)
    wanted = COSTS.costs(layers, COSTS.setting(ac=ac, microbatch_size=size), ac=ac, placement=schedule.placement)
    assert tuple(found["layers"]) == layers
    assert found["makespan"] == pytest.approx(zp.simulate(schedule, wanted).makespan)
    if "balanced" in flags or "time" in flags:
        assert zp.balance(COSTS, schedule, ac=ac).counts == layers
    _, out, _ = run("compare", name, *SIZES, "--costs", costs, *flags, "--json")
    (row,) = json.loads(out)["compared"]
    assert (tuple(row["layers"]), row["makespan"]) == (layers, pytest.approx(found["makespan"]))


def test_words_say_what_counts(run, costs):
    words = "measured costs of layers, "
    first = "setting: ac none, microbatches of 1, the first in the file"
    assert f"{words}spread evenly over the stages; {first}" in run("simulate", "1f1b", *SIZES, "--costs", costs)[1]
    flags = ("--costs", costs, "--balance", "time")
    assert f"{words}balanced over the stages: 3,1; {first}" in run("show", "1f1b", *SIZES, *flags)[1]
    chosen = "balanced over the stages; setting: ac selective:2, microbatches of 1"
    assert f"{words}{chosen}\n" in run("compare", "1f1b", *SIZES, *flags, "--ac", "selective:2")[1]
    searched = run("search", *SIZES, *flags, "--search-steps", 5, "--json")[1]
    assert json.loads(searched)["layers"] == [3, 1]


@pytest.mark.parametrize(
    "flags, line",
    [
        (("--ac", "selective:op"), "the costs of toy have no setting with ac=selective:op: must be one of ac none, "),
        (("--layers", "4,1"), "layers=[4, 1] adds up to 5: the model has 4 layers"),
        (("--layers", "1,2,1"), "layers=[1, 2, 1] has 3 entries: the schedule has 2 stages"),
        (("--layers", "some"), "--layers 'some': must be one number per stage, like 2,3,3,2"),
    ],
)
def test_what_the_costs_do_not_have_is_named(run, costs, flags, line):
    status, _, err = run("simulate", "1f1b", *SIZES, "--costs", costs, *flags)
    assert status == 2
    assert err.startswith(f"zeropipe: {line}")


def test_flags_for_layers_need_costs_of_layers(run, costs):
    for flag in ("--ac", "full"), ("--tp", 2), ("--microbatch", 2), ("--layers", "2,2"), ("--balance", "even"):
        line = f"zeropipe: {flag[0]} {flag[1]}: only costs of layers depend on it; pass --costs FILE of "
        assert run("simulate", "zbv", *SIZES, *flag)[2].startswith(line)
    shared = "--balance time depends on which stages share a rank: pass --placement vee or loop"
    assert shared in run("search", *SIZES, "-v", 2, "--costs", costs, "--balance", "time")[2]
    both = ("--balance", "time", "--layers", "3,1")
    assert (
        "--balance time and --layers 3,1: use one of them"
        in run("simulate", "1f1b", *SIZES, "--costs", costs, *both)[2]
    )


def test_schedules_with_more_stages_than_layers_are_left_out_of_all(run, costs):
    sizes = ("--ranks", 4, "--microbatches", 8)
    rows = json.loads(run("compare", "all", *sizes, "--costs", costs, "--json")[1])
    assert {row["num_stages"] for row in rows["compared"]} == {4}
    assert "8 stages for 4 layers" in {r["schedule"]: r["reason"] for r in rows["refused"]}["zbv"]
    assert "8 stages for 4 layers" in run("compare", "zbv", *sizes, "--costs", costs)[2]


def test_the_page_starts_with_the_costs_of_stages(costs):
    from zeropipe.cli.app import page_query
    from zeropipe.cli.request import create_request

    given = {"ranks": (2,), "microbatches": (4,), "stages_per_rank": None, "pairs": (), "costs_file": str(costs)}
    found = page_query(create_request(["1f1b", "zbv"], {**given, "layers": "3,1"}))
    times = ",".join(map(str, COSTS.costs((3, 1)).f))
    assert f"schedules=1f1b,zbv&f={times}&" in found


ORIGIN = Origin((3, 1), "full", sequence=COSTS.sequence, dtype="bfloat16")


@pytest.fixture
def measured(tmp_path):
    """A file with a run that took exactly what the costs say."""

    def write(**origin):
        found, schedule = replace(ORIGIN, **origin), zp.build("zb-h1", ranks=2, microbatches=4)
        costs = COSTS.costs((3, 1), COSTS.setting(ac="full"), placement=schedule.placement)
        path = tmp_path / "measured.json"
        path.write_text(to_json(replace(zp.simulate(schedule, costs), measured=True, origin=found)))
        return path

    return write


def test_a_recording_tells_its_cut_and_its_setting(run, costs, measured, tmp_path):
    path, corrected = measured(), tmp_path / "corrected.json"
    assert from_json(path.read_text()).origin == ORIGIN
    assert run("trace", "compare", path, "--costs", costs, "-o", corrected)[0] == 0
    assert run("profile", costs, "--fit", path, "-o", corrected)[0] == 0
    before, after = (
        from_layer_data(json.loads(file.read_text())).setting(ac="full").kinds for file in (costs, corrected)
    )
    for kind, cost in before.items():
        assert [after[kind].f, after[kind].i, after[kind].w] == pytest.approx([cost.f, cost.i, cost.w])
    assert json.loads(path.read_text())["origin"]["layers"] == [3, 1]


@pytest.mark.parametrize(
    "origin, flags, line",
    [
        ({}, ("--ac", "none"), "--ac none: the run had full; leave it out"),
        ({}, ("--layers", "2,2"), "--layers 2,2: the run had 3,1; leave it out"),
        ({"layers": (2, 1)}, (), "the run's model has 3 layers, toy has 4: use costs of that model"),
        ({"sequence": 64}, (), "the run has sequences of 64 tokens, the costs are for 128 tokens; create costs with"),
        ({"dtype": "float32"}, (), "the run has dtype float32, the costs bf16; create costs with --dtype float32"),
        ({"compile": True}, (), "the costs of toy have no setting with ac=full, microbatch_size=1, tp=1, compile=True"),
        ({"lora": True}, (), "the run trains an adapter (LoRA), costs are for training all weights"),
    ],
)
def test_costs_of_something_else_than_a_recording_are_refused(run, costs, measured, origin, flags, line):
    path = measured(**origin)
    for command in ("trace", "compare", path, "--costs", costs), ("profile", costs, "--fit", path):
        assert line in run(*command, *flags)[2]


@pytest.mark.parametrize("wrong", [{"layers": [3]}, {"ac": "some"}, {"ac": None}, {"tp": 0}, {"compile": 1}, {"x": 1}])
def test_an_origin_that_no_run_had_is_named(measured, wrong):
    data = json.loads(measured().read_text())
    data["origin"] |= wrong
    with pytest.raises(ScheduleError, match=r"origin is .*(which is invalid|a table with layers, ac)"):
        from_json(json.dumps(data))
