"""Files dropped on the page: read, proven, kept; and refused in one line when they are wrong."""

import json
from dataclasses import replace

import pytest
from app_client import ask, client, command_line, told, upload

import zeropipe as zp
from zeropipe.core.limits import PAGE
from zeropipe.sim.compare import compare


def test_a_dropped_schedule_is_simulated():
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    for name, text in (("mine.csv", zp.to_csv(schedule)), ("mine.json", zp.to_json(schedule))):
        status, facts = upload(name, text)
        assert (status, facts["kind"], facts["num_ranks"], facts["num_microbatches"]) == (200, "schedule", 2, 4)
        _, answer = ask("simulate", {"schedules": [{"file": facts["id"]}], "costs": {"f": 2.0}})
        assert answer["results"][0]["makespan"] == compare([schedule], zp.Costs(f=2.0))[0].makespan


def test_a_dropped_run_is_shown_as_it_was_and_its_times_can_be_used():
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    costs = zp.Costs(f=[0.1, 0.2, 0.3, 0.4], i=0.2, w=0.1, p2p=0.0, unit="s")
    run = replace(zp.simulate(schedule, costs), measured=True, label="run 7")
    _, facts = upload("run.json", zp.to_json(run))
    assert (facts["kind"], facts["name"], facts["measured"]) == ("timeline", "run 7", True)
    choices = [{"file": facts["id"]}, {"file": facts["id"], "simulate": True}]
    _, answer = ask("simulate", {"ranks": 2, "microbatches": 4, "schedules": choices})
    assert [r["recorded"] for r in answer["results"]] == [True, False]
    assert answer["results"][0]["makespan"] == run.makespan
    assert all(r["best_time"] for r in answer["results"]), "seconds and abstract units are not held against each other"
    _, answer = ask("simulate", {"ranks": 2, "microbatches": 4, "schedules": choices, "costs": facts["costs"]})
    assert answer["results"][1]["makespan"] == pytest.approx(run.makespan, rel=1e-5)


def test_files_of_other_sizes_are_not_held_against_each_other():
    sizes = [(2, 4), (2, 4), (4, 8)]
    choices = []
    for n, (ranks, microbatches) in enumerate(sizes):
        name = ("1f1b", "zbv", "1f1b")[n]
        _, facts = upload(f"{n}.csv", zp.to_csv(zp.build(name, ranks=ranks, microbatches=microbatches)))
        choices.append({"file": facts["id"]})
    _, answer = ask("simulate", {"schedules": choices})
    assert [r["group"] for r in answer["results"]] == [0, 0, 1]
    assert [r["best_time"] for r in answer["results"]] == [False, True, True]


def test_files_of_the_same_name_are_told_apart():
    schedules = [zp.build(name, ranks=4, microbatches=8) for name in ("1f1b", "gpipe", "gpipe")]
    texts = [zp.to_json(replace(schedule, name="1f1b")) for schedule in schedules]
    files = [{"file": upload(f"{n}.json", text)[1]["id"]} for n, text in enumerate(texts)]
    chosen = [*files, {"name": "1f1b"}, {"name": "1f1b"}, {"name": "zb-h2", "options": {"extra": 1}}]
    _, answer = ask("simulate", {"schedules": chosen})
    numbers = ["1f1b (file, simulated)", "1f1b (file, simulated, 2)", "1f1b (file, simulated, 3)"]
    assert [r["title"] for r in answer["results"]] == [*numbers, "1f1b", "1f1b (2)", "zb-h2"]


def test_costs_files_are_read_like_the_command_lines(tmp_path, capsys):
    assert upload("c.toml", "f = [1, 2]\np2p = 0.5")[1]["costs"] == {"f": [1, 2], "p2p": 0.5}
    assert upload("c.json", '{"w": 2}')[1]["costs"] == {"w": 2}
    for name, text in (("c.toml", "ff = 1"), ("c.toml", "f = -1"), ("c.json", '{"f": "x"}')):
        status, answer = upload(name, text)
        assert status == 422
        (tmp_path / name).write_text(text)
        words = command_line(capsys, "--costs", str(tmp_path / name)).replace(str(tmp_path / name), "costs")
        assert words.removeprefix("costs: ") in told(answer, "file")[0]


