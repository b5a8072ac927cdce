"""The executor against the plain model, against torch's own runtime, and against itself."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import engine_cases as cases
import torch
from engine_helpers import TOLERANCE, largest, ranks, train
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.core.needs import needs
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.errors import ConfigError, EngineError
from zeropipe.schedules.registry import entries

NAMES = [entry.name for entry in entries()]
V_OUT_OF_ORDER = """0F1,0F0,3F1,3F0,3I0,3B1,0B0,3W0,0I1,0W1
1F1,2F1,1F0,2F0,2B0,1I0,2I1,1I1,1W1,2W1,1W0
"""


def build(name: str, ranks: int = 4, microbatches: int = 8) -> zp.Schedule:
    try:
        return zp.build(name, ranks=ranks, microbatches=microbatches)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", NAMES)
def test_training_equals_the_plain_model(name):
    """Loss, every gradient, the gradient norm, and the weights after two optimizer steps; lengths vary."""
    differences = largest(ranks().run(train, build(name), 2))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("name", mark_rest_full(NAMES, ["1f1b", "chimera", "v-min"]))
@pytest.mark.parametrize("microbatches", [1, 5])
def test_few_and_odd_numbers_of_microbatches(name, microbatches):
    differences = largest(ranks().run(train, build(name, 4, microbatches), 1))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("name", mark_rest_full(NAMES, ["1f1b", "zbv", "dualpipe"]))
def test_two_pipelines_side_by_side(name):
    differences = largest(ranks().run(cases.train_in_halves, build(name, ranks=2, microbatches=4), 2))
    assert max(differences.values()) < TOLERANCE, differences


SEARCHED = [(1, 2, 1), (1, 3, 2), (2, 3, 1), (3, 7, 1)]


@pytest.mark.parametrize("per_rank,limit,parts", mark_rest_full(SEARCHED, SEARCHED[1:3]))
def test_searched_schedules_equal_the_plain_model(per_rank, limit, parts):
    """Uneven costs and less memory than any schedule with a name needs: orders that nobody has written by hand."""
    costs = zp.Costs(f={0: 1.5, "default": 1}, i=1.2, w=0.7, p2p=0.1, memory_limit=limit)
    found = zp.search(
        ranks=4, microbatches=8, stages_per_rank=per_rank, weight_parts=parts, costs=costs, steps=10, workers=1
    )
    assert found.schedule.name == "searched"
    differences = largest(ranks().run(train, found.schedule, 1))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize(
    "name", mark_rest_full(["zbv", "dualpipe", "1f1b", "interleaved-zb", "dualpipev"], ["zbv", "dualpipe"])
)
def test_eight_ranks(name):
    differences = largest(ranks(8).run(train, build(name, 8, 16), 1))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-zb", "dualpipe"])
def test_one_rank(name):
    differences = largest(ranks(1).run(train, build(name, 1, 4), 2))
    assert max(differences.values()) < TOLERANCE, differences


KNOBS = [
    {"recv_ahead": 0}, {"recv_ahead": 1}, {"recv_ahead": 9}, {"split": "whole"},
    {"shapes": "dynamic"}, {"shapes": "dynamic", "recv_ahead": 0}, {"direct_gradients": True}, {"check_finite": True},
]  # fmt: skip


@pytest.mark.parametrize(
    "name, options",
    mark_rest_full(
        [(name, options) for name in ("1f1b", "zbv", "dualpipe", "dualpipev") for options in KNOBS],
        lambda it: it[0] == "zbv" or it[1] == KNOBS[0],
    ),
    ids=str,
)
def test_every_knob_gives_the_same(name, options):
    schedule = build(name, microbatches=8 if name == "dualpipev" else 6)
    differences = largest(ranks().run(train_with, schedule, options))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize(
    "name",
    mark_rest_full(NAMES, ["1f1b", "zbv", "dualpipe", "dualpipev", "hanayo"]),
)
def test_no_rank_needs_a_message_under_way(name):
    """As on NCCL, where CUDA may hold a rank back until its sends and receives have ended."""
    differences = largest(ranks().run(cases.train_in_step, build(name), 1, 0, 20.0, timeout=30))
    assert max(differences.values()) < TOLERANCE, differences


def test_receives_posted_ahead_need_messages_under_way():
    """The other side of the test above: it would notice."""
    with LocalRanks(2) as two:
        found = two.outcomes(cases.train_in_step, build("1f1b", 2), 2, 1, 3.0, timeout=30)
    assert {item.text for item in found} == {"ranks wait for each other: 0 at 0SEND_F1, 1 at 1SEND_B0"}


def train_with(schedule, options):
    return train(schedule, 2, **options)


@pytest.mark.parametrize(
    "name, split",
    mark_rest_full(
        [(name, split) for name in ("zb-h1", "zbv", "dualpipe") for split in ("store", "whole")],
        lambda it: it[0] == "dualpipe" or it == ("zbv", "store"),
    ),
)
def test_weight_gradients_in_parts(name, split):
    schedule = zp.fill_gaps(build(name), zp.Costs(f=1, i=1.2, w=0.7, p2p=0.1, memory_limit=8), weight_parts=3)
    differences = largest(ranks().run(train_with, schedule, {"split": split}))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize(
    "name",
    mark_rest_full(
        [name for name in NAMES if name not in ("dualpipe", "chimera")],
        ["1f1b", "interleaved-overlap", "zb-h1", "dualpipev"],
    ),
)
def test_torchs_runtime_agrees(name):
    """The same rows on torch's executor: equal gradients."""
    schedule = build(name)
    own = [set(schedule.placement.stages_of(rank)) for rank in range(schedule.num_ranks)]
    if torch.__version__.startswith("2.11.") and any(stage + 1 in stages for stages in own for stage in stages):
        pytest.skip("torch 2.11's executor sends from a stage to the next one on the same rank, which gloo cannot")
    assert max(ranks().run(cases.on_torchs_runtime, schedule)) < TOLERANCE


