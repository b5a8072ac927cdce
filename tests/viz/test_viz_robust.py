"""Whatever a timeline holds, a picture is drawn or refused in one line; and a name is only ever text."""

import io
import json
import re
import warnings
import xml.etree.ElementTree as ET
from array import array
from dataclasses import replace
from itertools import pairwise, product
from math import inf, nan

import pytest
from full_marker import mark_rest_full
from rich.console import Console

import zeropipe as zp
from zeropipe.core.placement import Placement, Problem, linear
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Memory, Timeline
from zeropipe.viz.figure import figure
from zeropipe.viz.payload import payload
from zeropipe.viz.scene import Text
from zeropipe.viz.style import Style
from zeropipe.viz.words import cut_to, one_line, width_of

FILES = ("html", "svg", "png", "pdf", "json")


def run(name="1f1b", ranks=2, microbatches=2, **costs):
    return zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), zp.Costs(**costs))


def with_times(**changes):
    """1F1B on 2 ranks with other times: {"start" or "end": {place: time}}."""
    timeline = run()
    columns = {name: array("d", getattr(timeline, name)) for name in ("start", "end")}
    for name, places in changes.items():
        for place, time in places.items():
            columns[name][place] = time
    return replace(timeline, **{name: column.tobytes() for name, column in columns.items()})


def empty(ranks):
    problem = Problem(ranks, ranks, 0)
    return Timeline(Schedule.of(problem, linear(problem), [()] * ranks, "empty"), b"", b"")


def on_one_of_three():
    problem = Problem(3, 1, 1)
    row = (zp.Action(0, zp.Kind.F, 0), zp.Action(0, zp.Kind.B, 0))
    return zp.simulate(Schedule.of(problem, Placement(((1,),)), [(), row, ()]))


def many_stages(count=300):
    row = [zp.Action(s, zp.Kind.F, 0) for s in range(count)] + [zp.Action(s, zp.Kind.B, 0) for s in range(count)][::-1]
    return zp.simulate(Schedule.of(Problem(1, count, 1), Placement(((0,) * count,)), [row]))


DRAWN = {
    "no actions": empty(1), "no actions on three ranks": empty(3), "two ranks without actions": on_one_of_three(),
    "one of everything": run(ranks=1, microbatches=1), "300 stages on a rank": many_stages(),
    "no time passes": run(f=0, i=0, w=0), "some boxes have no length": run("zbv", 2, 4, w=0),
    "huge times": run(f=1e18, i=1e18, w=1e18), "tiny times": run(f=1e-18, i=1e-18, w=1e-18),
    "tiny beside huge": run(f=1e-12, i=1e12, w=1), "late": with_times(start={3: 1e15}, end={3: 1e15 + 8}),
    "no memory used": run(activation=0), "no memory allowed": run(memory_limit=0), "huge memory": run(activation=1e30),
}  # fmt: skip


