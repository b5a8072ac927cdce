"""The page's HTTP interface: figures equal the library's, mistakes are told by field, nothing is unbounded."""

import re
import signal
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import httpx
import pytest
from app_client import ask, client, command_line, told

import zeropipe as zp
from zeropipe.app import comparison, downloads, guard, thumbnails
from zeropipe.cli import main
from zeropipe.core import limits
from zeropipe.schedules.registry import entries
from zeropipe.sim.compare import compare

ONE = {"schedules": [{"name": "1f1b"}]}
FORMATS = ("html", "svg", "png", "pdf", "csv", "json")


def test_the_catalog_has_a_card_with_a_picture_for_every_schedule():
    catalog = client.get("/api/schedules").json()
    assert [card["name"] for card in catalog["schedules"]] == zp.names()
    for card in catalog["schedules"]:
        assert card["summary"]
        assert set("".join(card["picture"]["paths"])) >= {"F"}


def test_a_picture_shows_every_action():
    schedule = zp.build("zbv", ranks=4, microbatches=8)
    drawn = thumbnails.thumbnail(next(e for e in entries() if e.name == "zbv"))
    assert sum(path.count("M") for path in drawn["paths"].values()) == schedule.num_actions


def test_results_are_those_of_compare():
    names = ["1f1b", "zbv", "dualpipev", "interleaved"]
    costs = {"f": 1.0, "i": 1.2, "w": 0.8, "p2p": 0.1, "activation": 2.0, "memory_limit": 9.0}
    status, answer = ask(
        "simulate", {"ranks": 4, "microbatches": 12, "schedules": [{"name": n} for n in names], "costs": costs}
    )
    expected = compare([zp.build(n, ranks=4, microbatches=12) for n in names], zp.Costs(**costs))
    assert status == 200
    assert answer["errors"] == []
    for result, timeline in zip(answer["results"], expected, strict=True):
        assert result["makespan"] == timeline.makespan
        assert result["bubble"] == timeline.bubble
        assert result["peak_memory"] == max(timeline.peak_memory)
        assert result["over_limit"] == [r for r, peak in enumerate(timeline.peak_memory) if peak > 9.0]
        assert result["busy"] + sum(result["idle"].values()) == pytest.approx(timeline.makespan)
    fastest = min(expected, key=lambda t: t.makespan)
    assert [r["title"] for r in answer["results"] if r["best_time"]] == [fastest.title]
    assert [t["makespan"] for t in answer["viewer"]["timelines"]] == [t.makespan for t in expected]


def test_figures_beside_the_bubble_and_advice():
    body = {"ranks": 4, "microbatches": 3, "schedules": [{"name": "1f1b"}, {"name": "zbv"}], "costs": {"p2p": 0.1}}
    _, answer = ask("simulate", body)
    for result, name in zip(answer["results"], ("1f1b", "zbv"), strict=True):
        schedule = zp.build(name, ranks=4, microbatches=3)
        [timeline] = compare([schedule], zp.Costs(p2p=0.1))
        assert result["bubble_to_ideal"] == timeline.bubble_to_ideal
        assert result["advice"] == list(zp.advice(schedule)) != []
    _, answer = ask("simulate", {**body, "microbatches": 8})
    assert [result["advice"] for result in answer["results"]] == [[], []]


