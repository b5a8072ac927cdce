"""Every number that a command, the page or a report shows is Python's of the same run, by value.

The definitions themselves are in tests/test_one_number.py. A number that is added here to an output, and not compared,
fails a test: each compares all fields.
"""

import json
import re
from dataclasses import replace

import pytest

import zeropipe as zp
from zeropipe.cli.plan_output import print_plan
from zeropipe.core.explain import critical_path, idle_times
from zeropipe.core.units import gigabytes, number, percent, size_text, time_text
from zeropipe.planning.data import plan_data
from zeropipe.sim.compare import compare

pytest.importorskip("fastapi", reason="the app extra is not installed")
pytest.importorskip("pydantic", reason="needs pydantic")
from app_client import ask

from zeropipe.train.config.tables import DataTable, MeshTable, ModelTable, RunConfig, ScheduleTable
from zeropipe.train.report.page import write_report
from zeropipe.train.report.recorded_steps import RecordedStep

SIZES = {"ranks": 4, "microbatches": 6}
COSTS = {"f": 1.0, "i": 1.2, "w": 0.7, "p2p": 0.05, "activation": 2.0, "stash": 1.5, "weights": 3.0}
SHARDS = {"shards": "keep", "unshard": 0.6, "reduce": 1.5, "units": 4, "full_weights": 2.0, "full_gradients": 2.5}
RUNS = [("zbv", {}), ("zb-h1", SHARDS), ("1f1b", {"memory_limit": 8.5})]
WORDS = ("schedule", "title", "placement", "unit", "memory_unit", "costs_per")  # of `simulate --json`
# fields of the page's answers that are no numbers of the run: its words, and what was asked for
ASKED = {
    "choice", "title", "schedule", "placement", "measured", "recorded", "filled", "unit", "memory_unit", "advice",
    "fits", "best", "best_time", "best_memory", "group", "of_best",
}  # fmt: skip


def flags_of(costs):
    return [word for name, cost in costs.items() for word in (f"--{name.replace('_', '-')}", cost)]


def simulated(name, more):
    return compare([zp.build(name, **SIZES)], zp.Costs(**COSTS, **more))[0]


def numbers_of(timeline):
    """All numbers of a timeline, as `simulate --json` names them."""
    schedule = timeline.schedule
    return {
        "num_ranks": schedule.num_ranks, "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches, "num_weight_parts": schedule.problem.num_weight_parts,
        "num_actions": schedule.num_actions, "makespan": timeline.makespan, "idle_fraction": timeline.idle_fraction,
        "rank_idle_fraction": list(timeline.rank_idle_fraction), "bubble": timeline.bubble,
        "bubble_to_ideal": timeline.bubble_to_ideal, "rank_bubble": list(timeline.rank_bubble),
        "peak_memory": list(timeline.peak_memory), "memory_limit": timeline.memory_limit, "busy": list(timeline.busy),
        "idle": [causes._asdict() for causes in idle_times(timeline)],
        "critical_path": [
            {"rank": span.rank, "action": str(span.action), "start": span.start, "end": span.end}
            for span in critical_path(timeline)
        ],
    }  # fmt: skip


@pytest.mark.parametrize(("name", "more"), RUNS, ids=str)
def test_simulate_has_pythons_numbers(name, more, run):
    timeline = simulated(name, more)
    flags = ["-p", SIZES["ranks"], "-m", SIZES["microbatches"], *flags_of(COSTS | more)]
    data = json.loads(run("simulate", name, *flags, "--json")[1])
    expected = numbers_of(timeline)
    assert {key: data[key] for key in expected} == expected
    assert set(data) - set(expected) - set(WORDS) == {"layers", "warnings"}

    text = run("simulate", name, *flags)[1]
    causes = idle_times(timeline)
    for rank, own in enumerate(causes):
        assert sum(own) == pytest.approx(timeline.makespan - timeline.busy[rank])
        times = [timeline.busy[rank], own.warm_up, own.waiting, own.communication + own.other]
        times += [own.sharding] if more.get("shards") else []
        cells = [*map(number, (*times, own.cool_down)), percent(timeline.rank_idle_fraction[rank])]
        cells = [str(rank), *cells, number(timeline.peak_memory[rank])]
        assert any(line.split() == cells for line in text.splitlines()), (cells, text)
    path = critical_path(timeline)
    work = sum(span.end - span.start for span in path if span.action.kind.name in "FIWB")
    waits = f"{number(timeline.makespan - work)} of waiting for messages"
    assert f"critical path: {len(path)} actions, {number(work)} of work, {waits}" in " ".join(text.split())
    if limit := more.get("memory_limit"):
        over = [rank for rank, peak in enumerate(timeline.peak_memory) if peak > limit]
        assert over == list(timeline.over_limit) != []
        assert f"over the limit {number(limit)} on rank {', '.join(map(str, over))}" in " ".join(text.split())


