"""One run, one number: Python, the commands, their files, the page and the report say the same, by one definition."""

import ast
import json
import re
from dataclasses import fields, replace
from statistics import fmean

import pytest
from paths import ROOT

import zeropipe as zp
from zeropipe.core.units import number, percent
from zeropipe.planning.rows import RankMemory, StepSeconds
from zeropipe.sim import attribution
from zeropipe.sim.compare import compare

pytest.importorskip("fastapi", reason="the app extra is not installed")
pytest.importorskip("pydantic", reason="needs pydantic")
from app_client import ask
from page_fixtures import rows, settle

from zeropipe.app import plan_calls
from zeropipe.train.config.tables import DataTable, MeshTable, ModelTable, RunConfig, ScheduleTable
from zeropipe.train.report.page import write_report
from zeropipe.train.report.recorded_steps import RecordedStep

NAMES = ["1f1b", "zb-h2", "zbv", "dualpipe", "interleaved"]
SIZES = {"ranks": 4, "microbatches": 8}
COSTS = {"f": 1.0, "i": 1.2, "w": 0.7, "p2p": 0.05, "activation": 2.0, "stash": 1.5}
FLAGS = ["--ranks", 4, "--microbatches", 8, *(word for name, cost in COSTS.items() for word in (f"--{name}", cost))]
PLAN = {"gpus": 4, "batch": 16, "sequence": 2048}
PLAN_FLAGS = [word for name, value in PLAN.items() for word in (f"--{name}", value)]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


@pytest.fixture(scope="module")
def timelines():
    return compare([zp.build(name, **SIZES) for name in NAMES], zp.Costs(**COSTS))


def figures_of(timeline):
    """The definitions of the glossary, computed from the spans of the ranks alone."""
    spans = [list(timeline.spans(rank)) for rank in range(timeline.num_ranks)]
    makespan = max(s.end for row in spans for s in row) - min(s.start for row in spans for s in row)
    busy = [sum(end - start for start, end in {(s.start, s.end) for s in row}) for row in spans]  # an Overlap once
    longest = max(row[-1].end - row[0].start for row in spans)
    return {
        "makespan": makespan, "idle_fraction": 1 - fmean(busy) / makespan, "bubble": 1 - fmean(busy) / longest,
        "bubble_to_ideal": makespan / fmean(busy) - 1,
    }  # fmt: skip


def peaks_of(timeline):
    """The peak memory of each rank of a schedule with split or full backwards: F allocates, I and W (or B) free."""
    share = timeline.num_ranks / timeline.schedule.num_stages
    peaks = []
    for rank in range(timeline.num_ranks):
        level = peak = 0.0
        for span in timeline.spans(rank):
            change = {"F": 2.0, "I": 1.5 - 2.0, "W": -1.5, "B": -2.0}[span.action.kind.name] * share
            level += change
            peak = max(peak, level, level - change if change < 0 else 0.0)
        peaks.append(peak)
    return peaks


def test_python_follows_the_definitions(timelines):
    for timeline in timelines:
        for name, value in figures_of(timeline).items():
            assert getattr(timeline, name) == pytest.approx(value), (timeline.title, name)
        assert fmean(timeline.rank_idle_fraction) == pytest.approx(timeline.idle_fraction)
        assert timeline.peak_memory == pytest.approx(peaks_of(timeline))
    zbv = zp.simulate(zp.build("zbv", **SIZES))
    assert (zbv.idle_fraction, zbv.bubble) == (pytest.approx(1.5 / 25.5), pytest.approx(0))
    same = [zp.simulate(zp.build(name, **SIZES)) for name in ("zb-h1", "zb-h2")]
    assert same[0].makespan == same[1].makespan
    assert same[0].idle_fraction == pytest.approx(same[1].idle_fraction)  # their bubble rates are 11.1% and 0


def test_the_commands_have_pythons_numbers(timelines, run, tmp_path):
    compared = json.loads(run("compare", *NAMES, *FLAGS, "--json")[1])["compared"]
    table = run("compare", *NAMES, *FLAGS)[1]
    for name, timeline, data in zip(NAMES, timelines, compared, strict=True):
        alone = json.loads(run("simulate", name, *FLAGS, "--json")[1])
        for said in (data, alone):
            for field in (*figures_of(timeline), "peak_memory", "busy", "rank_idle_fraction"):
                value = getattr(timeline, field)
                assert said[field] == (list(value) if isinstance(value, tuple) else value), (name, field)
        idle, ideal, rate = map(percent, (timeline.idle_fraction, timeline.bubble_to_ideal, timeline.bubble))
        peak = number(max(timeline.peak_memory), 4)
        assert f"idle {idle} ({ideal} to ideal; bubble rate {rate})" in run("simulate", name, *FLAGS)[1]
        assert re.search(rf"^ *{name}( ★)? +\d+ +[\d.]+ +[\d.]+ +{idle} +{ideal} +{rate} +{peak}( ★)? *$", table, re.M)
        headline = f"makespan {number(timeline.makespan, 4)}, idle {idle}, peak memory {peak}"
        assert headline in run("show", name, *FLAGS)[1]
        assert headline in str(timeline)
        zp.draw(timeline, tmp_path / "one.svg")
        assert headline in (tmp_path / "one.svg").read_text()


