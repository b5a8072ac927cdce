"""What ranks share: outputs for all and shapes of microbatches in bounded memory, and one clock."""

from __future__ import annotations

import pickle
import sys

import pytest

pytest.importorskip("torch")

import share_cases as cases
import torch
from engine_helpers import ranks

import zeropipe as zp
from zeropipe.engine.step.agreement import describe_microbatch
from zeropipe.engine.torch_private.tensors import Allocations


def test_values_of_all_kinds_come_as_they_were():
    assert ranks().run(cases.shared_values) == [[True] * 4] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's peak")
@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_outputs_for_all_need_no_more_memory_than_the_outputs(name):
    used = ranks(2).run(cases.broadcast_memory, zp.build(name, ranks=2, microbatches=4), 48)
    assert max(used) < 2.0, used


@pytest.mark.parametrize("name", ["zbv", "dualpipe"])
def test_plain_values_that_are_always_new_are_not_remembered_for_ever(name):
    for error, remembered in ranks(2).run(cases.always_new_values, zp.build(name, ranks=2, microbatches=4), 12):
        assert error < 1e-12
        assert remembered <= 2 * (10 + 4) * 2, "of 48 microbatches, for two stages in two modes"


def test_long_plain_values_are_signed_in_short():
    def size(value):
        return len(pickle.dumps(describe_microbatch({"a": value})))

    assert size("x" * 10**6) < 200
    assert size(list(range(10**4))) < 200
    assert describe_microbatch({"a": "x" * 100}) != describe_microbatch({"a": "x" * 101})
    assert describe_microbatch({"a": [*range(100)]}) == describe_microbatch({"a": tuple(range(100))})
    assert describe_microbatch({"a": [*range(100)]}) != describe_microbatch({"a": [*range(99), 100]})


def test_timelines_are_on_one_clock_while_clocks_drift():
    """What arrives has left before, on every timeline; the drift is a hundred times what is allowed here."""
    schedule = zp.build("1f1b", ranks=2, microbatches=2)
    for timeline in ranks(2).run(cases.drifting_clocks, schedule, 3)[0]:
        ran = {str(span.action): span for rank in range(2) for span in timeline.spans(rank)}
        for microbatch in range(2):
            assert ran[f"1F{microbatch}"].start > ran[f"0F{microbatch}"].end - 0.005
            assert ran[f"0B{microbatch}"].start > ran[f"1B{microbatch}"].end - 0.005
        assert timeline.makespan < 60


def test_memory_alive_is_read_from_the_allocators_history(monkeypatch):
    """A level before, 5 up, 3 up, 5 down, then 1 up: of the three spans the second has the most."""
    events = [
        ("segment_alloc", 99),
        ("alloc", 5),
        ("alloc", 3),
        ("free_requested", 5),
        ("free_completed", 5),
        ("alloc", 1),
    ]
    trace = [{"action": action, "size": size} for action, size in events]
    stats = {"allocation": {"all": {"allocated": 103, "freed": 51}}, "allocated_bytes": {"all": {"current": 1004}}}
    switched = []
    monkeypatch.setattr("torch._C._cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr("torch._C._cuda_memoryStats", lambda device: stats, raising=False)
    monkeypatch.setattr("torch.cuda.memory._record_memory_history", lambda on, **_: switched.append(on))
    monkeypatch.setattr("torch.cuda.memory._snapshot", lambda device: {"device_traces": [trace]})
    allocations = Allocations(torch.device("cuda", 0))
    allocations.begin()
    assert allocations.end([(150, 151), (151, 153), (153, 154)]) == [1005, 1008, 1004]
    assert switched == [None, "all", None], "off again: it was not on before"