@pytest.mark.parametrize(("name", "more"), RUNS, ids=str)
def test_the_page_has_pythons_numbers(name, more):
    timeline = simulated(name, more)
    _, answer = ask("simulate", {**SIZES, "costs": COSTS | more, "schedules": [{"name": name}]})
    [result], [viewed] = answer["results"], answer["viewer"]["timelines"]
    expected, causes = numbers_of(timeline), idle_times(timeline)
    same = ("num_ranks", "num_stages", "num_microbatches", "num_weight_parts", "num_actions", "makespan")
    same += ("idle_fraction", "bubble", "bubble_to_ideal")
    assert {key: result[key] for key in same} == {key: expected[key] for key in same}
    peak = max(timeline.peak_memory)
    assert (result["peak_memory"], result["peak_rank"]) == (peak, timeline.peak_memory.index(peak))
    assert result["over_limit"] == list(timeline.over_limit) == viewed["overLimit"]
    assert result["busy"] == pytest.approx(sum(timeline.busy) / 4)
    assert list(result["idle"].values()) == pytest.approx([sum(column) / 4 for column in zip(*causes)])
    assert result["copies"] == len(timeline.schedule.placement.copies)
    compared = {*same, "peak_memory", "peak_rank", "over_limit", "busy", "idle", "copies"}
    assert set(result) - compared - ASKED == set()

    assert viewed["busy"] == list(timeline.busy)
    assert viewed["idle"] == [list(own) for own in causes]
    assert viewed["peakMemory"] == list(timeline.peak_memory)
    assert viewed["memoryLimit"] == timeline.memory_limit
    heads = ("makespan", "idleFraction", "bubble", "ranks", "stages", "microbatches")
    expected_heads = [expected[key] for key in ("makespan", "idle_fraction", "bubble", *same[:3])]
    assert [viewed[key] for key in heads] == expected_heads


def test_plan_prints_the_numbers_of_its_rows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    made = zp.plan("qwen3-0.6b", gpus=4, batch=16, sequence=2048, search_seconds=0, max_candidates=6, workers=1)
    print_plan(made, 8)
    text = capsys.readouterr().out
    data = json.loads(json.dumps(plan_data(made)))
    for place, (row, said) in enumerate(zip(made.rows, data["rows"], strict=True)):
        tokens = made.batch * made.context.costs.sequence / made.gpus
        assert said["tokens_per_second_per_gpu"] * said["step_seconds"] == pytest.approx(tokens)
        assert said["step_seconds"] == row.step == pytest.approx(sum(said["seconds"].values()))
        assert said["peak_memory"] == pytest.approx(sum(said["memory"].values()))
        assert said["memory"] == vars(row.memory)
        assert said["seconds"] == vars(row.seconds)
        figures = ("mfu", "idle_fraction", "bubble", "makespan", "gap")
        assert [said[key] for key in figures] == [
            made.mfu(row), row.idle_fraction, row.bubble, row.makespan, row.gap,
        ]  # fmt: skip
        cells = [time_text(row.step, "s"), f"{made.speed(row):,.0f}", percent(made.mfu(row))]
        cells += [percent(row.idle_fraction), gigabytes(row.memory.peak)]
        cells += [] if row.gap is None else [f"{row.gap:.1%}"]
        candidate, mesh = row.candidate, "x".join(str(said[size]) for size in ("pp", "dp_shard", "tp"))
        count = f"{candidate.num_microbatches}x{candidate.microbatch_size}"
        wanted = f"{mesh} {candidate.title} {count} {candidate.ac} {' '.join(cells)}"
        lines = [re.sub(r"^\d+\*? ", "", " ".join(line.split())) for line in text.splitlines()]
        assert place >= 8 or wanted in lines, (wanted, text)
    best = ", ".join(f"{name} {gigabytes(value)}" for name, value in data["rows"][0]["memory"].items())
    assert f"memory of the fullest rank: {best}" in text
    slower = data["rows"][1]["step_seconds"] / data["rows"][0]["step_seconds"] - 1
    assert f"2: {slower:.1%} slower" in text
    limit = f"{gigabytes(data['memory_limit'])} of each GPU ({gigabytes(data['memory_limit'] + data['reserve'])}"
    assert f"{limit} - {gigabytes(data['reserve'])} reserve)" in text
    for lever in data["levers"]:
        if lever["slower"] is not None:
            assert f"{lever['name']} {lever['slower']:.1%} slower" in text


@pytest.fixture
def recorded(tmp_path):
    """Two recorded steps on ranks that wait for messages, the second slower; and their metrics."""
    schedule = zp.build("1f1b", **SIZES)
    found = []
    for step, slow in ((3, 1.0), (7, 1.3)):
        costs = zp.Costs(f=0.01, b=[0.02, 0.02 * slow, 0.02, 0.02], p2p=0.002, unit="s", memory_unit="B")
        timeline = replace(zp.simulate(schedule, costs), measured=True)
        found.append(RecordedStep(step, timeline, timeline.makespan + 0.05))
    metrics = [
        {"step": 3, "loss": 5.25, "processed_tokens_per_second": 1200.0, "loss_tokens_per_second": 800.0,
         "memory": 2e9, "reserved_memory": 2.5e9},
        {"step": 7, "loss": 4.125, "evaluation_loss": 4.5, "processed_tokens_per_second": 1150.0,
         "loss_tokens_per_second": 790.0, "memory": 3e9, "reserved_memory": 3.25e9},
    ]  # fmt: skip
    return found, metrics


