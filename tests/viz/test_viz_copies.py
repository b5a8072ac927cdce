"""Copies to the host in pictures, traces and the causes of idle time."""

import json

import pytest

import zeropipe as zp
from zeropipe.core.explain import find_gaps, idle_times

ROWS = "0F0,0OFFLOAD0,0F1,0F2,0RELOAD0,0B0,0B1,0B2"


def simulated(bandwidth=0.5, text=ROWS):
    return zp.simulate(zp.from_csv(text), zp.Costs(offload_bandwidth=bandwidth))


def test_a_wait_for_a_reload_is_named():
    timeline = simulated()
    (idle,) = idle_times(timeline)
    assert idle.offload == idle.total == 2.0
    (gap,) = find_gaps(timeline)
    assert (gap.cause, str(gap.action), gap.start, gap.end) == ("offload", "0B0", 3.0, 5.0)
    assert idle_times(simulated(2.0))[0].offload == 0.5
    assert idle_times(simulated(None))[0].total == 0


@pytest.mark.parametrize("seed", range(4))
def test_causes_add_up(seed):
    plain = zp.build(("1f1b", "zbv", "interleaved", "dualpipev")[seed], ranks=4, microbatches=8)
    timeline = zp.simulate(zp.with_offload(plain, offload=1.0), zp.Costs(offload_bandwidth=0.3, p2p=0.1))
    for idle, busy in zip(idle_times(timeline), timeline.busy, strict=True):
        assert idle.total == pytest.approx(timeline.makespan - busy)
    assert sum(idle.offload for idle in idle_times(timeline)) > 0
    gaps = find_gaps(timeline)
    assert sum(gap.end - gap.start for gap in gaps if gap.cause == "offload") == pytest.approx(
        sum(idle.offload for idle in idle_times(timeline))
    )


def test_figure_and_trace(tmp_path):
    zp.draw(simulated(), tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert "0OFFLOAD0" in text
    assert "0RELOAD0" in text
    assert "offloaded to the host" in text
    zp.draw(simulated(text="0F0,0F1,0B0,0B1"), tmp_path / "y.svg")
    assert "offloaded" not in (tmp_path / "y.svg").read_text()
    zp.draw(simulated(), tmp_path / "x.json")
    zp.draw(simulated(), tmp_path / "x.trace.json")
    events = json.loads((tmp_path / "x.trace.json").read_text())["traceEvents"]
    copies = {event["name"]: (event["ts"], event["dur"]) for event in events if "LOAD" in event["name"]}
    assert copies == {"0OFFLOAD0": (1000.0, 2000.0), "0RELOAD0": (3000.0, 2000.0)}