def test_microbatches_out_of_order():
    """Every microbatch keeps its own loss, and W may run in another order than I: a user's CSV on 2 ranks."""
    schedule = zp.from_csv(V_OUT_OF_ORDER)
    zp.check(schedule)
    differences = largest(ranks(2).run(train, schedule, 3))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize(
    "name, make",
    mark_rest_full(
        [
            (name, make)
            for name in ("interleaved-zb", "dualpipe", "gpipe", "zbv", "dualpipev")
            for make in ("views", "some_identities", "twice", "several", "frozen_first")
        ],
        lambda it: it[0] == "dualpipe" or (it[0] == "interleaved-zb" and it[1] in ("twice", "several")),
    ),
)
def test_unusual_stages(name, make):
    differences = largest(ranks().run(cases.train_models, build(name), getattr(cases, make)))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize(
    "name", mark_rest_full(NAMES, ["1f1b", "chimera", "dualpipe", "dualpipev", "interleaved", "hanayo"])
)
def test_evaluation(name):
    """eval_step and forward on every placement: right, in order, in eval mode, gradients untouched."""
    for result in ranks().run(cases.evaluate, build(name)):
        assert result["where"]
        assert result["untouched"]
        assert max(result[key] for key in ("loss", "outputs", "post")) < TOLERANCE, result


@pytest.mark.parametrize(
    "name", mark_rest_full(["1f1b", "zbv", "dualpipe", "dualpipev"], ["1f1b", "dualpipe", "dualpipev"])
)
def test_losses_and_gradient_accumulation(name):
    for result in ranks().run(cases.losses, build(name)):
        assert result.pop("metrics") == (8, True)
        assert result.pop("clipped") < 1e-3  # torch's 1e-6 in the denominator
        assert max(result.values()) < TOLERANCE, result


@pytest.mark.parametrize(
    "name, one_tensor",
    mark_rest_full(
        [
            (name, one_tensor)
            for name in ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "dualpipev", "chimera")
            for one_tensor in (True, False)
        ],
        lambda it: it[0] in ("zbv", "dualpipe") or (it[1] and it[0] in ("1f1b", "interleaved", "chimera")),
    ),
)
def test_tied_embeddings(name, one_tensor):
    """One tensor or two, on one rank or two: the same gradients, norm and weights as one tied model."""
    differences = largest(ranks().run(cases.tied, build(name), one_tensor))
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize(
    "name", mark_rest_full(["1f1b", "zbv", "interleaved", "dualpipe", "dualpipev"], ["1f1b", "zbv", "dualpipe"])
)
def test_a_module_that_stands_twice_in_the_list(name):
    differences = largest(ranks().run(cases.shared_modules, build(name)))
    assert max(differences.values()) < TOLERANCE, differences


def test_shapes_that_depend_on_values():
    schedule = build("zbv")
    assert max(ranks().run(cases.shrinking, schedule, "dynamic")) < TOLERANCE
    with pytest.raises(EngineError, match="shapes='dynamic'"):
        ranks(2).run(cases.shrinking, build("zbv", 2), "auto")


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_inputs_that_need_a_gradient_in_some_steps_only(name):
    assert max(ranks(2).run(cases.inputs_with_gradients_now_and_then, build(name, 2))) < TOLERANCE


def test_outputs_are_dropped_once_they_are_sent():
    """In GPipe the first backward comes after all forwards have arrived: no output needs to be alive then."""
    alive = ranks().run(cases.alive_outputs, build("gpipe"))
    assert [len(numbers) for numbers in alive] == [8, 8, 8, 0]
    assert max(max(numbers, default=0) for numbers in alive) <= 1  # the last one may be on its way out


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "dualpipev"])
def test_the_recorded_timeline(name):
    """The same on every rank; every action after what it needs; memory back to where it was."""
    schedule = build(name)
    timelines = ranks().run(cases.record, schedule)
    first = timelines[0]
    assert all(timeline == first for timeline in timelines)
    assert first.measured
    assert zp.from_json(zp.to_json(first)) == first
    assert (first.unit, first.memory_unit, first.first_start) == ("s", "B", 0.0)
    spans = {span.action: span for rank in range(4) for span in first.spans(rank)}
    assert len(spans) == schedule.num_actions
    for action, span in spans.items():
        assert span.end > span.start
        for needed in needs(action, schedule.num_stages):
            other = spans.get(needed) or spans[needed._replace(kind=zp.Kind.B)]
            overlapped = (other.start, other.end) == (span.start, span.end)
            assert other.end <= span.start or overlapped, f"{action} started before {needed} ended"
    for rank in range(4):
        left = memoryview(first.memory.after).cast("d")[schedule.packed.offsets[rank + 1] - 1]
        assert left == 0
    assert all(peak > 0 for peak in first.peak_memory)


def test_another_default_device():
    """Messages are made on the CPU, whatever the program says of its own tensors."""
    assert max(ranks().run(cases.another_default_device, build("zbv"))) < TOLERANCE


def test_measured_memory_follows_the_schedule():
    """1F1B keeps 4, 3, 2, 1 microbatches; GPipe keeps all 8."""
    one = ranks().run(cases.record, build("1f1b"))[0].peak_memory
    all_of_them = ranks().run(cases.record, build("gpipe"))[0].peak_memory
    assert one[0] > one[1] > one[2] > one[3]
    assert all(more > 1.8 * less for more, less in zip(all_of_them, one))
