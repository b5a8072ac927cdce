"""What the viewer does, in a real Chromium, as an offline file and as modules served over HTTP."""

import http.server
import json
import re
import threading
from array import array
from dataclasses import replace
from functools import partial

import pytest
from browser import PHONE
from viewer_page import (
    COSTS,
    VIEWER,
    colours,
    hover,
    page_of,  # noqa: F401
    pixel,
    place,
    rgb,
    run,
    settle,
    window,
)

import zeropipe as zp
from zeropipe.core import explain
from zeropipe.core.placement import Placement, Problem
from zeropipe.core.schedule import Schedule
from zeropipe.viz.payload import payload


def test_hover_tells_the_action_and_what_it_waited_for(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    first_b = next(s for s in timeline.spans(0) if s.action.kind is zp.Kind.B)
    card = hover(page, 0, first_b.start + 0.5)
    assert "0B0 backward" in card
    assert "stage 0 · microbatch 0 · rank 0" in card
    lines = {"start": "11.5", "end": "13.5", "duration": "2", "waited for": "1B0 on rank 1 (idle 7.5)"}
    assert all(f"{label}\n{value}" in card for label, value in lines.items())
    blank = page.evaluate("zeropipeViewer.panels[0].layer.toDataURL()")
    assert hover(page, 0, -1) is None
    assert page.evaluate("zeropipeViewer.panels[0].layer.toDataURL()") != blank  # outline and arrows are gone


def test_hover_draws_an_arrow_from_each_need_and_to_each_user(page_of):  # noqa: F811
    page = page_of(run())
    links = page.evaluate(
        """() => { const t = zeropipeViewer.panels[0].timeline; const all = [];
        for (let i = 0; i < t.size; i++) all.push([t.remote[i], t.own[i]]); return all; }"""
    )
    why = explain.find_reasons(run())
    assert links == [[int(a), int(b)] for a, b in zip(why.remote, why.own)]
    x, y = place(page, 1, run().makespan / 3)
    page.mouse.move(x, y)
    painted = page.evaluate(
        """() => { const c = zeropipeViewer.panels[0].layer; let n = 0;
        const context = new OffscreenCanvas(c.width, c.height).getContext("2d");
        context.drawImage(c, 0, 0);
        for (const a of context.getImageData(0, 0, c.width, c.height).data) n += a > 0; return n; }"""
    )
    assert painted > 500


@pytest.mark.parametrize("cause", ["warm-up", "waiting for data", "communication", "cool-down"])
def test_hover_tells_why_a_rank_is_idle(page_of, cause):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    gap = max((g for g in explain.find_gaps(timeline) if g.cause == cause), key=lambda g: g.end - g.start)
    card = hover(page, gap.rank, (gap.start + gap.end) / 2)
    assert f"Idle: {cause}" in card
    if gap.needs:
        assert f"{gap.needs} on rank" in card


@pytest.mark.parametrize("policy", ["keep", "regather"])
def test_hover_tells_what_is_gathered_and_reduced_and_who_waits_for_it(page_of, policy):  # noqa: F811
    costs = zp.Costs(shards=policy, unshard=0.5, reduce=2, units=2, p2p=0.1)
    timeline = zp.simulate(zp.build("zbv", ranks=2, microbatches=4), costs)
    page = page_of(timeline)
    spans = [span for rank in range(2) for span in timeline.sharding_spans(rank)]
    for span in (spans[0], spans[-1]):
        x, y = place(page, span.rank, (span.start + span.end) / 2)
        below = page.evaluate("(({height, lane}) => 0.75 * height + lane / 2 + 1)(zeropipeViewer.panels[0].layout)")
        page.mouse.move(x, y + below)
        card = page.locator(".zp-card").inner_text()
        assert card.startswith(f"{span.action} ")
        assert f"stage {span.action.stage} · rank {span.rank}" in card
    for gap in (gap for gap in explain.find_gaps(timeline) if gap.cause == "sharding"):
        assert "Idle: sharding" in hover(page, gap.rank, (gap.start + gap.end) / 2)
    assert "weights gathered" in page.locator(".zp-legend").inner_text()


@pytest.mark.parametrize("shards", [{}, {"shards": "keep", "unshard": 0.5, "reduce": 1.0}])
def test_hover_tells_what_is_copied_and_who_waits_for_it(page_of, shards):  # noqa: F811
    costs = zp.Costs(offload_bandwidth=0.6, reload_bandwidth=0.5, p2p=0.1, **shards)
    timeline = zp.simulate(zp.with_offload(zp.build("1f1b", ranks=2, microbatches=4), offload=1.0), costs)
    page = page_of(timeline)
    copies = [span for rank in range(2) for span in timeline.offloading_spans(rank)]
    tracks = ["offload", "reload"] if not shards else ["sharding", "offload", "reload"]
    for span in copies:
        x, y = place(page, span.rank, (span.start + span.end) / 2 - timeline.first_start)
        track = (tracks.index(span.action.kind.name.lower()) + 0.4) / len(tracks)
        below = page.evaluate(
            "(at) => 0.75 * zeropipeViewer.panels[0].layout.height + 1 + at * zeropipeViewer.panels[0].layout.lane",
            track,
        )
        page.mouse.move(x, y + below)
        card = page.locator(".zp-card").inner_text()
        assert card.startswith(f"{span.action} ")
        assert f"stage {span.action.stage} · microbatch {span.action.microbatch} · rank {span.rank}" in card
    waits = [gap for gap in explain.find_gaps(timeline) if gap.cause == "offload"]
    assert waits
    for gap in waits:
        assert "Idle: offload" in hover(page, gap.rank, (gap.start + gap.end) / 2 - timeline.first_start)
    legend = page.locator(".zp-legend").inner_text()
    assert "offloaded to the host" in legend
    assert ("weights gathered" in legend) is bool(shards)


def test_copies_in_both_directions_are_drawn_one_above_the_other(page_of):  # noqa: F811
    timeline = zp.simulate(
        zp.from_csv("0F0,0OFFLOAD0,0F1,0OFFLOAD1,0RELOAD0,0B0,0RELOAD1,0B1"), zp.Costs(offload_bandwidth=0.5)
    )
    page = page_of(timeline)
    colours = page.evaluate(
        """() => { const v = zeropipeViewer, p = v.panels[0], x = v.state.gutter + v.view.x(4);
        const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        return [0.25, 0.75].map((share) => {
          const y = p.layout.height + p.layout.top(0) + 0.5 + share * p.layout.lane;
          context.drawImage(p.rows, -Math.floor(x), -Math.floor(y));
          return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3); }); }"""
    )
    colors = payload(timeline)["palette"]["light"]
    assert colours == [rgb(colors["offload"]), rgb(colors["reload"])]


def test_measured_pauses_are_told_from_waiting(page_of):  # noqa: F811
    timeline = run("gpipe", 2, 2, zp.Costs())
    starts = list(memoryview(timeline.start).cast("d"))
    starts[1] += 0.25
    page = page_of(replace(timeline, start=array("d", starts).tobytes(), measured=True))
    assert "Idle: other" in hover(page, 0, 1.1)
    assert page.locator(".zp-tag").inner_text() == "measured"


def test_wheel_zooms_to_the_pointer_and_drag_moves(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    x, y = place(page, 1, 10)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -400)
    settle(page)
    low, high = window(page)
    assert high - low < timeline.makespan * 0.6
    assert place(page, 1, 10)[0] == pytest.approx(x, abs=1)  # pointers come in whole pixels
    x = place(page, 1, 10)[0]
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=3)
    page.mouse.up()
    assert place(page, 1, 10)[0] == pytest.approx(x - 100, abs=1)
    page.get_by_role("button", name="Show everything").click()
    assert window(page) == [0, timeline.makespan]
    page.get_by_role("button", name="Zoom in").click()
    low, high = window(page)
    assert (low + high) / 2 == pytest.approx(timeline.makespan / 2)
    page.mouse.move(x, y)
    page.mouse.dblclick(x, y)
    assert window(page) == [0, timeline.makespan]