def test_costs_are_per_rank_or_per_stage_and_the_answer_says_which():
    body = {"ranks": 4, "microbatches": 8, "schedules": [{"name": "1f1b"}, {"name": "zbv"}], "costs": {"f": 2.0}}
    built = [zp.build(name, ranks=4, microbatches=8) for name in ("1f1b", "zbv")]
    costs = zp.Costs(f=2.0)
    for per, expected in (
        (None, compare(built, costs)), ("rank", compare(built, costs)),
        ("stage", [zp.simulate(one, costs) for one in built]),
    ):  # fmt: skip
        _, answer = ask("simulate", {**body, **({"per": per} if per else {})})
        assert answer["costs_per"] == (per or "rank")
        assert [result["makespan"] for result in answer["results"]] == [t.makespan for t in expected]
    assert [r["group"] for r in answer["results"]] == [0, 1], "with costs per stage, more stages are more work"
    assert all(r["best_time"] for r in answer["results"])
    _, chart = ask("chart", {"ranks": 4, "microbatches": 8, "costs": {"f": 2.0}, "per": "stage"})
    assert next(p["makespan"] for p in chart["points"] if p["name"] == "zbv") == expected[1].makespan
    text = client.post("/api/files/json", json={**body, "schedules": [{"name": "zbv"}], "per": "stage"}).text
    assert zp.from_json(text).makespan == expected[1].makespan
    status, answer = ask("simulate", {**body, "per": "model"})
    assert (status, told(answer, "per")) == (422, ["per='model': must be rank or stage"])


def test_what_is_over_its_memory_limit_cannot_win():
    names = ["1f1b", "zbv", "zb-h2", "v-half"]
    body = {"ranks": 4, "microbatches": 12, "schedules": [{"name": name} for name in names]}
    for limit, winners in ((None, {"zbv"}), (3.5, {"v-half"}), (1.0, set())):
        costs = {} if limit is None else {"memory_limit": limit}
        _, answer = ask("simulate", {**body, "costs": costs})
        assert {r["title"] for r in answer["results"] if r["best_time"]} == winners
        assert [r["fits"] for r in answer["results"]] == [not r["over_limit"] for r in answer["results"]]
        _, chart = ask("chart", {"ranks": 4, "microbatches": 12, "costs": costs})
        front = [p for p in chart["points"] if p["pareto"]]
        assert not any(p["over_limit"] for p in front)
        assert bool(front) == (limit != 1.0)


def test_stages_per_rank_are_a_wish_for_all_and_a_demand_for_one():
    choices = [{"name": "1f1b"}, {"name": "interleaved"}, {"name": "interleaved", "stages_per_rank": 2}]
    _, answer = ask("simulate", {"stages_per_rank": 4, "schedules": choices})
    assert [r["num_stages"] for r in answer["results"]] == [4, 16, 8]
    assert [r["title"] for r in answer["results"]] == ["1f1b", "interleaved (4 per rank)", "interleaved (2 per rank)"]
    status, answer = ask("simulate", {"schedules": [{"name": "1f1b", "stages_per_rank": 2}]})
    assert (status, told(answer, "schedules.0")) == (422, ["1f1b needs 1 stage per rank, got stages_per_rank=2"])


def test_costs_per_piece_are_added_up_to_each_schedules_stages():
    pieces = [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]
    _, answer = ask("simulate", {"schedules": [{"name": "1f1b"}, {"name": "zbv"}], "costs": {"f": pieces}})
    plain = zp.simulate(zp.build("1f1b", ranks=4, microbatches=8), zp.Costs(f=[3, 7, 3, 7]))
    assert answer["results"][0]["makespan"] == plain.makespan


def test_costs_that_fit_one_schedule_only_are_told_beside_the_other():
    body = {"schedules": [{"name": "1f1b"}, {"name": "zbv"}], "costs": {"f": [1.0] * 12}}
    status, answer = ask("simulate", body)
    assert (status, [r["title"] for r in answer["results"]]) == (200, ["1f1b"])
    assert "f has 12 entries, which 8 stages on 4 ranks cannot share" in told(answer, "schedules.1")[0]
    status, answer = ask("simulate", {**body, "schedules": [{"name": "zbv"}]})
    assert (status, [error["field"] for error in answer["errors"]]) == (422, ["costs.f"])


def test_a_schedule_that_cannot_be_built_does_not_spoil_the_others():
    status, answer = ask(
        "simulate", {"ranks": 3, "microbatches": 6, "schedules": [{"name": "dualpipe"}, {"name": "zbv"}]}
    )
    assert status == 200
    assert [r["choice"] for r in answer["results"]] == [1]
    with pytest.raises(zp.ConfigError) as error:
        zp.build("dualpipe", ranks=3, microbatches=6)
    assert answer["errors"] == [{"field": "schedules.0", "message": str(error.value)}]


