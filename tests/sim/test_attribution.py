"""A run held against its prediction: residuals, lost time, corrected costs, and the traces of others."""

import json
import random
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
from reference_simulator import reference_simulate

import zeropipe as zp
from zeropipe.core.formats.torch_trace import from_torch_traces
from zeropipe.errors import ConfigError, ScheduleError
from zeropipe.sim.attribution import attribute_idle_time, correct_costs, residuals
from zeropipe.sim.costs import Link
from zeropipe.sim.costs_file import costs_from_data, costs_to_data
from zeropipe.sim.fit import fit
from zeropipe.sim.megatron import costs_from_log, parse_megatron_log

UNEVEN = [1.0, 1.0, 1.0, 1.4]


def shaken(timeline, noise=0.2, seed=0):
    """The run in which each action takes as long as in `timeline`, and a little more."""
    generator, schedule = random.Random(seed), timeline.schedule
    lasts = {span.action: span.end - span.start for rank in range(schedule.num_ranks) for span in timeline.spans(rank)}
    times = reference_simulate(schedule, lambda actions: lasts[actions[0]] + generator.uniform(0, noise))
    columns = [array("d"), array("d")]
    for rank in range(schedule.num_ranks):
        for span in timeline.spans(rank):
            for column, time in zip(columns, times[span.action], strict=True):
                column.append(time)
    start, end = (column.tobytes() for column in columns)
    return replace(timeline, start=start, end=end, measured=True)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved", "chimera", "dualpipev"])
def test_lost_time_adds_up_to_the_idle_time_of_every_rank(name):
    schedule = zp.build(name, ranks=4, microbatches=8)
    stages = range(schedule.num_stages)
    timeline = zp.simulate(schedule, zp.Costs(f=[1 + s / 9 for s in stages], i=1.2, w=0.8, p2p=0.1, unit="s"))
    for run in (timeline, shaken(timeline)):
        for rank, causes in enumerate(attribute_idle_time(run)):
            assert causes.total == pytest.approx(run.makespan - run.busy[rank])


def test_each_cause_is_seen_where_it_is_the_only_one():
    schedule = zp.build("1f1b", ranks=4, microbatches=8)

    def mean(costs, **changes):
        run = replace(zp.simulate(schedule, costs), measured=True)
        causes = attribute_idle_time(replace(run, **changes))
        return [sum(column) / 4 for column in zip(*causes, strict=True)]

    schedule_only = mean(zp.Costs(f=1, b=2))
    assert schedule_only == pytest.approx([9, 0, 0, 0, 0])  # (p - 1) (f + b)
    uneven = mean(zp.Costs(f=UNEVEN, b=2))
    assert uneven[0] == pytest.approx(3 * (1.1 + 2))
    assert uneven[1] > 1
    assert uneven[2:] == pytest.approx([0, 0, 0])
    sent = mean(zp.Costs(f=1, b=2, p2p=0.5))
    assert sent[0] == pytest.approx(9)
    assert sent[2] == pytest.approx(zp.simulate(schedule, zp.Costs(f=1, b=2, p2p=0.5)).makespan - 33)
    sharded = mean(zp.Costs(f=1, b=2, shards="keep", unshard=0.5, reduce=1))
    assert sharded == pytest.approx([9, 0, 1.5, 0, 0])  # before the first F and behind the last B
    run = zp.simulate(schedule, zp.Costs(f=1, b=2))
    jitter = [causes.jitter for causes in attribute_idle_time(shaken(run))]
    assert min(jitter) > 0


def test_costs_that_know_no_shards_take_those_of_the_run(tmp_path, run):
    costs = zp.Costs(f=1, b=2, shards="keep", unshard=0.5, reduce=1, full_weights=3)
    recorded = replace(zp.simulate(zp.build("1f1b", ranks=4, microbatches=8), costs), measured=True)
    (tmp_path / "measured.json").write_text(zp.to_json(recorded))
    (tmp_path / "costs.toml").write_text("f = 1\nb = 2\n")
    status, out, _ = run("compare", tmp_path / "measured.json", "--costs", tmp_path / "costs.toml", "--json")
    found = json.loads(out)
    assert (status, found["measured_over_simulated"]) == (0, pytest.approx(1))
    assert found["simulated"]["peak_memory"] == pytest.approx(found["measured"]["peak_memory"])
    assert found["corrected"]["shards"] == "keep"


