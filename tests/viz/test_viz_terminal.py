"""The picture in the terminal."""

import io
import re
from itertools import product

import pytest
from rich.console import Console

import zeropipe as zp
from zeropipe.core.units import count_text, parameters_text, size_text, tick_step, time_text
from zeropipe.viz.colors import MIXED, shades


def shown(timelines, width=80, **options):
    out = io.StringIO()
    zp.draw(timelines, console=Console(file=out, width=width, highlight=False, **options))
    return out.getvalue().splitlines()


def rows(timelines, **options):
    """The lines of the ranks."""
    return [line for line in shown(timelines, **options) if re.match(r"(\x1b\[\d*m)* *rank \d+ ", line)]


def run(name, ranks=2, microbatches=2, **costs):
    return zp.simulate(zp.build(name, ranks=ranks, microbatches=microbatches), zp.Costs(**costs))


def test_boxes_and_bubbles_by_hand():
    """1F1B, 2 ranks, 2 microbatches: 9 units on 63 cells, 7 cells a unit."""
    lines = rows(run("1f1b"), width=9 * 7 + 7 + 7)
    f, b = "F{}-----", "B{}------------"
    idle = "·" * 7
    first = f.format(0) + f.format(1) + idle * 2 + b.format(0) + idle + b.format(1)
    second = idle + f.format(0) + b.format(0) + f.format(1) + b.format(1) + idle * 2
    assert lines == [f"rank 0 {first}   67%", f"rank 1 {second}   67%"]


def test_heading_axis_legend_and_summary():
    text = "\n".join(shown([run("1f1b"), run("gpipe")], width=100))
    assert "makespan 9, idle 33.3%, peak memory 2" in text
    assert "F forward   B backward   · idle" in text
    assert re.search(r"^1f1b +9 +best +33.3% +33.3% +2$", text, re.MULTILINE)
    assert re.search(r"^ +0 +2 +4 +6 +8", text, re.MULTILINE)


def test_every_line_fits():
    for width in (40, 80, 133):
        lines = shown(run("zbv", 4, 8), width=width)
        assert all(len(line) <= width for line in lines)


def test_an_overlap_is_a_box_in_two_halves_in_colour_and_an_x_without():
    timeline = run("dualpipev", 2, 4)
    assert "X" in rows(timeline)[0]
    coloured = rows(timeline, force_terminal=True, color_system="truecolor", no_color=False)
    assert "▀" in coloured[0]
    assert "\x1b[38;2;" in coloured[0]


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    lines = shown(run("1f1b"), force_terminal=True)
    assert not any(";2;" in line for line in lines)
    assert any("rank 0" in line and "F0" in line for line in lines)


@pytest.mark.parametrize("name", zp.names())
def test_cells_of_a_row_follow_the_schedule(name):
    """Wide enough that every box shows: the boxes read off the line are the row."""
    timeline = run(name, 2, 4)
    for rank, row in enumerate(timeline.schedule.rows):
        line = rows(timeline, width=1200)[rank]
        read = re.findall(r"[FBIW]\d+|X\d+&\d+", line)
        assert read == [written(step) for step in row]


def written(step):
    if isinstance(step, zp.Overlap):
        return f"X{step.forward.microbatch}&{step.backward.microbatch}"
    return f"{step.kind.name}{step.microbatch}"


def test_boxes_get_whole_cells_where_that_costs_little_room():
    """51 units on 66 columns: one cell each; 36 on 66 would leave half of it empty."""
    timeline = run("zbv", 4, 8)
    read = [re.sub(r"rank \d |·| +\d+%", "", line) for line in rows(timeline)]
    assert read == ["".join(step.kind.name for step in row) for row in timeline.schedule.rows]
    assert len(rows(run("1f1b", 2, 11))[0]) == 7 + 66 + 6


