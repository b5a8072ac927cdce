"""Profiles: costs of layers from what was measured, corrected by runs, and the command."""

import json
from array import array
from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.cli.profile import _add_data_sheet
from zeropipe.core.model.probe import (
    LayerGroup,
    Ping,
    Probe,
    Profile,
    full_schedule,
    ping_schedule,
    split_schedule,
    stream_schedule,
)
from zeropipe.errors import ConfigError
from zeropipe.sim.costs import Link
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting
from zeropipe.sim.layer_file import from_layer_data, to_layer_json
from zeropipe.sim.profile_costs import costs_from_profile
from zeropipe.sim.refit import refit

TRUTH = {
    "stage": LayerCost(0.1, 0.05, 0.01, b=0.06, overlap=0.15, activation=3, stash=1),
    "embedding": LayerCost(0.2, 0.01, 0.3, b=0.31, overlap=0.5, activation=2, stash=2, parameters=640, message=16),
    "dense": LayerCost(1, 1.2, 0.8, b=1.9, overlap=2.7, activation=20, stash=12, parameters=90, flops=7, message=16),
    "experts": LayerCost(2, 2.5, 1.5, b=3.8, overlap=5.1, activation=40, stash=30, parameters=300, flops=9, message=16),
    "head": LayerCost(0.7, 0.9, 0.6, b=1.5, overlap=2.1, activation=50, stash=10, parameters=700, flops=3),
}
LAYERS = ("dense", "experts", "dense", "experts")
LINK = Link(0.25, 8.0)
MEASURED = ("f", "i", "w", "b", "overlap", "activation", "stash")


def profile_of(kinds, pieces, microbatches=3, link=LINK, pings=(4.0, 16.0)):
    """What a machine with exactly these costs would measure."""

    def sums(name):
        return [sum(getattr(kinds[kind], name) for kind in ("stage", *piece)) for piece in pieces]

    costs = zp.Costs(**{name: sums(name) for name in MEASURED}, unit="s", memory_unit="B")
    runs = [(zp.simulate(make(len(pieces), microbatches), costs),) for make in (split_schedule, full_schedule)]
    known = tuple(
        LayerGroup(
            piece,
            sum(kinds[k].parameters for k in piece),
            sum(kinds[k].flops for k in piece),
            kinds[piece[-1]].message,
        )
        for piece in pieces
    )
    sent = zp.Costs(f=0.5, b=0.5, p2p=link.p2p, bandwidth=link.bandwidth, unit="s")
    steps = [Ping(size, (zp.simulate(ping_schedule(3, 4), replace(sent, message=size)),)) for size in pings]
    return Profile(
        "toy", LAYERS, (Probe(known, *runs),), tuple(steps), ("a", "a", "a"), False, 128, "float32", 4, {}, {}
    )  # fmt: skip


SINGLE = [("embedding",), ("dense",), ("experts",), ("dense", "experts", "dense", "experts"), ("head",)]
WITH_LAYERS = [("embedding", "dense"), ("dense",), ("experts",), ("experts", "dense"), ("experts", "head")]


@pytest.mark.parametrize("pieces", [SINGLE, WITH_LAYERS], ids=["bare ends", "ends that need a layer"])
def test_the_costs_of_layers_are_found_in_the_pieces(pieces):
    found = costs_from_profile(profile_of(TRUTH, pieces))
    assert (found.source, found.layers, found.each, found.after) == ("profile", LAYERS, ("stage",), ("head",))
    kinds = found.settings[0].kinds
    assert kinds.keys() == TRUTH.keys()
    for name, truth in TRUTH.items():
        for field in (*MEASURED, "parameters", "flops"):
            assert getattr(kinds[name], field) == pytest.approx(getattr(truth, field)), (name, field)
    assert found.link == pytest.approx(Link(0.25, 8.0))
    assert found.inter_node == Link()
    assert from_layer_data(json.loads(to_layer_json(found))) == found