def test_residuals_by_kind_and_stage():
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    real = zp.simulate(schedule, zp.Costs(f=[1, 2, 3, 4], i=2, w=1))
    found = {
        (r.kind, r.stage): r for r in residuals(real, zp.simulate(schedule, zp.Costs(f=2, i=2, w=4)), by_stage=True)
    }
    assert len(found) == 12
    assert [found["F", stage].ratio for stage in range(4)] == pytest.approx([0.5, 1, 1.5, 2])
    assert found["I", 1].ratio == 1
    assert found["W", 3].ratio == pytest.approx(0.25)
    assert {r.number for r in found.values()} == {4}
    assert max(r.spread for r in found.values()) == pytest.approx(0)
    with pytest.raises(ConfigError, match="different schedules"):
        residuals(real, zp.simulate(zp.build("zbv", ranks=2, microbatches=5)))


def test_corrected_costs_predict_the_run_and_keep_what_it_cannot_tell():
    schedule = zp.build("zb-h1", ranks=4, microbatches=8)
    truth = zp.Costs(f=UNEVEN, i=1.1, w=0.9, p2p=0.05, bandwidth=100.0, message=10.0, activation=3, stash=1, unit="s")
    run = replace(zp.simulate(schedule, truth), measured=True)
    wrong = zp.Costs(f=1, p2p=0.2, bandwidth=100.0, message=10.0, weights=7, memory_limit=50, node_size=4, unit="s")
    better = correct_costs(wrong, run)
    assert zp.simulate(schedule, better).makespan == pytest.approx(run.makespan)
    assert better.p2p == pytest.approx(0.05)
    assert (better.weights, better.memory_limit, better.node_size) == (7, 50, 4)
    with pytest.raises(ConfigError, match=r"'ms'.*'s'"):
        correct_costs(replace(wrong, unit="ms"), run)
    with pytest.raises(ConfigError, match="the costs are in 's', the run is in no unit; use one unit"):
        correct_costs(wrong, replace(run, unit=""))


def test_costs_as_plain_data_are_read_back():
    for costs in (
        zp.Costs(),
        zp.Costs(
            f=[1, 2],
            b=3,
            edges={(0, 1): Link(0.5), (1, 0): Link(None, 7.0)},
            node_size=2,
            inter_node=Link(1.0, 2.0),
            unit="s",
        ),
        zp.Costs(f={0: 0.8, "default": 2}, w={1: 3.0}, blocking=True, memory_limit=5),
    ):
        assert costs_from_data(json.loads(json.dumps(costs_to_data(costs)))) == costs


# --- traces of torch.profiler


def trace_of(rows, rank, steps=1, cat="user_annotation", prefix="", gap=1000.0, **more):
    """A trace of one rank in torch.profiler's format, its steps one after the other."""
    events = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
              {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0.5, "dur": 1.0},
              {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 9.0}]  # fmt: skip
    for step in range(steps):
        for text, start, end in rows:
            events.append({"ph": "X", "cat": cat, "name": prefix + text, "pid": 1, "tid": 1,
                           "ts": step * gap + start, "dur": end - start})  # fmt: skip
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events, **more}


ROW0 = [("0F0", 0, 10), ("0SEND_F0", 10, 11), ("0F1", 11, 20), ("0B0", 60, 80), ("0B1", 100, 120)]
ROW1 = [("1F0", 12, 30), ("1B0", 30, 55), ("1F1", 55, 70), ("1B1", 70, 95)]


def test_a_trace_of_each_rank_is_a_timeline():
    traces = [trace_of(ROW1, 5, 3, prefix="PP:"), trace_of(ROW0, 2, 3)]  # ranks of a larger world, in any order
    traces[1]["traceEvents"][-1]["dur"] = 500.0  # the last of three steps is slow: the median counts
    found = from_torch_traces(traces)
    assert found.measured
    assert [[str(step) for step in row] for row in found.schedule.rows] == [
        [text for text, *_ in ROW0 if "SEND" not in text], [text for text, *_ in ROW1]
    ]  # fmt: skip
    assert found.makespan == pytest.approx(120e-6)
    assert [span.start for span in found.spans(1)] == pytest.approx([12e-6, 30e-6, 55e-6, 70e-6])