def test_the_page_and_its_viewer_have_pythons_numbers(timelines):
    body = {**SIZES, "costs": COSTS}
    _, answer = ask("simulate", {**body, "schedules": [{"name": name} for name in NAMES]})
    _, chart = ask("chart", body)
    points = {point["name"]: point for point in chart["points"]}
    shown = answer["viewer"]["timelines"]
    for timeline, result, viewed in zip(timelines, answer["results"], shown, strict=True):
        for field in figures_of(timeline):
            assert result[field] == getattr(timeline, field)
        point = points[timeline.title]
        for field in ("makespan", "idle_fraction", "bubble"):
            assert point[field] == getattr(timeline, field)
        assert result["peak_memory"] == point["peak_memory"] == max(timeline.peak_memory)
        assert (viewed["makespan"], viewed["idleFraction"], viewed["bubble"]) == (
            timeline.makespan, timeline.idle_fraction, timeline.bubble,
        )  # fmt: skip
        assert viewed["peakMemory"] == list(timeline.peak_memory)
        assert sum(result["idle"].values()) == pytest.approx(timeline.idle_fraction * timeline.makespan)


def test_a_search_has_one_number_and_says_what_it_searched(run):
    _, answer = ask("search", {"ranks": 2, "microbatches": 4, "seconds": 0.2})
    text = run("search", "-p", 2, "-m", 4, "--search-seconds", 0.2)[1]
    found = zp.simulate(zp.from_json(answer["schedule"]))
    assert (answer["value"], answer["idle_fraction"]) == (pytest.approx(found.makespan), found.idle_fraction)
    assert f"idle {percent(found.idle_fraction)} (bubble rate {percent(found.bubble)})" in text
    assert answer["searched"] == "schedules with 1 stage per rank and one copy of the model"
    assert f"proven: none of the {answer['searched']} is faster" in text
    assert (
        zp.simulate(zp.build("zbv", ranks=2, microbatches=4), zp.Costs(f=0.5, i=0.5, w=0.5)).makespan < found.makespan
    )
    _, two = ask("search", {"ranks": 2, "microbatches": 4, "stages_per_rank": 2, "seconds": 0.2})
    assert two["searched"] == "schedules with 2 stages per rank in a vee or loop and one copy of the model"


def test_a_plan_has_the_same_numbers_everywhere(run, monkeypatch):
    monkeypatch.setattr(plan_calls, "MAX_CANDIDATES", 40)
    made = zp.plan("qwen3-0.6b", **PLAN, compile=True, search_seconds=0, max_candidates=40, workers=1)
    flags = (*PLAN_FLAGS, "--compile", "--search-seconds", 0, "--most", 40, "--workers", 1)
    command = json.loads(run("plan", "qwen3-0.6b", *flags, "--json")[1])["rows"]
    _, answer = ask("plan", {"model": "qwen3-0.6b", "gpu": "h100", **PLAN})
    assert answer["rows"] == command[: len(answer["rows"])]
    piped = 0
    for row, data in zip(made.rows, command):
        timeline = made.timeline(row)
        for field in ("makespan", "idle_fraction", "bubble"):
            assert data[field] == getattr(row, field) == pytest.approx(getattr(timeline, field))
        assert data["peak_memory"] == row.memory.peak == pytest.approx(max(timeline.peak_memory))
        assert data["step_seconds"] == pytest.approx(sum(data["seconds"].values()))
        if row.candidate.layout.dp_shard == 1:  # with shards, a part of `data` is idle time, too
            idle = data["seconds"]["imbalance"] + data["seconds"]["schedule"]
            assert row.idle_fraction * row.makespan == pytest.approx(idle, abs=1e-9)
            piped += row.candidate.layout.pp > 1
    assert piped