def test_microbatch_numbers_are_in_all_boxes_of_a_kind_or_in_none():
    for microbatches in (8, 12):
        read = "".join(rows(run("1f1b", 2, microbatches), width=14 + 2 * 3 * (microbatches + 1)))
        numbered = [re.findall(rf"{kind}(\d*)", read) for kind in "FB"]
        assert all(len(seen) == 2 * microbatches for seen in numbered)
        assert set(map(bool, numbered[1])) == {True}
        assert set(map(bool, numbered[0])) == {microbatches == 8}  # F has 2 cells: a letter and one digit


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("1f1b", 8, 200), ("zbv", 4, 64), ("gpipe", 8, 100)])
def test_too_many_boxes_are_shown_as_density(name, ranks, microbatches):
    """Each cell's shade is its share of busy time, by summing up here what every span has of it."""
    timeline = run(name, ranks, microbatches)
    lines = shown(timeline)
    assert any("Too many boxes" in line and "share of busy time" in line for line in lines)
    drawn = [re.fullmatch(r"rank \d (\S{66}) +\d+%", line)[1] for line in rows(timeline)]
    cell = timeline.makespan / 66
    for rank, line in enumerate(drawn):
        busy = [0.0] * 67
        for s in timeline.spans(rank):
            for at in range(int(s.start / cell), int(s.end / cell) + 1):
                busy[at] += max(0.0, min(s.end, (at + 1) * cell) - max(s.start, at * cell))
        for mark, share in zip(line, (time / cell for time in busy)):
            low, high = {"█": (0.95, 1), "▓": (0.7, 0.95), "▒": (0.4, 0.7), "░": (0.05, 0.4), "·": (0, 0.05)}[mark]
            assert low - 1e-6 <= share <= high + 1e-6


def test_density_is_coloured_by_the_kind_that_has_most():
    def colours(name):
        line = rows(run(name, 4, 200), force_terminal=True, color_system="truecolor", no_color=False)[0]
        cells, color = [], None
        for code, cell in re.findall(r"\x1b\[([\d;]*)m|(.)", line):
            color = color if cell else code.removeprefix("38;2;")
            cells += [color] if cell in "█▓▒░" and cell else []
        return set(cells[len(cells) // 2 : -3])

    def code(color):
        return ";".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))

    assert colours("1f1b") == {code(shades("B", 1)[0])}  # B takes two thirds
    assert code(MIXED) in colours("zbv")  # a third each


def test_a_rank_is_never_100_per_cent_busy_beside_idle_cells():
    """zbv has no bubble by the paper's rate, yet ranks start late and end early."""
    timeline = run("zbv", 4, 64)
    assert timeline.bubble == pytest.approx(0)
    assert all(line.endswith(" 99%") for line in rows(timeline))
    assert rows(run("1f1b", 1, 4))[0].endswith(" 100%")


def test_over_the_limit_cannot_be_best():
    fast, slow = run("gpipe", 2, 4, memory_limit=2, f=1), run("1f1b", 2, 4, memory_limit=2, f=3)
    text = "\n".join(shown([fast, slow], width=100))
    assert re.search(r"^gpipe +15 +x 0\.\d+ .* 4, over the limit$", text, re.MULTILINE)
    assert re.search(r"^1f1b +25 +best", text, re.MULTILINE)


@pytest.mark.parametrize("most", [2, 3, 7, 14])
@pytest.mark.parametrize("power", [-12, -3, 0, 5])
def test_every_span_has_ticks(most, power):
    for times, rounding in product((1, 2, 5), (0, 3e-16, -3e-16, 1e-12)):
        span = most * times * 10.0**power * (1 + rounding)
        assert span / tick_step(span, most) == pytest.approx(most)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (time_text(0, "s"), "0 s"), (time_text(-0.0025, "s"), "-2.5 ms"), (time_text(3e-7, "s"), "300 ns"),
        (time_text(3e-12, "s"), "0.003 ns"), (time_text(90, "s"), "90 s"),
        (time_text(3.3e-17, ""), "3.3e-17"), (time_text(2.5, ""), "2.5"),
        (size_text(0, "B"), "0 B"), (size_text(0.5, "B"), "0.5 B"), (size_text(1500, "B"), "1.5 KB"),
        (size_text(3e12, "B"), "3 TB"), (size_text(4, ""), "4"),
        (count_text(1, "rank"), "1 rank"), (count_text(0, "entry"), "0 entries"),
        (count_text(2, "process"), "2 processes"),
        (count_text(1024, "microbatch"), "1,024 microbatches"), (parameters_text(42560), "42,560 parameters"),
        (parameters_text(8_190_735_360), "8,190.7M parameters"),
        (zp.build("gpipe", ranks=1, microbatches=1).sizes, "1 rank, 1 stage (linear), 1 microbatch"),
    ],
)  # fmt: skip
def test_numbers_for_people(text, says):
    assert text == says
