"""Sharded stages in pictures: a thin lane below each rank's boxes, in every format."""

import io
import json
import re

import pytest

import zeropipe as zp
from zeropipe.core import explain

pytest.importorskip("numpy")

from rich.console import Console

from zeropipe.viz.colors import THEMES, contrast
from zeropipe.viz.lanes import lane, merged
from zeropipe.viz.payload import payload
from zeropipe.viz.terminal import show


def sharded(policy="keep", name="zbv"):
    costs = zp.Costs(shards=policy, unshard=0.5, reduce=2, units=2, p2p=0.1, full_weights=2)
    return zp.simulate(zp.build(name, ranks=2, microbatches=4), costs)


def names(timeline):
    return [str(span.action) for rank in range(timeline.num_ranks) for span in timeline.sharding_spans(rank)]


def test_svg_has_every_piece_and_a_legend(tmp_path):
    timeline = sharded()
    zp.draw(timeline, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert re.findall(r"<title>(\d+(?:UNSHARD|REDUCE_GRAD))</title>", text) == names(timeline)
    assert "weights gathered" in text
    assert "gradients reduced" in text
    zp.draw(zp.simulate(timeline.schedule), tmp_path / "y.svg")
    assert "weights gathered" not in (tmp_path / "y.svg").read_text()


def test_pieces_too_narrow_to_tell_apart_are_one():
    timeline = sharded("regather")
    pieces = list(lane(timeline, 0))
    assert merged(iter(pieces), 0.0) == pieces
    coarse = merged(iter(pieces), 3.0)
    assert len(coarse) < len(pieces)
    assert coarse[0].start == pieces[0].start
    assert max(piece.end for piece in coarse) == max(piece.end for piece in pieces)


def test_the_terminal_has_a_line_below_each_rank():
    out = io.StringIO()
    show([sharded()], 100, Console(file=out, width=100, no_color=True))
    lines = out.getvalue().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("rank 0"))
    assert re.fullmatch(r" +u[ur ]*r+ *", lines[first + 1])
    assert lines[first + 2].startswith("rank 1")
    assert "u weights gathered" in out.getvalue()


def test_a_trace_has_a_track_of_its_own(tmp_path):
    timeline = sharded()
    zp.draw(timeline, tmp_path / "x.json")
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {1: "rank 0", 2: "rank 1", 3: "rank 0 weights and gradients", 4: "rank 1 weights and gradients"}
    moves = [(e["name"], e["tid"] - 3, e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] > 2]
    wanted = [
        (str(s.action), s.rank, pytest.approx(1e3 * s.start), pytest.approx(1e3 * s.end))
        for rank in range(2) for s in timeline.sharding_spans(rank)
    ]  # fmt: skip
    assert moves == wanted
    assert zp.from_json((tmp_path / "x.json").read_text()) == timeline


def test_the_viewer_gets_the_lane():
    data = payload([sharded(), zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))])
    assert data["timelines"][0]["laneOffsets"] == [0, 4, 8]
    assert {"laneStart", "laneEnd", "laneStage", "laneMicrobatch", "laneLook"} <= set(data["timelines"][0]["columns"])
    assert data["timelines"][0]["laneLooks"] == ["unshard", "reduce"]
    assert "laneOffsets" not in data["timelines"][1]
    assert data["causes"][5] == "sharding"
    assert explain.idle_times(sharded())[0].sharding > 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_lane_can_be_seen(theme):
    colors = THEMES[theme]
    assert all(
        contrast(colors[look], colors[ground]) >= 3 for look in ("unshard", "reduce") for ground in ("paper", "lane")
    )
