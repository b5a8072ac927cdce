"""The page in a real Chromium: as a person uses it, with mouse, keys, files and links."""

import json
import tomllib
from contextlib import suppress
from dataclasses import replace
from urllib.parse import parse_qs, urlparse

import pytest
from browser import point_at
from page_fixtures import drop, query, rows, settle

import zeropipe as zp
from zeropipe.app import comparison
from zeropipe.schedules import registry
from zeropipe.sim.compare import compare
from zeropipe.sim.costs import Link
from zeropipe.sim.costs_file import costs_from_data


def test_the_page_opens_with_a_comparison(visit):
    page = visit()
    assert [card.get_attribute("data-name") for card in page.query_selector_all(".card")] == zp.names()
    assert all(card.query_selector("svg path") for card in page.query_selector_all(".card"))
    assert rows(page)["1f1b"] == ("33", "27.3%", "4")
    assert rows(page)["zbv"][:2] == ("25.5", "5.9%")
    assert len(page.query_selector_all(".zp-panel")) == 3
    assert page.inner_text("h1").startswith("zbv is fastest")
    assert page.evaluate("import('/viewer/units.js').then((m) => m.timeText(3.3e-17, ''))") == "3.3e-17"
    assert page.evaluate("import('/viewer/units.js').then((m) => m.ruler(0, 140 + 3e-14, 14, '').step)") == 10
    page.wait_for_selector("g.dot")
    assert len(page.query_selector_all("g.dot")) == len(zp.names())


def test_results_follow_every_change_without_a_button(visit):
    page = visit("?schedules=1f1b,zbv")
    page.fill("#in-ranks", "8")
    page.fill("#in-microbatches", "20")
    settle(page)
    first, second = compare([zp.build(n, ranks=8, microbatches=20) for n in ("1f1b", "zbv")], zp.Costs())
    assert rows(page)["1f1b"][0] == f"{first.makespan:g}"
    assert rows(page)["zbv"][0] == f"{second.makespan:g}"
    page.press("#in-ranks", "ArrowDown")
    settle(page)
    assert page.input_value("#in-ranks") == "7"
    assert "7 ranks" in page.inner_text("#status")
    page.click("#tab-costs")
    page.fill("#in-f", "2")
    page.check("#in-blocking")
    page.fill("#in-p2p", "0.25")
    settle(page)
    [timeline] = compare([zp.build("1f1b", ranks=7, microbatches=20)], zp.Costs(f=2, p2p=0.25, blocking=True))
    assert float(rows(page)["1f1b"][0]) == pytest.approx(timeline.makespan, rel=1e-3)
    assert query(page) == {
        "ranks": "7",
        "microbatches": "20",
        "schedules": "1f1b,zbv",
        "f": "2",
        "p2p": "0.25",
        "blocking": "1",
    }


def test_an_answer_in_flight_is_shown_and_an_old_one_is_dropped(visit):
    page = visit("?schedules=1f1b")
    held = []

    def hold(route):
        # the question about 5 ranks is answered only after the one about 6
        if json.loads(route.request.post_data)["ranks"] == 5:
            held.append(route)
        else:
            route.continue_()

    page.route("**/api/simulate", hold)
    page.fill("#in-ranks", "5")
    page.wait_for_timeout(400)
    assert len(held) == 1
    assert page.get_attribute("main", "aria-busy") == "true"
    page.click(".card[data-name=gpipe]")  # the page goes on working meanwhile
    page.fill("#in-ranks", "6")
    settle(page)
    assert "6 ranks" in page.inner_text("#status")
    with suppress(Exception):  # the browser may have given the old question up already, which is as good
        held[0].fulfill(json={"results": [], "errors": [], "viewer": {}})
    page.unroute_all(behavior="ignoreErrors")
    page.wait_for_timeout(300)
    assert "6 ranks" in page.inner_text("#status")
    assert set(rows(page)) == {"1f1b", "gpipe"}


