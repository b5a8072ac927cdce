"""The viewer in a real Chromium, as an offline file and as modules served over HTTP."""

import http.server
import io
import json
import threading
from array import array
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from browser import PHONE, browser, watched  # noqa: F401

import zeropipe as zp
from zeropipe.core import explain
from zeropipe.viz.payload import payload

COSTS = zp.Costs(f=1, i=1, w=1, p2p=0.25, memory_limit=5)
VIEWER = Path(zp.__file__).parent / "viz" / "viewer"


def run(name="1f1b", ranks=4, microbatches=6, costs=COSTS):
    return zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), costs)


@pytest.fixture
def page_of(watched, tmp_path):  # noqa: F811
    def open_page(timelines, draw=None, **options):
        zp.draw(timelines, tmp_path / "x.html", **(draw or {}))
        return watched((tmp_path / "x.html").as_uri(), **options)

    return open_page


def place(page, rank, time, panel=0, lower=False):
    """Page coordinates of a time on a rank."""
    return page.evaluate(
        """([n, rank, time, lower]) => { const v = zeropipeViewer, p = v.panels[n];
        const box = p.plot.getBoundingClientRect(), y = p.layout.top(rank) + p.layout.height * (lower ? 0.75 : 0.25);
        return [box.left + v.state.gutter + v.view.x(time), box.top + y]; }""",
        [panel, rank, time, lower],
    )


def hover(page, *where, **more):
    page.mouse.move(*place(page, *where, **more))
    return page.locator(".zp-card").inner_text() if page.locator(".zp-card").is_visible() else None


def pixel(page, rank, time, panel=0, lower=False, layer=False):
    """The colour painted there, as [r, g, b, a]."""
    return page.evaluate(
        """([n, rank, time, lower, layer]) => { const v = zeropipeViewer, p = v.panels[n];
        const x = v.state.gutter + v.view.x(time), y = p.layout.top(rank) + p.layout.height * (lower ? 0.92 : 0.1);
        const context = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
        context.drawImage(layer ? p.layer : p.rows, -Math.floor(x), -Math.floor(y));
        return [...context.getImageData(0, 0, 1, 1).data]; }""",
        [panel, rank, time, lower, layer],
    )


def beside_label(span):
    """A time inside a box, left of its label."""
    return span.start + 0.12 * (span.end - span.start)


def rgb(color):
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]


def colours(timeline, theme="light"):
    """What kinds and shades look like, from the payload."""
    data = payload(timeline)["palette"][theme]
    return {kind: [rgb(c) for c in entry["fill"]] for kind, entry in data["kinds"].items()} | {
        "lane": rgb(data["lane"])
    }


def window(page):
    return page.evaluate("[zeropipeViewer.view.from, zeropipeViewer.view.to]")


def settle(page):
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "dualpipe", "interleaved"])
def test_the_viewer_reads_every_span(page_of, name):
    timeline = run(name, 4, 8)
    page = page_of(timeline)
    names = page.evaluate(
        """() => { const t = zeropipeViewer.panels[0].timeline;
        const name = (i) => `${t.stage[i]}${"FBIW"[t.kind[i]]}${t.microbatch[i]}`;
        return Array.from({length: t.size}, (_, i) => [t.rank[i], name(i), t.start[i], t.end[i]]); }"""
    )
    expected = [[s.rank, str(s.action), s.start, s.end] for rank in range(4) for s in timeline.spans(rank)]
    assert names == expected
    path = page.evaluate("Array.from(zeropipeViewer.panels[0].timeline.path)")
    assert path == explain.critical_places(timeline)


def test_boxes_have_their_colour_and_idle_time_is_empty(page_of):
    timeline = run()
    page = page_of(timeline)
    color = colours(timeline)
    for rank in range(4):
        for span in timeline.spans(rank):
            assert pixel(page, rank, beside_label(span))[:3] == color[span.action.kind.name][0]
        for gap in (g for g in explain.gaps(timeline) if g.rank == rank and g.end - g.start > 0.3):
            assert pixel(page, rank, (gap.start + gap.end) / 2)[:3] == color["lane"]