@pytest.mark.parametrize(
    ("change", "field", "flags"),
    [
        ({"ranks": 0}, "ranks", ["--ranks", "0"]),
        ({"microbatches": -3}, "microbatches", ["--microbatches", "-3"]),
        ({"costs": {"f": -1.0}}, "costs.f", ["--f", "-1"]),
        ({"costs": {"w": [1.0, 2.0, 3.0]}}, "costs.w", ["--w", "1,2,3"]),
        ({"costs": {"bandwidth": 0.0}}, "costs.bandwidth", ["--bandwidth", "0"]),
        ({"costs": {"node_size": 0}}, "costs.node_size", ["--node-size", "0"]),
        ({"costs": {"memory_limit": -2.0}}, "costs.memory_limit", ["--memory-limit", "-2"]),
        ({"schedules": [{"name": "1f2b"}]}, "schedules.0", None),
        ({"schedules": [{"name": "interleaved", "options": {"group": 4}}]}, "schedules.0", None),
    ],
)
def test_an_error_is_told_by_its_field_in_the_words_of_the_command_line(capsys, change, field, flags):
    status, answer = ask("simulate", {**ONE, **change})
    assert status == 422
    [message] = told(answer, field)
    if flags:
        # one number given as 0 is written 0 by the one and 0.0 by the other
        assert message.replace(".0", "") == command_line(capsys, *flags).replace(".0", "")
    else:
        with pytest.raises(zp.ConfigError) as error:
            zp.build(
                change["schedules"][0]["name"], ranks=4, microbatches=8, **change["schedules"][0].get("options", {})
            )
        assert message == str(error.value)


@pytest.mark.parametrize(
    ("body", "field", "word"),
    [
        ({}, "schedules", "missing"),
        ({"schedules": []}, "schedules", "choose from 1 to 64"),
        ({**ONE, "ranks": "four"}, "ranks", "ranks='four': must be a positive integer"),
        ({**ONE, "ranks": 2.5}, "ranks", "ranks=2.5: must be a positive integer"),
        ({**ONE, "ranks": 4096}, "ranks", "up to 1,024"),
        ({**ONE, "costs": {"f": "1;2"}}, "costs.f", "write a number, several like 1,1,2, or some like 0=0.8"),
        ({**ONE, "costs": {"p2p": "x"}}, "costs.p2p", "p2p='x': must be a non-negative number"),
        ({**ONE, "costs": {"g": 1}}, "costs.g", "unknown field 'g'"),
        ({**ONE, "costs": {"shards": "x"}}, "costs.shards", "shards='x': must be keep or regather"),
        ({**ONE, "costs": {"units": 0}}, "costs.units", "units=0: must be an integer from 1 to 10000"),
        (
            {**ONE, "costs": {"inter_node": {"bandwidth": 0.0}}},
            "costs.inter_node.bandwidth",
            ": must be a positive number; leave it out for no limit",
        ),
        ({**ONE, "costs": {"f": 1e300}}, "costs.f", "must be 0, or from 1e-18"),
        ({**ONE, "costs": {"edges": {"0>1": {}}}}, "costs", "must be two different ranks"),
        ({"schedules": [{}]}, "schedules.0", "use one of the two"),
        ({"schedules": [{"file": "gone"}]}, "schedules.0.file", "drop it again"),
        ({"schedules": [{"name": "zb-h2", "options": {"extra": "x"}}]}, "schedules.0", "extra"),
        (
            {"schedules": [{"name": "zb-h2", "options": {"extra": [1]}}]},
            "schedules.0",
            "options.extra=[1]: must be a number, a string",
        ),
    ],
)
def test_bad_input_is_refused_by_field(body, field, word):
    status, answer = ask("simulate", body)
    assert status == 422
    assert any(word in message for message in told(answer, field)), answer


