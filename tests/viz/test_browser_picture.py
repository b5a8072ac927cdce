"""What the viewer paints, in a real Chromium."""

import io
from array import array
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from browser import PHONE
from viewer_page import (
    beside_label,
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
from zeropipe.core.placement import Problem, linear
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.viz.payload import payload


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "dualpipe", "interleaved"])
def test_the_viewer_reads_every_span(page_of, name):  # noqa: F811
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
    assert path == explain.critical_indices(timeline)


def test_boxes_have_their_colour_and_idle_time_is_empty(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    color = colours(timeline)
    for rank in range(4):
        for span in timeline.spans(rank):
            assert pixel(page, rank, beside_label(span))[:3] == color[span.action.kind.name][0]
        for gap in (g for g in explain.find_gaps(timeline) if g.rank == rank and g.end - g.start > 0.3):
            assert pixel(page, rank, (gap.start + gap.end) / 2)[:3] == color["lane"]


def test_an_overlap_has_two_halves_and_stages_of_a_rank_are_shaded(page_of):  # noqa: F811
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


def test_the_critical_path_stands_out(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    page.get_by_role("button", name="Critical path").click()
    settle(page)
    on_path = {str(hop.action) for hop in explain.critical_path(timeline)}
    for rank in range(4):
        for span in timeline.spans(rank):
            covered = pixel(page, rank, (span.start + span.end) / 2, layer=True)[3] > 0
            assert covered == (str(span.action) not in on_path)


def test_memory_follows_the_simulation(page_of):  # noqa: F811
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


def column(page, rank, time, panel=0):
    """All colours painted from top to bottom of a row at a time, as [r, g, b]."""
    return page.evaluate(
        """([n, rank, time]) => { const v = zeropipeViewer, p = v.panels[n], high = p.layout.height;
        const x = Math.floor(v.state.gutter + v.view.x(time)), y = p.layout.top(rank);
        const context = new OffscreenCanvas(1, high).getContext("2d", {willReadFrequently: true});
        context.drawImage(p.rows, -x, -y);
        const data = context.getImageData(0, 0, 1, high).data;
        return Array.from({length: high}, (_, n) => [...data.slice(4 * n, 4 * n + 3)]); }""",
        [panel, rank, time],
    )


def test_many_boxes_are_bands_as_high_as_their_share_of_time(page_of):  # noqa: F811
    """12,000 boxes on some 1,300 pixels: F takes 1, B 2 of 3 units, and F stands above B."""
    timeline = run("1f1b", 4, 3000, zp.Costs())
    page = page_of(timeline)
    assert page.evaluate("zeropipeViewer.panels[0].painted") == {"drawn": 0, "bands": True}
    assert "shares of time" in page.locator(".zp-note").inner_text()
    color = colours(timeline)
    f, b = color["F"][0], color["B"][0]
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        seen = column(page, 1, timeline.makespan * share)
        assert seen[0] == f
        assert seen[-1] == b
        assert seen.count(f) / len(seen) == pytest.approx(1 / 3, abs=0.05)
        assert seen.count(b) / len(seen) == pytest.approx(2 / 3, abs=0.05)
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
    assert not page.locator(".zp-note").is_visible()


def test_idle_time_among_bands_stays_empty(page_of):  # noqa: F811
    timeline = run("gpipe", 4, 2000, zp.Costs())
    page = page_of(timeline)
    color = colours(timeline)
    gap = next(g for g in explain.find_gaps(timeline) if g.rank == 0 and g.end - g.start > 5)
    page.evaluate("([a, b]) => zeropipeViewer.view.show(a - 70 * (b - a), 150 * (b - a))", [gap.start, gap.end])
    settle(page)
    assert page.evaluate("zeropipeViewer.panels[0].painted.bands")
    assert set(map(tuple, column(page, 0, (gap.start + gap.end) / 2))) == {tuple(color["lane"])}
    width = (gap.end - gap.start) / 2
    assert set(map(tuple, column(page, 0, gap.start - width))) == {tuple(color["F"][0])}
    assert set(map(tuple, column(page, 0, gap.end + width))) == {tuple(color["B"][0])}


def test_a_regular_schedule_makes_no_stripes(page_of):  # noqa: F811
    timeline = run("zbv", 16, 400, zp.Costs())
    page = page_of(timeline, draw={"memory": False})
    for zoom in (1, 1.13, 1.37):
        page.evaluate("(zoom) => zeropipeViewer.view.zoom(zoom)", zoom)
        settle(page)
        seen = [column(page, 5, timeline.makespan * (0.45 + n / 3000)) for n in range(40)]
        for one in seen[1:]:
            changed = [x for x, y in zip(one, seen[0]) if max(abs(a - b) for a, b in zip(x, y)) > 25]
            assert len(changed) <= 2  # where two bands meet, in the middle of a pixel


def test_numbers_are_in_all_boxes_of_a_kind_or_in_none(page_of):  # noqa: F811
    """The labels drawn, by the text that the canvas was asked to write."""
    page = page_of(run("1f1b", 2, 12, zp.Costs()), draw={"memory": False})
    for width in (300, 420, 560, 800, 1200):
        page.set_viewport_size({"width": width, "height": 700})
        settle(page)
        texts = page.evaluate(
            """() => { const seen = [], real = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
              if (this.font.startsWith("500")) seen.push(text + " " + this.font); real.call(this, text, ...at); };
            zeropipeViewer.paint(); CanvasRenderingContext2D.prototype.fillText = real; return seen; }"""
        )
        fonts = {}
        for text in texts:
            number, font = text.split(" ", 1)
            fonts.setdefault(font, []).append(int(number))
        assert sum(map(len, fonts.values())) % 24 == 0
        for numbers in fonts.values():
            assert set(numbers) == set(range(12))
    assert texts


def test_seconds_are_shown_in_fitting_units(page_of):  # noqa: F811
    timeline = replace(run(costs=zp.Costs(f=1e-3, i=1e-3, w=1e-3)), unit="s")
    page = page_of(timeline)
    assert "makespan 27 ms" in page.locator(".zp-heading").inner_text()
    assert "2 ms" in hover(page, 3, 5e-3)


def test_light_dark_and_print(page_of):  # noqa: F811
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


def test_a_timeline_of_no_length_is_shown(page_of):  # noqa: F811
    page = page_of([run("1f1b", 1, 1, zp.Costs(f=0, i=0, w=0)), run("1f1b", 1, 1)])
    assert page.locator(".zp-panel").count() == 2


def test_labels_option(page_of):  # noqa: F811
    seen = []
    for labels in ("microbatch", "action", "none"):
        page = page_of(run("1f1b", 2, 3), draw={"labels": labels})
        seen.append(page.evaluate("zeropipeViewer.panels[0].rows.toDataURL()"))
    assert len(set(seen)) == 3


NAMES = ["</script><img src=x onerror=alert(1)>\"'&<b>", "تجربة \u202e abc", "x" * 500, "a\nb\x1bc"]


def test_a_name_is_only_text(page_of):  # noqa: F811
    timelines = [run().with_label(name) for name in NAMES]
    page = page_of(timelines, draw={"title": NAMES[0]}, size=PHONE)
    asked = []
    page.on("dialog", lambda dialog: asked.append(dialog.message) or dialog.dismiss())
    shown = page.locator(".zp-panel h2").all_inner_texts()
    assert shown == [" ".join(data["title"].split()) for data in payload(timelines)["timelines"]]
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    settle(page)
    assert asked == []


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e12])
def test_numbers_on_the_ruler_stay_short(page_of, scale):  # noqa: F811
    page = page_of(run(costs=zp.Costs(f=scale, i=scale, w=scale)))
    texts = page.evaluate(
        """() => { const seen = [], real = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text) { seen.push(text); };
        zeropipeViewer.paintRuler(); CanvasRenderingContext2D.prototype.fillText = real; return seen; }"""
    )
    assert len(texts) > 5
    assert all(len(text) <= 8 for text in texts)
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("times", [zp.Costs(f=0, i=0, w=0), zp.Costs(f=1e-12, i=1e12, w=0), zp.Costs(w=0)])
def test_boxes_without_length_are_no_trouble(page_of, times):  # noqa: F811
    page = page_of([run("zbv", 2, 4, times), run("dualpipev", 2, 4, times)])
    page.keyboard.press("c")
    for _ in range(4):
        page.keyboard.press("+")
    settle(page)
    page.keyboard.press("ArrowRight")
    assert page.locator(".zp-card").is_visible()