def drawn(timeline, suffix, tmp_path):
    """The file, made without a warning; of a terminal what it shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if suffix == "terminal":
            out = io.StringIO()
            zp.draw(
                [timeline, run()], console=Console(file=out, width=80, force_terminal=True, color_system="truecolor")
            )
            return out.getvalue()
        options = {"memory": True} if suffix in ("svg", "png", "pdf") else {}
        zp.draw(timeline if suffix == "json" else [timeline, run()], tmp_path / f"x.{suffix}", **options)
    return (tmp_path / f"x.{suffix}").read_bytes().decode("utf-8", "replace")


# PNG and PDF are made by one library, as slowly: every other case is one of them
PIXELS = {case: ("png", "pdf")[place % 2] for place, case in enumerate([*DRAWN][::2])}


@pytest.mark.parametrize(
    ("case", "suffix"),
    mark_rest_full(
        product(DRAWN, ("terminal", *FILES)), lambda one: one[1] not in ("png", "pdf") or PIXELS.get(one[0]) == one[1]
    ),
)
def test_odd_timelines_are_drawn(case, suffix, tmp_path):
    text = drawn(DRAWN[case], suffix, tmp_path)
    assert len(text) > 100
    if suffix == "svg":
        numbers = [v for e in ET.fromstring(text).iter() for k, v in e.items() if k in ("x", "y", "width", "points")]
        assert not re.search("nan|inf", " ".join(numbers))
    if suffix == "json":
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


REFUSED = {
    "nan to 2; times must be at most": with_times(start={1: nan}),
    "1 to nan; times must be at most": with_times(end={1: nan}),
    "1 to inf; times must be at most": with_times(end={1: inf}),
    "1 to 1e+300; times must be at most": with_times(end={1: 1e300}),
    "0F1 runs from 1 to 0.5; an end must not be before its start": with_times(end={1: 0.5}),
    "0F1 runs from -1 to 2; the actions of a rank must start in the order of its row": with_times(start={1: -1.0}),
    "0F0 has memory nan": replace(run(), memory=Memory(*[array("d", [nan] * 8).tobytes()] * 2)),
    "must have one entry for each action": replace(run(), end=b""),
}


@pytest.mark.parametrize("suffix", ["terminal", *FILES])
@pytest.mark.parametrize("message", REFUSED)
def test_times_that_are_none_are_refused(message, suffix, tmp_path):
    with pytest.raises(zp.ConfigError, match=re.escape(message)):
        drawn(REFUSED[message].with_label("mine"), suffix, tmp_path)
    assert list(tmp_path.iterdir()) == []


MARKUP = "</script></title><img src=x onerror=alert(1)>\"'&<b>{}"
NAMES = {
    "markup": MARKUP, "control characters": "a\x00b\x1b[2Jc\rd\ne\u2028f\x9b31mg", "half a pair": "a\ud800b",
    "very long": "very long name " * 300, "right to left": "تجربة \u202e abc מילה", "blank": " ", "wide": "流水线" * 40,
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["terminal", "html", "svg", "json"])
@pytest.mark.parametrize("case", NAMES)
def test_a_name_is_only_text(case, suffix, tmp_path):
    timeline = replace(run(), label=NAMES[case], unit=NAMES[case][:20], memory_unit=NAMES[case][:20])
    text = drawn(timeline, suffix, tmp_path)
    if suffix == "terminal":
        assert not re.search(r"[\x00-\x09\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e]", text)
        assert "\x1b" not in re.sub(r"\x1b\[[\d;]*m", "", text)  # nothing but colours
    elif suffix == "svg":
        root = ET.fromstring(text)
        assert {e.tag.split("}")[1] for e in root.iter()} <= {
            "svg",
            "title",
            "rect",
            "g",
            "text",
            "polygon",
            "polyline",
        }
    elif suffix == "html":
        assert text.count("</script>") == 2
        assert "<img" not in text
        assert len(re.search("<title>(.*?)</title>", text)[1]) < 1300
    else:
        assert zp.from_json(text).label == NAMES[case]


@pytest.mark.parametrize(
    ("suffix", "case"),
    mark_rest_full(
        product(["png", "pdf"], ["markup", "control characters", "very long"]),
        [("png", "markup"), ("pdf", "control characters"), ("png", "very long")],
    ),
)
def test_a_name_in_a_figure_by_matplotlib(case, suffix, tmp_path):
    assert len(drawn(run().with_label(NAMES[case] + "$\\frac{$"), suffix, tmp_path)) > 1000


def test_signs_that_no_font_has_are_told_once(tmp_path):
    with pytest.warns(UserWarning, match=r"^no font has '\U00014400\U00014401', which is drawn as boxes") as told:
        zp.draw(run().with_label("\U00014400\U00014401\U00014400"), tmp_path / "x.png", dpi=20)
    assert len(told) == 1


def test_notebooks_and_the_page_take_names_as_text():
    assert "<img" not in run().with_label(MARKUP)._repr_html_()
    data = payload(replace(run(), label="a\nb", unit="\x1b"))["timelines"][0]
    assert (data["title"], data["unit"]) == ("a b", " ")


def test_texts_are_cut_to_their_room():
    assert one_line("abc") == "abc"
    assert len(one_line("x" * 1000)) == 200
    for text in ("WWWWWWWW", "iiiiiiii", "流水线流水线", "e\u0301" * 20):
        for room in (0, 10, 25, 1000):
            kept = cut_to(text, 8, room)
            assert width_of(kept, 8) <= max(room, width_of("…", 8))
            assert kept == text or kept.endswith("…")


@pytest.fixture(scope="module")
def ink():
    """How wide a text is in DejaVu Sans, which matplotlib brings along."""
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    files = [findfont(FontProperties(family="DejaVu Sans", weight=weight)) for weight in ("normal", "bold")]
    fonts = [FT2Font(file) for file in files]

    def wide(text, size, bold):
        fonts[bold].set_size(100, 72)
        return sum(fonts[bold].load_char(ord(sign)).linearHoriAdvance / 65536 for sign in text) * size / 100

    return wide


@pytest.mark.parametrize("width", [100, 120, 170, 240, 399, 400, 720])
def test_texts_of_a_figure_lie_inside_it_and_not_on_each_other(width, ink):
    costs = zp.Costs(memory_limit=1.25, shards="keep", unshard=0.3, reduce=0.5)
    long = zp.simulate(zp.build("dualpipe", ranks=4, microbatches=20), costs).with_label(
        "My own pipeline schedule " * 6
    )
    brief = zp.simulate(zp.build("zbv", ranks=4, microbatches=8), costs)
    tiny = run("dualpipe", 4, 8, f=0.0001, i=0.0001, w=0.0001)  # the last number of its axis is at the very end
    for shown in (long, brief, tiny):
        scene = figure([shown], Style(width=width, memory=True, title="WE MAKE ROOM % AND MORE ROOM " * 4))
        lines = {}
        for x, y, text, size, _, anchor, bold in (item for item in scene.items if isinstance(item, Text)):
            wide = ink(text, size, bold)
            left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
            assert -1 <= left <= left + wide <= width + 1, text
            lines.setdefault(y, []).append((left, left + wide, text))
        for texts in lines.values():
            for (_, end, one), (begin, _, other) in pairwise(sorted(texts)):
                assert end <= begin + 1, (one, other)
        assert max(lines) <= scene.height


def test_very_many_stages_share_shades():
    data = payload(many_stages())
    assert max(map(max, data["timelines"][0]["shades"])) < len(data["palette"]["light"]["kinds"]["F"]["fill"]) == 64


@pytest.mark.parametrize("scale", [1e-80, 1e-15, 1e-3, 1.0, 1e5, 1e9, 1e40])
@pytest.mark.parametrize("unit", ["", "s"])
def test_numbers_on_the_axis_stay_short(scale, unit, tmp_path):
    timeline = replace(run(f=scale, i=scale, w=scale), unit=unit)
    zp.draw(timeline, tmp_path / "x.svg")
    soft = [g for g in ET.parse(tmp_path / "x.svg").getroot() if g.get("fill") == "#667085"]
    on_axis = [text.text for g in soft if g.get("text-anchor") == "middle" for text in g]
    assert len(on_axis) > 4
    assert max(map(len, on_axis)) <= 6
    assert len(set(on_axis)) == len(on_axis)
    out = io.StringIO()
    zp.draw(timeline, console=Console(file=out, width=80))
    axis = next(line for line in out.getvalue().splitlines() if re.match(" +0 ", line))
    assert all(len(word) <= 7 for word in axis.split())