@pytest.mark.parametrize(
    "body", [b"{", b"\xff\xfe", b"[1]", b'"\\ud800"', b"1" * 5000, b"[" * 9000, b'{"ranks": Infinity}']
)
def test_a_body_that_is_no_request_is_refused(body):
    response = client.post("/api/simulate", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    assert response.json()["errors"]


@pytest.mark.parametrize("body,kind", [(b"[1]", "application/json"), (b'{"schedules": []}', "text/plain")])
def test_a_body_that_is_no_object_says_how_it_is_sent(body, kind):
    response = client.post("/api/simulate", content=body, headers={"Content-Type": kind})
    words = "the body is not a JSON object: send one, with the header Content-Type: application/json"
    assert (response.status_code, told(response.json(), "")) == (422, [words])


def test_two_million_actions_are_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(comparison, "build_entry", lambda *a, **k: pytest.fail("built"))
    status, answer = ask("simulate", {"ranks": 512, "microbatches": 2000, "schedules": [{"name": "1f1b"}]})
    assert status == 422
    assert "2,048,000 actions, the page takes up to 2,000,000" in told(answer, "microbatches")[0]
    status, answer = ask("chart", {"ranks": 256, "microbatches": 512})
    assert status == 422
    assert "all 18 schedules together" in told(answer, "chart")[0]


def test_the_count_before_building_is_never_below_the_real_one():
    for entry in entries():
        for per_rank in entry.stages_per_rank[:2]:
            schedule = zp.build(entry.name, ranks=4, microbatches=8, stages_per_rank=per_rank)
            assert schedule.num_actions <= limits.num_actions(entry.splits_backward, 4, 8, per_rank)


def test_a_large_body_is_refused(monkeypatch):
    monkeypatch.setattr(guard, "PAGE", replace(limits.PAGE, file_bytes=1000))
    monkeypatch.setattr(guard, "MAX_JSON_BYTES", 1000)
    for path in ("/api/simulate", "/api/uploads?name=a.csv"):
        for body in (b" " * 2000, iter([b" " * 600] * 3)):  # told by its length, and only while it comes
            response = client.post(path, content=body)
            assert response.status_code == 413
            assert "larger than" in response.json()["errors"][0]["message"]


def test_the_pareto_front_of_the_chart():
    _, answer = ask("chart", {"ranks": 4, "microbatches": 16, "costs": {"p2p": 0.2}})
    points = answer["points"]
    assert len(points) + len(answer["errors"]) == len(zp.names())
    better = [
        any(
            q["idle_fraction"] <= p["idle_fraction"] + 1e-9 and q["peak_memory"] <= p["peak_memory"] + 1e-9
            and (q["idle_fraction"] < p["idle_fraction"] - 1e-9 or q["peak_memory"] < p["peak_memory"] - 1e-9)
            for q in points
        )
        for p in points
    ]  # fmt: skip
    assert [p["pareto"] for p in points] == [not beaten for beaten in better]
    assert 0 < sum(better) < len(points)
    zbv = next(p for p in points if p["name"] == "zbv")
    [timeline] = compare([zp.build("zbv", ranks=4, microbatches=16)], zp.Costs(p2p=0.2))
    assert (zbv["bubble"], zbv["peak_memory"]) == (timeline.bubble, max(timeline.peak_memory))


def test_the_chart_says_why_a_schedule_is_missing():
    _, answer = ask("chart", {"ranks": 3, "microbatches": 4})
    with pytest.raises(zp.ConfigError) as error:
        zp.build("dualpipe", ranks=3, microbatches=4)
    assert {"field": "dualpipe", "message": str(error.value)} in answer["errors"]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_can_be_downloaded(form):
    body = {"ranks": 4, "microbatches": 8, "schedules": [{"name": "zbv"}], "costs": {"p2p": 0.1}}
    response = client.post(f"/api/files/{form}", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-disposition"] == f'attachment; filename="zbv.{form}"'
    schedule = zp.build("zbv", ranks=4, microbatches=8)
    [timeline] = compare([schedule], zp.Costs(p2p=0.1))
    if form == "csv":
        assert zp.from_csv(response.text) == schedule
    elif form == "json":
        back = zp.from_json(response.text)
        assert back.schedule == schedule
        assert back.makespan == timeline.makespan
    elif form == "svg":
        assert ElementTree.fromstring(response.text).tag.endswith("svg")
    else:
        assert response.content.startswith({"html": b"<!doctype html>", "png": b"\x89PNG", "pdf": b"%PDF"}[form])


@pytest.mark.parametrize("form", FORMATS)
def test_several_schedules_in_one_file(form):
    body = {"schedules": [{"name": "zbv"}, {"name": "1f1b"}]}
    response = client.post(f"/api/files/{form}", json=body)
    if form == "csv":
        assert response.status_code == 422
        assert "a .csv holds one schedule, not 2" in response.text
    else:
        assert response.status_code == 200


def test_a_file_too_large_to_be_of_use_is_refused(monkeypatch):
    monkeypatch.setitem(downloads.MAX_ACTIONS, "pdf", 50)
    status, answer = ask("files/pdf", ONE)
    assert (status, "64 actions is more than the page writes (50)" in told(answer, "format")[0]) == (422, True)


def test_headers_keep_the_page_to_its_host():
    for path in ("/", "/static/main.js", "/viewer/viewer.js", "/api/schedules", "/nothing"):
        response = client.get(path)
        assert "default-src 'self'" in response.headers["content-security-policy"], path
    assert client.get("/nothing").json() == {"errors": [{"field": "", "message": "Not Found"}]}
    assert client.get("/static/../server.py").status_code == 404


def test_nothing_but_names_and_uploads_is_opened(tmp_path):
    for name in (str(tmp_path / "x.py:y"), "mine.csv", "../../etc/passwd"):
        status, answer = ask("simulate", {"schedules": [{"name": name}]})
        assert status == 422
        assert told(answer, "schedules.0")[0].startswith("unknown schedule")


def test_the_port_in_use_is_a_mistake_in_one_line(capsys):
    from zeropipe.app.serve import listen, page_address

    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert page_address(taken) == f"http://127.0.0.1:{port}/"
        with pytest.raises(SystemExit) as stop:
            main(["app", "--port", str(port), "--no-browser"])
    assert stop.value.code == 2
    assert f"--port {port}: in use by another program" in capsys.readouterr().err


MINE = """
import zeropipe as zp

@zp.register("my-own", placement=zp.linear)
def mine(lane, rank, p):
    \"\"\"All forwards, then all backwards, by hand.\"\"\"
    lane.f(rank, times=p.num_microbatches)
    lane.b(rank, times=p.num_microbatches)
"""


def test_the_command_serves_the_page_until_it_is_interrupted(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    command = [sys.executable, "-c", "from zeropipe.cli import main; main()", "app", "--no-browser", "--port", "0"]
    process = subprocess.Popen(
        [*command, "1f1b", f"{tmp_path}/mine.py:mine"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job starts with it ignored
    )  # fmt: skip
    try:
        said = re.search(r"(http://127\.0\.0\.1:\d+/)(\S*)", process.stdout.readline())
        assert said[2] == "?schedules=1f1b,my-own"
        assert "<title>zeropipe</title>" in httpx.get(said[1], timeout=30).text
        cards = httpx.get(f"{said[1]}api/schedules", timeout=30).json()["schedules"]
        assert [card["picture"] is not None for card in cards if card["name"] == "my-own"] == [True]
    finally:
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=30)
    assert (process.returncode, complaints.strip()) == (130, "")


def test_the_command_tells_where_files_go(capsys):
    with pytest.raises(SystemExit):
        main(["app", "--no-browser", "run.json"])
    assert "drop the file there" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in [n for n in sys.modules if n.startswith("zeropipe.app.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit):
        main(["app", "--no-browser"])
    assert "pip install 'zeropipe[app]'" in capsys.readouterr().err
