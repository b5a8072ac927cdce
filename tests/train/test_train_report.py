"""The report of a run: what it says is true of timelines whose losses are known, and it opens in a browser."""

import itertools
import json
import random
import re
from array import array
from dataclasses import replace

import pytest
from browser import PHONE
from reference_simulator import reference_simulate

import zeropipe as zp

pytest.importorskip("pydantic", reason="needs pydantic")
from zeropipe.core.timeline import Origin
from zeropipe.sim.compare import compare
from zeropipe.sim.layer_file import to_layer_json
from zeropipe.train.config.tables import (
    DataTable,
    EngineTable,
    MeshTable,
    ModelTable,
    RunConfig,
    ScheduleTable,
    TrainTable,
)
from zeropipe.train.inputs import build_schedule, choose_layers, load_layer_costs
from zeropipe.train.report.drift import MAX_ROWS, compare_steps, predict_from_costs, predict_from_first
from zeropipe.train.report.hints import give_hint
from zeropipe.train.report.page import predict_steps, write_report
from zeropipe.train.report.recorded_steps import RecordedStep, load_steps, save_step
from zeropipe.train.report.recorder import Recorder
from zeropipe.viz.article.chart import MAX_POINTS, thinned

EVEN = zp.Costs(f=0.010, i=0.010, w=0.010, p2p=0.0, unit="s", memory_unit="B", activation=1e6)


def config_of(name, *, ranks=4, microbatches=16, size=1, **engine):
    return RunConfig(
        model=ModelTable(path="models/<i>tiny"), mesh=MeshTable(pp=ranks), schedule=ScheduleTable(name=name),
        data=DataTable(batch=microbatches * size, microbatch=size), engine=EngineTable(**engine),
    )  # fmt: skip


def recorded_of(schedule, costs=EVEN, step=10, outside=0.0):
    timeline = replace(zp.simulate(schedule, costs), measured=True)
    return RecordedStep(step, timeline, timeline.makespan + outside)


def disturbed(recorded, late):
    """The same step, in which every action starts `late` later than the one before it has ended."""
    t = recorded.timeline
    start, end = memoryview(t.start).cast("d").tolist(), memoryview(t.end).cast("d").tolist()
    for rank in range(t.num_ranks):
        begin, stop = t.schedule.packed.offsets[rank : rank + 2]
        for n, at in enumerate(range(begin, stop)):
            start[at], end[at] = start[at] + n * late, end[at] + n * late
    as_bytes = [array("d", column).tobytes() for column in (start, end)]
    timeline = replace(t, start=as_bytes[0], end=as_bytes[1])
    return RecordedStep(recorded.step, timeline, timeline.makespan)


def test_a_slow_last_stage_asks_for_the_layers_that_an_exhaustive_search_finds():
    schedule, layers = zp.build("1f1b", ranks=4, microbatches=16), (4, 4, 4, 4)
    head = 6  # the head takes as long as so many layers
    times = {k: [0.001 * n for n in (4, 4, 4, 4 + head)] for k in "fiw"}
    found = give_hint(config_of("1f1b"), recorded_of(schedule, replace(EVEN, **times)), layers)
    assert found.cause == "imbalance"
    assert "rank 3" in found.text
    said = json.loads(re.search(r"`schedule\.layers = (\[[\d, ]+\])`", found.text)[1])
    cuts = (c for c in itertools.product(range(17), repeat=4) if sum(c) == 16)
    fastest = min(max(*cut[:3], cut[3] + head) for cut in cuts)
    assert sum(said) == 16
    assert max(*said[:3], said[3] + head) == fastest


def test_a_bubble_of_the_schedule_names_a_schedule_that_is_faster_within_the_same_memory():
    schedule = zp.build("1f1b", ranks=4, microbatches=8)
    found = give_hint(config_of("1f1b", microbatches=8), recorded_of(schedule), (4, 4, 4, 4))
    assert found.cause == "schedule"
    name = re.search(r'`schedule\.name = "([\w-]+)"`', found.text)[1]
    now, then = compare([schedule, zp.build(name, ranks=4, microbatches=8)], EVEN)
    assert then.makespan < now.makespan
    assert max(then.peak_memory) <= 1.06 * max(now.peak_memory)
    assert f"({100 * (then.makespan / now.makespan - 1):+.0f}%)" in found.text


def test_without_layers_for_more_stages_more_microbatches_are_proposed():
    schedule = zp.build("zb-h1", ranks=4, microbatches=4)
    of = config_of("zb-h1", microbatches=4, size=2)
    found = give_hint(of, recorded_of(schedule), (1, 1, 1, 1))
    assert found.cause == "schedule"
    assert "`data.microbatch = 1`" in found.text
    assert "`data.batch = 8`" in give_hint(config_of("zb-h1", microbatches=4), recorded_of(schedule), (1, 1, 1, 1)).text