def test_a_report_has_the_numbers_of_trace_compare(run, tmp_path):
    """The run has no jitter, and all processes compute alone, so idle time by cause adds up to the headline."""
    schedule = zp.build("1f1b", **SIZES)
    timeline = replace(zp.simulate(schedule, zp.Costs(f=0.01, b=0.02, unit="s", memory_unit="B")), measured=True)
    config = RunConfig(
        model=ModelTable(path="tiny"), mesh=MeshTable(pp=4), schedule=ScheduleTable(name="1f1b"),
        data=DataTable(batch=8),
    )  # fmt: skip
    write_report(config, [RecordedStep(1, timeline, timeline.makespan)], tmp_path / "report.html", layers=(1,) * 4)
    (tmp_path / "run.json").write_text(zp.to_json(timeline))
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", (tmp_path / "report.html").read_text()))
    idle, rate = percent(timeline.idle_fraction), percent(timeline.bubble)
    assert f"idle {idle} of the pipeline; bubble rate {rate}" in page
    said = run("trace", "compare", tmp_path / "run.json")[1]
    assert re.search(rf"^ *idle +{idle} +{idle} *$", said, re.M)
    assert re.search(rf"^ *bubble rate +{rate} +{rate} *$", said, re.M)
    assert re.search(rf"^ *of the makespan +{idle} ", said, re.M)


def is_defined(words):
    """Whether the glossary has the words as a term: **Words**, **words and others**, or **Other words** (`words`)."""
    one = re.escape(words.removesuffix("es") if words.endswith("ches") else words)
    return re.search(rf"\*\*{one}\b[^*]*\*\*|\*\* \(`{one}`\)", GLOSSARY, re.IGNORECASE) is not None


def test_what_the_pages_show_is_pythons_number_and_in_the_glossary(visit, timelines):
    costs = "&".join(f"{name}={cost}" for name, cost in COSTS.items())
    page = visit(f"?ranks=4&microbatches=8&schedules={','.join(NAMES[:3])}&{costs}")
    settle(page)
    texts = page.inner_text(".compare")
    facts = page.locator(".zp-heading .zp-right").all_inner_texts()
    for timeline, fact in zip(timelines, facts):
        idle, rate = percent(timeline.idle_fraction), percent(timeline.bubble)
        makespan, peak = number(timeline.makespan, 5), number(max(timeline.peak_memory), 4)
        assert rows(page)[timeline.title] == (makespan, idle, peak)
        assert f"bubble rate {rate}" in texts
        assert fact == f"makespan {makespan} · idle {idle} · peak memory {peak}"
        dot = page.locator(f"g.dot[data-name='{timeline.title}']").get_attribute("aria-label")
        assert dot.startswith(f"{timeline.title}: idle {idle}, peak memory {peak}")
    heads = (
        page.locator(".compare thead th").all_inner_texts() + page.locator("#chart th[scope=col]").all_text_contents()
    )
    names = {head.strip().lower() for head in heads} - {"", "download and remove"}
    assert {"idle", "makespan", "peak memory", "bubble rate"} <= names
    assert [name for name in sorted(names) if not is_defined(name)] == []


COMMANDS = ("compare", "plan_output", "simulate", "trace_output", "run_output", "train_output", "layer_table")
NO_NUMBERS = {
    "name",
    "number",
    "layers",
    "messages sent",
}  # of which stages or layers a row is


def heads_of(file):
    """The heads of the tables that a file prints; one for each number where two share a column."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    for call in (call for call in calls if getattr(call.func, "attr", "") == "create_table"):
        for node in (node for argument in call.args for node in ast.walk(argument)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("-\n", "").replace("\n", " ").replace(" /GPU", "/GPU").strip()


@pytest.mark.parametrize("name", COMMANDS)
def test_heads_of_tables_are_in_the_glossary(name):
    heads = set(heads_of(ROOT / "src" / "zeropipe" / "cli" / f"{name}.py")) - NO_NUMBERS - {""}
    # a narrow plan has two numbers in a column, which are columns of the wide one
    heads -= {"step tok/s/GPU", "MFU idle", "peak memory gap"}
    heads = {head.replace("measured makespan", "makespan") for head in heads}
    assert heads
    assert [head for head in sorted(heads) if not is_defined(head)] == []


def test_the_parts_of_a_step_and_of_memory_are_in_the_glossary():
    names = {field.name for kind in (StepSeconds, RankMemory) for field in fields(kind)}
    assert {"imbalance", "optimizer", "workspace"} <= names
    assert [name for name in sorted(names) if not is_defined(name)] == []
    assert [cause for cause in attribution.LostTime._fields if not is_defined(cause)] == []


def test_the_figures_of_a_report_are_in_the_glossary():
    text = (ROOT / "src" / "zeropipe" / "train" / "report" / "page.py").read_text()
    titles = {title.partition(",")[0] for title in re.findall(r'Figure\("([^"]+)"', text)}
    assert {"loss", "step", "idle", "GPU memory", "measured / predicted"} <= titles
    assert [title for title in sorted(titles) if not is_defined(title)] == []
