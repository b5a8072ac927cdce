"""Modules written at random: the engine gives what the plain model gives, or refuses them in one line."""

from __future__ import annotations

import pytest
import random_cases as cases
from engine_helpers import ranks
from random_modules import write_model


def check(first: int, number: int, runs: int, compile: bool = False) -> None:
    """All ranks agree; what modifies no state is never refused."""
    results = ranks(2).run(cases.run_models, first, number, runs, compile, timeout=900.0)
    num_exact = num_refused = 0
    for each in zip(*results):
        seed = each[0][0]
        model = write_model(seed)
        for outcomes in zip(*(outcomes for _, outcomes in each)):
            run, refusals = outcomes[0].run, {outcome.refusal for outcome in outcomes}
            told = f"seed {seed}, {run}:\n{model.source}"
            worst = max(outcomes, key=lambda outcome: outcome.difference)
            assert worst.difference < cases.CLOSE, f"{worst.where} differs by {worst.difference:.2g}: {told}"
            num_exact += refusals == {None}
            num_refused += refusals != {None}
            for refusal in refusals - {None}:
                assert model.is_stateful, f"refused: {refusal}: {told}"
                assert "in place" in refusal, f"{refusal}: {told}"
                assert "\n" not in refusal, f"{refusal}: {told}"
    assert num_exact > 2 * num_refused, (num_exact, num_refused)


@pytest.mark.timeout(600)
def test_some_modules():
    check(0, 12, 2)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 1600, 50))
def test_many_modules(first):
    check(first, 50, 4)
