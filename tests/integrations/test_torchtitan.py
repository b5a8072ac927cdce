"""torchtitan's models through zeropipe.integrations.torchtitan: `make test-torchtitan`."""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-torchtitan")

import titan_cases
from titan_cases import Case

import zeropipe as zp
from zeropipe.engine import LocalRanks

pytestmark = pytest.mark.timeout(1000)  # compiled blocks take minutes on a slow machine
CASES = "titan_cases"  # where ranks find their functions
COMPILED = 1e-5  # float32, other kernels, five steps


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("model", ["llama3", "qwen3"])
def test_five_steps_equal_torchtitans_own(two, model, schedule):
    assert max(two.run(titan_cases.beside_torchtitan, Case(model, schedule), timeout=600)) == 0.0


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_whole_backward_equals_torchtitans_own(two, schedule):
    case = Case("llama3", schedule, steps=2)
    assert max(two.run(titan_cases.beside_torchtitan, case, timeout=600)) == 0.0


@pytest.mark.parametrize("model", ["llama3", "qwen3"])
@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_compiled_with_selective_checkpointing(two, model, schedule):
    eager = Case(model, schedule)
    case = eager._replace(compile=True, ac="selective")
    assert max(two.run(titan_cases.beside_torchtitan, case, eager, timeout=900)) < COMPILED


@pytest.mark.parametrize("model", ["llama3", "qwen3"])
def test_every_linear_layer_leaves_its_weight_gradient_to_w(two, model):
    for left, layers in two.run(titan_cases.deferred, Case(model, "ZBVZeroBubble", steps=1), timeout=600):
        assert left == layers > 0


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
def test_our_own_schedules(two, schedule):
    case = Case("llama3", schedule, steps=2, ac="selective")
    assert max(two.run(titan_cases.beside_plain, case, timeout=600)) < 1e-5


def test_a_schedule_from_a_file(two, tmp_path):
    text = zp.to_csv(zp.build("zbv", ranks=2, microbatches=6))
    case = Case("llama3", "1F1B", steps=2)
    assert max(two.run(titan_cases.from_file, case, text, str(tmp_path), timeout=600)) < 1e-5


def test_chunked_loss(two):
    case = Case("llama3", "ZBVZeroBubble", steps=2, chunked=True)
    assert max(two.run(titan_cases.beside_plain, case, timeout=600)) < 1e-5


def test_sharded_stages_equal_torchtitans_own():
    with LocalRanks(4, preload=["titan_cases"]) as four:
        case = Case("llama3", "ZBVZeroBubble", shards=2, steps=2, spmd_backend="partial_dtensor")
        assert max(four.run(titan_cases.beside_torchtitan, case, timeout=600)) == 0.0


SPREAD = Case("llama3", "ZBVZeroBubble", tensor=2, steps=2, spmd_backend="partial_dtensor")


@pytest.mark.parametrize("model", ["llama3", "qwen3"])
def test_spread_stages_equal_torchtitans_own(four, model):
    """Tensor parallelism with sequence parallelism, as torchtitan has it."""
    case = SPREAD._replace(model=model)
    assert max(four.run(titan_cases.beside_torchtitan, case, timeout=600)) == 0.0
    for left, layers in four.run(titan_cases.deferred, case._replace(steps=1), timeout=600):
        assert left == layers > 0


@pytest.mark.parametrize(
    "changes",
    [{"schedule": "1F1B"}, {"schedule": "v-half", "ac": "selective"}, {"compile": True}, {"chunked": True}],
    ids=["1F1B", "selective", "compiled", "chunked loss"],
)
def test_spread_stages_equal_the_whole_model(four, changes):
    assert max(four.run(titan_cases.beside_plain, SPREAD._replace(**changes), timeout=600)) < COMPILED


def test_spread_and_sharded_stages_equal_torchtitans_own():
    with LocalRanks(8, preload=["titan_cases"]) as eight:
        assert max(eight.run(titan_cases.beside_torchtitan, SPREAD._replace(shards=2), timeout=600)) == 0.0


EXPERTS = Case("deepseek_v3", "ZBVZeroBubble", shards=2, experts=2, steps=1, spmd_backend="partial_dtensor")