def test_an_empty_schedule_is_shown(page_of):  # noqa: F811
    problem = Problem(2, 2, 0)
    nothing = Timeline(Schedule.of(problem, linear(problem), [(), ()], "empty"), b"", b"")
    page = page_of([nothing, run()])
    for key in ("ArrowRight", "ArrowDown", "Home", "End"):
        page.keyboard.press(key)
    page.keyboard.press("c")
    settle(page)
    assert page.locator(".zp-panel").count() == 2


def test_very_many_ranks_are_painted(page_of):  # noqa: F811
    timeline = run("1f1b", 9000, 2, zp.Costs())
    page = page_of(timeline, draw={"memory": False})
    lane = tuple(colours(timeline)["lane"])
    for rank in (0, 4500, 8999):
        step = next(timeline.spans(rank))
        page.evaluate("([a, w]) => zeropipeViewer.view.show(a - w, 4 * w)", [step.start, step.end - step.start])
        settle(page)
        assert tuple(pixel(page, rank, (step.start + step.end) / 2)[:3]) != lane
    assert page.locator(".zp-plot").bounding_box()["height"] < 10_000


def test_any_window_can_be_painted(page_of):  # noqa: F811
    """Measured, overlapped and sparse timelines at many zooms, with kinds hidden: no error, and boxes or bands."""
    timeline, dice = run("dualpipev", 4, 300), Random(0)
    start, end = array("d", timeline.start), array("d", timeline.end)
    for i in range(len(start)):
        start[i] += dice.uniform(0, 0.2)
        end[i] = max(start[i], end[i] - dice.uniform(0, 0.2))
    noisy = replace(timeline, start=start.tobytes(), end=end.tobytes(), measured=True)
    page = page_of([noisy, run("zbv", 4, 300, zp.Costs(w=0)), run("1f1b", 4, 1)], draw={"labels": "action"})
    page.get_by_role("button", name="I input gradient").click()
    windows = [(dice.random(), 10 ** dice.uniform(-6, 0)) for _ in range(60)]
    painted = page.evaluate(
        """(windows) => windows.map(([at, share]) => { const { view } = zeropipeViewer;
        view.show(at * view.whole, share * view.whole); zeropipeViewer.paint();
        return zeropipeViewer.panels.map(({ painted }) => [painted.drawn, painted.bands]); })""",
        windows,
    )
    assert any(bands for panels in painted for _, bands in panels)
    assert any(drawn for panels in painted for drawn, _ in panels)
    assert all(drawn < 20_000 for panels in painted for drawn, _ in panels)