def test_times_of_the_gpu_are_taken_from_all_streams_or_not_at_all():
    gpu = trace_of(ROW0, 0)
    for at, (text, start, end) in enumerate(ROW0):
        for tid, first, last in ((7, start + 2, end + 2), (8, start + 1, end + 5)):
            gpu["traceEvents"].append({"ph": "X", "cat": "gpu_user_annotation", "name": text, "tid": tid, "ts": first,
                                       "dur": last - first, "args": {"External id": at}})  # fmt: skip
    gpu["traceEvents"].append({"ph": "X", "cat": "kernel", "name": "gemm", "ts": 3, "dur": 2})
    found = from_torch_traces([gpu, trace_of(ROW1, 1)])
    first = next(iter(found.spans(0)))
    assert (first.start, first.end) == pytest.approx((0, 14e-6))
    partial = {
        **gpu,
        "traceEvents": [e for e in gpu["traceEvents"] if (e["name"], e.get("cat")) != ("0B1", "gpu_user_annotation")],
    }
    with pytest.raises(ScheduleError, match="no time of 0B1 there"):
        from_torch_traces([partial, trace_of(ROW1, 1)])


@pytest.mark.parametrize(
    "traces,words",
    [
        ([trace_of(ROW0, 0)], "1 of 2 stages"),
        ([trace_of([ROW0[0], *ROW0[2:]], 0, zeropipe_pipeline={"num_stages": 2})], "1 of 2 stages"),
        ([trace_of(ROW1, 1)], "stage 0 is missing"),
        ([trace_of(ROW0, 0), trace_of(ROW1, 0)], "both of rank 0"),
        ([trace_of(ROW0, 0, 2), trace_of(ROW1, 1)], "1 training steps, trace 0 has 2"),
        ([trace_of(ROW0[:-1], 0), trace_of(ROW1, 1)], "not of complete steps"),
        ([trace_of([*ROW0, ("0F0", 130, 140)], 0), trace_of(ROW1, 1)], "differ"),
        ([trace_of([("x", 0, 1)], 0)], "has no action"),
        ([{"traceEvents": 3}], "not a list"),
        ([{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "0F0", "ts": "a"}]}], "no times"),
    ],
)
def test_traces_that_tell_no_run_are_refused(traces, words):
    with pytest.raises(ScheduleError, match=words):
        from_torch_traces(traces)