@pytest.mark.parametrize(
    "changes, tolerance",
    [({}, 1e-6), ({"model": "qwen3_moe"}, 1e-6), ({"rounded": True}, 2**-7)],
    ids=["deepseek_v3", "qwen3", "bfloat16"],
)
def test_experts_on_several_ranks_equal_torchtitans_own(four, changes, tolerance):
    """torchtitan rounds what a microbatch adds to the gradients of experts; W adds it to their sum without that."""
    case = EXPERTS._replace(**changes)
    for experts, others in four.run(titan_cases.experts_beside_torchtitan, case, timeout=600):
        assert others == 0.0
        assert experts < tolerance


def test_every_expert_leaves_its_weight_gradients_to_w(four):
    for left, layers in four.run(titan_cases.deferred, EXPERTS, timeout=600):
        assert left == layers > 0


def test_experts_that_are_sharded_equal_torchtitans_own():
    with LocalRanks(8, preload=["titan_cases"]) as eight:
        for experts, others in eight.run(
            titan_cases.experts_beside_torchtitan, EXPERTS._replace(shards=4), timeout=600
        ):
            assert others == 0.0
            assert experts < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "1F1B", "steps": 2},
        {"schedule": "DualPipeV", "ac": "full", "steps": 2},
        {"compile": True, "ac": "selective"},
        {"shards": 1, "tensor": 2, "chunked": True, "steps": 2},
    ],
    ids=["1F1B", "full", "compiled and selective", "spread and chunked loss"],
)
def test_experts_on_several_ranks_equal_the_whole_model(four, changes):
    """Also the tokens that each expert has got, by which torchtitan balances them."""
    assert max(four.run(titan_cases.beside_plain, EXPERTS._replace(**changes), timeout=900)) < COMPILED


SEQUENCES = Case("llama3", "ZBVZeroBubble", context=2, steps=1, spmd_backend="partial_dtensor")


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "1F1B", "steps": 2},
        {"steps": 2},
        {"compile": True, "ac": "selective"},
        {"model": "deepseek_v3", "schedule": "v-half", "experts": 2, "ac": "full"},
    ],
    ids=["1F1B", "ZBV", "compiled and selective", "experts"],
)
def test_sequences_on_several_ranks_equal_the_whole_model(four, changes):
    """Context parallelism. torch 2.13's own pipeline takes no lists of microbatches, each of which has its masks."""
    assert max(four.run(titan_cases.beside_plain, SEQUENCES._replace(**changes), timeout=900)) < COMPILED


def test_sequences_of_spread_stages_equal_the_whole_model():
    with LocalRanks(8, preload=["titan_cases"]) as eight:
        assert max(eight.run(titan_cases.beside_plain, SEQUENCES._replace(tensor=2), timeout=600)) < COMPILED


@pytest.mark.parametrize(
    "case, says",
    [
        (Case("llama3", "ZBVZeroBubble", compile=True, steps=1), "donated buffers"),
        (Case("llama3", "ZBVZeroBubble", ac="selective", steps=1), "backward an extra time"),
        (Case("llama3", "v-half", steps=1), "v-half"),
        (SPREAD._replace(schedule="1F1B", compile=True, ac="selective"), "tensors_saved_with_vc_check"),
    ],
    ids=["compile", "selective", "our name", "checkpointed, compiled and spread"],
)
def test_torchtitan_alone_cannot(case, says):
    """What the tests above do is not possible without us."""
    with LocalRanks(2 * case.tensor, preload=["titan_cases"], grace=5) as ranks:
        outcomes = ranks.outcomes(titan_cases.alone, case, timeout=600)
    assert any(says in f"{outcome.text}{outcome.details}" for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    "case, says",
    [
        (Case("llama3", "dualpipe"), "two copies"),
        (Case("llama3", "zbw"), "zbv"),
        (Case("llama3", "ZBVZeroBubble", csv="missing.csv"), "missing.csv"),
        (SPREAD._replace(compile=True, ac="selective"), "tp=2, compile and activation checkpointing"),
    ],
    ids=["mirrored", "unknown", "no file", "checkpointed, compiled and spread"],
)
def test_bad_wishes_are_refused_in_one_line(case, says):
    with LocalRanks(2 * case.tensor, preload=["titan_cases"]) as ranks:
        for outcome in ranks.outcomes(titan_cases.mine, case, timeout=300):
            assert outcome.foreseen
            assert says in outcome.text
            assert "\n" not in outcome.text
