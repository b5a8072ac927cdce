"""AReaL's Archon through zeropipe.integrations.archon: `make test-archon`."""

from types import SimpleNamespace

import pytest

pytest.importorskip("areal", reason="areal is not installed: make test-archon")

import archon_cases
from archon_cases import Case, get_model_spec, ours

import zeropipe as zp
from zeropipe.engine import LocalRanks
from zeropipe.errors import ConfigError

pytestmark = pytest.mark.timeout(1000)  # compiled blocks take minutes on a slow machine
CASES = "archon_cases"  # where ranks find their functions
COMPILED = 1e-5  # float32, other kernels
SCHEDULES = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]
MODELS = ["qwen2", "qwen3"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_train_and_eval_equal_the_model_without_pipelines(two, model, schedule):
    """Microbatches of their own lengths; evaluated before and after training."""
    assert max(two.run(archon_cases.beside_sequential, Case(model, schedule), timeout=900)) == 0.0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_equal_archons_own(two, model, schedule):
    assert max(two.run(archon_cases.beside_archon, Case(model, schedule), timeout=900)) == 0.0


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half", "v-min", "hanayo", "interleaved-zb"])
def test_schedules_that_torch_does_not_have(two, schedule):
    assert max(two.run(archon_cases.beside_sequential, Case("qwen3", schedule), timeout=900)) == 0.0


@pytest.mark.parametrize("ac", [None, "op", "full", "budget"])
@pytest.mark.parametrize("model", MODELS)
def test_compiled_and_checkpointed_zbv(two, model, ac):
    case = Case(model, "ZBVZeroBubble", compile=True, ac=ac)
    assert max(two.run(archon_cases.beside_sequential, case, timeout=900)) < COMPILED


@pytest.mark.parametrize("ac", ["op", "full"])
def test_checkpointed_zbv(two, ac):
    assert max(two.run(archon_cases.beside_sequential, Case("qwen3", "ZBVZeroBubble", ac=ac), timeout=900)) == 0.0


def test_a_schedule_from_a_file(two, tmp_path):
    path = tmp_path / "zbv.csv"
    path.write_text(zp.to_csv(zp.build("zbv", ranks=2, microbatches=4)))
    assert max(two.run(archon_cases.beside_sequential, Case("qwen3", str(path)), timeout=900)) == 0.0


def test_a_file_that_takes_losses_out_of_order_is_refused(tmp_path):
    path = tmp_path / "reordered.csv"
    swap = {"F0": "F1", "F1": "F0", "B0": "B1", "B1": "B0"}
    rows = zp.to_csv(zp.build("1f1b", ranks=2, microbatches=4)).splitlines()
    path.write_text("\n".join(",".join(c[:-2] + swap.get(c[-2:], c[-2:]) for c in row.split(",")) for row in rows))
    with LocalRanks(2, preload=["archon_cases"]) as ranks:
        outcomes = ranks.outcomes(archon_cases.beside_sequential, Case("qwen3", str(path)), timeout=900)
    assert any("Archon takes losses in order" in str(outcome) for outcome in outcomes), outcomes


def test_what_archon_switches_off_stays_on(two):
    """(compile, checkpointing mode, pad to maximum, rank of the last stage is 0)."""
    case = Case("qwen3", "ZBVZeroBubble", compile=True, ac="op")
    assert two.run(archon_cases.kept, case)[0] == (False, "full", True, True)
    assert two.run(archon_cases.kept_by_us, case)[0] == (True, "selective", True, True)
    eager = case._replace(compile=False)
    assert two.run(archon_cases.kept_by_us, eager)[0] == (False, "selective", False, True)


def test_the_last_stages_rank_is_the_placements(two):
    for schedule, is_first in {"1F1B": False, "DualPipeV": True, "v-half": True, "interleaved-zb": False}.items():
        case = Case("qwen3", schedule, ac="full")
        assert two.run(archon_cases.kept_by_us, case)[1][3] == is_first


def test_nothing_is_padded_to_the_maximum(two):
    mine, theirs = two.run(archon_cases.lengths)[0]
    assert len(set(theirs)) == 1
    assert len(set(mine)) > 1
    assert max(mine) < theirs[0]


def test_sharded_stages():
    with LocalRanks(4, preload=["archon_cases"]) as four:
        case = Case("qwen3", "ZBVZeroBubble", shards=2)
        assert max(four.run(archon_cases.beside_sequential, case, timeout=900)) < 1e-6


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule, most", [("Interleaved1F1B", 1e-6), ("ZBVZeroBubble", 0.0)])
def test_spread_stages_equal_archons_own(four, model, schedule, most):
    """Tensor parallelism with sequence parallelism, as Archon has it."""
    assert max(four.run(archon_cases.beside_archon, Case(model, schedule, tensor=2), timeout=900)) <= most


@pytest.mark.parametrize("ac", [None, "op", "full"])
def test_spread_stages_equal_the_model_without_pipelines(four, ac):
    case = Case("qwen3", "v-half", tensor=2, ac=ac)
    assert max(four.run(archon_cases.beside_sequential, case, timeout=900)) < 1e-5


def test_spread_and_sharded_stages():
    with LocalRanks(8, preload=["archon_cases"]) as eight:
        case = Case("qwen3", "ZBVZeroBubble", shards=2, tensor=2)
        assert max(eight.run(archon_cases.beside_sequential, case, timeout=900)) < 1e-5


def test_spread_and_compiled_is_refused(four):
    """Archon alone trains so, and its embedding learns nothing."""
    case = Case("qwen3", "ZBVZeroBubble", compile=True, tensor=2)
    found = four.run(archon_cases.embedding_alone, case._replace(schedule="1F1B"), timeout=900)
    assert [norm for norm in found if norm is not None] == [0.0, 0.0]
    with LocalRanks(4, preload=["archon_cases"]) as ranks:
        for outcome in ranks.outcomes(archon_cases.beside_sequential, case, timeout=900):
            assert "tp=2 and enable_compile: Archon's embedding gets no gradient" in outcome.text


EXPERTS = Case("qwen3_moe", "ZBVZeroBubble", shards=2, experts=2)


@pytest.mark.parametrize("schedule, most", [("Interleaved1F1B", 1e-6), ("ZBVZeroBubble", 0.0)])
@pytest.mark.parametrize("grouped", [False, True], ids=["one by one", "grouped"])
def test_experts_on_several_ranks_equal_archons_own(four, schedule, most, grouped):
    """W adds each microbatch to the gradients of experts, which may round otherwise."""
    case = EXPERTS._replace(schedule=schedule, grouped=grouped)
    for experts, others in four.run(archon_cases.experts_beside_archon, case, timeout=900):
        assert others <= most
        assert experts < 1e-6


@pytest.mark.parametrize("changes", [{}, {"compile": True}, {"ac": "op"}], ids=["plain", "compiled", "op"])
def test_every_expert_leaves_its_weight_gradients_to_w(four, changes):
    for left, layers in four.run(archon_cases.deferred, EXPERTS._replace(**changes), timeout=900):
        assert left == layers > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "1F1B"},
        {"schedule": "DualPipeV", "ac": "full"},
        {"schedule": "v-half", "grouped": True},
        {"ac": "op"},
        {"shards": 1, "context": 2, "grouped": True},
        {"compile": True, "ac": "op"},
    ],
    ids=["1F1B", "full", "grouped", "op", "sequences", "compiled and op"],
)
def test_experts_on_several_ranks_equal_the_model_without_pipelines(four, changes):
    """Also the tokens that each expert has got."""
    case = EXPERTS._replace(**changes)
    assert max(four.run(archon_cases.beside_sequential, case, timeout=900)) < COMPILED


