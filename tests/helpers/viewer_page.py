"""The offline page for tests: fixture `page_of`, where things are on it, and what colour is painted there."""

from pathlib import Path

import pytest

import zeropipe as zp
from zeropipe.viz.payload import payload

COSTS = zp.Costs(f=1, i=1, w=1, p2p=0.25, memory_limit=5)
VIEWER = Path(zp.__file__).parent / "viz" / "viewer"


def run(name="1f1b", ranks=4, microbatches=6, costs=COSTS):
    return zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), costs)


@pytest.fixture
def page_of(watched, tmp_path):
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
