"""NeMo Automodel's recipe through zeropipe.integrations.automodel: `make test-automodel`."""

import pytest

pytest.importorskip("nemo_automodel", reason="nemo-automodel is not installed: make test-automodel")

import automodel_cases as cases
import torch
from automodel_cases import Case

import zeropipe as zp
from zeropipe.engine import LocalRanks

pytestmark = pytest.mark.timeout(1000)  # each process imports Automodel
TOLERANCE = 1e-5


def start(number):
    return LocalRanks(number, preload=["automodel_cases"])


@pytest.fixture(scope="module")
def two():
    with start(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    cases.write_model(str(folder / "model"), tied=True)
    return Case(str(folder / "model"), str(folder / "checkpoints"))


@pytest.fixture(scope="module")
def run_alone():
    """Runs of one process without a pipeline, each once."""
    found = {}
    with start(1) as ranks:

        def run(case):
            if case not in found:
                found[case] = ranks.run(cases.alone, case, timeout=300)[0]
            return found[case]

        yield run


def require_equal(seen, want):
    """The logs of all ranks and the weights of all stages are those of one process."""
    names = set()
    for one in seen:
        assert len(one.logs) == len(want.logs)
        for log, other in zip(one.logs, want.logs):
            assert log == pytest.approx(other, rel=TOLERANCE)
        for name, weight in one.weights.items():
            torch.testing.assert_close(weight, want.weights[name], rtol=0, atol=TOLERANCE)
        names |= one.weights.keys()
    assert names == want.weights.keys()


@pytest.mark.parametrize("schedule", ["1f1b", "ZBVZeroBubble", "v-half", "interleaved", "zb-h1"])
def test_a_tied_model(two, case, run_alone, schedule):
    """Two batches of a step, clipped gradients; the loss is logged by every rank, wherever the last stage is."""
    require_equal(two.run(cases.pipelined, case._replace(schedule=schedule), timeout=300), run_alone(case))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_fused_loss(two, case, run_alone, schedule):
    """The head's weight is used by the loss, not by the stage."""
    require_equal(
        two.run(cases.pipelined, case._replace(schedule=schedule, loss="fused"), timeout=300), run_alone(case)
    )


def test_adapters(two, case, run_alone):
    adapted = case._replace(lora=True)
    require_equal(two.run(cases.pipelined, adapted._replace(schedule="zbv"), timeout=300), run_alone(adapted))


def test_a_schedule_from_a_file_and_layers_per_stage(two, case, run_alone, tmp_path):
    path = tmp_path / "searched.csv"
    path.write_text(zp.to_csv(zp.build("zbv", ranks=2, microbatches=4)))
    for changes in ({"csv": str(path)}, {"schedule": "interleaved", "layers_per_stage": 1}):
        require_equal(two.run(cases.pipelined, case._replace(**changes), timeout=300), run_alone(case))


def test_sharded_stages(case, run_alone):
    with start(4) as four:
        for changes in ({"schedule": "1f1b"}, {"schedule": "zbv"}, {"schedule": "zbv", "loss": "fused"}):
            sharded = case._replace(shards=2, rows_of_data=48)
            seen = four.run(cases.pipelined, sharded._replace(**changes), timeout=400)
            require_equal(seen, run_alone(sharded))


def test_weights_that_automodel_initializes_are_tied(two, case):
    first, last = two.run(cases.pipelined, case._replace(initialized=True), timeout=300)
    assert torch.equal(first.weights["model.embed_tokens.weight"], last.weights["lm_head.weight"])


def test_checkpoints(two, case, run_alone):
    """Saved by Automodel after two steps, and gone on with from there."""
    saving = case._replace(schedule="zbv", steps=2, resume="")
    two.run(cases.pipelined, saving, timeout=300)
    seen = two.run(cases.pipelined, saving._replace(steps=3, resume="LATEST"), timeout=300)
    want = run_alone(case)
    require_equal(seen, want._replace(logs=want.logs[2:]))


def test_two_copies_are_refused(two, case):
    with start(2) as ranks:
        for outcome in ranks.outcomes(cases.pipelined, case._replace(schedule="dualpipe"), timeout=300):
            assert "two copies" in outcome.text


def test_automodel_alone_trains_another_model(two, case, run_alone):
    """It initializes on the meta device, where embedding and head are not tied yet, and so does not refuse them."""
    seen = two.run(cases.by_automodel, case, timeout=300)
    want = run_alone(case)
    assert seen[0].logs[0]["loss"] == pytest.approx(want.logs[0]["loss"], rel=TOLERANCE)
    assert abs(seen[0].logs[1]["loss"] / want.logs[1]["loss"] - 1) > 0.01
