"""W in parts on the page: every schedule is filled under its own costs, and no request grows past its bound."""

from dataclasses import replace

import pytest
from app_client import ask, client, told, upload
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.app import comparison
from zeropipe.core import limits
from zeropipe.schedules.registry import entries
from zeropipe.sim.compare import compare
from zeropipe.sim.fill import divide_weights

NAMES = ["1f1b", "zbv", "v-half", "dualpipev"]
COSTS = {"i": 1.2, "w": 0.7, "p2p": 0.05, "stash": 0.5, "memory_limit": 5.0}
BODY = {"ranks": 4, "microbatches": 12, "costs": COSTS, "schedules": [{"name": name} for name in NAMES]}


def compared(parts, names=NAMES):
    built = [zp.build(name, ranks=4, microbatches=12) for name in names]
    return compare(built, zp.Costs(**COSTS), weight_parts=parts)


@pytest.mark.parametrize("parts", [None, 1, 4])
def test_every_schedule_is_filled_under_its_own_costs(parts):
    status, answer = ask("simulate", {**BODY, "weight_parts": parts})
    expected = compared(parts)
    assert (status, answer["errors"]) == (200, [])
    for result, timeline in zip(answer["results"], expected, strict=True):
        assert result["makespan"] == timeline.makespan
        assert result["peak_memory"] == max(timeline.peak_memory)
        assert result["num_actions"] == timeline.schedule.num_actions
        assert result["filled"] == (parts is not None)
    assert [r["num_weight_parts"] for r in answer["results"]] == [1, *[parts or 1] * 3]
    if parts:
        assert sum(t.makespan for t in expected) < sum(t.makespan for t in compared(None)), "nothing to see here"


def test_the_chart_is_of_filled_schedules():
    _, answer = ask("chart", {"ranks": 4, "microbatches": 12, "costs": COSTS, "weight_parts": 4})
    names = ("idle_fraction", "bubble", "peak_memory", "over_limit")
    points = {point["name"]: tuple(point[name] for name in names) for point in answer["points"]}
    for t in compared(4):
        assert points[t.title] == (t.idle_fraction, t.bubble, max(t.peak_memory), bool(t.over_limit))


@pytest.mark.parametrize(
    "form", mark_rest_full(["html", "svg", "png", "pdf", "csv", "json"], ["html", "png", "csv", "json"])
)
def test_files_hold_the_filled_schedule(form, tmp_path):
    body = {**BODY, "weight_parts": 4, "schedules": [{"name": "v-half"}]}
    response = client.post(f"/api/files/{form}", json=body)
    [timeline] = compared(4, ["v-half"])
    assert response.status_code == 200, response.text
    if form == "csv":
        assert zp.from_csv(response.text) == timeline.schedule
    elif form == "json":
        assert zp.from_json(response.text).schedule == timeline.schedule
    else:
        zp.draw(timeline, tmp_path / f"same.{form}", theme="light")
        assert response.content == (tmp_path / f"same.{form}").read_bytes()
        whole = client.post(f"/api/files/{form}", json={**body, "weight_parts": None})
        assert whole.content != response.content


@pytest.mark.parametrize("parts", [0, -1, 65, 2.5, True, "4", [1, 2]])
def test_a_bad_number_of_parts_is_told_beside_its_field(parts):
    for path in ("simulate", "chart", "files/csv"):
        body = {name: value for name, value in BODY.items() if name != "schedules" or path != "chart"}
        status, answer = ask(path, {**body, "weight_parts": parts})
        assert (status, told(answer, "weight_parts")) == (
            422,
            [f"weight_parts={parts!r}: must be an integer from 1 to 64"],
        )


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_dropped_schedule_of_whole_w_is_filled(kind):
    schedule = zp.build("zb-h1", ranks=4, microbatches=12)
    _, facts = upload(f"mine.{kind}", getattr(zp, f"to_{kind}")(schedule))
    _, answer = ask("simulate", {**BODY, "weight_parts": 3, "schedules": [{"file": facts["id"]}]})
    [result], [timeline] = answer["results"], compared(3, ["zb-h1"])
    assert (result["makespan"], result["num_weight_parts"], result["filled"]) == (timeline.makespan, 3, True)