def test_an_overlap_is_split_and_stages_of_a_rank_are_shaded(page_of):
    timeline = run("dualpipev", 2, 4)
    page = page_of(timeline)
    color = colours(timeline)
    overlaps = [
        (first, second)
        for rank in range(2)
        for first, second in pairwise(timeline.spans(rank))
        if (first.start, first.end) == (second.start, second.end)
    ]
    assert overlaps
    shade = payload(timeline)["timelines"][0]["shades"][0]
    for forward, backward in overlaps:
        time = beside_label(forward)
        assert pixel(page, forward.rank, time)[:3] == color["F"][shade[forward.action.stage]]
        assert pixel(page, forward.rank, time, lower=True)[:3] == color["B"][shade[backward.action.stage]]
    stages = {s.action.stage for s in timeline.spans(0)}
    assert len(stages) == len({shade[stage] for stage in stages}) == 2


def test_hover_tells_the_action_and_what_it_waited_for(page_of):
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


def test_hover_draws_an_arrow_from_each_need_and_to_each_user(page_of):
    page = page_of(run())
    links = page.evaluate(
        """() => { const t = zeropipeViewer.panels[0].timeline; const all = [];
        for (let i = 0; i < t.size; i++) all.push([t.remote[i], t.own[i]]); return all; }"""
    )
    why = explain.reasons(run())
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
def test_hover_tells_why_a_rank_is_idle(page_of, cause):
    timeline = run()
    page = page_of(timeline)
    gap = max((g for g in explain.gaps(timeline) if g.cause == cause), key=lambda g: g.end - g.start)
    card = hover(page, gap.rank, (gap.start + gap.end) / 2)
    assert f"Idle: {cause}" in card
    if gap.needs:
        assert f"{gap.needs} on rank" in card


def test_measured_pauses_are_told_from_waiting(page_of):
    timeline = run("gpipe", 2, 2, zp.Costs())
    starts = list(memoryview(timeline.start).cast("d"))
    starts[1] += 0.25
    page = page_of(replace(timeline, start=array("d", starts).tobytes(), measured=True))
    assert "Idle: other" in hover(page, 0, 1.1)
    assert page.locator(".zp-tag").inner_text() == "measured"


def test_wheel_zooms_to_the_pointer_and_drag_moves(page_of):
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


def test_two_fingers_zoom(page_of):
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


def test_keys_do_everything(page_of):
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


def test_the_legend_hides_a_kind(page_of):
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


def test_the_critical_path_stands_out(page_of):
    timeline = run()
    page = page_of(timeline)
    page.get_by_role("button", name="Critical path").click()
    settle(page)
    on_path = {str(hop.action) for hop in explain.critical_path(timeline)}
    for rank in range(4):
        for span in timeline.spans(rank):
            covered = pixel(page, rank, (span.start + span.end) / 2, layer=True)[3] > 0
            assert covered == (str(span.action) not in on_path)


def test_memory_follows_the_simulation(page_of):
    timeline = run()
    page = page_of(timeline)
    for rank in range(4):
        curve = page.evaluate("(rank) => zeropipeViewer.panels[0].curve(rank)", rank)
        assert max(level for _, _, level in curve) == timeline.peak_memory[rank]
        assert curve[-1][0] + curve[-1][1] == pytest.approx(
            page.evaluate("(t) => zeropipeViewer.view.x(t)", max(s.end for s in timeline.spans(rank))), abs=0.5
        )
    page.get_by_role("button", name="Memory").click()
    settle(page)
    assert not page.locator(".zp-memory").is_visible()


def test_several_timelines_share_one_axis_and_a_summary(page_of):
    slow = run(costs=replace(COSTS, f=2)).labelled("slow")
    page = page_of([run(), slow, run("zbv", 4, 6)])
    rows = [row.inner_text().split("\t") for row in page.locator(".zp-summary tbody tr").all()]
    assert [row[0] for row in rows] == ["1f1b", "slow", "zbv"]
    assert rows[0][1:5] == ["30", "best", "40.0%", "4"]
    assert rows[1][2] == f"× {slow.makespan / 30:.3f}"
    assert "over the limit" in rows[2][4]
    assert page.locator(".zp-panel").count() == 3
    x, y = place(page, 1, 10)
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    settle(page)
    assert [place(page, 1, 10, panel=n)[0] for n in range(3)] == [pytest.approx(x, abs=1)] * 3


