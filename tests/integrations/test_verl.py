"""verl's engine interface through zeropipe.integrations.verl, beside verl's FSDP engine: `make test-verl`."""

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

import torch
import verl_cases as cases
from verl_cases import Case, ZeropipeEngineConfig

from zeropipe.engine import LocalRanks
from zeropipe.errors import ConfigError

pytestmark = pytest.mark.timeout(1000)  # each process imports verl
TOLERANCE = 1e-5
SHARDED = (("pp", 2), ("dp_shard", 2))


def start(number):
    return LocalRanks(number, preload=["verl_cases"])


@pytest.fixture(scope="module")
def two():
    with start(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with start(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    cases.write_model(str(folder))
    return Case(str(folder))


@pytest.fixture(scope="module")
def by_verl():
    """Runs of verl's FSDP engine on as many processes as there are pipelines."""
    found = {}

    def run(case):
        sizes = dict(case.mesh)
        number = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
        key = case.loss, case.dynamic, number
        if key not in found:
            with start(number) as ranks:
                found[key] = ranks.run(cases.by_verl, case, timeout=300)
        return found[key]

    return run


def require_equal(seen, want):
    """Steps, log-probabilities and entropy of the ranks with outputs, and the weights of all."""
    outputs = [one for one in seen if one.metrics]
    assert len(outputs) == len(want)
    for one, other in zip(outputs, want):
        assert len(one.metrics) == len(other.metrics)
        for mine, theirs in zip(one.metrics, other.metrics):
            assert mine.keys() == theirs.keys()
            for name, values in mine.items():
                assert values == pytest.approx(theirs[name], rel=TOLERANCE, abs=TOLERANCE), name
        for mine, theirs in ((one.log_probs, other.log_probs), (one.entropy, other.entropy)):
            for row, other_row in zip(mine, theirs, strict=True):
                torch.testing.assert_close(row, other_row, rtol=0, atol=TOLERANCE)
    for one in seen:
        assert one.rate == want[0].rate
        assert one.weights.keys() >= want[0].weights.keys() - {"lm_head.weight"}
        for name, weight in one.weights.items():
            torch.testing.assert_close(weight, want[0].weights[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("loss", ["sft", "grpo"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_steps_equal_those_of_the_fsdp_engine(two, case, by_verl, schedule, loss):
    case = case._replace(schedule=schedule, loss=loss)
    require_equal(two.run(cases.pipelined, case, timeout=300), by_verl(case))


@pytest.mark.parametrize("changes", [{"packed": False}, {"dynamic": True}], ids=["padded", "dynamic"])
def test_other_microbatches(two, case, by_verl, changes):
    """Padded rows, and microbatches by their number of tokens, whose rows come back in their own order."""
    case = case._replace(schedule="v-half", loss="grpo", **changes)
    require_equal(two.run(cases.pipelined, case, timeout=300), by_verl(case))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_sharded_stages(four, case, by_verl, schedule):
    case = case._replace(schedule=schedule, loss="grpo", mesh=SHARDED)
    require_equal(four.run(cases.pipelined, case, timeout=300), by_verl(case))


def test_replicas(four, case, by_verl):
    case = case._replace(loss="grpo", mesh=(("pp", 2), ("dp_replicate", 2)))
    require_equal(four.run(cases.pipelined, case, timeout=300), by_verl(case))


def test_tensor_parallelism(four, case, by_verl):
    case = case._replace(schedule="zbv", loss="grpo", mesh=(("pp", 2), ("tp", 2)))
    require_equal(four.run(cases.pipelined, case, timeout=300), by_verl(case))


def test_a_checkpoint_of_another_layout(two, four, case, by_verl, tmp_path):
    """Saved by two shards of each of two stages after a step, gone on with by two ranks on a V."""
    saving = case._replace(mesh=SHARDED, checkpoint=str(tmp_path / "step"))
    four.run(cases.pipelined, saving._replace(steps=1), timeout=300)
    resumed = saving._replace(mesh=(("pp", 2),), schedule="zbv", resume=True)
    seen = two.run(cases.pipelined, resumed, timeout=300)
    whole = two.run(cases.pipelined, case._replace(schedule="zbv"), timeout=300)
    for one, other in zip(seen, whole):
        assert one.rate == other.rate
        for mine, theirs in zip(one.metrics, other.metrics[1:], strict=bool(one.metrics)):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
        for name, weight in one.weights.items():
            torch.testing.assert_close(weight, other.weights[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"param_offload": True}, "^param_offload=True: .*leave it out$"),
        ({"ulysses_sequence_parallel_size": 2}, "^ulysses_sequence_parallel_size=2: "),
        ({"mesh": {"cp": 2}}, "^mesh has cp=2: "),
        ({"mesh": {"dp_shard": 2, "dp_replicate": 2}}, "use one$"),
    ],
)
def test_what_is_not_supported_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        ZeropipeEngineConfig(**changes)
