"""Every type of docs/models.md through `zeropipe train`: loss and gradient norm of every step as in plain transformers.

Configs, layouts and options are random; ZEROPIPE_SEEDS is how many of each type are tried, 1 if it is not set.
"""

from __future__ import annotations

import pytest
from family_models import EXACT
from family_train_cases import draw, load_plain
from portions import portion
from train_runs import metrics_of, plain_steps, train_on

SEEDS = portion("ZEROPIPE_SEEDS", 1)
# Some types compute their rotation, their softmax or their routers in float32. A difference grows from step to step.
TOLERANCES = (1e-4, 5e-3, 5e-3, 1e-2)
QUICK = (("olmoe", 0),)


def assert_trained(model_type, seed, folder):
    config = draw(model_type, seed, folder)
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