def test_files_with_w_in_parts_are_left_as_they_are():
    """Its maker has placed them, maybe for other costs; a recorded run is what it was."""
    [timeline] = compared(3, ["zbv"])
    _, schedule = upload("mine.csv", zp.to_csv(timeline.schedule))
    _, run = upload("run.json", zp.to_json(timeline))
    choices = [{"file": schedule["id"]}, {"file": run["id"]}, {"file": run["id"], "simulate": True}, {"name": "zbv"}]
    status, answer = ask("simulate", {**BODY, "weight_parts": 5, "schedules": choices})
    assert (status, answer["errors"]) == (200, [])
    assert [r["num_weight_parts"] for r in answer["results"]] == [3, 3, 3, 5]
    assert [r["filled"] for r in answer["results"]] == [False, False, False, True]
    assert [r["makespan"] for r in answer["results"][:3]] == pytest.approx([timeline.makespan] * 3)


def test_parts_count_as_actions_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(comparison, "build_entry", lambda *a, **k: pytest.fail("built"))
    body = {"ranks": 64, "microbatches": 400, "schedules": [{"name": "zbv"}, {"name": "1f1b"}]}
    status, answer = ask("simulate", {**body, "weight_parts": 64})
    assert status == 422
    [message] = told(answer, "weight_parts")
    assert message.startswith(
        "zbv, 1f1b would have 3,430,400 actions with W in 64 parts, the page takes up to 2,000,000; "
    )
    assert "use fewer parts" in message
    status, answer = ask("simulate", {**body, "weight_parts": 64, "microbatches": 40_000})
    assert told(answer, "weight_parts") == []
    assert "20,480,000 actions, the page takes up to 2,000,000; use fewer ranks" in told(answer, "microbatches")[0]
    status, answer = ask("chart", {"ranks": 32, "microbatches": 80, "weight_parts": 64})
    assert "all 18 schedules together would have" in told(answer, "chart")[0]


def test_parts_of_a_file_count_as_well():
    schedule = zp.build("zb-h1", ranks=16, microbatches=2000)
    _, facts = upload("large.csv", zp.to_csv(schedule))
    status, answer = ask("simulate", {"weight_parts": 61, "schedules": [{"file": facts["id"]}]})
    assert (status, [error["field"] for error in answer["errors"]]) == (422, ["weight_parts"])
    assert "large would have 2,016,000 actions" in told(answer, "weight_parts")[0]


def test_the_count_of_parts_is_never_below_the_real_one():
    for entry in entries():
        for per_rank in entry.stages_per_rank[:2]:
            schedule = zp.build(entry.name, ranks=4, microbatches=8, stages_per_rank=per_rank)
            cut = divide_weights(schedule, 5)
            assert (
                cut.num_actions
                == limits.num_actions_with_parts(schedule, 5)
                <= limits.num_actions(entry.splits_backward, 4, 8, per_rank, 5)
            )


def test_a_schedule_that_does_not_say_it_has_w_is_counted_once_it_is_built(monkeypatch):
    @zp.register("silent", placement=zp.linear)
    def silent(lane, rank, p):
        for _ in range(p.num_microbatches):
            lane.f(rank)
            lane.i(rank)
            lane.w(rank)

    monkeypatch.setattr(comparison, "PAGE", replace(limits.PAGE, actions=100))
    status, answer = ask(
        "simulate", {"ranks": 1, "microbatches": 8, "weight_parts": 64, "schedules": [{"name": "silent"}]}
    )
    assert status == 422
    assert "silent would have 528 actions with W in 64 parts" in told(answer, "schedules.0")[0]


def test_the_interface_says_what_it_takes():
    size = client.get("/openapi.json").json()["components"]["schemas"]["SizeRequest"]["properties"]["weight_parts"]
    assert {"type": "integer", "minimum": 1, "maximum": 64} in size["anyOf"]