@pytest.mark.parametrize("pieces", [SINGLE, WITH_LAYERS], ids=["bare ends", "ends that need a layer"])
def test_a_fused_head_costs_something_else_with_full_backwards(pieces):
    """F then makes the gradients of its weights, which W makes with split ones."""
    full = replace(TRUTH["head"], f=1.3, i=0.9, w=0.0, b=0.9, activation=45, stash=0)
    split, whole = (profile_of({**TRUTH, "head": head}, pieces).probes[0] for head in (TRUTH["head"], full))
    probe = replace(split, full=whole.full, fused_head=True)
    found = costs_from_profile(replace(profile_of(TRUTH, pieces), probes=(probe,)))
    assert (found.after, found.after_full, found.fused_head) == (("head",), ("head-full",), True)
    kinds = found.settings[0].kinds
    assert kinds.keys() == {*TRUTH, "head-full"}
    for name in ("f", "b", "activation"):
        assert getattr(kinds["head-full"], name) == pytest.approx(getattr(full, name)), name
    for name in ("f", "i", "w", "activation", "stash"):
        assert getattr(kinds["head"], name) == pytest.approx(getattr(TRUTH["head"], name)), name
    assert kinds["head"].b == pytest.approx(full.f + full.b - TRUTH["head"].f), "where a B makes what a W makes"
    assert from_layer_data(json.loads(to_layer_json(found))) == found


def test_a_forward_before_a_split_backward_may_take_longer():
    """Then F is that one, and B what a microbatch takes beside it where its backward is whole."""
    plain = {name: replace(cost, f=cost.f / 1.1) for name, cost in TRUTH.items()}
    split, whole = (profile_of(kinds, SINGLE).probes[0] for kinds in (TRUTH, plain))
    both = replace(profile_of(TRUTH, SINGLE), probes=(replace(split, full=whole.full),))
    for name, found in costs_from_profile(both).settings[0].kinds.items():
        assert found.f == pytest.approx(TRUTH[name].f)
        assert found.f + found.b == pytest.approx(plain[name].f + TRUTH[name].b)


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_other_microbatches_are_under_way_beside_the_one_that_is_measured(ahead):
    for make, back in ((split_schedule, "I"), (full_schedule, "B")):
        schedule = make(3, 6, ahead)
        zp.check(schedule)
        place = {str(action): number for number, action in enumerate(schedule.rows[0])}
        assert place[f"2F{ahead}"] < place[f"2{back}0"] < place[f"0F{ahead + 1}"]
    place = {str(action): number for number, action in enumerate(split_schedule(3, 6, ahead).rows[0])}
    assert place[f"0I{ahead // 2}"] < place["0W0"] < place[f"0I{ahead // 2 + 1}"]


def test_costs_of_a_profile_predict_any_cut():
    """Stages of the whole model take what their pieces take, and what every stage takes once."""
    costs = costs_from_profile(profile_of(TRUTH, SINGLE)).costs((1, 3))
    assert costs.f == pytest.approx((0.1 + 0.2 + 1, 0.1 + 2 + 1 + 2 + 0.7))
    assert costs.overlap == pytest.approx((0.15 + 0.5 + 2.7, 0.15 + 5.1 + 2.7 + 5.1 + 2.1))


def test_links_of_two_machines_and_of_none():
    profile = profile_of(TRUTH, SINGLE)
    apart = costs_from_profile(replace(profile, nodes=("a", "b", "c")))
    assert apart.link == Link()
    assert apart.inter_node == pytest.approx(Link(0.25, 8.0))
    assert costs_from_profile(replace(profile, pings=())).link == Link()
    same = costs_from_profile(profile_of(TRUTH, SINGLE, link=Link(0.25, None)))
    assert same.link == pytest.approx(Link(0.25, None))  # no bandwidth is seen