def test_schedules_are_added_removed_and_varied(visit):
    page = visit("?schedules=1f1b")
    page.click(".card[data-name=interleaved]")
    settle(page)
    assert page.get_attribute(".card[data-name=interleaved]", "aria-pressed") == "true"
    body = page.locator(".compare tbody[data-choice=interleaved]")
    body.get_by_text("add a variant").click()
    settle(page)
    body.nth(1).locator("select").select_option("4")
    settle(page)
    assert set(rows(page)) == {"1f1b", "interleaved (2 per rank)", "interleaved (4 per rank)"}
    assert query(page)["schedules"] == "1f1b,interleaved,interleaved:v=4"
    body.nth(1).get_by_label("Remove interleaved").click()
    settle(page)
    assert set(rows(page)) == {"1f1b", "interleaved"}
    for name in ("1f1b", "interleaved"):
        page.click(f".card[data-name='{name}']")
    settle(page)
    assert page.is_visible(".empty")


def test_the_chart_marks_the_front_tells_on_hover_and_adds_on_click(visit):
    page = visit("?schedules=1f1b&microbatches=16")
    page.wait_for_selector("g.dot.front")
    answer = page.evaluate(
        "fetch('/api/chart', {method: 'POST', headers: {'Content-Type': 'application/json'}, "
        "body: JSON.stringify({microbatches: 16})}).then((r) => r.json())"
    )
    front = {point["name"] for point in answer["points"] if point["pareto"]}
    assert {dot.get_attribute("data-name") for dot in page.query_selector_all("g.dot.front")} == front
    page.hover("g.dot[data-name='v-min'] circle:last-child")
    tip = page.inner_text(".tip")
    assert "v-min" in tip
    assert "click to add" in tip
    page.click("g.dot[data-name='v-min'] circle:last-child")
    settle(page)
    assert set(rows(page)) == {"1f1b", "v-min"}
    page.focus("g.dot[data-name='v-half']")
    page.keyboard.press("Enter")
    settle(page)
    assert set(rows(page)) == {"1f1b", "v-min", "v-half"}
    page.click("text=As a table")
    assert page.locator(".plain tbody tr").count() == len(answer["points"])


CHART = """() => {
    const all = (what) => [...document.querySelectorAll(`.chart ${what}`)];
    const place = (dot) => dot.getAttribute("transform").match(/[\\d.]+/g).map(Number);
    const leader = (line) => line.getAttribute("d").match(/[\\d.]+/g).map(Number);
    const tick = (text) => [parseFloat(text.textContent), Number(text.getAttribute("x"))];
    return {
        ticks: all(".axes text[text-anchor=middle]").map(tick),
        dots: Object.fromEntries(all("g.dot").map((one) => [one.dataset.name, place(one)])),
        leaders: all("path.leader").map(leader),
    };
}"""  # a leader is "M4 5v6m0 -3H9": from 4 to 9, with 8 as its height


def test_a_dot_is_at_its_memory_or_tied_to_it(visit):
    page = visit("?schedules=1f1b&ranks=8&microbatches=8")
    page.wait_for_selector("g.dot.front")
    points = page.evaluate(
        "fetch('/api/chart', {method: 'POST', headers: {'Content-Type': 'application/json'}, "
        "body: JSON.stringify({ranks: 8, microbatches: 8})}).then((r) => r.json())"
    )["points"]
    seen = page.evaluate(CHART)
    (low, x_low), *_, (high, x_high) = seen["ticks"]
    tied = {(to, y + 3): x for x, y, *_, to in seen["leaders"]}
    for point in points:
        x, y = seen["dots"][point["name"]]
        exact = x_low + (point["peak_memory"] - low) * (x_high - x_low) / (high - low)
        assert tied.get((x, y), x) == pytest.approx(exact, abs=0.5), point["name"]
    assert tied, "some points are at the same place"