SENT = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.txt", "0F0", "drop a schedule"),
        ("a.csv", "", "has no action"),
        ("a.csv", "0F0,0X0\n", "line 1, cell 2"),
        ("a.csv", "0B0,0F0\n", "0B0 needs 0F0"),
        ("a.csv", "0F0\n", "stage 0, microbatch 0 has only F"),
        ("a.csv", "0F99999999999999\n", "too large"),
        ("a.csv", SENT + "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n", "received out of order"),
        ("a.csv", "0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD\n", "0B0"),
        ("a.csv", "0F0\n0F9999999\n", "too large"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", "[1]", "not zeropipe's"),
        ("a.json", '{"zeropipe": 1}', "field 'num_ranks' is missing"),
        ("a.json", '{"zeropipe": 1, "num_ranks": 1, "num_stages": 60000, "num_microbatches": 999999999}', "actions"),
        ("a.json", '{"zeropipe": 1, "num_ranks": 9999999, "num_stages": 1, "num_microbatches": 1}', "up to 1024"),
        ("a.toml", "f = ", "not TOML"),
        ("a.toml", "schedule = 'zbv'\n[costs]\nf = 1", "start the page with it (zeropipe app FILE)"),
        ("a.toml", "[mesh]\npp = 4\n", "start the page with it (zeropipe app FILE)"),
        ("a.toml", "f = {x = 1}", "'x' must be the number of a stage"),
        (
            "a.json",
            '{"zeropipe": 1, "type": "layer costs"}',
            "open it on the Plan page, or start this one with `zeropipe app zbv -p 4",
        ),
        ("config.json", '{"model_type": "qwen3"}', "a model's configuration: open it on the Plan page"),
    ],
)
def test_a_wrong_file_is_refused(name, text, word):
    status, answer = upload(name, text)
    assert status == 422
    assert word in told(answer, "file")[0]


def test_text_that_is_no_text_is_refused():
    status, answer = upload("a.csv", b"0F0,\xff")
    assert (status, told(answer, "file")) == (422, ["a.csv: not text: write it in UTF-8"])
    response = client.post("/api/uploads", content=b"0F0")
    assert (response.status_code, told(response.json(), "name")) == (422, ["name is missing"])


@pytest.mark.parametrize("damage", [
    {"start": [0, 1, "x", 3]},
        {"start": [3, 2, 1, 0]}, {"end": [float("nan"), 2, 3, 4]}, {"start": [5, 5, 5, 5]}, {"memory_limit": "much"},
    {"memory": {"during": [float("inf")] * 4, "after": [0] * 4}}, {"start": [0, 1]}, {"rows": ["0F0 0F1 0B0 0B99"]},
    {"end": [1, 2, 3, 1e300]}, {"start": [-1e300, 1, 2, 3]}, {"memory_limit": -1}, {"memory_limit": 1e300},
    {"start": [0, 0, 0, 0], "end": [1e-300, 1e-300, 1e-300, 1e-300]}, {"placement": 3},
    {"rows": ["0F0 0F1 0B0 0B99999999999999999999999"]},
])  # fmt: skip
def test_a_damaged_timeline_is_refused(damage):
    timeline = zp.simulate(zp.build("1f1b", ranks=1, microbatches=2))
    data = {**json.loads(zp.to_json(timeline)), **damage}
    status, answer = upload("run.json", json.dumps(data))
    assert status == 422, answer


def test_old_uploads_leave_when_there_are_too_many(monkeypatch):
    from zeropipe.app import uploads

    monkeypatch.setattr(uploads, "PAGE", replace(PAGE, actions=40))
    ids = [upload(f"{n}.csv", zp.to_csv(zp.build("1f1b", ranks=2, microbatches=8)))[1]["id"] for n in range(4)]
    statuses = [ask("simulate", {"schedules": [{"file": key}]})[0] for key in ids]
    assert statuses == [422, 422, 200, 200]