@pytest.mark.parametrize("name", [pytest.param("zbv", marks=pytest.mark.full), "dualpipev"])
def test_the_engine_names_its_actions_for_the_profiler(name, tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    from engine_helpers import ranks
    from trace_cases import profiled

    schedule = zp.build(name, ranks=2, microbatches=4)
    timeline = zp.from_json(ranks(2).run(profiled, schedule, str(tmp_path), 1)[0])
    files = sorted(tmp_path.glob("rank*.json"))
    traces = [json.loads(file.read_text()) for file in files]
    assert traces[1]["zeropipe_pipeline"] == {"schedule": name, "num_stages": 4}
    seen = from_torch_traces(traces)
    assert [list(map(str, row)) for row in seen.schedule.rows] == [list(map(str, row)) for row in schedule.rows]
    for rank in range(2):  # the recorder's clock runs around what the profiler sees
        for ours, theirs in zip(timeline.spans(rank), seen.spans(rank), strict=True):
            assert ours.action == theirs.action
            assert theirs.end - theirs.start <= ours.end - ours.start + 5e-6


def test_traces_of_torchs_own_runtime_are_read(tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    from engine_helpers import ranks
    from trace_cases import profiled_by_torch

    schedule = zp.build("interleaved-zb", ranks=2, microbatches=4)
    ranks(2).run(profiled_by_torch, schedule, str(tmp_path))
    seen = from_torch_traces([json.loads(file.read_text()) for file in sorted(tmp_path.glob("torch*.json"))])
    assert [list(map(str, row)) for row in seen.schedule.rows] == [list(map(str, row)) for row in schedule.rows]


# --- logs of Megatron-LM


def megatron_log(forward, backward, step, steps=3):
    text = " [2024-05-01 10:00:00] iteration 10/ 100 | elapsed time per iteration (ms): 900.1 | loss: 1.0E+01 |\n"
    for more in range(steps):
        text += "times across ranks (ms):"
        for name, times in (("forward-backward", step), ("forward-compute", forward), ("backward-compute", backward)):
            text += f"\n  {name}:"
            for rank, time in enumerate(times):
                text += f"\n     rank {rank:2d}: {time + (100 * more if more == steps - 1 else 0):.2f}"
        text += "\n iteration 20/ 100 | loss: 9.9\n"
    return text


def test_a_log_of_megatron_gives_the_costs_of_every_stage():
    schedule = zp.build("interleaved", ranks=2, microbatches=4)
    log = parse_megatron_log(megatron_log([80, 80, 160, 176], [160, 160, 320, 320], [900, 901, 899, 900]))
    assert log.step == pytest.approx(0.901)
    costs = costs_from_log(log, schedule)
    assert costs.column("f", 4) == pytest.approx([0.01, 0.021, 0.01, 0.021])
    assert costs.column("b", 4) == pytest.approx([0.02, 0.04, 0.02, 0.04])
    with pytest.raises(ConfigError, match="4 ranks: must be a multiple of the 3 pipeline ranks"):
        costs_from_log(log, zp.build("1f1b", ranks=3, microbatches=4))


@pytest.mark.parametrize(
    "text,words",
    [
        ("(min, max) time across ranks (ms):\n    forward-compute ......: (80.00, 90.00)\n", "smallest and largest"),
        (megatron_log([1, 2], [1, 2], [3]), "different numbers"),
        (megatron_log([1], [1], [1]).replace("rank  0: 1.00", "rank  0: 1e999", 1), "number of milliseconds"),
        (megatron_log([1, 2], [1, 2], [3, 3]).replace("rank  0", "rank  7", 1), "lacks some ranks"),
        ("times across ranks (ms):\n  optimizer:\n     rank  0: 3.0\n", "no timer forward-compute"),
    ],
)
def test_logs_that_do_not_tell_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_megatron_log(text)


# --- the command


@pytest.fixture
def run(run):
    return partial(run, "trace")


@pytest.fixture
def measured(tmp_path):
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    costs = zp.Costs(
        f=[0.1, 0.2, 0.1, 0.2], i=0.2, w=0.1, p2p=0.01, activation=8e6, stash=2e6, unit="s", memory_unit="B"
    )
    file = tmp_path / "measured.json"
    file.write_text(zp.to_json(shaken(zp.simulate(schedule, costs), 0.01)))
    return file


def test_a_run_is_held_against_costs_and_corrects_them(run, measured, tmp_path):
    (tmp_path / "costs.toml").write_text('f = 0.2\ni = 0.4\nw = 0.2\nunit = "s"\n')
    page, better = tmp_path / "page.html", tmp_path / "better.json"
    command = ("compare", measured, "--costs", tmp_path / "costs.toml", "--report", page, "-o", better)
    status, out, err = run(*command)
    assert (status, err) == (0, "")
    for word in ("makespan", "measured / simulated", "imbalance", "jitter", "of the makespan", f"wrote {better}"):
        assert word in out
    assert page.read_text().count("zbv, measured") >= 1
    assert "zbv, simulated" in page.read_text()
    timeline = zp.from_json(measured.read_text())
    again = costs_from_data(json.loads(better.read_text()))
    assert zp.simulate(timeline.schedule, again).makespan == pytest.approx(timeline.makespan, rel=0.05)
    status, out, _ = run(*command, "--json")
    facts = json.loads(out)
    assert facts["measured_over_simulated"] == pytest.approx(timeline.makespan / facts["simulated"]["makespan"])
    f = {r["stage"]: r["ratio"] for r in facts["residuals"] if r["kind"] == "F"}
    assert f[1] == pytest.approx(2, rel=0.1)
    for rank, causes in enumerate(facts["lost"]):
        assert causes["total"] == pytest.approx(timeline.makespan - timeline.busy[rank])
    assert costs_from_data(facts["corrected"]) == again


def test_the_memory_of_a_run_is_held_against_activations_alone(run, measured, tmp_path):
    """The engine records what actions hold; costs of layers have weights and optimizer, too."""
    held = 'f = 0.2\nactivation = 16e6\nstash = 4e6\nunit = "s"\nmemory_unit = "B"\n'
    (tmp_path / "costs.toml").write_text(held + "weights = 7e9\n")
    (tmp_path / "none.toml").write_text(held)
    with_weights, without = (
        json.loads(run("compare", measured, "--costs", tmp_path / name, "--json")[1])["simulated"]["peak_memory"]
        for name in ("costs.toml", "none.toml")
    )
    assert with_weights == pytest.approx(without, rel=0.01)
    assert "peak activations" in run("compare", measured, "--costs", tmp_path / "costs.toml")[1]


def test_without_costs_the_runs_own_means_predict_it(run, measured):
    facts = json.loads(run("compare", measured, "--json")[1])
    timeline = zp.from_json(measured.read_text())
    assert facts["costs"] == "of the run"
    assert facts["simulated"]["makespan"] == pytest.approx(zp.simulate(timeline.schedule, fit(timeline)).makespan)


def test_a_log_is_held_against_costs(run, tmp_path):
    log = tmp_path / "train.log"
    log.write_text(megatron_log([80, 80], [160, 160], [400, 400]))
    size = ("--schedule", "1f1b", "--ranks", 2, "--microbatches", 4)
    status, out, err = run("compare", log, *size)
    assert (status, err) == (0, "")
    assert "1f1b, from the log's means" in out
    facts = json.loads(run("compare", log, *size, "--json")[1])
    assert facts["measured"]["makespan"] == pytest.approx(0.4)
    assert facts["simulated"]["makespan"] == pytest.approx(5 * 0.06)
    assert facts["lost"] is None


@pytest.mark.parametrize(
    "content,args,words",
    [
        ("nonsense", (), "neither a trace"),
        ("{", (), "neither a trace"),
        ("[1]", (), "no field 'zeropipe'"),
        ('{"traceEvents": []}', (), "has no action"),
        (zp.to_json(zp.build("1f1b", ranks=2, microbatches=2)), (), "schedule without times"),
        (megatron_log([1], [1], [1]), (), "pass --schedule"),
        (megatron_log([1], [1], [1]), ("--schedule", "1f1b"), "ranks is missing"),
        (zp.to_json(zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))), ("--ranks", "2"), "has its own schedule"),
        (zp.to_json(zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))), ("-o", "x.txt"), "end in .json"),
        (zp.to_json(zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))), ("--report", "x.txt"), "must end in"),
        (zp.to_json(zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))), ("--costs", "no.json"), "cannot read"),
    ],
)
def test_bad_files_end_in_one_line(run, tmp_path, content, args, words):
    file = tmp_path / "it.json"
    file.write_text(content)
    status, out, err = run("compare", file, *args)
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert words in err


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zbv"])
@pytest.mark.parametrize("policy", ["keep", "regather"])
def test_a_sharded_step_predicted_from_itself(name, policy):
    """Waits for weights and gradients are communication: neither overhead nor jitter, which would be negative."""
    schedule = zp.build(name, ranks=2, microbatches=6)
    costs = zp.Costs(f=1, i=1.1, w=0.9, b=2, shards=policy, unshard=0.5, reduce=1.5, units=4, p2p=0.1, unit="s")
    timeline = zp.simulate(schedule, costs)
    assert zp.simulate(schedule, fit(timeline)).makespan == pytest.approx(timeline.makespan, rel=0.03)
    for causes in attribute_idle_time(timeline):
        assert causes.jitter == pytest.approx(0, abs=0.03 * timeline.makespan)
        assert causes.overhead == pytest.approx(0, abs=1e-9)
        assert causes.communication > 0


RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))  # 1f1b, pp 2, dp_shard 2: 4 processes on 2 cores


def test_recorded_sharded_steps_are_predicted_from_themselves():
    """The processes share cores, so an action takes longer when more ranks are busy. No simulation knows that."""
    runs = [zp.from_json(path.read_text()) for path in RECORDED]
    ratios = [run.makespan / zp.simulate(run.schedule, fit(run)).makespan for run in runs]
    assert len(runs) == 4
    assert fmean(abs(ratio - 1) for ratio in ratios) < 0.05
    assert max(abs(ratio - 1) for ratio in ratios) < 0.06
    for run in runs:
        for rank, causes in enumerate(attribute_idle_time(run)):
            assert causes.jitter >= -1e-9 * run.makespan
            assert causes.communication >= 0
            assert causes.total >= run.makespan - run.busy[rank] - 1e-9  # waits inside actions are added


def test_a_run_that_is_faster_than_its_mean_times_has_no_jitter():
    """The first forwards and the last backwards are faster: fewer ranks share the cores then."""
    schedule = zp.build("1f1b", ranks=4, microbatches=8)
    times = reference_simulate(schedule, lambda actions: 0.5 if str(actions[0])[1:] in ("F0", "B7") else 2.0)
    places = [times[span.action] for rank in range(4) for span in zp.simulate(schedule).spans(rank)]
    start, end = (array("d", column).tobytes() for column in zip(*places, strict=True))
    run = replace(zp.simulate(schedule), start=start, end=end, measured=True)
    assert zp.simulate(schedule, fit(run)).makespan > 1.03 * run.makespan
    for rank, causes in enumerate(attribute_idle_time(run)):
        assert causes.jitter == pytest.approx(0)
        assert causes.total == pytest.approx(run.makespan - run.busy[rank])