def test_hover_zoom_and_switches_in_the_timeline_and_their_link(visit):
    page = visit("?schedules=zbv")
    point_at(page, page.locator(".zp-plot").first, 68, 12, ".zp-card:not([hidden])")
    assert "0F0" in page.inner_text(".zp-card")
    page.mouse.wheel(0, -400)
    page.wait_for_timeout(100)
    page.click("text=Critical path")
    kept = query(page)
    start, end = map(float, kept["zoom"].split(":"))
    assert 0 <= start < end < 25.5
    assert kept["path"] == "1"
    other = visit(f"?{urlparse(page.url).query}")
    assert other.get_attribute(".zp-toggle-path", "aria-pressed") == "true"
    other.click("text=Critical path")  # the address is written anew, from what is in sight
    other.wait_for_url(lambda url: "path=" not in url, wait_until="commit")
    assert query(other) == {name: value for name, value in kept.items() if name != "path"}


def test_w_in_parts_fill_the_gaps_of_all_schedules_files_and_links(visit):
    page = visit("?microbatches=12&schedules=1f1b,v-half&i=1.2&w=0.7&p2p=0.05&memory_limit=5")
    before = rows(page)
    page.wait_for_selector("g.dot")
    page.fill("#in-weight_parts", "3")
    page.press("#in-weight_parts", "ArrowUp")
    settle(page)
    built = [zp.build(name, ranks=4, microbatches=12) for name in ("1f1b", "v-half")]
    costs = zp.Costs(i=1.2, w=0.7, p2p=0.05, memory_limit=5)
    plain, filled = compare(built, costs, weight_parts=4)
    shown = rows(page)
    assert shown["1f1b"] == before["1f1b"]
    assert float(shown["v-half"][0]) == pytest.approx(filled.makespan, rel=1e-3)
    assert float(shown["v-half"][0]) < float(before["v-half"][0])
    assert "W in 4 parts" in page.inner_text(".compare tbody[data-choice=v-half]")
    assert "W in" not in page.inner_text(".compare tbody[data-choice='1f1b']")
    assert f"{plain.schedule.num_actions + filled.schedule.num_actions:,} actions" in page.inner_text("#status")
    page.wait_for_selector(f"g.dot[data-name='v-half'][aria-label*='idle {filled.idle_fraction:.1%}']")
    assert query(page)["weight_parts"] == "4"
    assert rows(visit(page.url.split("/", 3)[3])) == shown
    for form, read in (("csv", zp.from_csv), ("json", lambda text: zp.from_json(text).schedule)):
        with page.expect_download() as download:
            page.click("[aria-label='Download v-half']")
            page.click(f"tbody[data-choice=v-half] [data-format={form}]")
        assert read(download.value.path().read_text()) == filled.schedule
    with visit.expected():
        page.fill("#in-weight_parts", "65")
        page.wait_for_selector("#error-weight_parts:not([hidden])")
        assert page.inner_text("#error-weight_parts") == "weight_parts=65: must be an integer from 1 to 64"
        page.fill("#in-weight_parts", "1")
        page.press("#in-weight_parts", "ArrowDown")  # below 1 is off
        page.wait_for_selector("#error-weight_parts", state="hidden")
        settle(page)
    assert page.input_value("#in-weight_parts") == ""
    assert "weight_parts" not in query(page)
    assert rows(page) == before


def test_a_file_with_w_in_parts_stays_as_it_is(visit):
    page = visit("?schedules=zbv&weight_parts=2")
    schedule = zp.fill_gaps(zp.build("zbv", ranks=4, microbatches=8), zp.Costs(w=0.5), weight_parts=3)
    drop(page, "mine.csv", zp.to_csv(schedule))
    page.wait_for_selector(".compare tbody:nth-of-type(2)")
    settle(page)
    [timeline] = compare([schedule], zp.Costs())
    assert float(rows(page)["mine"][0]) == pytest.approx(timeline.makespan, rel=1e-3)
    assert "W in 3 parts, as in the file" in page.inner_text(".compare tbody[data-choice=mine]")
    assert page.inner_text(".compare tbody[data-choice=zbv] .note").endswith("W in 2 parts")