def stream_of(sending, receiving):
    """What is recorded where ranks spend time on messages: an action begins behind what it takes, and ends before."""
    schedule = stream_schedule(3, 6)
    up, back = [1, 2, 3], [3, 2, 1]
    extra = [(0, sending), (receiving, sending), (receiving, 0)]
    f, b = ([t + x + y for t, (x, y) in zip(times, both)] for times, both in ((up, extra), (back, extra[::-1])))
    timeline = zp.simulate(schedule, zp.Costs(f=f, b=b, unit="s"))
    start, end = array("d", timeline.start), array("d", timeline.end)
    for at, action in enumerate(action for row in schedule.rows for action in row):
        before, behind = extra[action.stage] if action.kind.name == "F" else extra[2 - action.stage]
        start[at] += before
        end[at] -= behind
    return replace(timeline, start=start.tobytes(), end=end.tobytes())


def test_what_ranks_spend_on_messages_is_told_from_their_latency():
    sending, receiving = 0.05, 0.02
    profile = replace(profile_of(TRUTH, SINGLE), streams=(stream_of(sending, receiving),))
    found = costs_from_profile(profile)
    assert (found.sending, found.receiving) == pytest.approx((sending, receiving))
    assert found.link == pytest.approx(Link(0.25 - sending - receiving, 8.0))
    assert from_layer_data(json.loads(to_layer_json(found))) == found
    silent = costs_from_profile(profile_of(TRUTH, SINGLE))
    assert (silent.sending, silent.receiving) == (0, 0)


def test_messages_are_part_of_the_actions_of_a_rank():
    costs = replace(truth_costs(), sending=0.05, receiving=0.02)
    counts = (1, 1, 1, 1)
    vee = zp.build("zbv", ranks=2, microbatches=4)  # stages 1 and 2 share a rank: no message
    plain, priced = (one.costs(counts, placement=vee.placement) for one in (truth_costs(), costs))
    more = {name: [a - b for a, b in zip(getattr(priced, name), getattr(plain, name))] for name in "fiwb"}
    assert more["f"] == pytest.approx([0.05, 0.02, 0.05, 0.02])
    assert more["i"] == more["b"] == pytest.approx([0.02, 0.05, 0.02, 0.05])
    assert more["w"] == [0, 0, 0, 0]
    assert priced.overlap == pytest.approx([x + 0.07 for x in plain.overlap])
    line = costs.costs(counts)
    assert line.f[1] == pytest.approx(truth_costs().costs(counts).f[1] + 0.07)


def test_the_data_sheet_of_a_known_gpu_is_added():
    profile = profile_of(TRUTH, SINGLE)
    found = _add_data_sheet(replace(profile, machine={"gpu": "NVIDIA H200", "memory": 1}, bytes_per_number=2))
    assert (found["memory"], found["peak_flops"], found["bandwidth"]) == (1, 989.4e12, 4.8e12)
    assert _add_data_sheet(replace(profile, machine={"gpu": "Abacus"})) == {"gpu": "Abacus"}


def test_what_is_wrong_in_few_measurements_is_left_out():
    profile = profile_of(TRUTH, SINGLE)
    probe = profile.probes[0]
    slow = zp.simulate(split_schedule(5, 3), zp.Costs(f=99, i=99, w=99, unit="s", memory_unit="B"))
    noisy = replace(probe, split=(*probe.split * 20, slow), full=probe.full * 20)
    kinds = costs_from_profile(replace(profile, probes=(noisy,))).settings[0].kinds
    assert kinds["dense"].f == pytest.approx(1)
    assert kinds["dense"].spread["f"] == pytest.approx(0)


def truth_costs():
    return LayerCosts(
        "toy", "profile", LAYERS, (Setting(TRUTH),), after=("head",), each=("stage",), link=Link(0.2, 64.0)
    )