SEQUENCES = Case("qwen3", "ZBVZeroBubble", context=2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule, most", [("Interleaved1F1B", 1e-6), ("ZBVZeroBubble", 0.0)])
def test_sequences_on_several_ranks_equal_archons_own(four, model, schedule, most):
    """Context parallelism."""
    case = SEQUENCES._replace(model=model, schedule=schedule)
    assert max(four.run(archon_cases.beside_archon, case, timeout=900)) <= most


@pytest.mark.parametrize(
    "changes",
    [{"schedule": "1F1B"}, {"schedule": "v-half", "ac": "full"}, {"model": "qwen2", "ac": "op"}, {"compile": True}],
    ids=["1F1B", "full", "op", "compiled"],
)
def test_sequences_on_several_ranks_equal_the_model_without_pipelines(four, changes):
    case = SEQUENCES._replace(**changes)
    assert max(four.run(archon_cases.beside_sequential, case, timeout=900)) < COMPILED


def test_sharded_experts_and_spread_sequences():
    with LocalRanks(8, preload=["archon_cases"]) as eight:
        for experts, others in eight.run(archon_cases.experts_beside_archon, EXPERTS._replace(shards=4), timeout=900):
            assert others < 1e-7  # four processes are summed in another order
            assert experts < 1e-6
        for case in (
            EXPERTS._replace(shards=4),
            EXPERTS._replace(context=2, experts=4),
            EXPERTS._replace(context=2, ac="op"),
            SEQUENCES._replace(tensor=2),
        ):
            assert max(eight.run(archon_cases.beside_sequential, case, timeout=900)) < COMPILED


def test_spread_experts_are_refused(four):
    """Archon alone trains so, and copies of its routers get other gradients: each a part of theirs."""
    case = EXPERTS._replace(shards=1, tensor=2)
    first, second, *_ = four.run(archon_cases.routers_alone, case._replace(schedule="1F1B"), timeout=900)
    assert all(abs(one / other - 1) > 1e-3 for one, other in zip(first, second, strict=True))
    with LocalRanks(4, preload=["archon_cases"]) as ranks:
        for outcome in ranks.outcomes(archon_cases.beside_sequential, case, timeout=900):
            assert "tp=2 and experts: Archon's routers get a part of their gradient" in outcome.text


@pytest.mark.parametrize("name", ["tp", "cp", "ep"])
def test_models_that_archon_does_not_spread_are_refused(name):
    """It warns and trains with a part of each sequence, or with losses of a part of the vocabulary."""
    kind = get_model_spec("qwen3_5").model_class
    dims = {f"{other}_enabled": other == name for other in ("tp", "cp", "ep")} | {name: 2}
    with pytest.raises(ConfigError, match=f"^{name}=2: .* trains its Qwen3_5Model without it; set it to 1$"):
        ours.pipeline_llm(kind.__new__(kind), None, SimpleNamespace(**dims), None, None)


@pytest.mark.parametrize(
    "case, says",
    [
        (Case("qwen3", "ZBVZeroBubble"), "steal_bwd_input"),
        (Case("qwen3", "1F1B"), "StopIteration"),
        (Case("qwen3", "v-half"), "v-half"),
        (EXPERTS._replace(schedule="1F1B", ac="op"), "_record_function_enter_new"),
    ],
    ids=["eval of V", "training", "our name", "experts with selective checkpointing"],
)
def test_archon_alone_cannot(case, says):
    """What the tests above do is not possible without us, on this torch."""
    with LocalRanks(2 * case.shards, preload=["archon_cases"], grace=5) as ranks:
        outcomes = ranks.outcomes(archon_cases.alone, case, timeout=900)
    assert any(says in str(outcome) for outcome in outcomes), outcomes