def test_a_report_has_the_numbers_of_its_steps(recorded, run, tmp_path):
    steps, metrics = recorded
    config = RunConfig(
        model=ModelTable(path="tiny"), mesh=MeshTable(pp=4), schedule=ScheduleTable(name="1f1b"),
        data=DataTable(batch=6),
    )  # fmt: skip
    write_report(config, steps, tmp_path / "report.html", layers=(1,) * 4, metrics=metrics)
    page = (tmp_path / "report.html").read_text()
    figures = {
        name: (value, note) for name, value, note in re.findall(
            r"<div><dt>([^<]*)</dt><dd>([^<]*)(?:<small>([^<]*)</small>)?</dd></div>", page
        )
    }  # fmt: skip
    newest, first = steps[-1], steps[0].timeline.makespan  # predicted from the first step
    measured = newest.timeline.makespan
    assert {name: value.strip() for name, (value, _) in figures.items()} == {
        "loss": "4.125", "evaluation loss": "4.500", "tokens per second, processed": "1150",
        "tokens per second, with a loss": "790", "GPU memory": size_text(3e9, "B"),
        "step": time_text(newest.seconds, "s"), "pipeline, measured": time_text(measured, "s"),
        "measured / predicted": f"{measured / first:.2f}", "idle": percent(newest.timeline.idle_fraction),
    }  # fmt: skip
    notes = {name: note for name, (_, note) in figures.items()}
    assert notes["loss"] == "5.250 at step 3"
    assert notes["GPU memory"] == f"at the peak; {size_text(0.25e9, 'B')} more are reserved"
    assert notes["step"] == f"{time_text(0.05, 's')} of it outside the pipeline"
    assert notes["pipeline, measured"] == f"predicted {time_text(first, 's')}"
    assert notes["idle"] == f"of the pipeline; bubble rate {percent(newest.timeline.bubble)}"

    body = re.search(r"<tbody>(.*?)</tbody>", page, re.DOTALL)[1]
    for number_of, (one, row) in enumerate(zip(steps, re.findall(r"<tr.*?</tr>", body, re.DOTALL), strict=True)):
        path = tmp_path / f"{number_of}.json"
        path.write_text(zp.to_json(one.timeline))
        compared = json.loads(run("trace", "compare", path, "--json")[1])
        own = one.timeline.makespan
        cells = [str(one.step), *(time_text(value, "s") for value in (one.seconds, own, first))]
        cells += [f"{own / first:.3f}", percent(one.timeline.idle_fraction)]
        assert re.findall(r"<td>(.*?)</td>", row) == cells
        assert compared["measured"]["makespan"] == own
        assert compared["measured"]["idle_fraction"] == one.timeline.idle_fraction
        names = ("schedule", "imbalance", "communication", "overhead", "jitter")
        means = [sum(rank[name] for rank in compared["lost"]) / 4 for name in names]
        assert sum(means) == pytest.approx(one.timeline.idle_fraction * own)
        parts = zip((*names, "outside the pipeline"), (*means, 0.05))
        longest = newest.seconds
        assert f'title="{", ".join(f"{name} {percent(value / longest)}" for name, value in parts)}"' in row


def test_trace_compare_prints_its_numbers(recorded, run, tmp_path):
    steps, _ = recorded
    (tmp_path / "run.json").write_text(zp.to_json(steps[1].timeline))
    data = json.loads(run("trace", "compare", tmp_path / "run.json", "--json")[1])
    text = run("trace", "compare", tmp_path / "run.json")[1]
    lines = [" ".join(line.split()) for line in text.splitlines()]
    one, other = data["measured"], data["simulated"]
    expected = {key: value for key, value in numbers_of(steps[1].timeline).items() if key != "critical_path"}
    assert {key: one[key] for key in expected} == expected
    ratio = one["makespan"] / other["makespan"]
    assert data["measured_over_simulated"] == ratio
    assert f"makespan {time_text(one['makespan'], 's')} {time_text(other['makespan'], 's')} {ratio:.3f}" in lines
    for name, key in (("idle", "idle_fraction"), ("bubble rate", "bubble")):
        assert f"{name} {percent(one[key])} {percent(other[key])}" in lines
    for row in data["residuals"]:
        values = (row[key] if row[key] > 1e-9 else 0.0 for key in ("measured", "spread", "predicted"))  # no rounding
        times = " ".join(time_text(value, "s") for value in values)
        assert row["ratio"] == pytest.approx(row["measured"] / row["predicted"])
        assert f"{row['kind']} {row['stage']} {row['number']} {times} {row['ratio']:.3f}" in lines
    for rank, causes in enumerate(data["lost"]):
        *parts, total = causes.values()
        assert total == pytest.approx(sum(parts)) == one["makespan"] - one["busy"][rank]
        times = (time_text(value if abs(value) > 1e-9 else 0.0, "s") for value in (total, *parts))
        assert f"rank {rank} {' '.join(times)}" in lines
