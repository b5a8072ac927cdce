"""Sharded stages as they ran: a lane of what was gathered and reduced, memory of what was whole, other dtypes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import mesh_cases as cases
from engine_helpers import ranks

import zeropipe as zp
from zeropipe.core.action import Kind, actions_of


@pytest.mark.parametrize("regather", [False, True], ids=["keep", "regather"])
def test_a_recording_has_what_was_gathered_and_reduced_and_its_memory(regather):
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    program = zp.lower(schedule, shards="regather" if regather else "keep")
    for rank, timeline, weights in ranks(4).run(cases.recorded_on_mesh, schedule, {"regather": regather}):
        wanted = [a for a in actions_of(program.rows[rank]) if a.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD)]
        lane = list(timeline.sharding_spans(rank))
        assert [span.action for span in lane] == wanted
        assert all(span.start < span.end for span in lane)
        first = {span.action.stage: span.start for span in reversed(lane) if span.action.kind is Kind.UNSHARD}
        last = {span.action.stage: span.end for span in lane if span.action.kind is Kind.REDUCE_GRAD}
        for span in timeline.spans(rank):
            assert first[span.action.stage] <= span.start
            assert span.start <= last[span.action.stage]
        assert zp.from_json(zp.to_json(timeline)) == timeline
        begin, end = schedule.packed.offsets[rank : rank + 2]
        during = memoryview(timeline.memory.during).cast("d")[begin:end]
        after = memoryview(timeline.memory.after).cast("d")[begin:end]
        assert max(during) >= (1 if regather else 2) * weights  # gradients, and weights if they are kept
        assert after[-1] == 0  # nothing is whole any more


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_reducing_begins_within_the_last_backward(name):
    """Unit by unit: the first one is reduced while the gradients of the others are still being computed."""
    schedule = zp.build(name, ranks=2, microbatches=4)
    for rank, timeline, _ in ranks(4).run(cases.recorded_on_mesh, schedule, {}):
        (reduced,) = (span for span in timeline.sharding_spans(rank) if span.action.kind is Kind.REDUCE_GRAD)
        assert reduced.start < max(span.end for span in timeline.spans(rank))


@pytest.mark.parametrize("regather, offload", [(False, True), (True, False)], ids=["offloaded", "regathered"])
def test_bf16_computes_and_float32_sums(regather, offload):
    """Gradients of eight microbatches, added and reduced in float32, against the same bf16 gradients added there."""
    schedule = zp.build("1f1b", ranks=2, microbatches=8)
    for seen in ranks(4).run(cases.mixed_on_mesh, schedule, {"regather": regather}, offload):
        assert seen["dtypes"] == {"torch.float32"}  # weights, gradients and optimizer state
        assert seen["devices"] == {"cpu"}
        assert seen["computed"] == "torch.bfloat16"
        assert seen["error"] < 1e-5
        assert seen["in_bf16"] > 1e-3  # what adding in bf16 would be off by