def test_many_boxes_share_pixels_and_keep_their_mean(page_of):
    """12,000 boxes on some 1,300 pixels: what is painted has the colour of all of them together."""
    timeline = run("1f1b", 4, 3000, zp.Costs())
    page = page_of(timeline)
    drawn = page.evaluate("zeropipeViewer.panels[0].drawn")
    assert drawn < 2500  # one by one
    color = colours(timeline)
    middle = [pixel(page, 1, timeline.makespan * share)[:3] for share in (0.3, 0.5, 0.7)]
    for seen in middle:  # F takes 1, B 2 of 3 units
        assert seen == pytest.approx([(f + 2 * b) / 3 for f, b in zip(color["F"][0], color["B"][0])], abs=25)
    for rank in range(4):  # a row ends with B, and not with what the next row begins with
        red, _, blue, _ = pixel(page, rank, max(s.end for s in timeline.spans(rank)) - 0.01)
        assert red > blue
    assert "microbatch" in hover(page, 1, timeline.makespan / 2)
    page.mouse.move(*place(page, 1, timeline.makespan / 2))
    for _ in range(6):
        page.mouse.wheel(0, -500)
    settle(page)
    low, high = window(page)
    inside = [s for s in timeline.spans(1) if s.end > low and s.start < high and s.end - s.start > 0]
    assert 2 < len(inside) < 200
    for span in inside[1:-1]:
        assert pixel(page, 1, beside_label(span))[:3] == color[span.action.kind.name][0]


def test_seconds_are_shown_in_fitting_units(page_of):
    timeline = replace(run(costs=zp.Costs(f=1e-3, i=1e-3, w=1e-3)), unit="s")
    page = page_of(timeline)
    assert "makespan 27 ms" in page.locator(".zp-heading").inner_text()
    assert "2 ms" in hover(page, 3, 5e-3)


def test_light_dark_and_print(page_of):
    timeline = run()
    page = page_of(timeline, color_scheme="dark")
    dark = payload(timeline)["palette"]["dark"]["lane"]
    assert pixel(page, 1, 0.5)[:3] == rgb(dark)
    page.get_by_role("button", name="Light or dark").click()
    settle(page)
    assert pixel(page, 1, 0.5)[:3] == colours(timeline)["lane"]
    pypdf = pytest.importorskip("pypdf")
    text = pypdf.PdfReader(io.BytesIO(page.pdf())).pages[0].extract_text()
    assert "makespan 30" in text
    assert "Critical path" not in text


def test_a_phone_needs_no_sideways_scrolling(page_of):
    page = page_of([run("zbv", 4, 8), run("dualpipev", 4, 8)], size=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert "F" in hover(page, 0, 0.5)
    box = page.locator(".zp-card").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["width"]


def test_a_timeline_of_no_length_is_shown(page_of):
    page = page_of([run("1f1b", 1, 1, zp.Costs(f=0, i=0, w=0)), run("1f1b", 1, 1)])
    assert page.locator(".zp-panel").count() == 2


def test_labels_option(page_of):
    seen = []
    for labels in ("microbatch", "action", "none"):
        page = page_of(run("1f1b", 2, 3), draw={"labels": labels})
        seen.append(page.evaluate("zeropipeViewer.panels[0].rows.toDataURL()"))
    assert len(set(seen)) == 3


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_served_as_modules_and_updated(watched, tmp_path):  # noqa: F811
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


def test_title_and_memory_options(page_of):
    page = page_of(run(), draw={"title": "Why <b>zbv</b>", "memory": False})
    assert page.title() == page.get_by_role("heading", level=1).inner_text() == "Why <b>zbv</b>"
    assert not page.locator(".zp-memory").is_visible()
    assert page_of(run()).get_by_role("heading", level=1).count() == 0