def test_slow_messages_are_communication():
    schedule = zp.build("zbv", ranks=4, microbatches=16)
    found = give_hint(config_of("zbv"), recorded_of(schedule, replace(EVEN, p2p=0.03)), (1,) * 8)
    assert found.cause == "communication"
    assert "30 ms" in found.text
    assert "`schedule.name = " in found.text


def test_pauses_between_actions_are_overhead_and_ask_for_larger_microbatches():
    schedule = zp.build("gpipe", ranks=1, microbatches=16)
    found = give_hint(config_of("gpipe", ranks=1), disturbed(recorded_of(schedule), 0.004), (4,))
    assert found.cause == "overhead"
    assert "`data.microbatch = 2`" in found.text
    assert "`engine.compile = true`" in found.text


def test_time_outside_the_pipeline_is_named():
    schedule = zp.build("zbv", ranks=4, microbatches=16)
    found = give_hint(config_of("zbv"), recorded_of(schedule, outside=1.0), (1,) * 8)
    assert found.cause == "outside"
    assert "optimizer" in found.text


def test_irregular_times_ask_for_dynamic_weights_once():
    schedule = zp.build("zbv", ranks=4, microbatches=16)
    chance = random.Random(0)
    times = reference_simulate(schedule, lambda _: chance.choice((0.001, 0.02)))  # every stage has the same mean
    places = [times[span.action] for rank in range(4) for span in zp.simulate(schedule).spans(rank)]
    start, end = (array("d", column).tobytes() for column in zip(*places, strict=True))
    timeline = replace(zp.simulate(schedule, EVEN), start=start, end=end, measured=True)
    bad = RecordedStep(10, timeline, timeline.makespan)
    found = give_hint(config_of("zbv"), bad, (1,) * 8)
    assert found.cause == "jitter"
    assert "`engine.dynamic_weights = true`" in found.text
    assert "dynamic_weights" not in give_hint(config_of("zbv", dynamic_weights=True), bad, (1,) * 8).text


SHARDED = {"shards": "keep", "unshard": 0.01, "reduce": 0.02, "units": 4, "full_weights": 1e6, "full_gradients": 1e6}


def numbers_of(text):
    """`schedule.name`, `data.microbatch` and so on, in the order in which a hint proposes them."""
    return re.findall(r"`([a-z_]+\.[a-z_]+) = ", text)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("unshard", [0.01, 0.3])
def test_a_hint_for_sharded_stages_never_predicts_what_does_not_change(name, size, unshard):
    """Predictions have the gathers and reductions of the run, and a larger batch is proposed last."""
    schedule = zp.build(name, ranks=1, microbatches=4) if name != "zbv" else zp.build(name, ranks=2, microbatches=4)
    ranks = schedule.num_ranks
    costs = replace(EVEN, **{**SHARDED, "unshard": unshard})
    found = give_hint(config_of(name, ranks=ranks, microbatches=4, size=size), recorded_of(schedule, costs), None)
    assert found.cause == "communication"
    for less in re.findall(r"predicted to take ([\d.]+)% less time", found.text):
        assert float(less) >= 1
    for before, after in re.findall(r"from ([\d.]+%) to ([\d.]+%)", found.text):
        assert before != after
    if size == 2 and ranks == 1:  # half the size saves nothing where no rank waits for another
        assert "data.microbatch" not in found.text
    if "data.batch" in numbers_of(found.text):
        assert "changes the training" in found.text
        twice = zp.build(name, ranks=ranks, microbatches=8)
        gain = 1 - zp.simulate(twice, costs).makespan / zp.simulate(schedule, costs).makespan / 2
        assert f"{100 * gain:.1f}% less time" in found.text


def test_regathered_weights_are_proposed_to_be_kept():
    schedule = zp.build("1f1b", ranks=2, microbatches=8)
    costs = replace(EVEN, **{**SHARDED, "shards": "regather", "unshard": 0.05})
    run = recorded_of(schedule, costs)
    found = give_hint(config_of("1f1b", ranks=2, microbatches=8), run, (1, 1))
    assert found.cause == "communication"
    assert numbers_of(found.text) == ["engine.shards"]
    kept = zp.simulate(schedule, replace(costs, shards="keep"))
    change = 100 * (kept.makespan / run.timeline.makespan - 1)
    said = float(re.search(r"\(([+-]\d+)%\)", found.text)[1])
    assert change - 1 <= said < -1  # each action waits for a gather, so the run does not show how long it takes alone


