"""Files: SVG, PNG, PDF, the offline page's payload, Perfetto traces; and what the palette promises."""

import base64
import json
import os
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

import zeropipe as zp
from zeropipe.core.lower import lower
from zeropipe.core.placement import Placement
from zeropipe.core.timeline import Timeline
from zeropipe.viz import check_name
from zeropipe.viz.boxes import boxes
from zeropipe.viz.colors import KINDS, contrast, ink_on, shade_table, shades
from zeropipe.viz.columns import UPPER
from zeropipe.viz.html import MODULES, bundle, viewer_file
from zeropipe.viz.payload import payload

SVG = "{http://www.w3.org/2000/svg}"
COSTS = zp.Costs(f=1.0, i=1.1, w=0.9, p2p=0.1, memory_limit=6)


def run(name="zbv", ranks=4, microbatches=8, costs=COSTS):
    return zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), costs)


def spans(timeline: Timeline):
    return [span for rank in range(timeline.num_ranks) for span in timeline.spans(rank)]


@pytest.mark.parametrize("name", zp.names())
def test_svg_has_one_box_per_action_where_and_as_wide_as_it_lasts(name, tmp_path):
    timeline = run(name)
    zp.draw(timeline, tmp_path / "x.svg", labels="none")
    root = ET.parse(tmp_path / "x.svg").getroot()
    drawn = {box.find(f"{SVG}title").text: box for box in root.findall(f"{SVG}g[@class='boxes']/{SVG}rect")}
    assert drawn.keys() == {str(span.action) for span in spans(timeline)}
    scale = (720 - 34 - 6) / timeline.makespan
    rows = {}
    for span in spans(timeline):
        box = drawn[str(span.action)]
        assert float(box.get("x")) == pytest.approx(34 + span.start * scale, abs=0.006)
        assert float(box.get("width")) == pytest.approx((span.end - span.start) * scale, abs=0.7)
        rows.setdefault(span.rank, set()).add(round(float(box.get("y")) // 15))
    assert all(len(lines) <= 2 for lines in rows.values())


def test_svg_options(tmp_path):
    timeline = run()
    zp.draw(
        [timeline, timeline.with_label("a < b & c")],
        tmp_path / "x.svg",
        width=240,
        theme="dark",
        memory=True,
        labels="action",
    )
    root = ET.parse(tmp_path / "x.svg").getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert root.get("width") == "240pt"
    assert {"zbv", "a < b & c"} <= set(texts)
    assert len(list(root.iter(f"{SVG}polygon"))) == 8  # a memory curve per rank and timeline
    assert sum(line.get("stroke-dasharray") is not None for line in root.iter(f"{SVG}polyline")) == 8  # the limit
    assert root.find(f"{SVG}rect").get("fill") == "#12151c"
    assert all(float(group.get("font-size", 9)) >= 5 for group in root.iter(f"{SVG}g"))


def test_labels_are_microbatch_numbers(tmp_path):
    zp.draw(run("1f1b", 2, 3), tmp_path / "x.svg")
    texts = ET.parse(tmp_path / "x.svg").findall(f"{SVG}g[@fill='#ffffff']/{SVG}text")
    in_boxes = Counter(text.text for text in texts)
    assert in_boxes == {"0": 4, "1": 4, "2": 4}  # F and B on two ranks


@pytest.mark.parametrize("name", ["1f1b", "zbv", "hanayo"])
@pytest.mark.parametrize("width", [100, 150, 200, 240, 300, 400, 560, 720])
def test_all_boxes_of_a_kind_have_labels_or_none_has(name, width, tmp_path):
    """12 microbatches: 10 and 11 need twice the room of the others."""
    timeline = run(name, 2, 12, zp.Costs(f=1, i=1, w=1))
    zp.draw(timeline, tmp_path / "x.svg", width=width, legend=False)
    root = ET.parse(tmp_path / "x.svg").getroot()
    texts = [t.text for g in root.findall(f"{SVG}g[@text-anchor='middle']") if g.get("fill") != "#667085" for t in g]
    counts = Counter(texts)
    assert len(set(counts.values())) <= 1
    assert len(counts) in (0, 12)
    assert width < 700 or counts


def test_a_figure_of_many_boxes_stays_small(tmp_path):
    zp.draw(run("1f1b", 4, 4_000), tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size < 20_000
    zp.draw(jittered(run("zbv", 4, 1_500)), tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size < 400_000


def jittered(timeline):
    """The same with every box a little shorter, by chance, as in a measured run."""
    start, end = np.frombuffer(timeline.start), np.frombuffer(timeline.end)
    by = np.random.default_rng(0).uniform(0, 0.1, (2, len(start))) * (end - start)
    upper = np.flatnonzero(boxes(timeline).half == UPPER)
    by[:, upper + 1] = by[:, upper]  # both halves of an Overlap share their times
    return replace(timeline, start=(start + by[0]).tobytes(), end=(end - by[1]).tobytes(), measured=True)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("name", ["zbv", "interleaved-zb", "dualpipev", "gpipe"])
def test_bands_are_as_large_as_the_time_they_stand_for(name, noisy, tmp_path):
    timeline = run(name, 4, 320, zp.Costs(f=1, i=1.2, w=0.7))
    timeline = jittered(timeline) if noisy else timeline
    zp.draw(timeline, tmp_path / "x.svg")
    root = ET.parse(tmp_path / "x.svg").getroot()
    assert not root.findall(f"{SVG}g[@class='boxes']/{SVG}rect")
    lanes = [r for r in root.findall(f"{SVG}rect") if r.get("fill") == "#f3f4f7"]
    bottoms = sorted(float(r.get("y")) + float(r.get("height")) for r in lanes)
    stacks = {}  # a band is seen from its upper edge to that of the next one in its stack
    for band in root.iter(f"{SVG}polygon"):
        x, y = np.array([[float(n) for n in pair.split(",")] for pair in band.get("points").split()]).T
        turn = np.flatnonzero(np.diff(x) <= 0)[0] + 1
        grid = np.linspace(x.min(), x.max(), 500)
        bottom = next(b for b in bottoms if b > y.min())
        kind = next(k for k in KINDS if shades(k, 1)[0] == band.get("fill"))
        stacks.setdefault((x.min(), bottom), []).append((kind, grid, np.interp(grid, x[:turn], y[:turn])))
    drawn, expected = Counter(), Counter()
    for (_, bottom), stack in stacks.items():
        for (kind, grid, upper), (_, _, below) in zip(stack, [*stack[1:], (None, None, bottom)]):
            drawn[kind] += float(np.mean(below - upper) * (grid[-1] - grid[0]))
    scale = (720 - 34 - 6) / timeline.makespan
    height = (19 if timeline.schedule.name == "dualpipev" else 15) * 0.86
    starts = Counter((s.rank, s.start) for s in spans(timeline))
    for s in spans(timeline):
        expected[s.action.kind.name] += (s.end - s.start) * scale * height / starts[s.rank, s.start]
    for kind in expected:
        assert drawn[kind] == pytest.approx(expected[kind], rel=0.02, abs=0.002 * sum(expected.values()))


@pytest.mark.parametrize("dpi", [72, 96, 200])
def test_a_regular_schedule_makes_no_stripes(dpi, tmp_path):
    """zbv with 128 microbatches on 16 ranks: in steady state nothing changes from pixel to pixel along a row."""
    image = pytest.importorskip("matplotlib.image")
    zp.draw(run("zbv", 16, 128, zp.Costs()), tmp_path / "x.png", dpi=dpi)
    pixels = image.imread(tmp_path / "x.png")[..., :3]
    high, wide, _ = pixels.shape
    steady = pixels[int(0.15 * high) : int(0.85 * high), int(0.2 * wide) : int(0.75 * wide)]
    assert np.abs(np.diff(steady, axis=1)).max() < 0.05


def test_png_has_the_size_asked_for(tmp_path):
    zp.draw(run(), tmp_path / "x.png", width=240, dpi=300)
    data = (tmp_path / "x.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24])[0] == 1000


def test_pdf_is_vector_with_text_and_embedded_fonts(tmp_path):
    pypdf = pytest.importorskip("pypdf")
    zp.draw(run("1f1b", 2, 4), tmp_path / "x.pdf", width=240)
    page = pypdf.PdfReader(tmp_path / "x.pdf").pages[0]
    assert float(page.mediabox.width) == pytest.approx(240)
    assert "1f1b" in page.extract_text()
    fonts = [font.get_object() for font in page["/Resources"]["/Font"].values()]
    assert fonts
    assert all(font["/Subtype"] == "/Type0" or "/FontFile2" in font["/FontDescriptor"] for font in fonts)
    assert "/XObject" not in page["/Resources"] or not [
        x for x in page["/Resources"]["/XObject"].values() if x.get_object()["/Subtype"] == "/Image"
    ]


@pytest.mark.parametrize(
    "path,options,message",
    [
        ("x.bmp", {}, "x.bmp': the name must end in .html, .svg, .png, .pdf, .json"),
        ("x.svg", {"colour": 1}, ".svg has no option 'colour'"),
        ("x.svg", {"theme": "pink"}, "theme='pink': must be light or dark"),
        ("x.svg", {"labels": "all"}, "labels='all': must be microbatch, action or none"),
        ("x.svg", {"memory": "yes"}, "memory='yes': must be True or False"),
        ("x.pdf", {"title": 3}, "title=3: must be a string"),
        (
            "x.svg",
            {"dpi": 300},
            ".svg has no option 'dpi': its options are facts, labels, legend, memory, theme, title, width",
        ),
        ("x.png", {"width": 5}, "width=5: must be from 100 to 10000 points"),
        ("x.png", {"dpi": 0}, "dpi=0: must be from 20 to 2000 dots per inch"),
        ("x.png", {"width": True}, "width=True: must be from 100 to 10000 points"),
        ("x.png", {"width": 9000, "dpi": 2000}, "pixels: must be at most 150,000,000, and 65,535 along a side"),
        ("no/x.svg", {}, "no/x.svg: there is no folder"),
        ("x.json", {"theme": "dark"}, ".json has no option 'theme': it has none"),
        ("x.html", {"labels": "all"}, "labels='all'"),
        ("x.html", {"theme": "pink"}, "theme='pink'"),
    ],
)
def test_bad_options_say_what_is_allowed(tmp_path, path, options, message):
    with pytest.raises(zp.ConfigError, match=re.escape(message)):
        zp.draw(run(), tmp_path / path, **options)
    with pytest.raises(zp.ConfigError, match="at least one timeline"):
        zp.draw([], tmp_path / path)
    assert list(tmp_path.iterdir()) == []


def test_options_are_checked_before_the_work(tmp_path):
    check_name(tmp_path / "x.svg", title="mine", memory=True, legend=False)
    check_name(tmp_path / "X.PNG", dpi=300)
    with pytest.raises(zp.ConfigError, match="has no option 'dpi'"):
        check_name(tmp_path / "x.html", dpi=300)
    with pytest.raises(zp.ConfigError, match="there is no folder"):
        check_name(tmp_path / "no" / "x.html")


def test_title_and_legend_of_figures(tmp_path):
    zp.draw(run(), tmp_path / "x.svg", title="A <b> & c", legend=False)
    root = ET.parse(tmp_path / "x.svg").getroot()
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == root.find(f"{SVG}title").text == "A <b> & c"
    assert not any("forward" in text for text in texts)


@pytest.mark.parametrize("width", [720, 240])
@pytest.mark.parametrize(("costs", "label"), [(zp.Costs(), "time"), (zp.Costs(f=0.2, unit="s"), "time (s)")])
def test_the_time_axis_has_a_label_and_facts_are_left_out(tmp_path, costs, label, width):
    timeline = zp.simulate(zp.build("zbv", ranks=4, microbatches=8), costs)
    texts = {}
    for facts in (True, False):
        zp.draw(timeline, tmp_path / "x.svg", width=width, facts=facts)
        texts[facts] = [text.text for text in ET.parse(tmp_path / "x.svg").getroot().iter(f"{SVG}text")]
    assert texts[True].count(label) == texts[False].count(label) == 1
    assert any("makespan" in text for text in texts[True])
    assert not any("makespan" in text or "bubble" in text for text in texts[False])
    assert "zbv" in texts[False]


@pytest.mark.parametrize("suffix", ["html", "svg", "png", "pdf", "json"])
def test_a_picture_that_fails_leaves_the_old_file(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"x.{suffix}"
    path.write_text("old")
    real = os.replace

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(zp.ConfigError, match="No space left on device"):
        zp.draw(run(), path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(f"x.{suffix}", "old")]
    monkeypatch.setattr(os, "replace", real)
    zp.draw(run(), path)
    assert [p.name for p in tmp_path.iterdir()] == [f"x.{suffix}"]
    assert path.stat().st_size > 500


def test_shades_of_many_ranks_take_linear_work():
    compared = 0

    class Rank(int):
        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return int(self) == int(other)

        __hash__ = int.__hash__

    table = tuple(Rank(n % 500) for n in range(1000))
    assert shade_table(Placement((table,))) == [[0] * 500 + [1] * 500]
    assert compared < 10_000


@pytest.mark.parametrize("name", zp.names())
@pytest.mark.parametrize("scale", [1.0, 1e-4, 12345.678])
def test_the_payload_holds_every_span(name, scale):
    """Decoded here a second time, without the viewer."""
    timeline = run(name, costs=zp.Costs(f=scale, i=1.1 * scale, w=0.9 * scale, p2p=0.1 * scale))
    data = payload(timeline)["timelines"][0]
    raw, at, columns = zlib.decompress(base64.b64decode(data["data"])), 0, {}
    for (column, kind), length in zip(data["columns"].items(), data["lengths"]):
        columns[column] = np.frombuffer(raw, kind, length, at).astype(np.int64 if kind[0] != "f" else np.float64)
        at += length * int(kind[1])
    clock = np.cumsum(columns["gap"] + np.concatenate([[0], columns["duration"][:-1]]))
    expected = spans(timeline)
    assert clock * data["tick"] == pytest.approx([s.start for s in expected], abs=data["tick"])
    assert (clock + columns["duration"]) * data["tick"] == pytest.approx([s.end for s in expected], abs=data["tick"])
    assert np.cumsum(columns["microbatch"]).tolist() == [s.action.microbatch for s in expected]
    assert columns["stage"].tolist() == [s.action.stage for s in expected]
    assert (columns["head"] & 15).tolist() == [s.action.kind for s in expected]
    assert data["tick"] < 1e-7 * timeline.makespan
    json.dumps(data)


def test_shades_tell_the_stages_of_a_rank_apart():
    for name in zp.names():
        timeline = run(name)
        data = payload(timeline)["timelines"][0]
        second = data["secondFrom"] if data["secondFrom"] is not None else timeline.schedule.num_microbatches
        seen = {}
        for s in spans(timeline):
            copy = int(s.action.microbatch >= second)
            shade = data["shades"][copy][s.action.stage]
            assert seen.setdefault((s.rank, shade), (copy, s.action.stage)) == (copy, s.action.stage)


def test_the_page_needs_nothing_else(tmp_path):
    zp.draw(run().with_label("</script><b>"), tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text("utf-8")
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|https?://""", page.replace("http-equiv", ""))
    assert page.count("</script>") == 2
    assert not re.search(r"^(import|export)\b", bundle(), re.MULTILINE)


def test_viewer_modules_import_only_earlier_ones_and_share_one_scope():
    names = Counter()
    for n, module in enumerate(MODULES):
        source = viewer_file(module)
        assert set(re.findall(r'from "\./([^"]+)"', source)) <= set(MODULES[:n])
        names.update(re.findall(r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (\w+)", source, re.MULTILINE))
    assert [name for name, count in names.items() if count > 1] == []


def test_notebooks_show_the_page_in_a_frame():
    shown = run()._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "mountViewer" in shown


@pytest.mark.parametrize("suffix", ["html", "svg", "png", "json"])
@pytest.mark.parametrize(
    "costs", [zp.Costs(f=0, i=0, w=0), zp.Costs(f=1e-12, i=2e-12, w=0), zp.Costs(f=1e9, activation=0)]
)
def test_extreme_times_are_drawn(costs, suffix, tmp_path):
    timeline = run("1f1b", 1, 1, costs)
    zp.draw([timeline, timeline], tmp_path / f"x.{suffix}", **({"memory": True} if suffix in ("svg", "png") else {}))
    assert (tmp_path / f"x.{suffix}").stat().st_size > 500


# --- Perfetto ------------------------------------------------------------------------------------------------------

NUMBER = (int, float)
TRACE_SCHEMA = {  # the trace event format: phase -> required fields and their types
    "M": {"name": str, "pid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "dur": NUMBER, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": NUMBER},
    "f": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": NUMBER, "bp": str},
    "C": {"name": str, "pid": int, "ts": NUMBER, "args": dict},
}


def trace_of(timelines, tmp_path):
    zp.draw(timelines, tmp_path / "x.json")
    return json.loads((tmp_path / "x.json").read_text())


@pytest.mark.parametrize("name", zp.names())
def test_trace_is_valid_and_complete(name, tmp_path):
    timeline = run(name)
    trace = trace_of([timeline, timeline], tmp_path)
    assert trace.keys() == {"displayTimeUnit", "traceEvents"}
    by_phase = {phase: [] for phase in TRACE_SCHEMA}
    for event in trace["traceEvents"]:
        fields = TRACE_SCHEMA[event["ph"]]
        assert all(isinstance(event[field], kind) for field, kind in fields.items())
        assert event.keys() <= {"ph", "tid", *fields}
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        by_phase[event["ph"]].append(event)
    assert len(by_phase["X"]) == 2 * timeline.schedule.num_actions
    sends = sum(
        action.kind in (zp.Kind.SEND_F, zp.Kind.SEND_B)
        for row in lower(timeline.schedule).rows
        for action in row
        if isinstance(action, zp.Action)
    )
    assert len(by_phase["s"]) == len(by_phase["f"]) == 2 * sends
    check_arrows(by_phase)
    assert {(e["pid"], e["name"]) for e in by_phase["C"]} == {
        (p, f"memory of rank {r}") for p in (1, 2) for r in range(4)
    }
    peaks = [max(e["args"]["units"] for e in by_phase["C"] if e["name"].endswith(f"rank {r}")) for r in range(4)]
    assert peaks == list(timeline.peak_memory)


def test_a_trace_of_one_timeline_can_be_read_back(tmp_path):
    timeline = run("dualpipe").with_label("mine")
    zp.draw(timeline, tmp_path / "x.json")
    assert zp.from_json((tmp_path / "x.json").read_text()) == timeline


def check_arrows(by_phase):
    """Each arrow starts inside a slice and ends inside a later one, of another rank and the same process."""
    slices = {}
    for event in by_phase["X"]:
        slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    starts = {event["id"]: event for event in by_phase["s"]}
    assert len(starts) == len(by_phase["s"])
    for event in by_phase["f"]:
        start = starts[event["id"]]
        assert start["pid"] == event["pid"]
        assert start["tid"] != event["tid"]
        assert start["ts"] < event["ts"]
        for end in (start, event):
            assert any(a <= end["ts"] <= b for a, b in slices[end["pid"], end["tid"]])


def test_trace_slices_of_a_rank_nest_or_follow(tmp_path):
    """Perfetto drops slices that overlap in part."""
    events = trace_of(run("dualpipev", costs=zp.Costs(f=1 / 3, i=1 / 7, w=1 / 9)), tmp_path)["traceEvents"]
    for tid in range(1, 5):
        free = (0.0, 0.0)
        for e in sorted((e for e in events if e["ph"] == "X" and e["tid"] == tid), key=lambda e: e["ts"]):
            both = (e["ts"], round(e["ts"] + e["dur"], 3))
            assert both == free or both[0] >= free[1]
            free = both


# --- colours -------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def lab(color, sight):
    channels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SIGHT[sight]) @ linear, 0, 1)
    xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    )
    scaled = xyz @ seen / np.array([0.95047, 1, 1.08883])
    f = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_kinds_are_told_apart_in_every_shade_by_every_sight(sight, count):
    for one, other in combinations(KINDS, 2):
        for a in shades(one, count):
            for b in shades(other, count):
                assert np.linalg.norm(lab(a, sight) - lab(b, sight)) > 25


def test_labels_are_readable_on_every_box():
    for kind in KINDS:
        for color in shades(kind, 2):
            assert contrast(color, ink_on(color)) >= 4.5
