"""Phases in pictures: inside wide boxes of a page, on tracks of their own in a trace."""

import json
from dataclasses import replace

import pytest
from viewer_page import hover, page_of  # noqa: F401

import zeropipe as zp
from zeropipe.core.action import Kind
from zeropipe.core.phases import EXCHANGES, LayerPhases, PhaseTimes
from zeropipe.viz.payload import payload

LAYER = LayerPhases(PhaseTimes(4, 9, 2), PhaseTimes(6, 7), PhaseTimes(5, 5, 3), PhaseTimes(8, 6))


def run(name="dualpipev", **more):
    schedule = zp.build(name, ranks=2, microbatches=4)
    return zp.simulate(schedule, zp.Costs(phases=[LAYER], sm_tax=0.1, **more))


@pytest.mark.parametrize("name", ["dualpipev", "zbv", "1f1b-overlap"])
def test_phases_fill_the_actions_that_they_belong_to(name):
    timeline = run(name)
    for rank in range(2):
        for step in timeline.steps(rank):
            spans = list(timeline.phase_spans(step))
            kinds = {span.action.kind for span in step}
            if kinds == {Kind.W}:
                assert spans == []
                continue
            assert spans[0].start == pytest.approx(step[0].start)
            assert max(span.end for span in spans) == pytest.approx(step[0].end)
            assert len(spans) == (4 if Kind.F in kinds else 0) + (6 if Kind.B in kinds else 4 if Kind.I in kinds else 0)


def test_an_embedding_comes_before_and_a_head_after_the_layers():
    timeline = run("1f1b", f=[25, 25], i=[30, 27])
    spans = {str(span.action): span for rank in range(2) for span in timeline.spans(rank)}

    def bounds(name):
        found = list(timeline.phase_spans((spans[name],)))
        return found[0].start - spans[name].start, spans[name].end - found[-1].end

    assert bounds("0F0") == pytest.approx((2, 0))
    assert bounds("1F0") == pytest.approx((0, 2))
    assert bounds("0B0") == pytest.approx((0, 3))


def test_a_timeline_with_phases_survives_json():
    timeline = run()
    assert zp.from_json(zp.to_json(timeline)) == timeline
    data = json.loads(zp.to_json(timeline))
    assert "phases" not in json.loads(zp.to_json(replace(timeline, phases=None)))
    for wrong in ([[]], data["phases"]["stages"][:-1], [[[[-1, 0, 0]] * 4]] * 4, [[[["x", 0, 0]] * 4]] * 4):
        with pytest.raises(zp.ScheduleError):
            zp.from_json(json.dumps({**data, "phases": {"stages": wrong, "sm_tax": 0}}))


def test_a_trace_has_tracks_of_computations_and_exchanges(tmp_path):
    timeline = run()
    zp.draw(timeline, tmp_path / "x.json")
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values())[:3] == ["rank 0", "rank 1", "rank 0 phases"]
    for rank in range(2):
        for is_exchange, word in enumerate(("phases", "exchanges")):
            [track] = [tid for tid, name in tracks.items() if name == f"rank {rank} {word}"]
            found = [(e["name"], e["ts"]) for e in events if e["ph"] == "X" and e["tid"] == track]
            wanted = [
                (str(span), pytest.approx(1e3 * span.start))
                for step in timeline.steps(rank) for span in timeline.phase_spans(step)
                if (span.phase in EXCHANGES) == bool(is_exchange)
            ]  # fmt: skip
            assert found == wanted
            assert wanted


def test_a_page_gets_the_phases_of_every_kind_of_step():
    data = payload([run(), zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))])
    phases = data["timelines"][0]["phases"]
    assert "phases" not in data["timelines"][1]
    assert {"0F", "3B", "0F 3B", "3F 0B"} <= set(phases)
    assert [entry[:3] for entry in phases["0F"]] == [
        ["F", "attention", False], ["F", "dispatch", True], ["F", "experts", False], ["F", "combine", True],
    ]  # fmt: skip


def test_zooming_into_an_overlap_shows_its_phases(page_of):  # noqa: F811
    timeline = run()
    page = page_of(timeline)
    overlap = next(step for step in timeline.steps(0) if len(step) == 2)
    card = hover(page, 0, overlap[0].start + 1)
    assert "exchanges\n14" in card
    script = """([from, to]) => {
        const state = zeropipeViewer.panels[0].state;
        state.view.from = from; state.view.to = to; zeropipeViewer.panels[0].paint();
        return zeropipeViewer.panels[0].rows.toDataURL(); }"""
    zoomed = page.evaluate(script, [overlap[0].start - 1, overlap[0].end + 1])
    page.evaluate("() => { zeropipeViewer.panels[0].timeline.phases = undefined; }")
    assert page.evaluate(script, [overlap[0].start - 1, overlap[0].end + 1]) != zoomed