def test_what_does_not_change_the_training_is_proposed_first():
    schedule = zp.build("1f1b", ranks=1, microbatches=3)
    odd = config_of("1f1b", ranks=1, microbatches=3)
    pauses = give_hint(odd, disturbed(recorded_of(schedule), 0.01), (4,))
    assert numbers_of(pauses.text) == ["engine.compile", "data.microbatch", "data.batch"]
    replicas = odd.model_copy(update={"mesh": MeshTable(dp_replicate=4)})
    outside = give_hint(replicas, recorded_of(schedule, outside=1.0), (4,))
    assert numbers_of(outside.text) == ["mesh.dp_shard", "mesh.dp_replicate"]
    alone = give_hint(odd, recorded_of(schedule, outside=1.0), (4,))
    assert "changes the training" in alone.text


def test_a_good_run_is_left_alone():
    schedule = zp.build("zbv", ranks=4, microbatches=32)
    found = give_hint(config_of("zbv", microbatches=32), recorded_of(schedule), (1,) * 8)
    assert found.cause == "nothing"


def test_drift_is_measured_over_predicted_and_has_the_first_and_the_last_of_many_steps():
    schedule = zp.build("1f1b", ranks=2, microbatches=4)
    slower = [replace(EVEN, **{k: getattr(EVEN, k) * (1 + n / 1000) for k in "fiw"}) for n in range(0, 301, 2)]
    recorded = [recorded_of(schedule, costs, step) for step, costs in enumerate(slower)]
    rows = compare_steps(recorded, predict_from_first(recorded))
    assert len(rows) == MAX_ROWS < len(recorded)
    assert (rows[0].step, rows[-1].step) == (0, 150)
    assert rows[0].ratio == pytest.approx(1.0)
    assert rows[-1].ratio == pytest.approx(1.3)
    assert sum(rows[-1].lost) == pytest.approx(rows[-1].measured - sum(recorded[-1].timeline.busy) / 2)
    half = compare_steps(
        recorded[:1], predict_from_costs(replace(EVEN, f=0.005, i=0.005, w=0.005), "given", recorded[:1])
    )
    assert half[0].ratio == pytest.approx(2.0)


def test_a_long_curve_is_thinned_by_means_and_keeps_its_end():
    points = tuple((float(n), float(n % 2)) for n in range(100_000))
    found = thinned((*points, (100_000.0, float("nan"))))
    assert len(found) == MAX_POINTS
    assert found[-1] == points[-1]
    assert all(abs(y - 0.5) < 0.02 for _, y in found[:-1])


def test_the_report_names_both_numbers_of_tokens_and_reads_older_metrics(tmp_path):
    schedule = zp.build("1f1b", ranks=4, microbatches=8)
    recorded = [recorded_of(schedule, step=10, outside=0.01)]

    def report(**speeds):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 10, "loss": 1.0, **speeds}) + "\n")
        write_report(config_of("1f1b", microbatches=8), recorded, tmp_path / "report.html", layers=(1,) * 4)
        return (tmp_path / "report.html").read_text()

    new = report(processed_tokens_per_second=5432.0, loss_tokens_per_second=1234.0, tokens_per_second=1234.0)
    assert new.index("tokens per second, processed") < new.index("5432") < new.index("tokens per second, with a loss")
    old = report(tokens_per_second=1234.0)
    assert old.index("tokens per second, with a loss") < old.index("1234")
    assert "tokens per second, processed" not in old
    assert "GPU memory" not in old
    assert "1 GB more are reserved" in report(memory=3e9, reserved_memory=4e9)