@pytest.mark.parametrize(
    "name,counts", [("zb-h1", (1, 1, 1, 1)), ("1f1b", (2, 0, 1, 1)), ("zbv", (1, 0, 1, 0, 1, 0, 0, 1))]
)
def test_a_run_corrects_costs_of_layers(name, counts):
    schedule, truth = zp.build(name, ranks=4, microbatches=8), truth_costs()
    run = replace(zp.simulate(schedule, truth.costs(counts)), measured=True)
    wrong = {
        kind: replace(cost, f=cost.f * 1.3, i=cost.i * 0.8, w=cost.w * 1.1, b=cost.b * 0.7)
        for kind, cost in TRUTH.items()
    }
    guess = replace(truth, settings=(Setting(wrong), Setting(TRUTH, ac="full")), link=Link(0.5, 64.0))
    better = refit(guess, run, counts)
    assert zp.simulate(schedule, better.costs(counts)).makespan == pytest.approx(run.makespan, rel=2e-3)
    assert zp.simulate(schedule, guess.costs(counts)).makespan != pytest.approx(run.makespan, rel=2e-2)
    assert better.link == pytest.approx(Link(0.2, 64.0), rel=1e-3)
    assert better.settings[1] == guess.settings[1]
    has_weights = name != "1f1b"
    assert (better.settings[0].kinds["dense"].w == wrong["dense"].w) is not has_weights, "only what the run has"


def test_the_medians_of_several_steps_correct():
    """One slow step among three changes nothing."""
    schedule, truth, counts = zp.build("zb-h1", ranks=4, microbatches=8), truth_costs(), (1, 1, 1, 1)
    slow = replace(truth, settings=(Setting({kind: replace(cost, f=3 * cost.f) for kind, cost in TRUTH.items()}),))
    steps = [zp.simulate(schedule, costs.costs(counts)) for costs in (truth, slow, truth)]
    better = refit(slow, steps, counts)
    assert zp.simulate(schedule, better.costs(counts)).makespan == pytest.approx(steps[0].makespan, rel=2e-3)


def test_runs_that_cannot_correct_are_refused():
    run = zp.simulate(zp.build("1f1b", ranks=2, microbatches=4), zp.Costs(unit="s"))
    with pytest.raises(ConfigError, match="the run has 2 stages"):
        refit(truth_costs(), run, (1, 1, 2))
    with pytest.raises(ConfigError, match="are in seconds"):
        refit(truth_costs(), replace(run, unit=""), (2, 2))
    other = zp.simulate(zp.build("zb-h1", ranks=2, microbatches=4), zp.Costs(unit="s"))
    with pytest.raises(
        ConfigError, match=r"^there are steps of 1f1b \(2 ranks, .*\) and of zb-h1 .*: must be of one schedule$"
    ):
        refit(truth_costs(), [run, other], (2, 2))


# --- on the engine


@pytest.fixture(scope="module")
def measured():
    """A tiny model of two kinds of layers, measured in two modes."""
    pytest.importorskip("torch", reason="needs torch")
    from engine_helpers import ranks
    from profile_cases import CONFIG, SEQUENCE

    from zeropipe.profiling.measure import profile
    from zeropipe.profiling.spec import ProfileJob, list_settings

    settings = list_settings(("none", "selective:2"), (1,), (False,))
    job = ProfileJob("tiny", CONFIG, settings, sequence=SEQUENCE, steps=1, microbatches=2)
    return costs_from_profile(ranks(2).run(profile, job)[0])


def test_kinds_parameters_and_messages_are_the_models(measured):
    from profile_cases import CONFIG, SEQUENCE
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    assert measured.layers == ("dense", "experts", "dense", "experts")
    assert [setting.ac for setting in measured.settings] == ["none", "full"]
    kinds = measured.settings[0].kinds
    total = sum(kinds[kind].parameters for kind in (*measured.before, *measured.layers, *measured.after))
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert measured.message_bytes(measured.settings[0]) == SEQUENCE * CONFIG["hidden_size"] * 4
    for setting in measured.settings:
        for kind in ("dense", "experts"):
            cost = setting.kinds[kind]
            assert min(cost.f, cost.i, cost.w, cost.full_backward, cost.overlapped) > 0
    assert measured.link.p2p is not None
    assert measured.versions["torch"]
    assert kinds["head"].flops == 2 * SEQUENCE * 32 * 64
    estimated = zp.estimate(CONFIG, sequence=SEQUENCE).settings[0].kinds
    assert {kind: kinds[kind].flops for kind in measured.layers} == {k: estimated[k].flops for k in measured.layers}


