"""Every type of docs/models.md through `zeropipe train`: loss and gradient norm of every step as in plain transformers.

Configs, layouts and options are random; ZEROPIPE_SEEDS is how many of each type are tried, 1 if it is not set.
"""

from __future__ import annotations

import pytest
from family_models import EXACT, IS_OF_TABLE, TABLE
from family_train_cases import draw, find_refusal, load_plain
from portions import portion
from train_runs import metrics_of, plain_steps, train_on

from zeropipe.errors import ZeropipeError

SEEDS = portion("ZEROPIPE_SEEDS", 1)
# Some types compute their rotation, their softmax or their routers in float32. A difference grows from step to step.
TOLERANCES = (1e-4, 5e-3, 5e-3, 1e-2)
QUICK = (("olmoe", 0),)


def assert_trained(model_type, seed, folder):
    config = draw(model_type, seed, folder)
    if (refusal := find_refusal(config)) is not None:
        assert not IS_OF_TABLE or TABLE[model_type].packed != "yes", refusal
        with pytest.raises(ZeropipeError, match=refusal) as refused:
            train_on(config)
        assert "\n" not in str(refused.value)
        assert not (folder / "out" / "metrics.jsonl").exists()
        if not config.data.packing:
            return
        config = config.model_copy(update={"data": config.data.model_copy(update={"packing": False})})
    train_on(config)
    names = ("mesh", "schedule", "engine", "data")
    run = {name: getattr(config, name).model_dump(exclude_defaults=True) for name in names}
    found = [(line["loss"], line["grad_norm"]) for line in metrics_of(folder / "out")]
    wanted = plain_steps(config, load_plain(config))
    assert len(found) == len(wanted) == len(TOLERANCES)
    assert found[0] == pytest.approx(wanted[0], rel=TOLERANCES[0]), run
    allowed = [[rate * abs(value) for value in step] for rate, step in zip(TOLERANCES, wanted)]
    if not are_within(found, wanted, allowed):
        # some drawn models magnify rounding errors of float32 ten thousand times in a step, in plain transformers too
        changed = plain_steps(config, load_plain(config, noise=True))
        allowed = [[max(abs(a - b), most) for a, b, most in zip(*step)] for step in zip(changed, wanted, allowed)]
        assert are_within(found, wanted, allowed), (found, wanted, changed, run)


def are_within(found, wanted, allowed):
    """Whether loss and norm of every step differ by what is allowed, or less."""
    return all(abs(a - b) <= most for step in zip(found, wanted, allowed) for a, b, most in zip(*step))


@pytest.mark.parametrize(("model_type", "seed"), QUICK)
def test_some_types(model_type, seed, tmp_path):
    assert_trained(model_type, seed, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", EXACT)
def test_every_type(model_type, seed, tmp_path):
    assert_trained(model_type, seed, tmp_path)
