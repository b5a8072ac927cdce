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
    losses, norms = zip(*plain_steps(config, load_plain(config)))
    names = ("mesh", "schedule", "engine", "data")
    run = {name: getattr(config, name).model_dump(exclude_defaults=True) for name in names}
    for line, *wanted, tolerance in zip(metrics_of(folder / "out"), losses, norms, TOLERANCES, strict=True):
        assert [line["loss"], line["grad_norm"]] == pytest.approx(wanted, rel=tolerance), (line["step"], run)


@pytest.mark.parametrize(("model_type", "seed"), QUICK)
def test_some_types(model_type, seed, tmp_path):
    assert_trained(model_type, seed, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", EXACT)
def test_every_type(model_type, seed, tmp_path):
    assert_trained(model_type, seed, tmp_path)