def test_the_chart_says_why_it_is_not_drawn(visit):
    with visit.expected():
        page = visit("?ranks=0&schedules=1f1b", wait="#error-ranks:not([hidden])")
        page.wait_for_selector("#chart .blank:text-is('Not drawn: ranks=0: must be a positive integer')")
        assert page.get_attribute("#chart", "aria-busy") == "false"
        assert not page.is_visible("#chart .legend")
        page.fill("#in-ranks", "4")
        page.wait_for_selector("g.dot")
        assert page.inner_text("#chart .blank") == ""
        assert page.is_visible("#chart .legend")
        page.fill("#in-ranks", "x")  # the last picture stays, and looks like it
        page.wait_for_selector("#chart.stale g.dot")
        page.fill("#in-ranks", "5")
        page.wait_for_selector("#chart:not(.stale) g.dot")
        other = visit(
            "?schedules=&weight_parts=65", wait="#error-weight_parts:not([hidden])"
        )  # no comparison is asked for
        other.wait_for_selector("#chart .blank:has-text('Not drawn: weight_parts=65')")
        other.fill("#in-weight_parts", "2")
        other.wait_for_selector("g.dot")
        assert not other.is_visible("#error-weight_parts")


def test_a_dropped_schedule_joins_the_comparison_and_its_link(visit):
    page = visit("?schedules=zbv")
    schedule = zp.build("1f1b", ranks=2, microbatches=5)
    drop(page, "mine, 1.csv", zp.to_csv(schedule))
    page.wait_for_selector(".compare tbody:nth-of-type(2)")
    settle(page)
    assert page.input_value("#in-ranks") == "2"
    assert rows(page)["mine, 1"] == ("18", "16.7%", "2")
    page.wait_for_timeout(200)
    other = visit(page.url.split("/", 3)[3])  # another browser, which never saw the file
    assert rows(other) == rows(page)
    page.wait_for_selector("g.dot[data-name='mine, 1']")
    page.fill("#in-ranks", "3")  # the chart is of another size then, the file is not
    settle(page)
    page.wait_for_selector("g.dot[data-name='mine, 1']", state="detached")
    assert set(rows(page)) == {"zbv", "mine, 1"}


def test_a_measured_trace_is_shown_as_it_was_and_predicted_beside(visit, tmp_path):
    schedule = zp.build("zbv", ranks=2, microbatches=6)
    costs = zp.Costs(f=[0.010, 0.012, 0.011, 0.013], i=0.012, w=0.008, p2p=0.001, unit="s")
    run = replace(zp.simulate(schedule, costs), measured=True, label="run 7")
    zp.draw(run, tmp_path / "run.json")
    page = visit("?schedules=1f1b")
    page.set_input_files("#file", tmp_path / "run.json")
    page.wait_for_selector(".compare tbody:nth-of-type(2)")
    settle(page)
    assert "measured" in page.inner_text(".compare tbody:nth-of-type(2)")
    page.click("text=also simulate it")
    settle(page)
    page.click("text=use its times as costs")
    settle(page)
    measured, predicted = rows(page)["run 7"], rows(page)["zbv"]
    assert float(measured[0].split()[0]) == pytest.approx(run.makespan * 1000, rel=1e-3)
    assert predicted[0] == measured[0]
    assert len(page.query_selector_all(".zp-panel")) == 3


def test_a_wrong_file_is_told_where_files_are_opened(visit):
    page = visit("?schedules=1f1b")
    with visit.expected():
        drop(page, "bad.csv", "0B0,0F0\n")
        page.wait_for_selector("#error-file:not([hidden])")
    assert "bad.csv: no rank can go on" in page.inner_text("#error-file")
    assert set(rows(page)) == {"1f1b"}
    drop(page, "good.csv", "0F0,0B0\n")
    page.wait_for_selector("#error-file", state="hidden")