def test_packed_samples_are_measured_packed():
    """And cost the FLOPs of their own lengths."""
    pytest.importorskip("torch", reason="needs torch")
    from engine_helpers import ranks
    from profile_cases import CONFIG, SEQUENCE

    from zeropipe.profiling.measure import profile
    from zeropipe.profiling.spec import ProfileJob

    job = ProfileJob("tiny", CONFIG, sequence=SEQUENCE, steps=1, microbatches=2, sample=SEQUENCE // 4)
    costs = costs_from_profile(ranks(1).run(profile, job)[0])
    assert (costs.sequence, costs.sample) == (SEQUENCE, SEQUENCE // 4)
    kinds, estimated = costs.settings[0].kinds, zp.estimate(CONFIG, sequence=SEQUENCE, sample=SEQUENCE // 4)
    wanted = estimated.settings[0].kinds
    assert {kind: kinds[kind].flops for kind in costs.layers} == {kind: wanted[kind].flops for kind in costs.layers}
    assert costs.message_bytes(costs.settings[0]) == SEQUENCE * CONFIG["hidden_size"] * 4


@pytest.mark.parametrize("ac", ["selective:2", *(pytest.param(ac, marks=pytest.mark.full) for ac in ("none", "full"))])
def test_the_memory_of_a_run_is_the_sum_of_its_layers(measured, ac):
    """Measured piece by piece, predicted for a cut, and recorded from the whole model: the same bytes."""
    from engine_helpers import ranks
    from profile_cases import recorded

    schedule = zp.build("zb-h1", ranks=2, microbatches=3)
    run = ranks(2).run(recorded, schedule, (1, 3), ac)[0]
    costs = measured.costs((1, 3), measured.setting(ac="full" if ac == "full" else "none"), ac=ac)
    guess = zp.simulate(schedule, replace(costs, weights=0.0, first_gradients=0.0, workspace=0.0, i_workspace=0.0))
    tables = 1024  # of a stage's rotary embeddings, which checkpointed layers do not keep
    assert guess.peak_memory == pytest.approx(run.peak_memory, rel=0.01, abs=tables)


def test_what_selective_checkpointing_keeps_is_counted():
    """A layer holds its input and the results of its products, which are counted here in a plain forward."""
    pytest.importorskip("torch", reason="needs torch")
    from engine_helpers import ranks
    from profile_cases import held_by_a_layer, recorded

    schedule = zp.build("gpipe", ranks=2, microbatches=1)
    more = []
    for layers in ((1, 3), (3, 1)):
        run = ranks(2).run(recorded, schedule, layers, "selective:op")[0]
        more.append(run.peak_memory[0])
    assert (more[1] - more[0]) == held_by_a_layer(1) + held_by_a_layer(2)


# --- the command


def test_costs_of_layers_are_compared_with_a_run_and_corrected(run, tmp_path):
    schedule, truth = zp.build("1f1b", ranks=2, microbatches=4), truth_costs()
    recorded = replace(zp.simulate(schedule, truth.costs((3, 1))), measured=True)
    doubled = {kind: replace(cost, f=2 * cost.f) for kind, cost in TRUTH.items()}
    files = {"run": zp.to_json(recorded), "costs": to_layer_json(replace(truth, settings=(Setting(doubled),)))}
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    costs, better, other = (tmp_path / f"{name}.json" for name in ("costs", "better", "other"))
    command = ("trace", "compare", tmp_path / "run.json", "--costs", costs, "--layers", "3,1")
    facts = json.loads(run(*command, "-o", better, "--json")[1])
    assert {r["stage"]: r["ratio"] for r in facts["residuals"] if r["kind"] == "F"} == pytest.approx({0: 0.5, 1: 0.5})
    again = json.loads(
        run("trace", "compare", tmp_path / "run.json", "--costs", better, "--layers", "3,1", "--json")[1]
    )
    assert again["measured_over_simulated"] == pytest.approx(1, rel=2e-3)
    fit = ("--fit", tmp_path / "run.json") * 2
    status, out, err = run("profile", costs, *fit, "--layers", "3,1", "-o", other)
    assert (status, err) == (0, "")
    assert "measured" in out
    assert json.loads(other.read_text()) == json.loads(better.read_text())


def test_a_run_corrects_the_setting_that_is_named(run, tmp_path):
    schedule, truth = zp.build("1f1b", ranks=2, microbatches=4), truth_costs()
    recorded = replace(zp.simulate(schedule, truth.costs((3, 1))), measured=True)
    doubled = {kind: replace(cost, f=2 * cost.f) for kind, cost in TRUTH.items()}
    two = replace(truth, settings=(Setting(doubled), Setting(doubled, ac="full")))
    run_file, costs, better = (tmp_path / f"{name}.json" for name in ("run", "costs", "better"))
    run_file.write_text(zp.to_json(recorded))
    costs.write_text(to_layer_json(two))
    for command in (("profile", costs, "--fit", run_file), ("trace", "compare", run_file, "--costs", costs)):
        status, _, err = run(*command, "--layers", "3,1", "-o", better)
        assert (status, "the costs are of ac none and of ac full; set the one of the run with --ac" in err) == (2, True)
    assert run("profile", costs, "--fit", run_file, "--layers", "3,1", "--ac", "full", "-o", better)[0] == 0
    none, full = (setting["kinds"]["dense"]["f"] for setting in json.loads(better.read_text())["settings"])
    assert none == doubled["dense"].f
    assert full < 0.7 * none


@pytest.mark.parametrize(
    "args,words",
    [
        (("costs.json", "--fit", "seconds.json", "--ac", "full"), "no setting with ac=full"),
        (("costs.json", "--fit", "seconds.json", "--sequence", "64"), "--sequence: set by the costs in costs.json"),
        (("nowhere",), "must be a directory with config.json"),
        (("qwen3-8b", "--num-layers", "3"), "only for tiny models"),
        (("tiny-qwen3", "--ac", "half"), "activation checkpointing 'half'"),
        (("tiny-qwen3", "--ac", "memory_budget:0.5"), "use --compile"),
        (("tiny-qwen3", "--ranks", "9999"), "too many processes"),
        (("qwen3-30b-a3b", "--ep", "8"), "--ep 8: a profile measures experts that are not divided; record a step with"),
        (("tiny-qwen3", "-o", "x.txt"), "must end in .json"),
        (("tiny-qwen3", "--layers", "2,2"), "the run that --fit names"),
        (("costs.json",), "pass --fit"),
        (("costs.json", "--fit", "nowhere.json"), "cannot read"),
        (("costs.json", "--fit", "costs.json"), "costs.json"),
        (("tiny-qwen3", "--fit", "nowhere.json"), "cannot read nowhere.json"),  # and nothing is measured before
        (("tiny-qwen3", "--fit", "timeline.json"), "timeline.json: the run's times are in no unit"),
        (("config.json",), "not a model's configuration"),
        (("broken.json",), "not JSON"),
        (("folder",), "no config.json"),
    ],
)
def test_mistakes_end_in_one_line(run, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.json").write_text(to_layer_json(truth_costs()))
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "timeline.json").write_text(zp.to_json(zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))))
    seconds = zp.simulate(zp.build("1f1b", ranks=2, microbatches=2), zp.Costs(unit="s"))
    (tmp_path / "seconds.json").write_text(zp.to_json(seconds))
    (tmp_path / "folder").mkdir()
    status, out, err = run("profile", *args)
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert words in err