def test_two_fingers_zoom(page_of):  # noqa: F811
    page = page_of(run(), size=PHONE, has_touch=True)
    x, y = place(page, 1, run().makespan / 2)
    client = page.context.new_cdp_session(page)

    def touch(kind, *xs):
        points = [{"x": at, "y": y, "id": n} for n, at in enumerate(xs)]
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", x - 20, x + 20)
    for spread in (30, 45, 60, 80):
        touch("touchMove", x - spread, x + spread)
    touch("touchEnd")
    low, high = window(page)
    assert high - low == pytest.approx(run().makespan / 4, rel=0.2)
    assert low < run().makespan / 2 < high


def test_keys_do_everything(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "zp-plot":
            break
    else:
        pytest.fail("Tab does not reach the plot")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "0F1 forward" in page.locator(".zp-card").inner_text()
    assert "0F1 forward" in page.locator("[aria-live]").inner_text()
    page.keyboard.press("ArrowDown")
    assert "1F0 forward" in page.locator(".zp-card").inner_text()
    page.keyboard.press("+")
    assert window(page)[1] < timeline.makespan
    page.keyboard.press("d")
    assert window(page)[0] > 0
    page.keyboard.press("0")
    assert window(page) == [0, timeline.makespan]
    page.keyboard.press("Escape")
    assert not page.locator(".zp-card").is_visible()
    page.keyboard.press("c")
    assert page.locator(".zp-toggle-path").get_attribute("aria-pressed") == "true"
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()


def test_the_legend_hides_a_kind(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    button = page.get_by_role("button", name="F forward")
    button.click()
    settle(page)
    assert button.get_attribute("aria-pressed") == "false"
    assert pixel(page, 0, 0.5)[:3] == colours(timeline)["lane"]
    assert hover(page, 0, 0.5) is None
    button.click()
    settle(page)
    assert pixel(page, 0, 0.5)[:3] == colours(timeline)["F"][0]


def test_several_timelines_share_one_axis_and_a_summary(page_of):  # noqa: F811
    slow = run(costs=replace(COSTS, f=2)).with_label("slow")
    page = page_of([run(), slow, run("zbv", 4, 6)])
    rows = [row.inner_text().split("\t") for row in page.locator(".zp-summary tbody tr").all()]
    assert [row[0] for row in rows] == ["1f1b", "slow", "zbv"]
    assert rows[0][1:6] == ["30", "best", "40.0%", "40.0%", "4"]
    assert rows[1][2] == f"{slow.makespan / 30:.3f}"
    assert "over the limit" in rows[2][5]
    assert page.locator(".zp-panel").count() == 3
    x, y = place(page, 1, 10)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    settle(page)
    assert [place(page, 1, 10, panel=n)[0] for n in range(3)] == [pytest.approx(x, abs=1)] * 3


def test_a_phone_needs_no_sideways_scrolling(page_of):  # noqa: F811
    page = page_of([run("zbv", 4, 8), run("dualpipev", 4, 8)], size=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert "F" in hover(page, 0, 0.5)
    box = page.locator(".zp-card").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["width"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_served_as_modules_and_updated(watched, tmp_path):
    """The way a web page uses it: import over HTTP, then update with new data."""
    for file in VIEWER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "one.json").write_text(json.dumps(payload(run())))
    (tmp_path / "two.json").write_text(json.dumps(payload([run("zbv", 2, 4), run("gpipe", 2, 4)])))
    (tmp_path / "index.html").write_text(
        """<!doctype html><link rel="icon" href="data:,"><link rel="stylesheet" href="viewer.css"><div id="here"></div>
        <script type="module">import { mountViewer } from "./viewer.js";
        const get = async (name) => (await fetch(name)).json();
        window.zeropipeViewer = mountViewer(document.getElementById("here"), await get("one.json"));
        window.get = get;</script>"""
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = watched(f"http://127.0.0.1:{server.server_port}/")
        assert page.locator(".zp-panel").count() == 1
        page.evaluate("get('two.json').then((data) => zeropipeViewer.update(data))")
        assert page.locator(".zp-panel h2").all_inner_texts() == ["zbv", "gpipe"]
        assert window(page) == [0, max(run("zbv", 2, 4).makespan, run("gpipe", 2, 4).makespan)]
        page.evaluate("zeropipeViewer.destroy()")
        assert page.locator(".zp-viewer").count() == 0
        server.shutdown()


def test_title_and_memory_options(page_of):  # noqa: F811
    page = page_of(run(), draw={"title": "Why <b>zbv</b>", "memory": False})
    assert page.title() == page.get_by_role("heading", level=1).inner_text() == "Why <b>zbv</b>"
    assert not page.locator(".zp-memory").is_visible()
    assert page_of(run()).get_by_role("heading", level=1).count() == 0


def test_the_table_knows_who_wins(page_of):  # noqa: F811
    """As zeropipe.core.ranking says it: what is over its memory limit cannot."""
    costs = zp.Costs(f=1, i=1, w=1, memory_limit=3)
    page = page_of([run("gpipe", 3, 6, costs), run("1f1b", 3, 6, replace(costs, f=2))])
    rows = page.locator(".zp-summary tbody tr").all()
    cells = [[cell.inner_text() for cell in row.locator("td").all()] for row in rows]
    assert [row[1] for row in cells] == [f"{24 / 32:.3f}", "best"]
    assert cells[0][4] == "6 over the limit"
    none = page_of([run("gpipe", 3, 6, costs), run("gpipe", 3, 6, costs)])
    assert "None of them fits its memory limit." in none.locator(".zp-summary-box").inner_text()
    assert "best" not in [cell.inner_text() for cell in none.locator(".zp-summary tbody td").all()]


def test_where_the_time_goes_is_told_and_explained(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    whole = timeline.makespan * timeline.num_ranks
    idle = [sum(rank[n] for rank in explain.idle_times(timeline)) / whole for n in range(5)]
    says = page.locator(".zp-shares").inner_text()
    told = {name.strip(): float(share) for name, share in re.findall(r"([a-z -]+) ([\d.]+)%", says)}
    expected = {"busy": sum(timeline.busy) / whole, **{c: share for c, share in zip(explain.CAUSES, idle) if share}}
    assert told == {name: pytest.approx(100 * share, abs=0.051) for name, share in expected.items()}
    assert "other" not in says
    assert "nothing has reached it yet" in hover(page, 3, 0.5)
    page.get_by_role("button", name="Help").click()
    assert "on its way" in page.locator("dialog").inner_text()


def test_the_critical_path_is_told(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    assert not page.locator(".zp-path-note").is_visible()
    page.get_by_role("button", name="Critical path").click()
    settle(page)
    path = explain.critical_path(timeline)
    work = sum(hop.end - hop.start for hop in path)
    says = page.locator(".zp-path-note").inner_text()
    assert says == f"critical path: {len(path)} actions take {work:g}, messages and pauses {timeline.makespan - work:g}"


def test_hover_tells_the_memory(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    box = page.locator(".zp-memory canvas").bounding_box()
    x = place(page, 0, timeline.makespan / 2)[0]
    page.mouse.move(x, box["y"] + 12)
    card = page.locator(".zp-card").inner_text()
    assert "rank 0 · at 15" in card
    assert "peak of the rank\n4" in card
    assert "limit\n5 (80.0% used)" in card
    assert "full height 5, dashed: the limit 5" in page.locator(".zp-memory").inner_text()
    page.mouse.move(x, 5)
    assert not page.locator(".zp-card").is_visible()


def test_keys_work_before_anything_is_focused(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    page.keyboard.press("+")
    assert window(page)[1] < timeline.makespan
    page.keyboard.press("0")
    page.keyboard.press("ArrowRight")
    assert "0F0 forward" in page.locator(".zp-card").inner_text()
    page.keyboard.press("End")
    assert "0B5 backward" in page.locator(".zp-card").inner_text()
    page.keyboard.press("Home")
    assert "0F0 forward" in page.locator(".zp-card").inner_text()


def rested(page):
    """How far the page is scrolled, once it no longer moves."""
    seen = [None]
    while len(seen) < 4 or len(set(seen[-4:])) > 1:
        seen.append(page.evaluate("scrollY"))
        page.wait_for_timeout(60)
    return seen[-1]


def test_a_wheel_that_scrolls_the_page_goes_on_scrolling(page_of):  # noqa: F811
    page = page_of([run()] * 6)
    page.mouse.move(*place(page, 1, 10))
    page.mouse.wheel(0, 600)
    down = rested(page)
    assert down > 100
    page.mouse.move(*place(page, 1, 10, panel=1))
    page.evaluate("zeropipeViewer.state.scrolled = Infinity")  # as if it were still moving
    page.mouse.wheel(0, -200)
    assert rested(page) < down
    assert window(page) == [0, run().makespan]
    page.mouse.move(*place(page, 1, 10, panel=1))
    page.evaluate("zeropipeViewer.state.scrolled = -Infinity")
    page.mouse.wheel(0, -200)
    settle(page)
    assert window(page)[1] - window(page)[0] < run().makespan


def test_keys_pass_over_ranks_without_actions(page_of):  # noqa: F811
    row = (zp.Action(0, zp.Kind.F, 0), zp.Action(0, zp.Kind.B, 0))
    other = (zp.Action(1, zp.Kind.F, 0), zp.Action(1, zp.Kind.B, 0))
    schedule = Schedule.of(Problem(4, 2, 1), Placement(((1, 3),)), [(), row, (), other])
    page = page_of(zp.simulate(schedule))
    seen = []
    for key in ("ArrowRight", "End", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
        seen.append(page.locator(".zp-card strong").inner_text().split()[0])
    assert seen == ["0F0", "0B0", "1B0", "1B0", "0F0", "0F0"]


def test_a_taller_window_shows_painted_timelines(page_of):  # noqa: F811
    """The viewer's own size does not change with the window's height, so it hears of the window."""
    timelines = [run(name, 8, 8) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")]
    page = page_of(timelines)
    page.set_viewport_size({"width": 1440, "height": 400})
    settle(page)
    last = len(timelines) - 1
    span = next(iter(timelines[last].spans(7)))
    middle = (span.start + span.end) / 2
    assert pixel(page, 7, middle, panel=last)[3] == 0, "below the window: not painted yet"
    page.set_viewport_size({"width": 1440, "height": 2400})
    settle(page)
    assert pixel(page, 7, middle, panel=last)[3] == 255


OVERLAPS = """() => {
    const seen = document.querySelectorAll(".zp-shares > :not([hidden], .zp-off)");
    const boxes = [...seen].map((one) => one.getBoundingClientRect());
    const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
    return boxes.some((a, n) => boxes.slice(n + 1).some((b) => !apart(a, b)));
}"""


@pytest.mark.parametrize("width", [1100, 900, 700])
def test_the_note_on_bands_covers_no_share_of_time(page_of, width):  # noqa: F811
    page = page_of(run("interleaved", 8, 512), size={"width": width, "height": 900})
    assert page.is_visible(".zp-note")
    assert page.locator(".zp-shares .zp-part-key:has-text('cool-down')").is_visible()
    assert not page.evaluate(OVERLAPS)