def test_costs_come_from_a_file_from_paste_and_per_stage(visit):
    page = visit("?schedules=1f1b,zbv")
    drop(page, "costs.toml", "f = 2\nmemory_limit = 3\n")
    page.wait_for_selector("text=over on")
    assert query(page)["f"] == "2"
    page.click("#tab-costs")
    assert page.input_value("#in-f") == "2"
    page.click("text=Paste…")
    with visit.expected():
        page.fill("#pasted", "f = -1")
        page.click("text=Use these costs")
        page.wait_for_selector("#error-paste:not([hidden])")
    assert "f=-1: must be a non-negative number" in page.inner_text("#error-paste")
    page.fill("#pasted", '{"w": 3, "edges": {"0-1": {"p2p": 0.5}}}')
    page.click("text=Use these costs")
    page.wait_for_selector("#paste", state="hidden")
    settle(page)
    assert (page.input_value("#in-f"), page.input_value("#in-w")) == ("1", "3")
    assert query(page) == {"ranks": "4", "microbatches": "8", "schedules": "1f1b,zbv", "w": "3", "edges": "0-1:0.5:"}
    page.fill("#in-f", "0=0.8, default=2")
    settle(page)
    names = ("1f1b", "zbv")
    costs = zp.Costs(f={0: 0.8, "default": 2}, w=3, edges={(0, 1): Link(p2p=0.5)})
    expected_ = compare([zp.build(n, ranks=4, microbatches=8) for n in names], costs)
    assert [float(row[0]) for row in rows(page).values()] == pytest.approx([t.makespan for t in expected_], rel=1e-3)
    other = visit(page.url.split("/", 3)[3])
    assert rows(other) == rows(page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#pane-costs >> text=Copy")
    page.wait_for_selector("text=Costs copied as TOML")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert costs_from_data(tomllib.loads(copied)) == costs
    drop(page, "again.toml", copied)
    page.wait_for_selector("#pane-schedules:not([hidden])")
    page.wait_for_url(lambda url: parse_qs(urlparse(url).query).get("f") == ["0=0.8,default=2"])
    page.click("#tab-costs")
    page.click("text=Reset")
    page.click("text=Per stage…")
    page.fill("[aria-label='F of stage 3']", "1.5")
    settle(page)
    pieces = (0.5, 0.5, 0.5, 1.5, 0.5, 0.5, 0.5, 0.5)
    first, second = compare([zp.build(n, ranks=4, microbatches=8) for n in ("1f1b", "zbv")], zp.Costs(f=pieces))
    assert [row[0] for row in rows(page).values()] == [f"{first.makespan:g}", f"{second.makespan:g}"]
    assert query(page)["f"] == "0.5,0.5,0.5,1.5,0.5,0.5,0.5,0.5"
    with visit.expected():
        page.fill("[aria-label='F of stage 0']", "x")
        page.wait_for_selector("#stages .error:not([hidden])")
    assert "write a number" in page.inner_text("#stages .error")
    page.fill("[aria-label='F of stage 0']", "")  # empty cells keep their share of the form's number
    settle(page)
    assert not page.is_visible("#stages .error")
    page.select_option("#num-stages", "4")
    settle(page)
    assert query(page)["f"] == "1,2,1,1"
    page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.setData("text", "2\\t3\\n4\\t5");
            const cell = document.querySelector("[aria-label='I of stage 1']");
            cell.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
        }"""
    )
    settle(page)
    assert (query(page)["i"], query(page)["w"]) == ("1,2,4,1", "1,3,5,1")
    page.keyboard.press("Escape")
    assert not page.is_visible("#stages")


def test_costs_per_stage_are_a_switch_that_the_link_keeps(visit):
    page = visit("?schedules=1f1b,zbv&f=2")
    per_rank = [
        t.makespan for t in compare([zp.build(n, ranks=4, microbatches=8) for n in ("1f1b", "zbv")], zp.Costs(f=2))
    ]
    assert [float(row[0]) for row in rows(page).values()] == per_rank
    assert page.inner_text("#per") == "costs per rank, divided among its stages"
    page.click("#tab-costs")
    page.click("label[for=in-per-stage]")
    settle(page)
    per_stage = [zp.simulate(zp.build(n, ranks=4, microbatches=8), zp.Costs(f=2)).makespan for n in ("1f1b", "zbv")]
    assert [float(row[0]) for row in rows(page).values()] == per_stage
    assert page.inner_text("#per") == "costs per stage"
    assert page.inner_text("h1") == f"Not the same work: 1f1b {per_stage[0]:g}, zbv {per_stage[1]:g}"
    assert query(page)["per"] == "stage"
    other = visit(page.url.split("/", 3)[3])
    assert rows(other) == rows(page)
    assert other.is_checked("#in-per-stage")
    page.focus("#in-per-stage")
    page.keyboard.press("ArrowLeft")
    settle(page)
    assert [float(row[0]) for row in rows(page).values()] == per_rank
    assert "per" not in query(page)


def test_a_busy_server_is_asked_again(visit):
    page = visit("?schedules=1f1b")
    busy = json.dumps({"errors": [{"field": "", "message": "64 requests wait already"}]})
    with visit.expected():
        page.route("**/api/simulate", lambda route: route.fulfill(
            status=503, body=busy, headers={"Retry-After": "1", "Content-Type": "application/json"}
        ))  # fmt: skip
        page.fill("#in-ranks", "6")
        page.wait_for_selector("#error-page:has-text('64 requests wait already')")
        page.unroute("**/api/simulate")
        page.wait_for_selector("#status:has-text('6 ranks')")
    assert not page.is_visible("#error-page")


def test_a_busy_server_is_asked_again_for_the_chart(visit):
    page = visit("?schedules=1f1b")
    page.wait_for_selector("#chart[aria-busy=false] g.dot")
    busy = json.dumps({"errors": [{"field": "", "message": "64 requests wait already"}]})
    with visit.expected():
        page.route("**/api/chart", lambda route: route.fulfill(
            status=503, body=busy, headers={"Retry-After": "1", "Content-Type": "application/json"}
        ))  # fmt: skip
        page.fill("#in-microbatches", "64")
        page.wait_for_selector("#chart.stale")
        page.unroute("**/api/chart")
        page.wait_for_selector("#chart:not(.stale)[aria-busy=false] [data-name=gpipe][aria-label*='peak memory 64']")


def test_a_link_reproduces_the_view(visit, monkeypatch):
    from zeropipe.cli.app import page_query
    from zeropipe.cli.request import create_request

    given = []
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @zp.register("100% mine", placement=zp.linear)
    def mine(lane, rank, p, *, lazy=True, order="", keep=1):
        given.append((lazy, order, keep))
        lane.f(rank, times=p.num_microbatches)
        lane.b(rank, times=p.num_microbatches)

    names = ["zbv", "interleaved:v=4", "zb-h2:extra=2", "100% mine"]
    sizes = {"ranks": (4,), "microbatches": (12,), "stages_per_rank": ()}
    costs = {"f": ",".join(["1,1,2,1"] * 4), "p2p": 0.1, "memory_limit": 30.0}
    pairs = ("lazy=False", "order=a,b:50%=c", "keep=1.5")
    page = visit(page_query(create_request(names, {**sizes, **costs, "pairs": pairs}, several=("schedule",))))
    built = [
        zp.build("zbv", ranks=4, microbatches=12),
        zp.build("interleaved", ranks=4, microbatches=12, stages_per_rank=4),
        zp.build("zb-h2", ranks=4, microbatches=12, extra=2),
        zp.build("100% mine", ranks=4, microbatches=12),
    ]
    timelines = compare(built, zp.Costs(f=[1, 1, 2, 1] * 4, p2p=0.1, memory_limit=30))
    shown = rows(page)
    assert [float(shown[t.title][0]) for t in timelines] == pytest.approx([t.makespan for t in timelines], rel=1e-3)
    assert (False, "a,b:50%=c", 1.5) in given  # options mean what they mean on the command line
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#share")
    page.wait_for_selector("text=Link copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    given.clear()
    comparison._build_small.cache_clear()
    assert rows(visit(copied.split("/", 3)[3])) == shown
    assert (False, "a,b:50%=c", 1.5) in given


def test_mistakes_are_told_beside_their_fields_and_go_away(visit):
    page = visit("?schedules=1f1b,dualpipe")
    with visit.expected():
        page.fill("#in-ranks", "0")
        page.wait_for_selector("#error-ranks:not([hidden])")
        assert page.inner_text("#error-ranks") == "ranks=0: must be a positive integer"
        assert page.get_attribute("#in-ranks", "aria-invalid") == "true"
        assert page.get_attribute("#in-ranks", "aria-describedby") == "error-ranks"
        page.fill("#in-ranks", "4")
        page.fill("#in-microbatches", "1000000")
        page.wait_for_selector("#error-microbatches:not([hidden])")
        assert "the page takes up to 2,000,000" in page.inner_text("#error-microbatches")
        assert not page.is_visible("#error-ranks")
        page.fill("#in-microbatches", "8")
        page.click("#tab-costs")
        page.fill("#in-f", "1,2,x")
        page.wait_for_selector("#error-costs-f:not([hidden])")
        assert page.inner_text("#error-costs-f").endswith("write a number, several like 1,1,2, or some like 0=0.8")
        page.fill("#in-inter_bandwidth", "0")
        page.wait_for_selector("#error-costs-inter_bandwidth:not([hidden])")
        page.fill("#in-inter_bandwidth", "")
        page.fill("#in-f", "1")
        settle(page)
        page.wait_for_selector("#error-costs-f", state="hidden")
        assert page.get_attribute("#in-f", "aria-invalid") is None
    with visit.expected():  # costs for four stages, and the pane of costs is out of sight
        page.fill("#in-f", "1,1,2,1")
        page.click("#tab-schedules")
        page.fill("#in-ranks", "5")
        page.wait_for_selector("#tab-costs.wrong")
        page.click("#tab-costs")
        assert "f has 4 entries, which 5 stages on 5 ranks cannot share" in page.inner_text("#error-costs-f")
        page.fill("#in-f", "1")
        settle(page)
    page.fill("#in-ranks", "3")  # 1f1b goes on, dualpipe says why it does not
    settle(page)
    assert "dualpipe needs" in page.inner_text(".compare tbody[data-choice=dualpipe] .error")
    assert rows(page)["1f1b"] == ("30", "20.0%", "3")


def test_files_can_be_downloaded(visit):
    page = visit("?schedules=zbv")
    starts = {"html": b"<!doctype", "svg": b"<", "png": b"\x89PNG", "pdf": b"%PDF", "json": b"{", "csv": b"0F0"}
    for form, start in starts.items():
        with page.expect_download() as download:
            page.click("#download summary")
            page.click(f"#download [data-format={form}]")
        assert download.value.suggested_filename == f"zbv.{form}"
        assert download.value.path().read_bytes().startswith(start)
        assert not page.is_visible("#download .sheet")


def test_a_refused_download_says_why(visit):
    page = visit("?schedules=zbv,1f1b")
    with visit.expected():
        page.click("#download summary")
        page.click("#download [data-format=csv]")
        page.wait_for_selector("#error-page:not([hidden])")
    assert "a .csv holds one schedule, not 2" in page.inner_text("#error-page")


def test_a_server_that_is_gone_is_named(visit):
    page = visit("?schedules=1f1b")
    with visit.expected():
        page.route("**/api/**", lambda route: route.abort())
        page.fill("#in-ranks", "5")
        page.wait_for_selector("#error-page:not([hidden])")
        page.wait_for_timeout(100)
    assert "the server does not answer" in page.inner_text("#error-page")
    page.unroute("**/api/**")
    page.fill("#in-ranks", "6")
    settle(page)
    assert "6 ranks" in page.inner_text("#status")
    assert not page.is_visible("#error-page")


def test_a_million_actions_do_not_freeze_the_page(visit):
    page = visit("?ranks=64&microbatches=8&schedules=1f1b")
    with visit.expected():  # the chart of all schedules is too large here, and says so
        page.fill("#in-microbatches", "8000")
        page.wait_for_selector("main[aria-busy=true]")
        page.click("#tab-costs")  # answers while the server computes
        assert page.is_visible("#in-f")
        page.wait_for_selector("main[aria-busy=false]", timeout=180_000)
    assert "1,024,000 actions" in page.inner_text("#status")
    assert "all 18 schedules together would have" in page.inner_text("#chart .error")
