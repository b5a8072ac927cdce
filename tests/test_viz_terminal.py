"""The picture in the terminal."""

import io
import re

import pytest
from rich.console import Console

import zeropipe as zp
from zeropipe.core.units import size_text, time_text


def shown(timelines, width=80, **options):
    out = io.StringIO()
    zp.draw(timelines, console=Console(file=out, width=width, highlight=False, **options))
    return out.getvalue().splitlines()


def run(name, ranks=2, microbatches=2, **costs):
    return zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), zp.Costs(**costs))


def test_boxes_and_bubbles_by_hand():
    """1F1B, 2 ranks, 2 microbatches: 9 units on 63 cells, 7 cells a unit."""
    lines = shown(run("1f1b"), width=9 * 7 + 7 + 7)
    f, b = "F{}-----", "B{}------------"
    idle = "·" * 7
    first = f.format(0) + f.format(1) + idle * 2 + b.format(0) + idle + b.format(1)
    second = idle + f.format(0) + b.format(0) + f.format(1) + b.format(1) + idle * 2
    assert lines[1:3] == [f"rank 0 {first}   67%", f"rank 1 {second}   67%"]


def test_heading_axis_legend_and_summary():
    text = "\n".join(shown([run("1f1b"), run("gpipe")], width=100))
    assert "makespan 9, bubble 33.3%, peak memory 2" in text
    assert "F forward   B backward   · idle" in text
    assert re.search(r"^1f1b +9 +best +33.3% +2$", text, re.MULTILINE)
    assert re.search(r"^ +0 +2 +4 +6 +8", text, re.MULTILINE)


def test_every_line_fits():
    for width in (40, 80, 133):
        lines = shown(run("zbv", 4, 8), width=width)
        assert all(len(line) <= width for line in lines)


def test_an_overlap_is_a_split_box_in_colour_and_an_x_without():
    timeline = run("dualpipev", 2, 4)
    assert "X" in shown(timeline)[1]
    coloured = shown(timeline, force_terminal=True, color_system="truecolor", no_color=False)
    assert "▀" in coloured[1]
    assert "\x1b[38;2;" in coloured[1]


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    lines = shown(run("1f1b"), force_terminal=True)
    assert not any(";2;" in line for line in lines)
    assert "F0" in lines[1]


@pytest.mark.parametrize("name", zp.names())
def test_cells_of_a_row_follow_the_schedule(name):
    """Wide enough that every box shows: the boxes read off the line are the row."""
    timeline = run(name, 2, 4)
    for rank, row in enumerate(timeline.schedule.rows):
        line = shown(timeline, width=1200)[1 + rank]
        read = re.findall(r"[FBIW]\d+|X\d+&\d+", line)
        assert read == [written(step) for step in row]


def written(step):
    if isinstance(step, zp.Overlap):
        return f"X{step.forward.microbatch}&{step.backward.microbatch}"
    return f"{step.kind.name}{step.microbatch}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (time_text(0, "s"), "0 s"), (time_text(-0.0025, "s"), "-2.5 ms"), (time_text(3e-7, "s"), "300 ns"),
        (time_text(3e-12, "s"), "0.003 ns"), (time_text(90, "s"), "90 s"), (time_text(2.5, ""), "2.5"),
        (size_text(0, "B"), "0 B"), (size_text(0.5, "B"), "0.5 B"), (size_text(1536, "B"), "1.5 KiB"),
        (size_text(3 * 2**40, "B"), "3 TiB"), (size_text(4, ""), "4"),
    ],
)  # fmt: skip
def test_numbers_for_people(text, says):
    assert text == says