def test_the_page_opens_offline_on_every_screen(watched, tmp_path):
    schedule = zp.build("1f1b", ranks=4, microbatches=8)
    recorded = [recorded_of(schedule, step=step, outside=0.01) for step in (10, 20, 30)]
    lines = [{"step": n, "loss": 5 / n, "tokens_per_second": 1000.0} for n in range(1, 31)]
    lines[19]["evaluation_loss"] = 0.3
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 31, "lo'  # the last line is being written
    (tmp_path / "metrics.jsonl").write_text(text)
    write_report(config_of("1f1b", microbatches=8), recorded, tmp_path / "report.html", layers=(1,) * 4)
    page = watched(f"file://{tmp_path / 'report.html'}")
    assert page.inner_text("h1") == "<i>tiny trained with 1f1b"
    assert page.locator(".zp-chart").count() == 2
    assert "schedule.name" in page.inner_text(".zp-advice code")
    assert page.locator(".zp-table tbody tr").count() == 3
    assert page.locator(".zp-panel").count() == 2
    page.locator(".zp-chart-plot").first.hover(position={"x": 1, "y": 40})
    assert "training" in page.inner_text(".zp-chart-card >> nth=0")
    assert "5" in page.inner_text(".zp-chart-card b >> nth=0")
    before = page.evaluate("getComputedStyle(document.querySelector('.zp-figures > div')).backgroundColor")
    page.evaluate("zeropipeViewer.actions.theme()")
    assert page.evaluate("getComputedStyle(document.querySelector('.zp-figures > div')).backgroundColor") != before
    phone = watched(f"file://{tmp_path / 'report.html'}", size=PHONE)
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_nothing_is_written_before_a_step_is_recorded(tmp_path):
    write_report(config_of("1f1b"), [], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_keeps_what_was_recorded_before_and_is_compared_with_its_own_first_step(tmp_path):
    before, after = zp.build("zbv", ranks=4, microbatches=8), zp.build("1f1b", ranks=2, microbatches=4)
    old = [replace(recorded_of(before, step=step), setup="zbv on pp 4") for step in (3, 10, 20)]
    for one in old:
        save_step(one, tmp_path)
    (tmp_path / "step-000011.json").write_text('{"zeropipe": 1, "tr')  # cut off
    kept = load_steps(tmp_path, 10)
    assert [(one.step, one.seconds, one.setup) for one in kept] == [(o.step, o.seconds, o.setup) for o in old[:2]]
    assert kept[0].timeline == old[0].timeline
    assert not (tmp_path / "step-000020.json").exists()  # the run makes this step again
    new = [replace(recorded_of(after, step=step), setup="1f1b on pp 2") for step in (13, 20)]
    rows = compare_steps([*kept, *new], predict_from_first([*kept, *new]))
    assert [row.ratio for row in rows] == pytest.approx([1.0] * 4)
    twice = replace(EVEN, f=0.005, i=0.005, w=0.005)
    rows = compare_steps([*kept, *new], predict_from_costs(twice, "given", [*kept, *new]))
    assert [row.ratio for row in rows] == pytest.approx([1.0, 1.0, 2.0, 2.0])
    write_report(config_of("1f1b", ranks=2), [*kept, *new], tmp_path / "report.html")
    assert "setup from here on: 1f1b on pp 2" in (tmp_path / "report.html").read_text()


def test_steps_are_compared_with_the_costs_of_the_file(tmp_path):
    of = config_of("1f1b", ranks=2, microbatches=4)
    of = of.model_copy(update={"model": ModelTable(path="tiny-qwen3", weights="random")})
    of = of.model_copy(update={"schedule": ScheduleTable(name="1f1b", costs="h100")})
    recorded = [recorded_of(build_schedule(of))]
    layers = choose_layers(of, build_schedule(of))
    prediction = predict_steps(of, recorded, layers)
    costs = load_layer_costs(of)
    expected = zp.simulate(build_schedule(of), costs.costs(layers, placement=build_schedule(of).placement))
    assert prediction.timeline_of(recorded[0]).makespan == pytest.approx(expected.makespan)
    assert "h100" in prediction.source
    apart = ScheduleTable(name="1f1b", costs="h100", gpus_per_node=1)
    spread = of.model_copy(update={"schedule": apart, "mesh": MeshTable(pp=2, dp_shard=2)})
    stages = costs.costs(layers, shards=2, gather="keep", shard_link=costs.inter_node, node_size=1)
    prediction = predict_steps(spread, recorded, layers)
    assert prediction.timeline_of(recorded[0]).makespan == pytest.approx(
        zp.simulate(build_schedule(of), stages).makespan
    )
    (tmp_path / "costs.json").write_text(to_layer_json(replace(costs, sequence=8 * costs.sequence)))
    longer = of.model_copy(update={"schedule": ScheduleTable(name="1f1b", costs=str(tmp_path / "costs.json"))})
    assert "the durations of actions in step" in predict_steps(longer, recorded, layers).source


@pytest.mark.parametrize(("packing", "length"), [(True, 1024), (False, 0)])
def test_recorded_steps_have_the_settings_of_the_run(tmp_path, packing, length):
    """Padded rows are as long as their samples."""
    config = RunConfig(
        model=ModelTable(path="tiny-qwen3", dtype="bfloat16"), mesh=MeshTable(pp=2, tp=2),
        schedule=ScheduleTable(name="1f1b", layers=[5, 3]), engine=EngineTable(ac="full", compile=True),
        data=DataTable(kind="tokens", batch=8, microbatch=2, packing=packing), train=TrainTable(output=str(tmp_path)),
    )  # fmt: skip
    Recorder(config, True, 0, print).add(1, recorded_of(build_schedule(config)).timeline, 1.0)
    (found,) = load_steps(tmp_path / "timelines", 2)
    assert found.timeline.origin == Origin((5, 3), "full", 2, length, "bfloat16", 2, True)
